"""A plan as SVG or PDF: time of a round and bytes of a round over the ratio."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedfq.network.plan import Plan, PlannedRound

SUFFIXES = (".svg", ".pdf")


def suffix(path: Path) -> str:
    """How a figure is written, by its name."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: a figure is named {' or '.join(SUFFIXES)}")
    return path.suffix.lower().lstrip(".")


def draw(plans: Mapping[str, Plan], path: Path) -> None:
    """The recommended ratio is the one with a ring."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter

    from fedfq.report import styles
    from fedfq.report.figures import PANEL, RC, UNDATED

    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(2 * PANEL[0], PANEL[1] + 0.17 * len(plans)), layout="constrained")
        seconds, sizes = figure.subplots(1, 2)
        for number, (name, plan) in enumerate(plans.items()):
            look = styles.style(number)
            style = {"color": look.hex, "marker": look.marker, "markersize": 3.5, "linewidth": 1.2}
            ratios = [each.ratio for each in plan.rounds]
            best = plan.recommended
            values = {
                seconds: ([each.seconds for each in plan.rounds], best.seconds),
                sizes: ([_total(each) for each in plan.rounds], _total(best)),
            }
            for axes, (curve, marked) in values.items():
                axes.plot(ratios, curve, label=name if axes is seconds else None, **style)
                axes.plot(best.ratio, marked, "o", markersize=9, markerfacecolor="none", color=style["color"])
        seconds.set_ylabel("time of a round")
        sizes.set_ylabel("bytes of a round, up and down")
        for axes, unit in ((seconds, "s"), (sizes, "B")):
            axes.set_xlabel("ratio (ring: recommended)")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            if len(plans) == 1:
                axes.set_ylim(bottom=0)
            else:
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(EngFormatter(unit))
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.grid(alpha=0.3, linewidth=0.5)
        figure.legend(loc="outside lower center")
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = suffix(path)
        figure.savefig(path, metadata=UNDATED[kind])


def _total(each: PlannedRound) -> float:
    return each.uplink_bytes + each.downlink_bytes
