"""`fedfq reproduce`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedfq.cli.errors import FAILED
from fedfq.cli.options import Machine, refuse_given, spread
from fedfq.cli.progress import saying_how_to_go_on, showing_progress
from fedfq.hints import nearest

if TYPE_CHECKING:
    from fedfq.reproduce.cells import Cell
    from fedfq.reproduce.results import Outcomes

TRAINING_OUT = {"quick": Path("results/reproduce"), "paper": Path("results/paper"), "targets": Path("results/targets")}
NETWORK_OUT = Path("results/network")


def _network_option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="table3 and table4 (need root)", **more)


@dataclass(frozen=True)
class Network:
    """What the tables that are measured on a network depend on."""

    clients: Annotated[
        list[int] | None, _network_option("Numbers of clients. Repeatable.", show_default="2, 4, 8 and 16")
    ] = None
    rounds: Annotated[
        int | None, _network_option("Rounds to measure, after one that does not count.", show_default="10")
    ] = None
    step_seconds: Annotated[
        float | None,
        _network_option("What a local step takes (emulated).", show_default="from the paper's 2 clients"),
    ] = None
    downlink: Annotated[str, _network_option("access (ten times the uplink) or symmetric.")] = "access"
    slow_motion: Annotated[
        float,
        _network_option(
            "Links and emulated steps so many times slower, seconds divided again: clients with more of a core each."
        ),
    ] = 1.0
    by_tensor: Annotated[bool, _network_option("table3: also send tensor by tensor.", "--by-tensor")] = False


# What there is, and options that have no effect on it.
FOR_MACHINE = tuple(each.name for each in fields(Machine))
FOR_TRAINING = ("profile", "only", "seed", *FOR_MACHINE)
FOR_NETWORK = tuple(each.name for each in fields(Network))
WITHOUT_EFFECT = {
    "table1": FOR_NETWORK,
    "table2": FOR_NETWORK,
    "table3": FOR_TRAINING,
    "table4": (*FOR_TRAINING, "by_tensor"),
    "figures": (*FOR_MACHINE, *FOR_NETWORK),
}


@spread
def reproduce(
    *,
    context: typer.Context,
    what: Annotated[str, typer.Argument(metavar="table1|table2|table3|table4|figures")],
    profile: Annotated[
        str,
        typer.Option(
            help="quick (about 10 hours on two cores, both tables), targets (the paper's setting to its target, or as "
            "far as two cores get) or paper (all of its setting)."
        ),
    ] = "quick",
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="These columns and methods, as in 'simplecnn-*' and 'fedfq@*'. Repeatable.",
            show_default="all",
        ),
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Repeatable; the spread is shown.", show_default="0")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of what is made.",
            show_default=f"the profile's in results, or {NETWORK_OUT} for tables 3 and 4",
        ),
    ] = None,
    machine: Machine,
    network: Network,
) -> None:
    """Run the paper's tables again, cell by cell, or draw the learning curves of what ran.

    Can be stopped at any moment: the next call goes on there. A cell that failed is shown with its reason, and tried
    again by the next call. To run one anew, delete its folder.
    """
    _refuse_unknown("part", what, list(WITHOUT_EFFECT))
    refuse_given(context, WITHOUT_EFFECT[what], what)
    if what in ("table3", "table4"):
        _measure_table(what, out or NETWORK_OUT, network)
        return
    chosen = _choose_cells(what, profile, seed or [0], only or [])
    folder = out or TRAINING_OUT[profile]
    if what == "figures":
        _draw_figures(profile, chosen, folder)
    else:
        _make_tables(profile, chosen, folder, machine.resolve())


def _refuse_unknown(what: str, name: str, valid: list[str]) -> None:
    if name not in valid:
        raise ValueError(f"unknown {what} {name!r}{nearest(name, valid)}; there are {', '.join(valid)}")


# Tables 3 and 4


def _measure_table(table: str, folder: Path, network: Network) -> None:
    """Measure what a table needs, and write all tables of what was measured."""
    from fedfq.network.measure import BY_TENSOR, CLIENTS, ROUNDS, STEP_SECONDS, VARIANTS, NetworkCell, measure_cells
    from fedfq.network.tables import write_tables

    variants = VARIANTS[table] + ((BY_TENSOR,) if network.by_tensor else ())
    rounds = ROUNDS if network.rounds is None else network.rounds
    seconds = STEP_SECONDS if network.step_seconds is None else network.step_seconds
    cells = [
        NetworkCell(network.downlink, number, variant, rounds, seconds, network.slow_motion)
        for number in network.clients or CLIENTS
        for variant in variants
    ]
    try:
        measure_cells(cells, folder, lambda what: typer.echo(f"measuring {what} ...", err=True))
    except (RuntimeError, TimeoutError) as error:  # Flower's, with the end of its log
        typer.echo(f"fedfq: {error}", err=True)
        raise typer.Exit(FAILED) from None
    for path in write_tables(folder):
        typer.echo(path)


# Tables 1 and 2, and figures


def _choose_cells(what: str, profile: str, seeds: list[int], only: list[str]) -> list[Cell]:
    from fedfq.reproduce.cells import PROFILES, TABLES, cells

    _refuse_unknown("profile", profile, list(PROFILES))
    if any(seed < 0 for seed in seeds):
        raise ValueError("--seed must be at least 0")
    columns = PROFILES[profile]
    if what in TABLES:
        columns = tuple(column for column in columns if what in column.tables)
    return cells(columns, (what,) if what in TABLES else TABLES, seeds, only)


def _make_tables(profile: str, chosen: Sequence[Cell], out: Path, resources: dict[str, Any]) -> None:
    """Run the cells. After each, both tables, which share them, and the page are written anew."""
    from fedfq.reproduce.results import claim
    from fedfq.reproduce.run import run_cells

    @contextmanager
    def watching(cell: Cell) -> Iterator[Any]:
        with showing_progress(cell.config.rounds) as bar:
            yield bar(f"{cell.column.name}: {cell.method}, seed {cell.seed}", cell.folder(out))

    def announce_held(cell: Cell) -> None:
        typer.echo(f"left alone, as another process is at work there: {cell.folder(out)}", err=True)

    def write(cell: Cell) -> None:
        _write_tables(profile, out)

    claim(out, profile, chosen)
    with saying_how_to_go_on(lambda: "the same command goes on there"):
        failed = run_cells(chosen, out, watching=watching, done=write, held=announce_held, **resources)
    for path in _write_tables(profile, out):
        typer.echo(path)
    for cell in failed:
        typer.echo(f"failed: {cell.folder(out)}", err=True)
    if failed:
        raise typer.Exit(FAILED)


def _write_tables(profile: str, out: Path) -> list[Path]:
    from fedfq.reproduce.cells import PROFILES, TABLES
    from fedfq.reproduce.forms import write_table
    from fedfq.reproduce.page import read
    from fedfq.reproduce.tables import table_1, table_2

    found = read(out)
    made = zip(TABLES, (table_1, table_2))
    files = [path for name, make in made for path in write_table(make(PROFILES[profile], found), out / name)]
    return [*files, _write_page(out, found)]


def _write_page(out: Path, found: Outcomes) -> Path:
    from fedfq.report.page import write_html
    from fedfq.reproduce.page import page

    return write_html(page(out, found), out / "report.html")


def _draw_figures(profile: str, chosen: Sequence[Cell], out: Path) -> None:
    """One folder per column and table: Figure 2 shows what Table 1 compares, Figures 3 to 5 what Table 2 does.

    Where both tables compare the same, the first one's is all there is. And Theorem 4, which needs no run.
    """
    from fedfq.report.figures import write_figures
    from fedfq.report.runs import read_runs
    from fedfq.reproduce.figures import write_theorem_4
    from fedfq.reproduce.page import read
    from fedfq.reproduce.results import claim, outcomes

    found = outcomes(out, {cell.column.name: cell.column for cell in chosen}.values())
    ran = [cell for cell in chosen if cell.seed in found[cell.column.name, cell.method].runs]
    if not ran:
        raise ValueError(f"{out}: none of these cells was run; `fedfq reproduce table1` does it")
    claim(out, profile, ran)
    written = write_theorem_4(out / "figures")
    for column in {cell.column.name: cell.column for cell in ran}.values():
        drawn: list[list[Path]] = []
        for table in column.tables:
            methods = list(map(column.method, column.rows_of(table)))
            folders = [cell.folder(out) for cell in ran if cell.column == column and cell.method in methods]
            if folders and folders not in drawn:
                drawn.append(folders)
                written += write_figures(read_runs(folders), out / "figures" / column.name / table)
    for path in [*written, _write_page(out, read(out))]:
        typer.echo(path)
