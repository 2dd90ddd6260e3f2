"""Tables as Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fedfq.files import write_bytes
from fedfq.reproduce.tables import Table, TablePart

COLUMNS_PER_BAND = 2  # of the paper, in a band of LaTeX's table


def write_table(table: Table, stem: Path) -> list[Path]:
    """STEM.md and STEM.tex."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix, form in ((".md", markdown), (".tex", latex)):
        path = stem.with_name(stem.name + suffix)
        write_bytes(path, form(table).encode())
        written.append(path)
    return written


def markdown(table: Table) -> str:
    """A table for every column of the paper."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    blocks = [f"# {table.title}", "\n".join(f"- {note}" for note in table.notes)]
    for part in table.parts:
        lines = [line(["method", *table.titles]), line(["---", *["---:"] * len(table.titles)])]
        lines += [line([f"`{row.method}`", *(entry.text for entry in row.entries)]) for row in part.rows]
        blocks += [f"## {part.column.title}", *part.how, *part.above, "\n".join(lines), *part.below]
    return "\n\n".join(blocks) + "\n"


def latex(table: Table) -> str:
    """The paper's columns side by side, in bands of as many as can be read: needs booktabs and graphicx.

    There is no room for reasons: a cell says "failed" and "unfinished".
    """
    bands = [table.parts[place : place + COLUMNS_PER_BAND] for place in range(0, len(table.parts), COLUMNS_PER_BAND)]
    about = [f"{part.column.title}: {line}" for part in table.parts for line in (*part.how, *part.above, *part.below)]
    return "\n".join(
        [
            *(f"% {_tex(line)}" for line in about),  # too much for a caption
            *("\\begin{table*}", "\\centering", "\\resizebox{\\textwidth}{!}{%"),
            f"\\begin{{tabular}}{{l{'r' * len(table.titles) * len(bands[0])}}}",
            "\n\\addlinespace[2ex]\n".join("\n".join(_tex_band(table.titles, band)) for band in bands),
            *("\\bottomrule", "\\end{tabular}}"),
            f"\\caption{{{_tex(' '.join([table.caption + '.', *table.notes]))}}}",
            *("\\end{table*}", ""),
        ]
    )


def _tex_band(titles: Sequence[str], parts: Sequence[TablePart]) -> list[str]:
    width = len(titles)
    groups = [f"\\multicolumn{{{width}}}{{c}}{{{_tex(part.column.title)}}}" for part in parts]
    briefs = [f"\\multicolumn{{{width}}}{{c}}{{{_tex(part.brief)}}}" for part in parts]
    under = [_tex_row(["", *briefs])] if any(part.brief for part in parts) else []
    rules = [f"\\cmidrule(lr){{{2 + width * n}-{1 + width * (n + 1)}}}" for n in range(len(groups))]
    titled = ["Method", *map(_tex, [*titles] * len(groups))]
    body = [
        [
            f"\\texttt{{{_tex(rows[0].name)}}}",
            *(_tex(entry.text.split(": ")[0]) for row in rows for entry in row.entries),
        ]
        for rows in zip(*(part.rows for part in parts))
    ]
    head = ["\\toprule", _tex_row(["", *groups]), *under, " ".join(rules), _tex_row(titled), "\\midrule"]
    return [*head, *map(_tex_row, body)]


def _tex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + " \\\\"


_TEX = str.maketrans(
    {
        **{letter: "\\" + letter for letter in "&%$#_{}"},
        **{"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"},
        **{"×": "$\\times$", "–": "--", "−": "$-$", "Δ": "$\\Delta$", "†": "$^\\dagger$", "<": "$<$", ">": "$>$"},
    }
)


def _tex(text: str) -> str:
    return text.translate(_TEX)
