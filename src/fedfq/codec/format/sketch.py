"""The sketch: an estimate of what the sections leave out, noisy, but right in the mean over its random numbers.

All entries that are sketched stand one after the other, each divided by a scale that both sides know, and are dealt to
blocks like cards: entry f is number f // B of block f % B. A block is sent as the one among 128 random directions, and
their opposites, that is nearest to it, and as its length. docs/theory.md says why that is unbiased.
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
from .layout import Spec
from .normal import fill_with_normals
from .random_numbers import stream_key, uniform
from .reader import ByteReader, deflate, inflate, refuse_malformed, varint
from .sections import PlainSection, Surroundings
from .tiles import CodedTile, read_tiles, write_tiles

DIRECTIONS = 128  # of a block, and as many opposite ones
NEGATIVE = 128  # the bit of a block's byte that says: the opposite direction
MOST_NUMBERS = 1 << 15  # of a block
LENGTH = 2.5  # of an ordinary block, in units
FULL_SCALE = 255  # byte b of a tensor is the scale 2^((b - 255) / 8); 0: it is not sketched
LOWEST_CLASS = -12  # of a row or column, in the same eighths of octaves
_EIGHTHS = (  # 2^(k / 8)
    *(1.0, 1.0905077326652577, 1.189207115002721, 1.2968395546510096),
    *(1.4142135623730951, 1.5422108254079407, 1.681792830507429, 1.8340080864093424),
)
_LEAST = 1 + 2 * LOWEST_CLASS
# 2^((e - 255) / 8) for e from _LEAST on: multiplication by a power of two is exact
SCALES = np.array(
    [math.ldexp(_EIGHTHS[(e - 255) % 8], (e - 255) // 8) for e in range(_LEAST, FULL_SCALE + 1)], np.float32
)

_LEVELS = Surroundings(1.0, 1.0, NO_SHIFTS)  # in which values are levels


class Classes(NamedTuple):
    """How large the rows and the columns of a tensor are beside its largest ones, as far as both sides know: int64,
    from LOWEST_CLASS to 0. The first dimension is the rows, all others are the columns."""

    rows: Array
    columns: Array

    @classmethod
    def of(cls, drift: Array) -> Classes | None:
        """By the energies of rows and columns of the drift; None where these tell nothing."""
        if drift.ndim < 2 or drift.size == 0:
            return None
        matrix = np.ascontiguousarray(drift, np.float32).reshape(drift.shape[0], -1)
        rows, columns = np.zeros(matrix.shape[0]), np.zeros(matrix.shape[1])
        _sum_squares(matrix, rows, columns)
        return cls(_classify(rows), _classify(columns)) if rows.any() else None

    @classmethod
    def unknown(cls, shape: tuple[int, ...]) -> Classes:
        """All alike."""
        rows = shape[0] if len(shape) > 1 else 1
        return cls(np.zeros(rows, np.int64), np.zeros(math.prod(shape) // max(rows, 1), np.int64))


@kernel
def _sum_squares(matrix: Array, rows: Array, columns: Array) -> None:
    """Squares of float32 numbers are exact in float64; sums are made row by row, from left to right."""
    for i in range(matrix.shape[0]):
        for j in range(matrix.shape[1]):
            square = np.float64(matrix[i, j]) * np.float64(matrix[i, j])
            rows[i] += square
            columns[j] += square


def _classify(energies: Array) -> Array:
    """A class per octave of energy, which is an eighth of an octave of scale: the eighth root of the energy."""
    exponents = np.frexp(energies)[1].astype(np.int64)
    exponents[energies == 0] = np.iinfo(np.int32).min
    return np.maximum(exponents - exponents.max(), LOWEST_CLASS)


def seed_key(seed: int, checksum: int) -> int:
    """What the random numbers of a sketch depend on: its seed, and the bytes before it (their CRC-32)."""
    return seed << 32 | checksum


ALL = np.arange(DIRECTIONS)


def make_directions(key: int, numbers: int, wanted: Array = ALL) -> Array:
    """Those of the random directions that are wanted, a column each."""
    directions = np.empty((numbers, wanted.size), np.float32)
    fill_with_normals(stream_key(key, 0), DIRECTIONS, wanted, directions)
    return directions


def draw_dithers(key: int, blocks: int) -> Array:
    """A number between -1/2 and 1/2 for each block."""
    dithers = np.empty(blocks)
    _fill_with_dithers(stream_key(key, 1), dithers)
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
    words: Array  # uint8: a block's direction, and NEGATIVE
    levels: Sequence[CodedTile | None]  # of lengths, as of a vector: how many units above an ordinary one

    def to_bytes(self) -> bytes:
        packed = deflate(self.scales.tobytes())
        head = struct.pack("<If", self.seed, self.unit) + varint(len(packed)) + packed
        return head + varint(self.words.size) + self.words.tobytes() + write_tiles(self.levels)

    @classmethod
    def read(cls, reader: ByteReader, layout: Sequence[Spec]) -> Sketch:
        """From a stranger's bytes, up to their end."""
        (seed,) = struct.unpack("<I", reader.take(4))
        unit = reader.float32()
        if not (math.isfinite(unit) and unit > 0):
            refuse_malformed(f"a sketch in units of {unit}")
        floats = [spec for spec in layout if spec.is_float]
        scales = np.frombuffer(inflate(reader.take(reader.varint()), len(floats), "the scales of a sketch"), np.uint8)
        entries = sum(spec.size for spec, scale in zip(floats, scales) if scale)
        words = np.frombuffer(reader.take(reader.varint()), np.uint8)
        if not 1 <= words.size <= entries <= MOST_NUMBERS * words.size:
            refuse_malformed(f"a sketch of {entries} entries in {words.size} blocks")
        return cls(seed, unit, scales, words, read_tiles(reader.rest(), (words.size,)))

    def decode(
        self, checksum: int, layout: Sequence[Spec], known: Mapping[str, Classes]
    ) -> Iterator[tuple[str, SketchPart]]:
        """What is added to each tensor. `checksum` is that of the bytes before the sketch."""
        key = seed_key(self.seed, checksum)
        floats = [spec for spec in layout if spec.is_float]
        entries = sum(spec.size for spec, scale in zip(floats, self.scales) if scale)
        blocks = self.words.size
        levels = np.zeros(blocks, np.float32)
        shape = Spec("lengths", (blocks,), levels.dtype)
        for job in PlainSection(self.levels).jobs(shape, _LEVELS):
            job().add_to(levels, shape.shape, 1.0)
        lengths = with_dither(levels, draw_dithers(key, blocks)) * self.unit
        lengths[self.words >= NEGATIVE] *= -1
        lengths = np.clip(lengths, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)
        used, words = np.unique(self.words & (NEGATIVE - 1), return_inverse=True)  # few blocks, few directions to hold
        directions = make_directions(key, -(-entries // blocks), used)
        at = 0
        for spec, scale in zip(floats, self.scales.tolist()):
            if scale and spec.size:
                classes = known.get(spec.name) or Classes.unknown(spec.shape)
                yield spec.name, SketchPart(at, scale, classes, lengths, words, directions)
                at += spec.size


def with_dither(levels: Array, dithers: Array) -> Array:
    """Lengths in units, in float64: levels count from the one that a block of ordinary length has."""
    return (levels.astype(np.float64) + np.rint(LENGTH + dithers)) - dithers


class SketchPart(NamedTuple):
    """What a sketch says of one tensor, whose entries begin at `at` among those that are sketched."""

    at: int
    scale: int
    classes: Classes
    lengths: Array  # float32, of blocks, with their sign
    words: Array
    directions: Array

    def add_to(self, total: Array, shape: tuple[int, ...], weight: float) -> None:
        """total += weight * the estimate, kept within float32; `total` is the tensor, flat."""
        rows, columns = self.classes.rows + (self.scale - _LEAST), self.classes.columns
        _add(total, self.at, rows, columns, SCALES, self.lengths, self.words, self.directions, weight)


@kernel
def _add(
    total: Array,
    at: int,
    rows: Array,
    columns: Array,
    scales: Array,
    lengths: Array,
    words: Array,
    directions: Array,
    weight: float,
) -> None:
    """In float32, every product rounded: (direction length) scale. A row is cut where its entries come to block 0."""
    blocks, width = lengths.size, columns.size
    number, block = at // blocks, at % blocks
    factor, most = np.float32(weight), np.float32(FLOAT32_MAX)
    for i in range(rows.size):
        j = 0
        while j < width:
            count = min(width - j, blocks - block)
            direction = directions[number]
            for k in range(count):
                made = direction[U(words[U(block + k)])] * lengths[U(block + k)]
                made *= scales[U(rows[i] + columns[U(j + k)])]
                f = U(i * width + j + k)
                total[f] = min(max(total[f] + factor * made, -most), most)
            j += count
            block += count
            if block == blocks:
                block = 0
                number += 1
