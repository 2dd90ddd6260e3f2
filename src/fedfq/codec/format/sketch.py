"""The sketch: an estimate of what the sections leave out, noisy, but right in the mean over its random numbers.

All entries that are sketched stand one after the other, each divided by its tensor's scale, and are dealt to blocks
like cards: entry f is number f // B of block f % B. A block is sent as the one among 128 random directions, and their
opposites, that is nearest to it, and as its length. With a shared basis, the entries may be those of a matrix that was
made shorter along known directions (`stretch.py`). docs/theory.md says why all this is unbiased.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedfq.types import Array

from ..kernels import FLOAT32_MAX, U, kernel
from .coefficients import NO_SHIFTS
from .directions import MAX_STRETCHED, KnownDirections
from .fold import fold
from .layout import Spec
from .normal import fill_with_normals
from .random_numbers import stream_key, uniform
from .reader import ByteReader, deflate, inflate, refuse_malformed, varint
from .sections import PlainSection, Surroundings
from .stretch import Stretch
from .tiles import CodedTile, read_tiles, write_tiles

DIRECTIONS = 128  # of a block, and as many opposite ones
NEGATIVE = 128  # the bit of a block's byte that says: the opposite direction
MOST_NUMBERS = 1 << 15  # of a block
LENGTH = 2.5  # of an ordinary block, in units
FULL_SCALE = 255  # byte b of a tensor is the scale 2^((b - 255) / 8); 0: it is not sketched
LARGEST_NORMAL = 16.0  # no number of a direction is as large
_EIGHTHS = (  # 2^(k / 8)
    *(1.0, 1.0905077326652577, 1.189207115002721, 1.2968395546510096),
    *(1.4142135623730951, 1.5422108254079407, 1.681792830507429, 1.8340080864093424),
)
# By byte: multiplication by a power of two is exact
SCALES = np.array(
    [math.ldexp(_EIGHTHS[(b - FULL_SCALE) % 8], (b - FULL_SCALE) // 8) for b in range(FULL_SCALE + 1)], np.float32
)

_LEVELS = Surroundings(1.0, 1.0, NO_SHIFTS)  # in which values are levels


ALL = np.arange(DIRECTIONS)


def make_directions(seed: int, numbers: int, wanted: Array = ALL) -> Array:
    """Those of the random directions that are wanted, a column each."""
    directions = np.empty((numbers, wanted.size), np.float32)
    fill_with_normals(stream_key(seed, 0), DIRECTIONS, wanted, directions)
    return directions


def draw_dithers(seed: int, blocks: int, stream: int = 1) -> Array:
    """A number between -1/2 and 1/2 for each block."""
    dithers = np.empty(blocks)
    _fill_with_dithers(stream_key(seed, stream), dithers)
    return dithers


@kernel
def _fill_with_dithers(key: np.uint64, dithers: Array) -> None:
    for b in range(dithers.size):
        dithers[b] = uniform(key, b) - 0.5


class Sketch(NamedTuple):
    """A sketch as it is in a payload."""

    seed: int  # 32 bits
    unit: float  # of lengths
    scales: Array  # uint8, a byte for each tensor of floats, in the order of the layout
    stretched: Array  # uint8, likewise: along how many known directions; empty without a shared basis
    words: Array  # uint8: a block's direction, and NEGATIVE
    levels: Sequence[CodedTile | None]  # of lengths, as of a vector: how many units above an ordinary one

    def to_bytes(self) -> bytes:
        packed = deflate(self.scales.tobytes() + self.stretched.tobytes())
        head = struct.pack("<If", self.seed, self.unit) + varint(len(packed)) + packed
        return head + varint(self.words.size) + self.words.tobytes() + write_tiles(self.levels)

    @classmethod
    def read(cls, reader: ByteReader, layout: Sequence[Spec], has_basis: bool) -> Sketch:
        """From a stranger's bytes, up to their end."""
        (seed,) = struct.unpack("<I", reader.take(4))
        unit = reader.float32()
        if not (math.isfinite(unit) and unit > 0):
            refuse_malformed(f"a sketch in units of {unit}")
        floats = [spec for spec in layout if spec.is_float]
        packed = reader.take(reader.varint())
        said = np.frombuffer(inflate(packed, len(floats) * (1 + has_basis), "the scales of a sketch"), np.uint8)
        scales, stretched = said[: len(floats)], said[len(floats) :]
        if stretched.max(initial=0) > MAX_STRETCHED:
            refuse_malformed(f"a sketch stretched along {stretched.max()} directions")
        entries = sum(spec.size for spec, scale in zip(floats, scales) if scale)
        words = np.frombuffer(reader.take(reader.varint()), np.uint8)
        if not 1 <= words.size <= entries <= MOST_NUMBERS * words.size:
            refuse_malformed(f"a sketch of {entries} entries in {words.size} blocks")
        return cls(seed, unit, scales, stretched, words, read_tiles(reader.rest(), (words.size,)))

    def decode(self, layout: Sequence[Spec], known: Mapping[str, KnownDirections]) -> Iterator[tuple[str, SketchPart]]:
        """What is added to each tensor."""
        floats = [spec for spec in layout if spec.is_float]
        entries = sum(spec.size for spec, scale in zip(floats, self.scales) if scale)
        blocks = self.words.size
        levels = np.zeros(blocks, np.float32)
        shape = Spec("lengths", (blocks,), levels.dtype)
        for job in PlainSection(self.levels).jobs(shape, _LEVELS):
            job().add_to(levels, shape.shape, 1.0)
        lengths = with_dither(levels, draw_dithers(self.seed, blocks)) * self.unit
        lengths[self.words >= NEGATIVE] *= -1
        lengths = np.clip(lengths, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)
        largest = float(np.abs(lengths).max()) * LARGEST_NORMAL
        used, words = np.unique(self.words & (NEGATIVE - 1), return_inverse=True)  # few blocks, few directions to hold
        directions = make_directions(self.seed, -(-entries // blocks), used)
        counts = self.stretched.tolist() or [0] * len(floats)
        at = 0
        for spec, byte, count in zip(floats, self.scales.tolist(), counts):
            if byte and spec.size:
                stretch = None
                if count:
                    stretch = _find_stretch(spec, count, known)
                    if largest * float(SCALES[byte]) * stretch.longest * spec.size > FLOAT32_MAX:
                        refuse_malformed(f"a sketch of tensor {spec.name!r} that exceeds float32")
                yield spec.name, SketchPart(at, SCALES[byte], stretch, lengths, words, directions)
                at += spec.size


def _find_stretch(spec: Spec, count: int, known: Mapping[str, KnownDirections]) -> Stretch:
    held = known[spec.name].left.shape[1] if spec.name in known else 0
    if count > held:
        refuse_malformed(f"a sketch along {count} known directions, of which the shared basis has {held}")
    return Stretch.along(known[spec.name], count)


def with_dither(levels: Array, dithers: Array) -> Array:
    """Lengths in units, in float64: levels count from the one that a block of ordinary length has."""
    return (levels.astype(np.float64) + np.rint(LENGTH + dithers)) - dithers


class SketchPart(NamedTuple):
    """What a sketch says of one tensor, whose entries begin at `at` among those that are sketched."""

    at: int
    scale: float  # float32
    stretch: Stretch | None
    lengths: Array  # float32, of blocks, with their sign
    words: Array
    directions: Array

    def add_to(self, total: Array, shape: tuple[int, ...], weight: float) -> None:
        """total += weight * the estimate, kept within float32; `total` is the tensor, flat."""
        if self.stretch is None:
            self._add(total, weight)
            return
        view = fold(shape)
        assert view is not None
        matrix = np.zeros(view.shape(shape), np.float32)
        self._add(matrix.reshape(-1), 1.0)
        self.stretch.apply(matrix)
        view.add_to(total, shape, matrix, weight)

    def _add(self, total: Array, weight: float) -> None:
        _add(total, self.at, self.scale, self.lengths, self.words, self.directions, weight)


@kernel
def _add(total: Array, at: int, scale: float, lengths: Array, words: Array, directions: Array, weight: float) -> None:
    """(direction length) scale, every product rounded to float32 and kept within it: weighted, too, it is finite."""
    blocks = lengths.size
    number, block = at // blocks, at % blocks
    factor, most = np.float32(weight), np.float32(FLOAT32_MAX)
    f = 0
    while f < total.size:
        count = min(total.size - f, blocks - block)
        direction = directions[number]
        for k in range(count):
            made = direction[U(words[U(block + k)])] * lengths[U(block + k)]
            made = min(max(made * np.float32(scale), -most), most)
            g = U(f + k)
            total[g] = min(max(total[g] + factor * made, -most), most)
        f += count
        block += count
        if block == blocks:
            block = 0
            number += 1
