"""`fedfq plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedfq.cli.options import refuse_given, spread
from fedfq.codec.ratio import check_ratio

if TYPE_CHECKING:
    from fedfq.network.plan import Plan, Setting

DOWNLINK_TIMES = 10  # the uplink, if no downlink is given


@dataclass(frozen=True)
class Links:
    """What lies between the clients and the server."""

    uplink_mbps: Annotated[float, typer.Option(help="Bandwidth of the link that --shared or --own says.")] = 33.0
    downlink_mbps: Annotated[float | None, typer.Option(help="The other way.", show_default="ten times the uplink")] = (
        None
    )
    shared: Annotated[
        bool,
        typer.Option(
            "--shared/--own",
            help="Bandwidths are of the server's link, shared by all clients; or of each client's own line, with a "
            "server that is never the bottleneck.",
        ),
    ] = True
    latency_ms: Annotated[float, typer.Option(help="One way; a round trip goes before each transfer.")] = 20.0

    def choose(self, clients: int) -> dict[str, Any]:
        """As arguments of `Setting`."""
        down = DOWNLINK_TIMES * self.uplink_mbps if self.downlink_mbps is None else self.downlink_mbps
        if self.shared:
            bandwidths: dict[str, Any] = {"uplink_mbps": self.uplink_mbps, "downlink_mbps": down}
        else:
            bandwidths = {"own_uplinks": (self.uplink_mbps,) * clients, "own_downlinks": (down,) * clients}
        return {"latency_ms": self.latency_ms, **bandwidths}


@dataclass(frozen=True)
class Work:
    """What a round takes beside transfers and the codec."""

    steps: Annotated[int, typer.Option(help="Local steps of a round.")] = 5
    step_seconds: Annotated[float, typer.Option(help="Of a local step.")] = 0.1
    fixed_seconds: Annotated[
        float, typer.Option(help="Of a round, whatever is sent. Flower's deployment: about 5.")
    ] = 0.0


@spread
def plan(
    *,
    context: typer.Context,
    parameters: Annotated[int, typer.Option(help="Of the model.")],
    clients: Annotated[int, typer.Option(help="That take part in a round.")] = 16,
    links: Links,
    work: Work,
    down_ratio: Annotated[
        float | None,
        typer.Option(help="Of the model on its way down, at every ratio but 1.", show_default="128, but 4 KB at least"),
    ] = None,
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

    Simulates a round at every ratio, 1 being float32 both ways: download, local steps, encoding, upload, decoding. The
    model goes down as to a client that missed no round. Prints time and bytes, with the acknowledgements of the other
    way, and recommends the smallest ratio whose
    round takes at most 5% longer than the fastest: less compression is more exact.
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
    setting = planning.Setting(
        parameters=parameters, clients=clients, down_ratio=down_ratio, **links.choose(clients), **vars(work)
    )
    setting = _add_codec(setting, codec_seconds)
    plans = _plan_at_scale(setting, ratios) if scale else {f"{clients:,} clients": planning.plan(setting, ratios)}
    for name, found in plans.items():
        _print(name, found)
    if out is not None:
        draw(plans, out)
        typer.echo(out)


def _add_codec(setting: Setting, given: tuple[float, float] | None) -> Setting:
    """The setting with the seconds that encoding and decoding take, as given or as measured."""
    from fedfq.network.plan import codec_seconds

    encode, decode = given or codec_seconds(setting.parameters)
    setting = replace(setting, encode_seconds=encode, decode_seconds=decode)
    whence = "as given" if given else "measured here"
    typer.echo(f"codec ({whence}): {encode:.3g} s to encode an update, {decode:.3g} s to decode it")
    return setting


def _plan_at_scale(setting: Setting, ratios: Sequence[float]) -> dict[str, Plan]:
    from fedfq.network import plan as planning

    typer.echo(
        f"uplinks: log-normal, median {planning.MEDIAN_UPLINK:g} Mbit/s, sigma {planning.SPREAD:g}, "
        f"{planning.SLOWEST_UPLINK:g} Mbit/s at least; downlinks {planning.DOWNLINK_TIMES:g} times that; "
        f"the server has {planning.SERVER_MBPS:,.0f} Mbit/s both ways; {planning.FRACTION:.0%} of the clients per round"
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
