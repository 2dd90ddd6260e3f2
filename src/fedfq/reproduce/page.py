"""A reproduction on one HTML page: both tables and the learning curves, column by column of the paper."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from fedfq.report import markup
from fedfq.report.markup import text
from fedfq.report.page import Curves, Names, breakable, charts, document, footer, introduction
from fedfq.report.runs import RunData
from fedfq.report.styles import styles
from fedfq.reproduce.cells import PROFILES, Column
from fedfq.reproduce.results import Outcomes, outcomes, profile_of
from fedfq.reproduce.tables import Table, TableRow, table_1, table_2
from fedfq.reproduce.theory import FIGURE

LONG_TEXT_CHARACTERS = 30  # a text beyond it, such as a reason, is given room to wrap


def read(folder: Path) -> Outcomes:
    """What there is in a reproduction's folder."""
    return outcomes(folder, PROFILES[profile_of(folder)])


def runs_in(found: Outcomes) -> list[RunData]:
    return [run for one in found.values() for run in one.runs.values()]


def page(folder: Path, found: Outcomes) -> str:
    """The whole page about this folder, in which that was found."""
    profile = profile_of(folder)
    columns = PROFILES[profile]
    tables = (table_1(columns, found), table_2(columns, found))
    drawn: list[Curves] = []
    names = Names(styles([row.method for table in tables for part in table.parts for row in part.rows]), several=False)
    sections = [_column(column, tables, found, names, drawn) for column in columns]
    heading = f"Tables 1 and 2 of the paper, run again (profile {escape(profile)})"
    parts = [
        f"<h1>{heading}</h1>",
        _at_a_glance(tables[1], found),
        markup.fold("What the columns mean", "\n".join(map(_notes, tables))),
        *sections,
        _theorem(folder / "figures" / f"{FIGURE}.svg"),
        footer(runs_in(found)),
    ]
    return document(heading, "\n".join(filter(None, parts)), drawn)


def _at_a_glance(table: Table, found: Outcomes) -> str:
    items = "".join(
        f'<li><a href="#{part.column.name}">{escape(part.column.title)}</a> ({_progress(part.column, found)}): '
        f"{escape(' '.join(part.below))}"
        for part in table.parts
    )
    return f"<ul>{items}</ul>\n{introduction('Of several seeds, the curves are those of the least.')}"


def _progress(column: Column, found: Outcomes) -> str:
    own = [found[column.name, method] for method in column.methods]
    counts = {
        "finished": sum(bool(one.finished) for one in own),
        "unfinished": sum(bool(one.unfinished) for one in own),
        "failed": sum(bool(one.failed) for one in own),
    }
    shown = [f"{count} {what}" for what, count in counts.items() if count or what == "finished"]
    return f"of {len(own)} methods, {', '.join(shown)}"


def _notes(table: Table) -> str:
    items = "".join(f"<li>{escape(note)}" for note in table.notes)
    return f"<p>{escape(table.title)}</p><ul>{items}</ul>"


# A column


def _column(column: Column, tables: Iterable[Table], found: Outcomes, names: Names, drawn: list[Curves]) -> str:
    """Its tables and curves. What is to be drawn is added to `drawn`.

    The curves of Table 1's methods are the paper's Figure 2, those of Table 2's its Figures 3 to 5.
    """
    shown: list[str] = []
    for table, part in ((one, part) for one in tables for part in one.parts if part.column == column):
        firsts = {row.method: found[column.name, row.method].first for row in part.rows}
        runs = [run for run in firsts.values() if run is not None]
        if not shown:
            shown += [f'<section id="{column.name}" class="column"><h2>{escape(column.title)}</h2>', *_soft(part.how)]
        shown += [f"<h3>{escape(table.title)}</h3>", *_soft(part.above)]
        shown.append(_table(f"{table.title}, {column.title}", table.titles, part.rows, names, firsts))
        shown += [f"<p>{escape(line)}</p>" for line in part.below]
        if runs:
            drawn.append(Curves(f"{table.title}, {column.title}", runs, names, part.target))
            shown.append(charts(len(drawn) - 1, drawn[-1]))
    return "\n".join([*shown, "</section>"])


def _soft(lines: Iterable[str]) -> list[str]:
    return [markup.note(escape(line)) for line in lines]


def _table(
    name: str, titles: Sequence[str], rows: Iterable[TableRow], names: Names, drawn: dict[str, RunData | None]
) -> str:
    def first(method: str) -> markup.TableCell:
        run = drawn[method]
        if run is not None:
            return names.cell(run)
        return markup.TableCell(
            f'<span class="run"><span class="swatch"></span><span>{breakable(method)}</span></span>'
        )

    cells = [
        [
            first(row.method),
            *(
                markup.TableCell(text(entry.text), entry.number, long=len(entry.text) > LONG_TEXT_CHARACTERS)
                for entry in row.entries
            ),
        ]
        for row in rows
    ]
    return markup.table(name, [("Method", False), *((title, True) for title in titles)], cells)


# The theory


def _theorem(path: Path) -> str:
    """The figure of Theorem 4, where `fedfq reproduce figures` drew it."""
    if not path.is_file():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    about = (
        "Theorem 4 on two small problems: strongly convex, the error falls about as 1 / T; non-convex, the gradients "
        "fall about as 1 / sqrt(T). Both grow with q, the bound on the quantizer's variance (Corollary 5)."
    )
    image = f'<img class="figure" alt="{about}" src="data:image/svg+xml;base64,{data}">'
    return markup.section("Theorem 4 and Corollary 5", markup.note(about), image)
