"""`fedfq report` of a reproduction's folder."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedfq.reproduce import cells
from fedfq.reproduce.cells import Cell
from fedfq.reproduce.results import FAILED, claim
from tests.cli.runner import ok, refused
from tests.report.test_page import Outline, embedded
from tests.reproduce.small import COLUMNS, IID, SHARDS, write_cell

TABLE_1 = "Table 1: accuracy and compression, Digits, IID"
TABLE_2 = "Table 2: uplink to the target accuracy, Digits, IID"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """FedAvg with two seeds, our row, a method that failed and one that did not finish."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(cells.PROFILES, "quick", COLUMNS)
    out = tmp_path / "out"
    claim(out, "quick")
    for seed in (0, 1):
        write_cell(out, IID, "fedavg", [0.6, 0.8 + 0.05 * seed], uplink=2**21, seed=seed)
    write_cell(out, IID, "fedfq@512", [0.6, 0.8], uplink=2**12)
    write_cell(out, IID, "fedpaq", [0.4], uplink=2**18)
    failed = Cell(IID, "fedavg-2bit", 0).folder(out)
    failed.mkdir()
    (failed / FAILED).write_text("out of <luck>\n")
    return out


def html(folder: Path) -> str:
    assert ok("report", "out").startswith("out/report.html: 4 runs, ")
    return (folder / "report.html").read_text("utf-8")


def test_both_tables_of_every_column_and_why_cells_are_empty(folder: Path) -> None:
    outline = Outline(html(folder))
    assert [name for name in outline.tables if name.endswith("Digits, IID")] == [TABLE_1, TABLE_2]
    assert len(outline.tables) == 2 * len(COLUMNS)
    first = {row[0][0]: [cell[0] for cell in row[1:]] for row in outline.tables[TABLE_1][1:]}
    assert first["fedfq@512"][:2] == ["70.00", "+0.00†"] and first["fedavg"][:3] == [
        "71.25 (70.00 to 72.50)",
        "–",
        "77.78",
    ]
    assert first["fedavg-2bit"][0] == "failed: out of <luck>"
    assert first["fedavg-8bit"][0] == "left out"
    second = {row[0][0]: [cell[0] for cell in row[1:]] for row in outline.tables[TABLE_2][1:]}
    assert second["fedfq@512"][:3] == ["2", "0.00391", "0.00781"]
    assert second["fedpaq unfinished"][0] == "unfinished: 1 of 2 rounds"


def test_a_column_that_is_not_in_the_paper_has_table_2_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = replace(SHARDS, title="Ours", paper_accuracy={})
    monkeypatch.setitem(cells.PROFILES, "quick", (ours, IID))
    tables = list(Outline(html(folder)).tables)
    assert tables == ["Table 2: uplink to the target accuracy, Ours", TABLE_1, TABLE_2]


def test_the_verdict_stands_at_the_top_and_beneath_its_table(folder: Path) -> None:
    page = html(folder)
    assert page.count("fedfq@512 needs 512 times fewer bytes than fedavg (aim: 250)") == 2
    assert "(of 5 methods, 2 finished, 1 unfinished, 1 failed)" in page
    assert "<luck>" not in page


def test_curves_are_apart_for_each_table_and_of_the_least_seed(folder: Path) -> None:
    one, two = embedded(html(folder))
    assert [run["label"] for run in one["runs"]] == ["fedavg", "fedfq@512"]
    assert [run["label"] for run in two["runs"]] == ["fedavg", "fedpaq", "fedfq@512"]
    assert one["target"] is None and two["target"] == pytest.approx(0.72)
    assert one["runs"][0]["points"][1]["accuracy"] == 0.8


def test_a_row_whose_way_down_is_compressed_too_has_a_curve_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its configuration is called as that of the row without."""
    rows = ("fedavg", "fedfq@128", "fedfq@128+down", "fedfq")
    column = replace(IID, rows=rows, table_rows={"table1": rows, "table2": rows})
    monkeypatch.setitem(cells.PROFILES, "quick", (column,))
    for row in rows[1:3]:
        write_cell(folder, column, row, [0.6, 0.8])
    ok("report", "out")
    shown, _ = embedded((folder / "report.html").read_text("utf-8"))
    looks = {run["label"]: (run["colour"], run["dashes"], run["marker"]) for run in shown["runs"]}
    assert list(looks) == ["fedavg", "fedfq@128", "fedfq@128+down", "fedfq@512"] and len(set(looks.values())) == 4


def test_a_folder_without_the_mark_is_no_reproduction(folder: Path) -> None:
    (folder / "reproduction.json").unlink()
    assert "neither a run nor a folder of runs" in refused("report", "out")
    ok("report", "out/digits-iid/fedavg-0")


def test_what_only_other_reports_have_is_refused(folder: Path) -> None:
    for option in (("--target", 0.5), ("--figures", "figures")):
        assert "a reproduction has its own targets" in refused("report", "out", *option)
    assert not (folder / "report.html").exists()


def test_the_mark_of_an_unknown_profile(folder: Path) -> None:
    (folder / "reproduction.json").write_text('{"profile": "slow"}')
    assert "out/reproduction.json: unknown profile 'slow'" in refused("report", "out")
