"""`fedfq report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that hold some.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: report.html in the first folder.")] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the curves as SVG and PDF as well, for a paper.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(metavar="ACCURACY", help="Count the bytes until this accuracy, such as 0.8.")
    ] = None,
) -> None:
    """Compare runs in one HTML page: accuracy over rounds and bytes, sizes, configurations."""
    from fedfq.report.page import write_page
    from fedfq.report.runs import read_runs

    if figures is not None:
        from fedfq.report.figures import write_figures  # what is missing is said before anything is written
    found = read_runs(runs)
    page = write_page(found, out or runs[0] / "report.html", target)
    typer.echo(f"{page}: {len(found)} {'run' if len(found) == 1 else 'runs'}, {page.stat().st_size:,} bytes")
    if figures is not None:
        for path in write_figures(found, figures):
            typer.echo(path)
