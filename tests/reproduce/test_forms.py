"""The tables as Markdown and LaTeX."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedfq.reproduce.forms import latex, markdown, write_table
from fedfq.reproduce.tables import Table
from tests.reproduce.small import IID, SHARDS, write_cell
from tests.reproduce.test_tables import fail, table_1, table_2


@pytest.fixture
def table(tmp_path: Path) -> Table:
    write_cell(tmp_path, IID, "fedavg", [0.70, 0.80])
    write_cell(tmp_path, SHARDS, "fedavg", [0.60, 0.60])
    fail(tmp_path, "fedfq@128", "no data | more")
    return table_1(tmp_path)


def test_markdown_is_a_table_a_column_with_as_many_cells_in_every_line(table: Table) -> None:
    first, *parts = markdown(table).split("\n## ")
    assert first.startswith("# Table 1") and [part.splitlines()[0] for part in parts] == [
        "Digits, IID",
        "Digits, shards",
    ]
    for part in parts:
        lines = [line for line in part.splitlines() if line.startswith("|")]
        assert {line.replace("\\|", "").count("|") for line in lines} == {2 + len(table.titles)}
    assert "| `fedavg` | 75.00 | – | 77.78 |" in parts[0] and "6 clients, 2 per round" in parts[0]
    assert "failed: no data \\| more" in parts[0]


def test_markdown_names_what_our_row_stands_for(tmp_path: Path) -> None:
    iid, shards = markdown(table_2(tmp_path)).split("\n## ")[1:]
    assert "| `fedfq@512` |" in iid and "| `fedfq@1024` |" in shards


def test_latex_has_as_many_cells_in_every_line_and_escapes(table: Table) -> None:
    text = latex(table)
    body = text.split("\\midrule")[1].split("\\bottomrule")[0].strip().splitlines()
    assert {line.replace("\\&", "").count("&") for line in body} == {2 * len(table.titles)}
    assert "& failed & " in text and "more" not in text  # the reason is in the other forms
    assert "\\multicolumn{6}{c}{Digits, IID}" in text and "\\cmidrule(lr){2-7} \\cmidrule(lr){8-13}" in text
    assert text.isascii()
    hostile = latex(replace(table, caption="50% of <b>a_b</b> | \\x & more"))
    assert "50\\% of $<$b$>$a\\_b$<$/b$>$ | \\textbackslash{}x \\& more" in hostile


def test_latex_stacks_what_would_be_too_wide_to_read(table: Table) -> None:
    first, second = latex(replace(table, parts=(*table.parts, table.parts[0]))).split("\\addlinespace")
    assert first.count("{Digits, IID}") == first.count("{Digits, shards}") == second.count("{Digits, IID}") == 1
    assert first.count("\\texttt{fedavg}") == second.count("\\texttt{fedavg}") == 1
    assert f"\\begin{{tabular}}{{l{'r' * 12}}}" in first and "\\cmidrule(lr){8-13}" not in second


def test_latex_is_one_row_for_what_columns_chose(tmp_path: Path) -> None:
    write_cell(tmp_path, IID, "fedavg", [0.70, 0.80])
    write_cell(tmp_path, IID, "fedavg", [0.70, 0.70], seed=1)
    text = latex(table_2(tmp_path))
    assert text.count("\\texttt{fedfq}") == 1
    assert "{c}{target: 72.00\\% (seed 0), 63.00\\% (seed 1); fedfq: fedfq@512}" in text
    assert "{c}{target: not run yet; fedfq: fedfq@1024}" in text


def test_both_forms_are_written(table: Table, tmp_path: Path) -> None:
    names = [path.name for path in write_table(table, tmp_path / "new" / "table1")]
    assert names == ["table1.md", "table1.tex"]
    assert sorted(names) == sorted(path.name for path in (tmp_path / "new").iterdir())
