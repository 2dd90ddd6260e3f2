"""`fedfq report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedfq.cli.options import Target


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page.", show_default="report.html in the first folder")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the curves as SVG and PDF as well, for a paper.")
    ] = None,
    target: Target = None,
) -> None:
    """Compare runs in one HTML page: accuracy over rounds and bytes, sizes, configurations.

    RUN is the folder of a run, or one that holds some; or that of a reproduction: of what `fedfq reproduce` left, the
    page shows both tables and the curves of every column.
    """
    from fedfq.report.page import write_page
    from fedfq.report.runs import read_runs
    from fedfq.reproduce.results import is_reproduction

    page = out or runs[0] / "report.html"
    if len(runs) == 1 and is_reproduction(runs[0]):
        if figures is not None or target is not None:
            raise ValueError(
                f"{runs[0]}: a reproduction has its own targets; `fedfq reproduce figures` draws its curves"
            )
        _report_reproduction(runs[0], page)
        return
    if figures is not None:
        from fedfq.report.figures import write_figures  # what is missing is said before anything is written
    found = read_runs(runs)
    _announce(write_page(found, page, target), len(found))
    if figures is not None:
        for path in write_figures(found, figures):
            typer.echo(path)


def _report_reproduction(folder: Path, out: Path) -> None:
    from fedfq.report.page import write_html
    from fedfq.reproduce.page import page, read, runs_in

    found = read(folder)
    _announce(write_html(page(folder, found), out), len(runs_in(found)))


def _announce(page: Path, runs: int) -> None:
    typer.echo(f"{page}: {runs} {'run' if runs == 1 else 'runs'}, {page.stat().st_size:,} bytes")
