"""The tables say what was measured, and of every other cell why it was not."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedfq.reproduce.run import FAILED, Cell
from fedfq.reproduce.tables import Table, html, latex, markdown, table_1, table_2, write_table
from tests.reproduce.small import COLUMNS, IID, SHARDS, write_cell


def row(table: Table, method: str, column: int = 0) -> list[str]:
    """What a method's cells of a column say."""
    width = len(table.columns)
    return [entry.text for entry in dict(table.rows)[method][width * column : width * (column + 1)]]


def fail(out: Path, method: str, reason: str, seed: int = 0) -> None:
    folder = Cell(IID, method, seed).folder(out)
    folder.mkdir(parents=True)
    (folder / FAILED).write_text(reason + "\n")


def test_table_1_has_our_number_the_papers_and_both_ratios(tmp_path: Path) -> None:
    write_cell(tmp_path, IID, "fedavg", [0.70, 0.80], uplink=5 * 4960)  # as float32; claims are half of it
    assert row(table_1(COLUMNS, tmp_path), "fedavg") == ["75.00", "77.78", "1.0×", "2.0×"]


def test_several_seeds_are_a_mean_and_its_spread(tmp_path: Path) -> None:
    for seed, accuracy in ((0, 0.70), (1, 0.74)):
        write_cell(tmp_path, IID, "fedavg", [accuracy, accuracy], seed=seed)
    assert row(table_1(COLUMNS, tmp_path), "fedavg")[0] == "72.00 (70.00–74.00)"


def test_a_cell_without_a_number_says_why(tmp_path: Path) -> None:
    fail(tmp_path, "fedavg", "no data here")
    write_cell(tmp_path, IID, "fedavg-2bit", [0.5])
    for make in (table_1, table_2):
        table = make(COLUMNS, tmp_path)
        assert row(table, "fedavg")[0] == "failed: no data here"
        assert row(table, "fedfq@512")[0] == "not run yet"
        assert row(table, "fedfq@512", column=1)[0] == "left out"
    assert row(table_1(COLUMNS, tmp_path), "fedavg-2bit")[0] == "unfinished: 1 of 2 rounds"


def test_a_seed_that_failed_is_not_hidden_by_one_that_did_not(tmp_path: Path) -> None:
    write_cell(tmp_path, IID, "fedavg", [0.5, 0.5])
    fail(tmp_path, "fedavg", "no data here", seed=1)
    assert row(table_1(COLUMNS, tmp_path), "fedavg")[0] == "50.00; seed 1 failed: no data here"
    assert row(table_2(COLUMNS, tmp_path), "fedavg")[0].endswith("seed 1 failed: no data here")


# --- Table 2 -----------------------------------------------------------------------------------------------


def test_table_2_counts_one_client_as_the_paper_does_and_all_of_them(tmp_path: Path) -> None:
    """Two clients a round. FedAvg's best is 0.8, so the target is 0.72: reached in its second round."""
    write_cell(tmp_path, IID, "fedavg", [0.70, 0.80], uplink=40 * 2**20)
    write_cell(tmp_path, IID, "fedfq@512", [0.73, 0.75], uplink=2**20)
    table = table_2(COLUMNS, tmp_path)
    assert row(table, "fedavg")[:4] == ["40.00", "80.00", "416.34", "1.0×"]
    assert row(table, "fedfq@512")[:4] == ["0.5", "1.00", "–", "80.0×"]
    assert any("0.9 times FedAvg's best with the same seed, 72.00% (paper: 75%)" in note for note in table.notes)


def test_a_target_that_was_not_reached(tmp_path: Path) -> None:
    write_cell(tmp_path, IID, "fedavg", [0.70, 0.80])
    write_cell(tmp_path, IID, "fedpaq", [0.1, 0.2])
    assert row(table_2(COLUMNS, tmp_path), "fedpaq")[:2] == ["not reached", "not reached"]
    write_cell(tmp_path, IID, "fedavg", [0.70, 0.80], seed=1)
    write_cell(tmp_path, IID, "fedpaq", [0.1, 0.9], seed=1)
    assert row(table_2(COLUMNS, tmp_path), "fedpaq")[0] == "1.00; seed 0 not reached"


def test_without_fedavg_there_is_no_target(tmp_path: Path) -> None:
    write_cell(tmp_path, IID, "fedpaq", [0.1, 0.2])
    assert row(table_2(COLUMNS, tmp_path), "fedpaq")[0] == "no target: fedavg not run yet"


def test_a_profile_may_fix_the_target(tmp_path: Path) -> None:
    write_cell(tmp_path, IID, "fedpaq", [0.1, 0.2], uplink=2**20)
    table = table_2([replace(IID, target=0.15)], tmp_path)
    assert row(table, "fedpaq")[:2] == ["1.00", "2.00"]


def test_the_papers_unreachable_target_is_noted(tmp_path: Path) -> None:
    assert any("50% for the LSTM lie above every accuracy" in note for note in table_2(COLUMNS, tmp_path).notes)


# --- forms -------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Table:
    write_cell(tmp_path, IID, "fedavg", [0.70, 0.80])
    write_cell(tmp_path, SHARDS, "fedavg", [0.60, 0.60])
    fail(tmp_path, "fedfq@128", "50% of <b>a_b</b> | \\x & more")
    return table_1(COLUMNS, tmp_path)


def test_markdown_has_as_many_cells_in_every_line(table: Table) -> None:
    lines = [line for line in markdown(table).splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {2 + 2 * len(table.columns)}
    assert "Digits, IID: acc. %" in lines[0] and any("`fedavg` | 75.00 | 77.78" in line for line in lines)


def test_latex_has_as_many_cells_in_every_line_and_escapes(table: Table) -> None:
    text = latex(table)
    body = text.split("\\midrule")[1].split("\\bottomrule")[0].strip().splitlines()
    assert {line.replace("\\&", "").count("&") for line in body} == {2 * len(table.columns)}
    assert "50\\% of $<$b$>$a\\_b$<$/b$>$ | \\textbackslash{}x \\& more" in text
    assert "\\multicolumn{4}{c}{Digits, IID}" in text and "\\cmidrule(lr){2-5} \\cmidrule(lr){6-9}" in text
    assert text.isascii()


def test_html_sorts_and_escapes(table: Table) -> None:
    text = html(table)
    assert text.startswith("<!DOCTYPE html>") and 'data-value="75.0"' in text
    assert "&lt;b&gt;a_b&lt;/b&gt;" in text and "<b>" not in text


def test_all_forms_are_written(table: Table, tmp_path: Path) -> None:
    names = [path.name for path in write_table(table, tmp_path / "new" / "table1")]
    assert names == ["table1.md", "table1.tex", "table1.html"]
    assert sorted(names) == sorted(path.name for path in (tmp_path / "new").iterdir())
