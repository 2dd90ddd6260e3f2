"""`fedfq reproduce table3 | table4` and `fedfq plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedfq.codec.ratio import check_ratio

if TYPE_CHECKING:
    from fedfq.network.plan import Plan, Setting

TABLES = ("table3", "table4")
OUT = Path("results/network")
FAILED = 1
PANEL = "table3 and table4 (need root)"

Clients = Annotated[
    list[int] | None,
    typer.Option(help="Numbers of clients. Repeatable.", show_default="2, 4, 8 and 16", rich_help_panel=PANEL),
]
Rounds = Annotated[
    int | None,
    typer.Option(help="Rounds to measure, after one that does not count.", show_default="10", rich_help_panel=PANEL),
]
StepSeconds = Annotated[
    float | None,
    typer.Option(
        help="What a local step takes (emulated).", show_default="from the paper's 2 clients", rich_help_panel=PANEL
    ),
]
Downlink = Annotated[str, typer.Option(help="access (ten times the uplink) or symmetric.", rich_help_panel=PANEL)]
SlowMotion = Annotated[
    float,
    typer.Option(
        help="Links and emulated steps so many times slower, seconds divided again: clients with more of a core each.",
        rich_help_panel=PANEL,
    ),
]
ByTensor = Annotated[
    bool, typer.Option("--by-tensor", help="table3: also send tensor by tensor.", rich_help_panel=PANEL)
]


def refuse_given(context: typer.Context, names: Sequence[str], what: str) -> None:
    """Options that would have no effect."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":  # the enum's home depends on the version of typer
            raise ValueError(f"--{name.replace('_', '-')} does not go with {what}")


def network_table(
    table: str,
    out: Path | None,
    clients: list[int] | None,
    rounds: int | None,
    step_seconds: float | None,
    downlink: str,
    slow_motion: float,
    by_tensor: bool,
) -> None:
    """Measure what a table needs, and write all tables of what was measured."""
    from fedfq.network.measure import BY_TENSOR, CLIENTS, ROUNDS, STEP_SECONDS, VARIANTS, Cell, measure_cells
    from fedfq.network.tables import write_tables

    variants = VARIANTS[table] + ((BY_TENSOR,) if by_tensor else ())
    seconds = STEP_SECONDS if step_seconds is None else step_seconds
    cells = [
        Cell(downlink, number, variant, ROUNDS if rounds is None else rounds, seconds, slow_motion)
        for number in clients or CLIENTS
        for variant in variants
    ]
    folder = out or OUT
    try:
        measure_cells(cells, folder, lambda what: typer.echo(f"measuring {what} ...", err=True))
    except (RuntimeError, TimeoutError) as error:  # Flower's, with the end of its log
        typer.echo(f"fedfq: {error}", err=True)
        raise typer.Exit(FAILED) from None
    for path in write_tables(folder):
        typer.echo(path)


def plan(
    context: typer.Context,
    parameters: Annotated[int, typer.Option(help="Of the model.")],
    clients: Annotated[int, typer.Option(help="That take part in a round.")] = 16,
    uplink_mbps: Annotated[float, typer.Option(help="Bandwidth of the link that --shared or --own says.")] = 33.0,
    downlink_mbps: Annotated[
        float | None, typer.Option(help="The other way.", show_default="ten times the uplink")
    ] = None,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared/--own",
            help="Bandwidths are of the server's link, shared by all clients; or of each client's own line, with a "
            "server that is never the bottleneck.",
        ),
    ] = True,
    latency_ms: Annotated[float, typer.Option(help="One way; a round trip goes before each transfer.")] = 20.0,
    steps: Annotated[int, typer.Option(help="Local steps of a round.")] = 5,
    step_seconds: Annotated[float, typer.Option(help="Of a local step.")] = 0.1,
    fixed_seconds: Annotated[
        float, typer.Option(help="Of a round, whatever is sent. Flower's deployment: about 5.")
    ] = 0.0,
    ratio: Annotated[
        list[float] | None, typer.Option(help="To choose from. Repeatable.", show_default="1 to 1024")
    ] = None,
    codec_seconds: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="ENCODE DECODE", help="Of an update.", show_default="measured on this machine"),
    ] = None,
    scale: Annotated[
        bool,
        typer.Option(
            "--scale",
            help="100 to 1,000,000 clients with lines of their own, 1% of them in a round, instead of --clients and "
            "bandwidths.",
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Draw it: a .svg or .pdf file.")] = None,
) -> None:
    """How long will a round take, and what ratio should I choose?

    Simulates a round at every ratio: download, local steps, encoding, upload, decoding. Prints time and bytes, and
    recommends the smallest ratio whose round takes at most 5% longer than the fastest: less compression is more exact.
    """
    if scale:
        refuse_given(context, ("clients", "uplink_mbps", "downlink_mbps", "shared"), "--scale")
    from fedfq.network import plan as planning
    from fedfq.network.figures import draw, suffix

    if out is not None:
        suffix(out)
    ratios = ratio or planning.RATIOS
    for value in ratios:
        check_ratio(value)
    down = 10 * uplink_mbps if downlink_mbps is None else downlink_mbps
    links: dict[str, Any] = {"uplink_mbps": uplink_mbps, "downlink_mbps": down}
    if not shared:
        links = {"own_uplinks": (uplink_mbps,) * clients, "own_downlinks": (down,) * clients}
    setting = planning.Setting(
        parameters=parameters,
        clients=clients,
        latency_ms=latency_ms,
        steps=steps,
        step_seconds=step_seconds,
        fixed_seconds=fixed_seconds,
        **links,
    )
    encode, decode = codec_seconds or planning.codec_seconds(parameters)
    setting = replace(setting, encode_seconds=encode, decode_seconds=decode)
    whence = "as given" if codec_seconds else "measured here"
    typer.echo(f"codec ({whence}): {encode:.3g} s to encode an update, {decode:.3g} s to decode it")
    plans = _at_scale(setting, ratios) if scale else {f"{clients:,} clients": planning.plan(setting, ratios)}
    for name, found in plans.items():
        _print(name, found)
    if out is not None:
        draw(plans, out)
        typer.echo(out)


def _at_scale(setting: Setting, ratios: Sequence[float]) -> dict[str, Plan]:
    from fedfq.network import plan as planning

    typer.echo(
        f"uplinks: log-normal, median {planning.MEDIAN_UPLINK:g} Mbit/s, sigma {planning.SPREAD:g}, "
        f"{planning.SLOWEST_UPLINK:g} Mbit/s at least; downlinks {planning.DOWNLINK_TIMES:g} times that; "
        f"the server has {planning.SERVER_MBPS:,.0f} Mbit/s both ways; {planning.FRACTION:.0%} of the clients a round"
    )
    found = {}
    for size in planning.SIZES:
        drawn = planning.at_scale(setting, size)
        found[f"{drawn.clients:,} of {size:,} clients"] = planning.plan(drawn, ratios)
    return found


def _print(name: str, found: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{name}: one round", title_justify="left", box=None)
    for column in ("ratio", "seconds", "uplink MB", "downlink MB", ""):
        table.add_column(column, justify="right" if column else "left")
    for each in found.rounds:
        marked = {"fastest": found.fastest, "recommended": found.recommended}
        sizes = (f"{each.uplink_bytes / 1e6:,.2f}", f"{each.downlink_bytes / 1e6:,.2f}")
        table.add_row(
            f"{each.ratio:g}",
            f"{each.seconds:,.2f}",
            *sizes,
            ", ".join(word for word, best in marked.items() if best == each),
        )
    Console(highlight=False).print(table)
