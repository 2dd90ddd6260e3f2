"""`fedfq data` as its users meet it."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from fedfq.cli import data
from fedfq.tasks import store
from tests.cli.runner import ok, refused, run
from tests.tasks import miniatures


@pytest.fixture
def plays(tmp_path):
    (tmp_path / "plays.txt").write_text(miniatures.PLAYS)
    return tmp_path / "plays.txt"


def test_fetch(cache, plays):
    assert ok("data", "fetch", "shakespeare", "--from", plays) == (
        f"shakespeare: 3 clients, 334 training and 2 test windows, in {cache / 'shakespeare'}\n"
    )
    assert ok("data", "fetch", "shakespeare") == f"shakespeare is in {cache / 'shakespeare'} already\n"


def test_fetch_into_a_folder(cache, plays, tmp_path):
    ok("data", "fetch", "shakespeare", "--from", plays, "--data-dir", tmp_path / "mine")
    assert (tmp_path / "mine" / "shakespeare").is_dir() and not cache.exists()


def test_fetch_refuses(cache, plays, tmp_path):
    assert "did you mean 'cifar10'?" in refused("data", "fetch", "cifar100")
    assert "missing.npz: No such file" in refused("data", "fetch", "cifar10", "--from", tmp_path / "missing.npz")
    assert "plays.txt: neither the folder" in refused("data", "fetch", "cifar10", "--from", plays)
    (tmp_path / "a.npz").write_text("text")
    assert "a.npz: not a readable .npz file" in refused("data", "fetch", "cifar10", "--from", tmp_path / "a.npz")


def test_fetch_without_a_network(cache, tmp_path, monkeypatch):
    source = replace(store.SOURCES["cifar10"], url=(tmp_path / "missing").as_uri())
    monkeypatch.setitem(store.SOURCES, "cifar10", source)
    result = run("data", "fetch", "cifar10")
    assert result.exit_code == 2 and result.stdout == ""
    announcement, error = result.stderr.splitlines()
    assert announcement == f"downloading {source.url} ..."
    assert error.startswith("fedfq: ") and error.endswith("then fedfq data fetch cifar10 --from PATH")


def bars(output):
    """The rows of the table: client, samples, bar."""
    rows = [line.split() for line in output.splitlines()[4:]]
    return rows[: rows.index([])]


def test_show_classes(filled):
    output = ok("data", "show", "cifar10-vgg11", "--split", "one-class", "--clients", 10)
    assert output.startswith("cifar10-vgg11, one-class, 10 clients, seed 0\n")
    rows = bars(output)
    assert [row[:2] for row in rows] == [[str(client), "5"] for client in range(10)]
    assert {row[2] for row in rows} == {str(label) * data.BAR_CHARACTERS for label in range(10)}
    assert "samples per client  min 5, median 5, max 5; 50 in all" in output
    assert "classes per client  min 1, median 1, max 1" in output


def test_bars_are_as_long_as_clients_have_samples():
    output = ok("data", "show", "digits", "--split", "dirichlet:0.3", "--clients", 7, "--seed", 3)
    rows = bars(output)
    samples = np.array([int(row[1]) for row in rows])
    assert len(rows) == 7 and samples.sum() == 1347
    assert [len(row[2]) for row in rows] == np.rint(data.BAR_CHARACTERS * samples / samples.max()).astype(int).tolist()
    assert all(list(row[2]) == sorted(row[2]) for row in rows)
    assert ok("data", "show", "digits", "--split", "dirichlet:0.3", "--clients", 7, "--seed", 3) == output
    assert ok("data", "show", "digits", "--split", "dirichlet:0.3", "--clients", 7, "--seed", 4) != output


def test_many_clients_are_not_all_shown():
    rows = bars(ok("data", "show", "digits", "--clients", 400))
    assert len(rows) == data.SHOWN_CLIENTS and rows[0][0] == "0" and rows[-1][0] == "399"


def test_defaults_are_those_of_the_task():
    assert ok("data", "show", "digits").startswith("digits, iid, 20 clients, seed 0\n")


def test_show_sizes(filled):
    output = ok("data", "show", "shakespeare-lstm", "--clients", 3)
    rows = [line.split() for line in output.splitlines()[4:]]
    counts = {row[0]: row[3] for row in rows[: rows.index([])]}
    assert counts["0"] == "0" and counts["2"] == "1" and counts["8"] == "1" and counts["256"] == "1"
    assert "samples per client  min 2, median 8, max 324; 334 in all" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cifar10",), "unknown task 'cifar10'"),
        (("cifar10-vgg11",), "cifar10 is not in"),
        (("digits", "--split", "shard:2"), "did you mean 'shards'?"),
        (("digits", "--split", "natural"), "this data knows no clients"),
        (("digits", "--clients", 0), "at least one client"),
        (("digits", "--clients", 5000), "1,347 examples are too few for 5,000 clients"),
        (("digits", "--seed", -1), "the seed must be non-negative, got -1"),
    ],
)
def test_show_refuses(cache, arguments, message):
    assert message in refused("data", "show", *arguments)


def test_show_without_its_extra(monkeypatch):
    def fail(name):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(data.tasks, "get", fail)
    assert "pip install 'fedfq[sim]'" in refused("data", "show", "digits")


def test_help_does_not_wait_for_pytorch():
    code = "import sys; from fedfq.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    for arguments in (["--help"], ["data", "fetch", "--help"], ["data", "show", "--help"]):
        result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert result.returncode == 0 and result.stdout.endswith("False\n")
