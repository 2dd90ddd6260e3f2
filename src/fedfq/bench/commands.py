"""`fedfq bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Measure speed, size and error beside the peers.", no_args_is_help=True)


@app.command()
def codec(
    updates: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Real updates to measure as well: .npz or .safetensors files.")
    ] = None,
    nncodec: Annotated[
        Path | None, typer.Option(metavar="PYTHON", help="The Python of an environment in which NNCodec is installed.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data sets are, if not in the cache.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write OUT.json and the figure OUT.svg.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer ratios and no large update.")] = False,
) -> None:
    """Compare the codec with every peer: bytes, error, speed, memory.

    Trains SimpleCNN on CIFAR-10 for real updates, or a small network on digits if CIFAR-10 was not fetched. Takes about
    ten minutes, and wants the machine for itself.
    """
    from rich.console import Console
    from rich.table import Table

    from fedfq.bench import codec as benchmark

    if nncodec is not None and not nncodec.is_file():
        raise ValueError(f"{nncodec}: no such file")
    if updates is not None and not updates.is_dir():
        raise ValueError(f"{updates}: no such folder")
    console = Console(width=None)
    result = benchmark.run(
        updates, nncodec, data_dir, quick, lambda text: typer.echo(f"measuring {text} ...", err=True)
    )
    for title, rows in benchmark.sections(result):
        table = Table(title=title)
        for column in rows[0]:
            table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
        for row in rows:
            table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
        console.print(table)
    if out is not None:
        benchmark.write(result, out)
