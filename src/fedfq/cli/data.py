"""`fedfq data`: fetch a data set, and show who would hold what of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedfq import tasks
from fedfq.cli.completion import complete_task
from fedfq.cli.options import DataDir, NumberOfClients, Split
from fedfq.cli.output import make_console, make_table

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    Array = np.ndarray[Any, np.dtype[Any]]

SHOWN_CLIENTS = 20
BAR_CHARACTERS = 50
HISTOGRAM_ROWS = 12
COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "bright_red", "bright_green", "bright_blue", "white")

app = typer.Typer(no_args_is_help=True, help="Fetch data sets, and show who holds what.")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="cifar10|shakespeare")],
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="PATH", help="A file or folder instead of a download."),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Put a data set into the cache.

    cifar10 is taken from cifar-10-python.tar.gz, its folder cifar-10-batches-py, or an .npz file with x_train, y_train,
    x_test and y_test; shakespeare from Project Gutenberg's text of 1994, as .txt, .zip or .xz.
    """
    from fedfq.tasks import store

    if source is None and name in store.SOURCES and not (store.cache(data_dir) / name).exists():
        typer.echo(f"downloading {store.SOURCES[name].url} ...", err=True)
    typer.echo(store.fetch(name, source, data_dir))


@app.command(
    help="Draw who holds what: the classes of each client, or for text how much each one has.\n\n"
    f"TASK is one of {', '.join(tasks.TASKS)}."
)
def show(
    task: Annotated[str, typer.Argument(metavar="TASK", autocompletion=complete_task)],
    split: Split = None,
    clients: NumberOfClients = None,
    seed: Annotated[int, typer.Option(help="Of the split.")] = 0,
    data_dir: DataDir = None,
) -> None:
    import numpy as np

    chosen = tasks.get(task)
    spec = split or chosen.defaults.split
    data = chosen.load(data_dir)
    parts = tasks.split(spec, data, chosen.defaults.clients if clients is None else clients, seed)
    sizes = np.array([len(part) for part in parts])
    labels = np.asarray(data.train.labels)
    counts = np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])
    console = make_console()
    console.print(f"{chosen.name}, {spec}, {len(parts):,} clients, seed {seed}\n")
    console.print(_draw_classes(counts) if counts.shape[1] <= len(COLOURS) else _draw_sizes(sizes))
    console.print()
    console.print(f"samples per client  {_describe_spread(sizes)}; {sizes.sum():,} in all")
    console.print(f"classes per client  {_describe_spread((counts > 0).sum(1))}")


def _describe_spread(numbers: Array) -> str:
    import numpy as np

    return f"min {numbers.min():,}, median {np.median(numbers):,.0f}, max {numbers.max():,}"


def _draw_classes(counts: Array) -> Table:
    """One stacked bar per client, as long as it has samples; for some clients, evenly spaced, if there are many."""
    import numpy as np
    from rich.text import Text

    table = _make_table("client", "samples", "classes")
    shown = np.unique(np.linspace(0, len(counts) - 1, SHOWN_CLIENTS).round().astype(int))
    scale = BAR_CHARACTERS / counts.sum(1).max()
    for client in shown:
        # Cut points are rounded, not lengths: so the whole bar has the right length.
        cuts = np.rint(np.cumsum(counts[client]) * scale).astype(int)
        pieces = zip(range(len(cuts)), np.diff(cuts, prepend=0))
        bar = Text.assemble(*((str(label) * length, COLOURS[label]) for label, length in pieces))
        table.add_row(str(client), f"{counts[client].sum():,}", bar)
    return table


def _draw_sizes(sizes: Array) -> Table:
    """How many clients have how many samples, in bins that double."""
    import numpy as np
    from rich.text import Text

    top = int(sizes.max()).bit_length()
    edges = [0] + [2**power for power in range(max(0, top - HISTOGRAM_ROWS + 1), top + 1)]
    table = _make_table("samples", "clients", "")
    frequencies, _ = np.histogram(sizes, edges)
    for low, high, frequency in zip(edges, edges[1:], frequencies):
        bar = Text("█" * round(BAR_CHARACTERS * frequency / frequencies.max()), COLOURS[3])
        table.add_row(f"{low:,} to {high - 1:,}", f"{frequency:,}", bar)
    return table


def _make_table(*headers: str) -> Table:
    """The last column holds bars, all others numbers."""
    table = make_table(padding=1)
    for header in headers[:-1]:
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column(headers[-1], no_wrap=True)
    return table
