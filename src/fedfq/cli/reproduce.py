"""`fedfq reproduce`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedfq.cli.federation import DataDir, Device, Workers, machine
from fedfq.cli.plan import TABLES as NETWORK
from fedfq.cli.plan import (
    ByTensor,
    Clients,
    Downlink,
    Rounds,
    SlowMotion,
    StepSeconds,
    network_table,
    refuse_given,
)
from fedfq.cli.progress import progress, saying_how_to_go_on
from fedfq.hints import nearest

if TYPE_CHECKING:
    from fedfq.reproduce.cells import Cell
    from fedfq.reproduce.results import Outcomes

WHAT = ["table1", "table2", *NETWORK, "figures"]
OUT = Path("results/reproduce")
FAILED = 1
FOR_RUNNING = ("workers", "data_dir", "device")
FOR_TRAINING = ("profile", "only", "seed", *FOR_RUNNING)
FOR_NETWORK = ("clients", "rounds", "step_seconds", "downlink", "slow_motion", "by_tensor")
OTHERS = {"table3": FOR_TRAINING, "table4": (*FOR_TRAINING, "by_tensor"), "figures": (*FOR_RUNNING, *FOR_NETWORK)}


def reproduce(
    context: typer.Context,
    what: Annotated[str, typer.Argument(metavar="table1|table2|table3|table4|figures")],
    profile: Annotated[
        str, typer.Option(help="quick (about 8 hours on two cores, both tables) or paper (its setting).")
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
            help="Folder of what is made.", show_default="results/reproduce, or results/network for tables 3 and 4"
        ),
    ] = None,
    workers: Workers = None,
    data_dir: DataDir = None,
    device: Device = None,
    clients: Clients = None,
    rounds: Rounds = None,
    step_seconds: StepSeconds = None,
    downlink: Downlink = "access",
    slow_motion: SlowMotion = 1.0,
    by_tensor: ByTensor = False,
) -> None:
    """Run the paper's tables again, cell by cell, or draw the learning curves of what ran.

    Can be stopped at any moment: the next call goes on there. A cell that failed is shown with its reason, and tried
    again by the next call. To run one anew, delete its folder.
    """
    _known("part", what, WHAT)
    refuse_given(context, OTHERS.get(what, FOR_NETWORK), what)
    if what in NETWORK:
        network_table(what, out, clients, rounds, step_seconds, downlink, slow_motion, by_tensor)
        return
    from fedfq.reproduce.cells import PROFILES, ROWS, TABLES, cells

    out = out or OUT
    columns = PROFILES[_known("profile", profile, list(PROFILES))]
    if any(number < 0 for number in seed or []):
        raise ValueError("--seed must be at least 0")
    if what in TABLES:
        columns = tuple(column for column in columns if what in column.tables)
    chosen = cells(columns, TABLES.get(what, ROWS), seed or [0], only or [])
    if what == "figures":
        _figures(profile, chosen, out)
    else:
        _tables(profile, chosen, out, machine({"workers": workers, "data_dir": data_dir, "device": device}))


def _known(what: str, name: str, valid: list[str]) -> str:
    if name not in valid:
        raise ValueError(f"unknown {what} {name!r}{nearest(name, valid)}; there are {', '.join(valid)}")
    return name


def _tables(profile: str, chosen: Sequence[Cell], out: Path, where: dict[str, Any]) -> None:
    """Run the cells. After each, both tables, which share them, and the page are written anew."""
    from fedfq.reproduce.cells import PROFILES, TABLES
    from fedfq.reproduce.forms import write_table
    from fedfq.reproduce.page import read
    from fedfq.reproduce.results import claim
    from fedfq.reproduce.run import run_cells
    from fedfq.reproduce.tables import table_1, table_2

    @contextmanager
    def watching(cell: Cell) -> Iterator[Any]:
        with progress(cell.config.rounds) as bar:
            yield bar(f"{cell.column.name}: {cell.method}, seed {cell.seed}", cell.folder(out))

    def write() -> list[Path]:
        found = read(out)
        made = zip(TABLES, (table_1, table_2))
        files = [path for name, make in made for path in write_table(make(PROFILES[profile], found), out / name)]
        return [*files, _page(out, found)]

    def held(cell: Cell) -> None:
        typer.echo(f"left alone, as another process is at work there: {cell.folder(out)}", err=True)

    claim(out, profile, chosen)
    with saying_how_to_go_on(lambda: "the same command goes on there"):
        failed = run_cells(chosen, out, watching=watching, done=lambda cell: write(), held=held, **where)
    for path in write():
        typer.echo(path)
    for cell in failed:
        typer.echo(f"failed: {cell.folder(out)}", err=True)
    if failed:
        raise typer.Exit(FAILED)


def _page(out: Path, found: Outcomes) -> Path:
    from fedfq.report.page import write_html
    from fedfq.reproduce.page import page

    return write_html(page(out, found), out / "report.html")


def _figures(profile: str, chosen: Sequence[Cell], out: Path) -> None:
    """A folder for every column and table: Figure 2 shows what Table 1 compares, Figures 3 to 5 what Table 2 does.

    And Theorem 4, which needs no run.
    """
    from fedfq.report.figures import write_figures
    from fedfq.report.runs import read_runs
    from fedfq.reproduce.cells import TABLES
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
        for table in column.tables:
            methods = list(map(column.method, TABLES[table]))
            folders = [cell.folder(out) for cell in ran if cell.column == column and cell.method in methods]
            if folders:
                written += write_figures(read_runs(folders), out / "figures" / column.name / table)
    for path in [*written, _page(out, read(out))]:
        typer.echo(path)
