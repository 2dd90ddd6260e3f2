"""Tables 1 and 2 from the runs there are, beside the paper's numbers, as Markdown, LaTeX and HTML.

A cell without a number says why: not run yet, unfinished, failed, target not reached. Several seeds are shown as their
mean and, in parentheses, the least and the most of them. MB are 2^20 bytes here, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedfq.files import write_bytes
from fedfq.report import markup
from fedfq.report.page import document
from fedfq.report.runs import LAST, RunData
from fedfq.reproduce.cells import FEDAVG, TABLE_1, TABLE_2, TARGET_FRACTION, Column
from fedfq.reproduce.run import Outcome, outcome

MB = 2**20
NOT_RUN = "not run yet"
LEFT_OUT = "left out"  # of this profile
NOTHING = markup.NOTHING
LONG = 30  # characters: a reason is given room to wrap

Form = Callable[[float], str]


@dataclass(frozen=True)
class Entry:
    """What a cell shows, and the number to sort by where there is one."""

    text: str
    number: float | None = None


EMPTY = Entry(NOTHING)


@dataclass(frozen=True)
class Table:
    """A row a method; for every column of the paper a group of columns with these titles."""

    title: str
    groups: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Entry, ...]], ...]
    notes: tuple[str, ...]


def write_table(table: Table, stem: Path) -> list[Path]:
    """STEM.md, STEM.tex and STEM.html."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix, form in ((".md", markdown), (".tex", latex), (".html", html)):
        path = stem.with_name(stem.name + suffix)
        write_bytes(path, form(table).encode())
        written.append(path)
    return written


# Table 1


def table_1(columns: Sequence[Column], out: Path) -> Table:
    """Accuracy, and the compression it was reached with."""

    def entries(column: Column, method: str) -> list[Entry]:
        found = outcome(out, column, method)
        paper = _paper(column.paper_accuracy.get(method), "{:.2f}".format)
        if (missing := _missing(column, method, found)) is not None:
            return [missing, paper, EMPTY, EMPTY]
        accuracy = _summary(found, lambda seed, run: _percent(run.last_accuracy), "{:.2f}".format)
        return [_with_the_rest(accuracy, found), paper, *_ratios(found)]

    notes = (
        f"Accuracy: % of the test examples, the mean of the last {LAST} evaluations.",
        "Wire: float32 bytes over the bytes that were sent. Claimed: over what the method's own paper counts.",
        *_how(columns),
    )
    return _table(
        "Table 1: accuracy and compression", columns, TABLE_1, ("acc. %", "paper", "wire", "claimed"), entries, notes
    )


# Table 2


def table_2(columns: Sequence[Column], out: Path) -> Table:
    """Uplink MB until the target accuracy."""
    baselines = {column.name: outcome(out, column, FEDAVG).finished for column in columns}

    def entries(column: Column, method: str) -> list[Entry]:
        found, baseline = outcome(out, column, method), baselines[column.name]
        paper = _paper(column.paper_mb.get(method), "{:,.2f}".format)
        if (missing := _missing(column, method, found)) is not None:
            return [missing, EMPTY, paper, EMPTY, EMPTY, EMPTY]
        targets = {seed: _target(column, baseline.get(seed)) for seed in found.finished}

        def total(seed: int, run: RunData | None) -> float | None:
            target = targets[seed]
            sent = run.bytes_to(target) if run is not None and target is not None else None
            return None if sent is None else sent / MB

        def client(seed: int, run: RunData) -> float | None:
            mb = total(seed, run)
            return None if mb is None else mb / run.config.per_round

        def fewer(seed: int, run: RunData) -> float | None:
            own, reference = total(seed, run), total(seed, baseline.get(seed))
            return reference / own if own and reference else None

        def otherwise(seed: int) -> str:
            return f"no target: {FEDAVG} {NOT_RUN}" if targets[seed] is None else "not reached"

        one, all_ = (_summary(found, value, _mb, otherwise) for value in (client, total))
        return [_with_the_rest(one, found), all_, paper, _summary(found, fewer, _times), *_ratios(found)]

    notes = (
        "MB (2^20 bytes) that were sent until the first evaluation that reached the target: of one client that takes "
        "part in every round, as the paper counts (a tenth of the sum, with ten clients a round), and of all clients.",
        "Fewer: FedAvg's MB over the method's. Wire and claimed: as in Table 1, over the whole run.",
        *(_about_target(column, baselines[column.name]) for column in columns),
        "The paper's 50% for the LSTM lie above every accuracy of its own Table 1, where the best is 48.12%.",
        *_how(columns),
    )
    titles = ("MB a client", "MB in all", "paper", "fewer", "wire", "claimed")
    return _table("Table 2: uplink to the target accuracy", columns, TABLE_2, titles, entries, notes)


def _target(column: Column, baseline: RunData | None) -> float | None:
    """The accuracy to reach. Where the profile fixes none, it is a fraction of what FedAvg reached."""
    if column.target is not None:
        return column.target
    best = None if baseline is None else baseline.best_accuracy
    return None if best is None else TARGET_FRACTION * best


def _about_target(column: Column, baseline: dict[int, RunData]) -> str:
    paper = "" if column.paper_target is None else f" (paper: {column.paper_target:.0%})"
    if column.target is not None:
        return f"Target of {column.title}: {column.target:.0%}{paper}."
    targets = [target for run in baseline.values() if (target := _target(column, run)) is not None]
    shown = _spread(targets, "{:.2%}".format).text if targets else NOT_RUN
    return f"Target of {column.title}: {TARGET_FRACTION:g} times FedAvg's best with the same seed, {shown}{paper}."


# What both have


def _table(
    title: str,
    columns: Sequence[Column],
    methods: Iterable[str],
    titles: tuple[str, ...],
    entries: Callable[[Column, str], list[Entry]],
    notes: tuple[str, ...],
) -> Table:
    rows = tuple(
        (method, tuple(entry for column in columns for entry in entries(column, method))) for method in methods
    )
    return Table(title, tuple(column.title for column in columns), titles, rows, notes)


def _missing(column: Column, method: str, found: Outcome) -> Entry | None:
    """Why there is no number."""
    if found.finished:
        return None
    if found.failed:
        return Entry(f"failed: {next(iter(found.failed.values()))}")
    if found.unfinished:
        run = next(iter(found.unfinished.values()))
        return Entry(f"unfinished: {len(run.rounds)} of {run.config.rounds} rounds")
    return Entry(NOT_RUN if method in column.methods else LEFT_OUT)


def _summary(
    found: Outcome,
    value: Callable[[int, RunData], float | None],
    form: Form,
    otherwise: Callable[[int], str] = lambda seed: NOTHING,
) -> Entry:
    """All seeds in one cell, and which of them have no value."""
    values = {seed: value(seed, run) for seed, run in found.finished.items()}
    numbers = [number for number in values.values() if number is not None]
    if not numbers:
        return Entry("; ".join(dict.fromkeys(map(otherwise, values))))
    spread = _spread(numbers, form)
    without = [f"seed {seed} {otherwise(seed)}" for seed, number in values.items() if number is None]
    return Entry("; ".join([spread.text, *without]), spread.number)


def _with_the_rest(entry: Entry, found: Outcome) -> Entry:
    """Seeds that failed or are not finished, beside those that are."""
    rest = [f"seed {seed} failed: {reason}" for seed, reason in found.failed.items()]
    rest += [f"seed {seed} unfinished" for seed in found.unfinished]
    return Entry("; ".join([entry.text, *rest]), entry.number)


def _spread(numbers: Sequence[float], form: Form) -> Entry:
    mean = math.fsum(numbers) / len(numbers)
    least, most = form(min(numbers)), form(max(numbers))
    return Entry(form(mean) if least == most else f"{form(mean)} ({least}–{most})", mean)


def _ratios(found: Outcome) -> list[Entry]:
    return [
        _summary(found, lambda seed, run: run.wire_ratio, _times),
        _summary(found, lambda seed, run: run.claimed_ratio, _times),
    ]


def _paper(number: float | None, form: Form) -> Entry:
    return EMPTY if number is None else Entry(form(number), number)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _times(ratio: float) -> str:
    return f"{ratio:,.1f}×"


def _mb(count: float) -> str:
    return f"{count:,.2f}" if count >= 1 else f"{count:.3g}"


def _how(columns: Sequence[Column]) -> list[str]:
    """How each column was trained."""
    return [
        f"{column.title}: {', '.join(f'{name} {value}' for name, value in column.settings.items())}."
        for column in columns
    ]


# Forms


def markdown(table: Table) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    first, *others = table.columns
    header = ["method", *(title for group in table.groups for title in (f"{group}: {first}", *others))]
    lines = [f"# {table.title}", "", line(header), line(["---", *["---:"] * (len(header) - 1)])]
    lines += [line([f"`{method}`", *(entry.text for entry in entries)]) for method, entries in table.rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in table.notes), ""])


def latex(table: Table) -> str:
    """A `table*` that needs the packages booktabs and graphicx."""
    width = len(table.columns)
    groups = [f"\\multicolumn{{{width}}}{{c}}{{{_tex(group)}}}" for group in table.groups]
    rules = [f"\\cmidrule(lr){{{2 + width * n}-{1 + width * (n + 1)}}}" for n in range(len(groups))]
    titles = ["Method", *map(_tex, table.columns * len(groups))]
    body = [[f"\\texttt{{{_tex(method)}}}", *(_tex(entry.text) for entry in row)] for method, row in table.rows]
    return "\n".join(
        [
            *("\\begin{table*}", "\\centering", "\\resizebox{\\textwidth}{!}{%"),
            f"\\begin{{tabular}}{{l{'r' * width * len(groups)}}}",
            *("\\toprule", _tex_row(["", *groups]), " ".join(rules), _tex_row(titles), "\\midrule"),
            *map(_tex_row, body),
            *("\\bottomrule", "\\end{tabular}}"),
            f"\\caption{{{_tex(' '.join([table.title + '.', *table.notes]))}}}",
            *("\\end{table*}", ""),
        ]
    )


def _tex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + " \\\\"


_TEX = str.maketrans(
    {
        **{letter: "\\" + letter for letter in "&%$#_{}"},
        **{"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"},
        **{"×": "$\\times$", "–": "--", "<": "$<$", ">": "$>$"},
    }
)


def _tex(text: str) -> str:
    return text.translate(_TEX)


def html(table: Table) -> str:
    """A page of its own, whose columns sort."""
    columns = [("Method", False), *((f"{group}: {title}", True) for group in table.groups for title in table.columns)]
    rows = [
        [
            markup.Cell(markup.text(method)),
            *(markup.Cell(markup.text(entry.text), entry.number, long=len(entry.text) > LONG) for entry in entries),
        ]
        for method, entries in table.rows
    ]
    notes = [markup.note(markup.text(note)) for note in table.notes]
    heading = markup.text(table.title)
    return document(heading, "\n".join([f"<h1>{heading}</h1>", markup.table(table.title, columns, rows), *notes]))
