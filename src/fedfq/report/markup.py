"""Pieces of HTML: text that is safe, numbers, tables that sort."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

MAX_TEXT_CHARACTERS = 300  # of a text from outside
NOTHING = "–"


def text(value: Any) -> str:
    """Anything as text of the page: escaped, not too long, and without characters that rearrange what is around."""
    shown = str(value)
    if len(shown) > MAX_TEXT_CHARACTERS:
        shown = shown[: MAX_TEXT_CHARACTERS - 1] + "…"
    return escape(shown if shown.isprintable() else repr(shown))


def short_bytes(count: float) -> str:
    """Four digits and a unit: 1 kB is 1000 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.95:
            return f"{count:.0f} B" if unit == "B" else f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"


def duration(seconds: float) -> str:
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


# Cells


@dataclass(frozen=True)
class TableCell:
    """What is shown, the number to sort by, what appears under the pointer, and the length of a bar (0 to 1)."""

    html: str
    number: float | None = None
    exact: str | None = None
    bar: float | None = None
    long: bool = False


def number(value: float | None, form: Callable[[Any], str], exact: Callable[[Any], str] | None = None) -> TableCell:
    if value is None:
        return TableCell(NOTHING)
    return TableCell(form(value), value, exact(value) if exact else None)


def count(value: int) -> TableCell:
    return number(value, "{:,}".format)


def in_bytes(value: float | None) -> TableCell:
    return number(value, short_bytes, "{:,.0f} bytes".format)


def percent(value: float | None) -> TableCell:
    return number(value, "{:.2%}".format, "{:.6f}".format)


def times(value: float | None) -> TableCell:
    return number(value, "{:,.1f}×".format, "{:.6g}".format)


# Tables

Columns = Sequence[tuple[str, bool]]  # names, and whether a column is of numbers


def table(name: str, columns: Columns, rows: Iterable[Sequence[TableCell]], foot: Sequence[TableCell] = ()) -> str:
    """A table that sorts by any column. Where it is wider than the page, it scrolls by itself."""
    numeric = [is_number for _, is_number in columns]
    header = "".join(
        f'<th scope="col"{_class(is_number and "number")}><button type="button">{title}</button></th>'
        for title, is_number in columns
    )
    body = "\n".join(f"<tr>{_row(row, numeric)}</tr>" for row in rows)
    footer = f"<tfoot><tr>{_row(foot, numeric)}</tr></tfoot>" if foot else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(name)}"><table>\n'
        f"<thead><tr>{header}</tr></thead>\n<tbody>\n{body}\n</tbody>{footer}</table></div>"
    )


def _row(cells: Sequence[TableCell], numeric: Sequence[bool]) -> str:
    tags = ["th", *["td"] * (len(cells) - 1)]
    return "".join(_cell(*described) for described in zip(cells, numeric, tags))


def _cell(cell: TableCell, is_number: bool, tag: str) -> str:
    attributes = _class(is_number and "number", cell.bar is not None and "bar", cell.long and "long")
    if tag == "th":
        attributes += ' scope="row"'
    if cell.number is not None:
        attributes += f' data-value="{cell.number!r}"'
    if cell.exact is not None:
        attributes += f' title="{escape(cell.exact)}"'
    if cell.bar is not None:
        attributes += f' style="--bar-length: {cell.bar:.2%}"'
    return f"<{tag}{attributes}>{cell.html}</{tag}>"


def _class(*names: str | bool) -> str:
    given = " ".join(name for name in names if isinstance(name, str))
    return f' class="{given}"' if given else ""


# Around them


def section(title: str, *parts: str) -> str:
    return "\n".join([f"<section><h2>{title}</h2>", *parts, "</section>"])


def note(words: str) -> str:
    return f'<p class="soft">{words}</p>'


def pairs(items: Iterable[tuple[str, Any]]) -> str:
    return "<dl>" + "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in items) + "</dl>"


def fold(title: str, content: str, unfolded: bool = False) -> str:
    return f"<details{' open' if unfolded else ''}><summary>{title}</summary>\n{content}</details>"
