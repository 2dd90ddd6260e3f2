"""How the curves of several runs are told apart, on the page and in figures alike.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart, darkened to a contrast of 3 and more on
white; the dark page has lighter ones (`page.css`, --c0 to --c6). Markers and dashes differ as well, for print in grey.
There are 7 colours and markers and 4 dashes, so that the first 28 runs all look different. Those that share a colour do
not share a marker.
"""

from __future__ import annotations

from typing import NamedTuple

COLOURS = ("#0072b2", "#d55e00", "#00805d", "#b5508a", "#3a3a3a", "#9a7400", "#2b9bd6")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # as matplotlib names them
DASHES: tuple[tuple[int, ...], ...] = ((), (7, 3), (2, 2), (9, 3, 2, 3))  # on, off, ... in pixels or points

# The same markers as SVG paths around the origin.
MARKER_PATHS = {
    "o": "M-4,0a4,4 0 1 0 8,0a4,4 0 1 0 -8,0Z",
    "s": "M-3.5,-3.5H3.5V3.5H-3.5Z",
    "^": "M0,-4.5L4.5,3.5H-4.5Z",
    "D": "M0,-5L5,0L0,5L-5,0Z",
    "v": "M0,4.5L4.5,-3.5H-4.5Z",
    "P": "M-1.5,-4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z",
    "X": "M-4.5,-2.5L-2.5,-4.5L0,-2L2.5,-4.5L4.5,-2.5L2,0L4.5,2.5L2.5,4.5L0,2L-2.5,4.5L-4.5,2.5L-2,0Z",
}


class Style(NamedTuple):
    colour: int  # place in COLOURS
    marker: str
    dashes: tuple[int, ...]


def style(number: int) -> Style:
    """How run `number` is drawn."""
    cycle = number // len(MARKERS)
    return Style((number + cycle) % len(COLOURS), MARKERS[number % len(MARKERS)], DASHES[number % len(DASHES)])


def styles(labels: list[str]) -> dict[str, Style]:
    """A style for every label: a method looks the same in every setting."""
    return {label: style(number) for number, label in enumerate(dict.fromkeys(labels))}
