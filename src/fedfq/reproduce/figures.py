"""Figures of a reproduction that are not of runs alone: Theorem 4, as SVG and PDF."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from fedfq.report.figures import PANEL, RC, save
from fedfq.report.styles import COLOURS, style
from fedfq.reproduce.theory import FIGURE, errors, q

TAU = 5
ITERATIONS = (50, 100, 200, 400, 800, 1600, 3200)  # T
WIDTHS = (1, 2, 3, None)  # b
GUIDE = 2.0  # the dotted line is this over T


def write_theorem_4(folder: Path) -> list[Path]:
    """The error over T for several q, beside a line that falls as 1 / T."""
    with matplotlib.rc_context(RC | {"text.parse_math": True, "legend.handlelength": 2}):
        return save(_theorem_4(), folder / FIGURE)


def _theorem_4() -> Figure:
    figure = Figure(figsize=PANEL, layout="constrained")
    axes = figure.subplots()
    for place, bits in enumerate(WIDTHS):
        found = errors(ITERATIONS, TAU, bits)
        look = style(place)
        name = f"$q = {q(bits):g}$" + ("" if bits is None else f" ($b = {bits}$)")
        axes.plot(ITERATIONS, found, label=name, color=COLOURS[look.colour], marker=look.marker, markersize=3.5)
    guide = [GUIDE / t for t in ITERATIONS]
    axes.plot(ITERATIONS, guide, label=f"${GUIDE:g} / T$", color="0.5", linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(rf"$T$, local steps in all ($\tau = {TAU}$)")
    axes.set_ylabel(r"mean $\|\theta - \theta^*\|^2$")
    axes.grid(alpha=0.3, linewidth=0.5)
    figure.legend(loc="outside lower center", ncols=3)
    return figure
