"""`fedfq methods`: what there is to choose from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fedfq.cli.completion import complete_method
from fedfq.cli.output import UNLIMITED, make_console, make_table

if TYPE_CHECKING:
    from rich.table import Table


def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="Explain this one, with its options.", show_default="all", autocompletion=complete_method),
    ] = None,
) -> None:
    """List the methods: where they come from, what they claim to cost, what they remember, whether they are unbiased.

    With a NAME, explain that one: also what each of its options means. Options go behind the name: fedfq@256:gain=true.
    """
    if name is not None:
        _explain(name)
        return
    _print(_list_all())
    typer.echo("fedfq methods NAME explains one, and its options")


def _list_all() -> Table:
    from fedfq.methods import METHODS, make, options_of, written

    columns = ("method", "options", "paper", "claimed cost", "client keeps", "server keeps", "unbiased")
    table = _make_table(*columns, typed=2)
    for name in METHODS:
        made = make(name)
        options = "\n".join(f"{option}={written(getattr(made, option))}" for option in options_of(name))
        memories = (made.client_memory, made.server_memory)
        table.add_row(name, options, made.paper, made.claims, *memories, "yes" if made.is_unbiased else "no")
    return table


def _explain(name: str) -> None:
    from fedfq.methods import make, meanings_of, options_of, written

    made = make(name)
    facts = _make_table("", "", typed=1)
    facts.show_header = False
    for what, text in (
        ("what it is", made.summary),
        ("paper", made.paper),
        ("claimed cost", made.claims),
        ("client keeps", made.client_memory),
        ("server keeps", made.server_memory),
        ("unbiased", "yes" if made.is_unbiased else "no"),
    ):
        facts.add_row(what, text)
    typer.echo(f"{name}\n")
    _print(facts)
    options = options_of(name)
    if not options:
        typer.echo("\nIt has no options.")
        return
    meanings = meanings_of(name)
    table = _make_table("option", "default", "values", "meaning", typed=2)
    for option in options:
        table.add_row(option, written(getattr(made, option)), *meanings[option])
    typer.echo()
    _print(table)
    option, default = next(iter(options.items()))
    example = f"{name}@64" if option == "ratio" else f"{name}:{option}={written(default)}"
    typer.echo(f"\nfor instance: fedfq run --method {example}")


def _make_table(*columns: str, typed: int) -> Table:
    """The first so many columns hold names and values, which somebody has to type: they are never broken."""
    table = make_table(padding=0)
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number < typed, overflow="fold")
    return table


def _print(table: Table) -> None:
    """Wide enough for all words, also on a narrow terminal."""
    from rich.console import Console

    words = Console(width=UNLIMITED).measure(table).minimum
    make_console(least_width=words).print(table)
