"""How curves are told apart, on the page and in figures alike.

A method has its own colour and marker, the same on every page and in every figure. Its ratio chooses among three shades
of the colour and four dashes, so that twelve ratios in a row, each twice the one before, all look different; and below
256 the markers are hollow, so that the eight from 16 to 2048 do without the shades.

The first colours are those of Okabe and Ito, which colour-blind readers can tell apart, darkened to a contrast of 3 and
more on white; the dark page has lighter ones (`page.css`, --c0 to --c9). A shade is the colour with some of the text's.
Markers and dashes differ as well, for print in grey.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple
from zlib import crc32

COLOURS = (
    *("#0072b2", "#d55e00", "#00805d", "#b5508a", "#3a3a3a", "#9a7400", "#2b9bd6"),
    *("#6a51c4", "#8a4b2a", "#667700"),
)
INK = "#1b1f24"  # of the page's text
SHADES = (0.0, 0.3, 0.55)  # how much of it
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # as matplotlib names them
DASHES: tuple[tuple[int, ...], ...] = ((), (7, 3), (2, 2), (9, 3, 2, 3))  # on, off, ... in pixels or points
VARIANTS = 12  # of one colour and marker: shades and dashes, whose numbers have no common factor

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

# Colour and marker of a method. Fixed widths are one, whose ratio is 32 over the width.
METHODS = {
    "fedavg": (4, "o"),
    "fedfq": (0, "s"),
    "fedfq-cgsa": (1, "^"),
    "fedfq-exact": (1, "D"),
    "fedavg-bit": (2, "v"),
    "fedpaq": (3, "P"),
    "qsgd": (3, "s"),
    "aqg": (6, "X"),
    "dadaquant": (6, "^"),
    "acsgd": (8, "^"),
    "acsgd-topk": (8, "D"),
    "topk": (5, "v"),
    "stc": (9, "o"),
    "signsgd": (9, "X"),
    "eden": (7, "D"),
}
PLAIN_RATIO = 256  # has the colour itself and no dashes, as methods without a ratio have
PLAIN = re.compile(r"[a-z0-9-]+(@\d+|:claimed_ratio=\d+)?")  # a label of a method with no option but its ratio
RATIO = re.compile(r"(?:@|\bratio=|\bclaimed_ratio=)(\d+\.?\d*)")
WIDTH = re.compile(r"-(\d+)bit$")


class Style(NamedTuple):
    colour: int  # place in COLOURS
    shade: int  # place in SHADES
    marker: str
    dashes: tuple[int, ...]
    hollow: bool = False  # markers are

    @property
    def css(self) -> str:
        """The colour on the page, in a dark scheme, too."""
        own = f"var(--c{self.colour})"
        return f"color-mix(in srgb, {own}, var(--ink) {SHADES[self.shade]:.0%})" if self.shade else own

    @property
    def hex(self) -> str:
        """The colour on white."""
        share = SHADES[self.shade]
        pairs = zip(*(bytes.fromhex(colour[1:]) for colour in (COLOURS[self.colour], INK)))
        return "#" + bytes(round((1 - share) * own + share * ink) for own, ink in pairs).hex()


def styles(labels: list[str]) -> dict[str, Style]:
    """A style for every label of a run.

    A method at a ratio always has the same one. What else differs between runs, as in fedfq@64:gain=true, takes the
    next one that is free.
    """
    looks: dict[str, Style] = {}
    for label in sorted(labels, key=lambda label: not PLAIN.fullmatch(label)):
        taken = set(looks.values())
        choice = (_of_method(label, number) for number in range(VARIANTS * len(MARKERS)))
        looks.setdefault(label, next((look for look in choice if look not in taken), _of_method(label, 0)))
    return looks


def _of_method(label: str, number: int) -> Style:
    """The style of a label, and others (1, 2, ...) where that is taken."""
    name = re.split(r"[^a-z0-9-]", label, maxsplit=1)[0]
    ratio = float(found[1]) if (found := RATIO.search(label)) else 0.0
    if width := WIDTH.search(name):
        name, ratio = WIDTH.sub("-bit", name), 32 / max(int(width[1]), 1)
    colour, marker = METHODS.get(name) or _of_unknown(name)
    variant = number + (round(math.log2(ratio / PLAIN_RATIO)) if ratio else 0)
    marker = MARKERS[(MARKERS.index(marker) + number // VARIANTS) % len(MARKERS)]
    return Style(colour, variant % len(SHADES), marker, DASHES[variant % len(DASHES)], variant < 0)


def _of_unknown(name: str) -> tuple[int, str]:
    """The same for a name every time."""
    place = crc32(name.encode())
    return place % len(COLOURS), MARKERS[place // len(COLOURS) % len(MARKERS)]


def style(number: int) -> Style:
    """How curve `number` is drawn where curves are not of methods. The first 28 differ, in grey, too."""
    cycle = number // len(MARKERS)
    return Style((number + cycle) % len(COLOURS), 0, MARKERS[number % len(MARKERS)], DASHES[number % len(DASHES)])
