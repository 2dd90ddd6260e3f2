"""`fedfq bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedfq.cli.options import DataDir

JsonOut = Annotated[Path | None, typer.Option(help="Write OUT.json.")]

app = typer.Typer(help="Measure speed, size and error beside the peers.", no_args_is_help=True)


@app.command()
def codec(
    updates: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Real updates to measure as well: .npz or .safetensors files.")
    ] = None,
    nncodec: Annotated[
        Path | None, typer.Option(metavar="PYTHON", help="The Python of an environment in which NNCodec is installed.")
    ] = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Write OUT.json and the figure OUT.svg.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer ratios and no large update.")] = False,
) -> None:
    """Compare the codec with every peer: bytes, error, speed, memory.

    Trains SimpleCNN on CIFAR-10 for real updates, or a small network on digits if CIFAR-10 was not fetched. Takes about
    ten minutes, and wants the machine for itself.
    """
    from fedfq.bench import codec as benchmark

    if nncodec is not None and not nncodec.is_file():
        raise ValueError(f"{nncodec}: no such file")
    if updates is not None and not updates.is_dir():
        raise ValueError(f"{updates}: no such folder")
    result = benchmark.run(updates, nncodec, data_dir, quick, _say)
    _show(result, benchmark.TITLES)
    if out is not None:
        benchmark.write(result, out)


@app.command()
def federation(
    data_dir: DataDir = None,
    out: JsonOut = None,
    quick: Annotated[bool, typer.Option("--quick", help="Without the large model.")] = False,
) -> None:
    """Measure what a round costs beside training, processes beside threads, and memory.

    On SimpleCNN and CIFAR-10, or on digits if CIFAR-10 was not fetched. Wants the machine for itself.
    """
    from fedfq.bench import federation as benchmark

    result = benchmark.run(data_dir, quick, _say)
    _show(result, benchmark.TITLES)
    _write(result, out)


@app.command()
def flower(
    out: JsonOut = None,
    quick: Annotated[bool, typer.Option("--quick", help="Without the large models.")] = False,
) -> None:
    """Measure fedfq on Flower: a round in simulation beside one without it, bytes on the wire, the server's memory.

    Wants the machine for itself; bytes are counted in network namespaces, where root may make them.
    """
    from fedfq.bench import flower as benchmark

    result = benchmark.run(quick, _say)
    _show(result, benchmark.TITLES)
    _write(result, out)


@app.command()
def residuals(
    task: Annotated[str, typer.Option(help="What is trained, IID.")] = "cifar10-simplecnn",
    precision: Annotated[str, typer.Option(help="Of what clients' layers compute: float32 or bfloat16.")] = "float32",
    workers: Annotated[int, typer.Option(help="Processes that train clients.", min=1)] = 2,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Write OUT.json and the figure OUT.svg.")] = None,
) -> None:
    """Measure what updates lose on the way, and how much of it all clients lose alike.

    Thirty rounds of FedAvg with 10 local steps and with 5 local epochs: about ten minutes on two cores.
    """
    from fedfq.bench import residuals as benchmark

    result = benchmark.run(data_dir, task, workers, precision, _say)
    _show(result, benchmark.TITLES)
    if out is not None:
        benchmark.write(result, out)


def _write(result: dict[str, Any], out: Path | None) -> None:
    from fedfq.files import write_bytes

    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(out.with_suffix(".json"), (json.dumps(result, indent=1) + "\n").encode())


def _say(text: str) -> None:
    typer.echo(f"measuring {text} ...", err=True)


def _show(result: dict[str, Any], titles: dict[str, str]) -> None:
    """One table per part of a result that has a title."""
    from rich.console import Console
    from rich.table import Table

    for rows, title in ((result[key], title) for key, title in titles.items() if result.get(key)):
        table = Table(title=title)
        for column in rows[0]:
            table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
        for row in rows:
            table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
        Console().print(table)
