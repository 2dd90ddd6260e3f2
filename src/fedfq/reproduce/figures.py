"""Figures of a reproduction that are not of runs alone: Theorem 4, as SVG and PDF."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedfq.report.figures import PANEL, RC, save
from fedfq.report.styles import style
from fedfq.reproduce.theory import FIGURE, errors, q, stationarity

TAU = 5
ITERATIONS = (50, 100, 200, 400, 800, 1600, 3200)  # T
WIDTHS = (1, 2, 3, None)  # b


def write_theorem_4(folder: Path) -> list[Path]:
    """Eqs. 15 and 16: what is bounded over T for several q, beside a line of the bound's slope."""
    with matplotlib.rc_context(RC | {"text.parse_math": True, "legend.handlelength": 2}):
        figure = Figure(figsize=(2 * PANEL[0], PANEL[1]), layout="constrained")
        convex, other = figure.subplots(1, 2)
        convex.set_title("strongly convex (Eq. 15)")
        convex.set_ylabel(r"mean $\|\theta - \theta^*\|^2$")
        _curves(convex, errors)
        convex.plot(ITERATIONS, [2 / t for t in ITERATIONS], "0.5", linestyle=":", label="$2 / T$")
        other.set_title("non-convex (Eq. 16)")
        other.set_ylabel(r"mean $\|\nabla f\|^2$ over $T$ steps")
        _curves(other, stationarity)
        other.set_yticks([2, 5, 10, 20, 50], labels=["2", "5", "10", "20", "50"])
        other.minorticks_off()
        other.plot(ITERATIONS, [120 / t**0.5 for t in ITERATIONS], "0.5", linestyle="--", label=r"$120 / \sqrt{T}$")
        lines = dict(zip(*reversed(convex.get_legend_handles_labels())))
        lines |= dict(zip(*reversed(other.get_legend_handles_labels())))
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines))
        return save(figure, folder / FIGURE)


def _curves(axes: Axes, found: Callable[[Sequence[int], int, int | None], list[float]]) -> None:
    for place, bits in enumerate(WIDTHS):
        look = style(place)
        name = f"$q = {q(bits):g}$" + ("" if bits is None else f" ($b = {bits}$)")
        values = found(ITERATIONS, TAU, bits)
        axes.plot(ITERATIONS, values, label=name, color=look.hex, marker=look.marker, markersize=3.5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(rf"$T$, local steps in all ($\tau = {TAU}$)")
    axes.grid(alpha=0.3, linewidth=0.5)
