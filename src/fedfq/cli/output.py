"""What several commands print alike: tables, as wide as there is room, and text that somebody else wrote."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

UNLIMITED = 1000  # characters per line that goes to a file or a pipe


def make_console(least_width: int = 0) -> Console:
    """As wide as the terminal, or wider if so many characters are needed: then the terminal breaks the lines."""
    from rich.console import Console

    width = max(Console().width, least_width) if sys.stdout.isatty() else UNLIMITED
    return Console(width=width, highlight=False, markup=False, emoji=False)


def make_table(padding: int) -> Table:
    """Without columns yet; so many blanks stand between them, beside the one that always does."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE, show_edge=False, padding=(0, padding, 0, 0))


def escape(text: str) -> str:
    """Names and reasons may come from a stranger: no control characters may reach the terminal."""
    return text if text.isprintable() else repr(text)
