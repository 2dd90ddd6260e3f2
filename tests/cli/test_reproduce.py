"""`fedfq reproduce` as its users meet it."""

import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedfq.cli import app
from fedfq.federation.folder import Folder
from fedfq.network import links
from fedfq.reproduce import cells
from fedfq.reproduce import run as run_module
from tests.cli.runner import ok, refused
from tests.cli.test_federation import interrupted
from tests.network.test_links import needs_root
from tests.reproduce.small import COLUMNS, IID, write_cell

ONE = ("--workers", "1")


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(cells.PROFILES, "quick", COLUMNS)
    return tmp_path / "results" / "reproduce"


def test_both_tables_share_their_runs(small: Path) -> None:
    only = ("--only", "digits-iid", "--only", "fedavg", "--only", "fedfq@512")
    said = ok("reproduce", "table1", *only, *ONE)
    names = ("table1.md", "table1.tex", "table2.md", "table2.tex", "report.html")
    assert said.splitlines() == [f"results/reproduce/{name}" for name in names]
    ledger = small / "digits-iid" / "fedavg-0" / "rounds.jsonl"
    before = ledger.stat().st_mtime_ns
    ok("reproduce", "table2", *only, *ONE)
    assert ledger.stat().st_mtime_ns == before
    assert sorted(path.name for path in (small / "digits-iid").iterdir()) == ["fedavg-0", "fedfq@512-0"]
    assert not (small / "digits-shards").exists()
    table = (small / "table2.md").read_text("utf-8")
    assert "not run yet" in table and "416.34" in table


def test_a_failed_cell_is_in_the_table_and_in_the_exit_code(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments, **options):
        raise RuntimeError("out of luck")

    arguments = ["reproduce", "table1", "--only", "digits-iid", "--only", "fedavg", *ONE]
    with monkeypatch.context() as patched:
        patched.setattr(run_module, "run_federation", failing)
        assert CliRunner().invoke(app, arguments).exit_code == 1
    assert "failed: out of luck" in (small / "table1.md").read_text("utf-8")
    ok(*arguments)
    assert "failed" not in (small / "table1.md").read_text("utf-8")


def test_an_interrupted_reproduction_goes_on_with_the_next_call(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("reproduce", "table1", "--only", "digits-iid", "--only", "fedavg", "--only", "fedfq@128", *ONE)
    result = interrupted(monkeypatch, signal.SIGINT, *arguments)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "fedfq: interrupted; the same command goes on there"
    assert "failed" not in (small / "table1.md").read_text("utf-8")
    ok(*arguments)
    assert len(Folder(small / "digits-iid" / "fedfq@128-0").rounds()) == 2


def test_a_cell_that_another_process_runs_is_named(small: Path) -> None:
    with Folder(small / "digits-iid" / "fedavg-0").held():
        done = CliRunner().invoke(app, ["reproduce", "table1", "--only", "digits-iid", "--only", "fedavg", *ONE])
    assert done.exit_code == 0
    assert "left alone, as another process is at work there: results/reproduce/digits-iid/fedavg-0" in done.stderr


def test_several_seeds(small: Path) -> None:
    ok("reproduce", "table1", "--only", "digits-iid", "--only", "fedavg", "--seed", "0", "--seed", "1", *ONE)
    assert sorted(path.name for path in (small / "digits-iid").iterdir()) == ["fedavg-0", "fedavg-1"]


def test_figures_are_drawn_of_what_ran(small: Path) -> None:
    write_cell(small, IID, "fedavg", [0.1, 0.2])
    write_cell(small, IID, "fedpaq", [0.1, 0.2])
    said = ok("reproduce", "figures").splitlines()
    assert said[:2] == ["results/reproduce/figures/theorem-4.svg", "results/reproduce/figures/theorem-4.pdf"]
    assert "results/reproduce/figures/digits-iid/table1/accuracy-rounds.svg" in said
    assert "results/reproduce/figures/digits-iid/table2/accuracy-bytes.pdf" in said
    drawn = {table: (small / f"figures/digits-iid/{table}/accuracy-rounds.svg").read_text() for table in cells.TABLES}
    assert "fedpaq" not in drawn["table1"] and "fedpaq" in drawn["table2"]
    assert "Theorem 4" in (small / "report.html").read_text("utf-8")


def test_a_folder_holds_one_profile(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cells.PROFILES, "paper", (replace(IID, settings=IID.settings | {"lr": 0.5}),))
    write_cell(small, IID, "fedavg", [0.1, 0.2])
    ok("reproduce", "table1", "--only", "digits-iid", "--only", "fedavg", *ONE)
    said = refused("reproduce", "table1", "--profile", "paper", "--out", str(small), *ONE)
    assert "holds the profile quick, not paper; give another folder with --out" in said


def test_runs_of_another_profile_do_not_make_the_folder_this_ones(small: Path) -> None:
    """Runs that were made before folders said whose they are."""
    write_cell(small, replace(IID, settings=IID.settings | {"lr": 0.5}), "fedavg", [0.1, 0.2])
    assert "another configuration" in refused("reproduce", "table1", *ONE)
    assert [path.name for path in small.iterdir()] == ["digits-iid"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tabel1",), "unknown part 'tabel1' (did you mean 'table1'?)"),
        (("table1", "--profile", "quik"), "unknown profile 'quik' (did you mean 'quick'?)"),
        (("table1", "--only", "digits-idd"), "did you mean 'digits-iid'?"),
        (("table1", "--only", "fedavg-2bits"), "did you mean 'fedavg-2bit'?"),
        (("table1", "--seed", "-1"), "--seed must be at least 0"),
        (("table1", "--workers", "0"), "--workers must be at least 1"),
        (("figures",), "none of these cells was run"),
        (("table1", "--only", "digits-shards", "--only", "fedpaq"), "matches nothing"),
        (("table2", "--only", "digits-shards", "--only", "fedpaq"), "fedpaq is left out of digits-shards"),
        (("table1", "--rounds", "5"), "--rounds does not go with table1"),
        (("figures", "--by-tensor"), "--by-tensor does not go with figures"),
        (("table3", "--data-dir", "."), "--data-dir does not go with table3"),
        (("table4", "--profile", "quick"), "--profile does not go with table4"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(small: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in refused("reproduce", *arguments)
    assert not small.exists()


def test_the_help_says_how_long_it_takes() -> None:
    assert "10 hours" in " ".join(ok("reproduce", "--help").split())


# Tables 3 and 4: what can be asked without a network

TABLE = ("reproduce", "table3", "--clients", "2", "--rounds", "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--downlink", "fast"), "unknown downlink 'fast'; there are access, symmetric"),
        (("--rounds", "0"), "clients and rounds must be at least 1"),
        (("--clients", "0"), "clients and rounds must be at least 1"),
        (("--step-seconds", "-1"), "a step takes from 0 to 3600 s"),
        (("--slow-motion", "0.5"), "slow motion is from 1 to 100 times slower, got 0.5"),
    ],
)
def test_conditions_that_cannot_be_are_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in refused(*TABLE, "--out", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "need root" in refused(*TABLE, "--out", tmp_path)


def test_without_tc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")
    assert "the command tc is not there" in refused(*TABLE, "--out", tmp_path)


@needs_root
def test_with_a_namespace_in_the_way(tmp_path: Path) -> None:
    name = f"fq{os.getpid()}-client1"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        said = refused(*TABLE, "--out", tmp_path)
        assert f"{name} exists already" in said
        assert [found for found in links._namespaces() if f"fq{os.getpid()}" in found] == [name]
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
