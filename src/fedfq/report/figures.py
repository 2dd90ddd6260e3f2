"""Accuracy over rounds, over uplink bytes and over bytes both ways, as SVG and PDF, for papers.

The same runs give the same files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from fedfq.report.runs import RunData, settings
from fedfq.report.styles import Style, styles

FIGURES = {"accuracy-rounds": "round", "accuracy-bytes": "uplink_bytes", "accuracy-total": "total_bytes"}
AXES = {"round": "round", "uplink_bytes": "uploaded by all clients", "total_bytes": "sent up and down, all clients"}
PANEL = (3.4, 2.5)  # inches: the width of a column
MARKERS_PER_CURVE = 8  # about

# Identifiers in SVG files come from a salt instead of chance; no file says when it was made.
RC: Any = {
    **{"svg.hashsalt": "fedfq", "pdf.fonttype": 42, "text.parse_math": False, "lines.scale_dashes": False},
    **{"font.size": 8, "axes.titlesize": 8, "legend.frameon": False, "legend.handlelength": 4},
}
UNDATED: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def write_figures(runs: Sequence[RunData], folder: Path) -> list[Path]:
    """accuracy-rounds, accuracy-bytes and accuracy-total, each as .svg and .pdf, with a panel for every setting."""
    written = []
    with matplotlib.rc_context(RC):
        for name, field in FIGURES.items():
            written += save(_figure(runs, field), folder / name)
    return written


def save(figure: Figure, stem: Path) -> list[Path]:
    """STEM.svg and STEM.pdf."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, metadata in UNDATED.items():
        path = stem.with_name(f"{stem.name}.{kind}")
        figure.savefig(path, metadata=metadata)
        written.append(path)
    return written


def _figure(runs: Sequence[RunData], field: str) -> Figure:
    groups = settings(runs)
    looks = styles([run.label for run in runs])
    columns = 2 if len(groups) > 1 else 1
    lines = -(-len(groups) // columns)
    names = {run.label: run.label if run.finished else f"{run.label} (unfinished)" for run in runs}
    beside = max(1, int(PANEL[0] * columns / (0.65 + 0.065 * max(map(len, names.values())))))  # inches of a letter
    height = PANEL[1] * lines + 0.17 * -(-len(names) // beside)
    figure = Figure(figsize=(PANEL[0] * columns, height), layout="constrained")
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, (setting, group) in zip(grid, groups.items()):
        axes.set_title(setting)
        for place, run in enumerate(group):
            _curve(axes, run, field, looks[run.label], names[run.label], place / len(group))
        _axes(axes, field)
    for axes in grid[len(groups) :]:
        axes.set_visible(False)
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            found.setdefault(label, handle)
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=beside)
    return figure


def _curve(axes: Any, run: RunData, field: str, look: Style, name: str, phase: float) -> None:
    """`phase` (0 to 1) shifts the markers, so that curves which coincide do not hide each other's."""
    points = [point for point in run.points if getattr(point, field) > 0]  # no bytes yet: not on a log axis
    every = max(1, len(points) // MARKERS_PER_CURVE)
    axes.plot(
        [getattr(point, field) for point in points],
        [point.accuracy for point in points],
        label=name,
        color=look.hex,
        linestyle=(0, look.dashes) if look.dashes else "-",
        linewidth=1.2,
        marker=look.marker,
        markersize=3.5,
        **({"markerfacecolor": "white"} if look.hollow else {}),
        markevery=(int(phase * every), every),
    )


def _axes(axes: Any, field: str) -> None:
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.set_xlabel(AXES[field])
    if field == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    else:
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        narrow = max(1.0, math.sqrt(10 * low / high))  # a decade at least, or there might be no tick in it
        axes.set_xlim(low / narrow, high * narrow)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axes.xaxis.set_major_formatter(EngFormatter("B"))
        axes.xaxis.set_minor_formatter(NullFormatter())
