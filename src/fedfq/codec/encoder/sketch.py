"""Making a sketch of what the sections leave out, in so many bytes.

Its variance is about (sum of scales) (sum of r^2 / scale) / (8 blocks): least if scales go with the size of r.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedfq.types import Array

from ..format.random_numbers import stream_key
from ..format.sketch import (
    FULL_SCALE,
    LENGTH,
    LOWEST_CLASS,
    MOST_NUMBERS,
    NEGATIVE,
    SCALES,
    Classes,
    Sketch,
    draw_dithers,
    make_directions,
    seed_key,
)
from ..format.tiles import cut_into_tiles
from ..kernels import U, kernel
from ..parallel import with_workers
from ..tensors import QUANTIZED, Tensor
from .tiles import encode_levels

EXPECTED_LARGEST = 2.827557803897746  # of the magnitudes of 128 standard normal numbers
SMALLEST_SIZE = float(np.finfo(np.float32).tiny)  # what is less than that is not worth a sketch
BYTES_PER_BLOCK = 1.12  # about what a block takes: its direction and what is said of its length
SLAB_BLOCKS = 1 << 12  # blocks that are compared with the directions at a time
FREE_BLOCKS = 0.006  # of all: room for so few more is not used
MAX_TRIALS = 6


class Rest(NamedTuple):
    """What is left out of one tensor."""

    divided: Array  # flat, by the scales that both sides know of rows and columns
    size: float  # the scale of the tensor that makes the variance least: how large `divided` is
    energy: float

    @classmethod
    def of(cls, array: Array, decoded: Array, known: Classes | None) -> Rest:
        classes = known or Classes.unknown(array.shape)
        rows, columns = (SCALES[-1 + each].astype(np.float64) for each in classes)  # the last is that of class 0
        divided = np.empty(array.size, np.float32)
        weighted, energy = _divide(_flat(array), _flat(decoded), 1.0 / rows, 1.0 / columns, divided)
        return cls(divided, math.sqrt(weighted / (np.square(rows).sum() * np.square(columns).sum())), energy)


class Sketcher:
    """What is left out of one update, ready to be sketched in any number of bytes."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        decoded: Mapping[str, Array],
        known: Mapping[str, Classes],
        seed: int,
        checksum: int,
        threads: int = 1,
    ) -> None:
        """`tensors` are in the order of the payload, `decoded` is what its sections make of them.

        `known` are classes of rows and columns that both sides hold, `checksum` is that of the bytes before the sketch.
        """
        self.seed = int(stream_key(seed, 0)) >> 32
        self.key = seed_key(self.seed, checksum)
        self.threads = threads
        floats = [tensor for tensor in tensors if tensor.spec.is_float]
        sketched = [tensor for tensor in floats if tensor.kind == QUANTIZED and tensor.spec.size]
        rests: list[Rest] = self._spread(
            lambda tensor: Rest.of(tensor.array, decoded[tensor.spec.name], known.get(tensor.spec.name)), sketched
        )
        sizes = {t.spec.name: rest.size for t, rest in zip(sketched, rests) if 0.0 < rest.size < math.inf}
        largest = max(sizes.values(), default=0.0)
        if largest < SMALLEST_SIZE:
            sizes = {}
        self.scales = np.array([_as_byte(sizes.get(t.spec.name, 0.0), largest) for t in floats], np.uint8)
        self._largest = largest
        used = [rest.divided for t, rest in zip(sketched, rests) if t.spec.name in sizes]
        for divided, scale in zip(used, self.scales[self.scales > 0].tolist()):
            factor = np.float64(1.0 / (largest * float(SCALES[scale - 1 - 2 * LOWEST_CLASS])))
            np.multiply(divided, factor, out=divided, casting="unsafe")  # in float64, whose range is larger
        self._flat = np.concatenate(used) if used else np.zeros(0, np.float32)
        self.entries = self._flat.size
        self.energy = sum(rest.energy for rest in rests)

    @property
    def fewest_blocks(self) -> int:
        return -(-self.entries // MOST_NUMBERS)

    def sketch(self, room: float) -> Sketch | None:
        """The sketch with the most blocks that takes at most so many bytes; None if there is none."""
        if not self.entries:
            return None
        fits: Sketch | None = None
        few, many = self.fewest_blocks - 1, self.entries + 1  # that fit, and that do not
        blocks = int(room / BYTES_PER_BLOCK)
        for _ in range(MAX_TRIALS):
            blocks = min(max(blocks, few + 1), many - 1)
            frame = self._measure_lengths(blocks)
            spare = room - len(frame.to_bytes())
            if spare >= 0:
                fits, few = frame, blocks
            else:
                many = blocks
            if many - few <= 1 + FREE_BLOCKS * few or 0 <= spare <= FREE_BLOCKS * room:
                break
            blocks += math.floor(spare / BYTES_PER_BLOCK)
        return None if fits is None else fits._replace(words=self._choose_words(fits.words.size))

    def smallest(self) -> int:
        """The length of the shortest sketch."""
        return 0 if not self.entries else len(self._measure_lengths(self.fewest_blocks).to_bytes())

    def _measure_lengths(self, blocks: int) -> Sketch:
        """The sketch in so many blocks, but for their directions."""
        lengths = np.zeros(blocks)
        _sum_squares(self._flat, lengths)
        np.sqrt(lengths, out=lengths)
        mean = float(lengths.mean())
        dithers = draw_dithers(self.key, blocks)
        levels = np.rint(lengths * (LENGTH / mean) + dithers) - np.rint(LENGTH + dithers)
        unit = self._largest * mean / (LENGTH * EXPECTED_LARGEST)
        tiles = encode_levels(levels.astype(np.int32), cut_into_tiles((blocks,)))
        unit = min(max(unit, float(np.finfo(np.float32).tiny)), float(np.finfo(np.float32).max))
        return Sketch(self.seed, unit, self.scales, np.zeros(blocks, np.uint8), tiles)

    def _choose_words(self, blocks: int) -> Array:
        whole, over = divmod(self.entries, blocks)  # the first blocks have a number more
        directions = make_directions(self.key, whole + (over > 0))
        dealt = self._flat[: whole * blocks].reshape(whole, blocks)
        last = self._flat[whole * blocks :]

        def choose(start: int) -> Array:
            products = directions[:whole].T @ dealt[:, start : start + SLAB_BLOCKS]
            more = last[start : start + SLAB_BLOCKS]
            if more.size:
                products[:, : more.size] += np.outer(directions[whole], more)
            return _find_largest(products)

        return np.concatenate(self._spread(choose, range(0, blocks, SLAB_BLOCKS)))

    def _spread(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        return with_workers(self.threads, lambda spread: spread(function, items))


def _flat(array: Array) -> Array:
    return np.ascontiguousarray(array, np.float32).reshape(-1)


def _as_byte(size: float, largest: float) -> int:
    """The scale of a tensor, as the square root of its size: quarters of octaves of that."""
    if size == 0.0:
        return 0
    return max(1, FULL_SCALE + round(4 * math.log2(size / largest)))


@kernel
def _divide(h: Array, decoded: Array, rows: Array, columns: Array, divided: Array) -> tuple[float, float]:
    """What is left out, times factors of its row and its column; the energy of that, and without the factors."""
    weighted = energy = 0.0
    width = columns.size
    for i in range(rows.size):
        for j in range(width):
            f = U(i * width + j)
            rest = np.float64(h[f]) - np.float64(decoded[f])
            scaled = rest * (rows[i] * columns[U(j)])
            divided[f] = scaled
            weighted += scaled * scaled
            energy += rest * rest
    return weighted, energy


@kernel
def _sum_squares(flat: Array, sums: Array) -> None:
    """Of every block: entry f belongs to block f % blocks."""
    blocks = sums.size
    for start in range(0, flat.size, blocks):
        for b in range(min(blocks, flat.size - start)):
            sums[b] += np.float64(flat[start + b]) * np.float64(flat[start + b])


@kernel
def _find_largest(products: Array) -> Array:
    """The row with the largest magnitude in every column, and whether it is negative, as a block's byte."""
    largest = np.full(products.shape[1], np.float32(-1.0))
    words = np.zeros(products.shape[1], np.uint8)
    for i in range(products.shape[0]):
        for b in range(products.shape[1]):
            if abs(products[i, b]) > largest[b]:
                largest[b] = abs(products[i, b])
                words[b] = i | (NEGATIVE if products[i, b] < 0 else 0)
    return words
