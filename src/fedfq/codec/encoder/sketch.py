"""Making a sketch of what the sections leave out, in so many bytes.

Its variance is about (sum of scales) (sum of r^2 / scale) / (8 blocks): least if scales go with the size of r. Along
known directions, r is made shorter by what it is likely to be longer there, where that helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fedfq.types import Array

from ..format.directions import MAX_STRETCHED, KnownDirections
from ..format.fold import energy, fold
from ..format.random_numbers import stream_key
from ..format.sketch import (
    FULL_SCALE,
    LENGTH,
    MOST_NUMBERS,
    NEGATIVE,
    SCALES,
    Sketch,
    draw_dithers,
    make_directions,
)
from ..format.stretch import Stretch
from ..format.tiles import cut_into_tiles
from ..kernels import U, kernel
from ..parallel import with_workers
from ..tensors import QUANTIZED, Tensor
from .tiles import encode_levels

EXPECTED_LARGEST = 2.827557803897746  # of the magnitudes of 128 standard normal numbers
ALONG = 7.148251810874743  # the expected square of that largest, less 1
DITHERED = 1.0 + 1.0 / (12.0 * LENGTH**2)  # by how much dither raises the square of a block's length
SMALLEST_SIZE = 2.0**-100  # of a number: what is less is not worth a sketch
BYTES_PER_BLOCK = 1.12  # about what a block takes: its direction and what is said of its length
SLAB_BLOCKS = 1 << 12  # blocks that are compared with the directions at a time
FREE_BLOCKS = 0.006  # of all: room for so few more is not used
MAX_TRIALS = 6
SLACK = 0.25  # bytes left free per root of the number of blocks: by so much, other dithers take more
SHRINK = 0.97  # of the blocks, if they take more all the same
HASH_PRIME = np.uint64(0x100000001B3)  # of FNV-1a
SAFE_ENERGIES = (1e-30, 1e30)  # between which sums of squares in float32 are right


class Rest(NamedTuple):
    """What is left out of one tensor."""

    entries: Array  # flat, in the order in which they are dealt to blocks
    energy: float
    mark: int  # a hash of the entries
    size: float  # the scale of the tensor that makes the variance least: how large the entries are
    spread: float  # the square root of what its variance is proportional to, if it is sketched alone
    stretched: int = 0  # along so many known directions the matrix was made shorter

    @classmethod
    def of(cls, array: Array, decoded: Array, known: KnownDirections | None) -> Rest:
        """With known directions, whichever has less variance: the entries as they are, or stretched."""
        rest = np.empty(array.size, np.float32)
        left_out, mark = _subtract(_flat(array), _flat(decoded), rest)
        plain = cls(rest, left_out, int(mark), math.sqrt(left_out / rest.size), math.sqrt(left_out * rest.size))
        if known is None or not SAFE_ENERGIES[0] < left_out < SAFE_ENERGIES[1]:
            return plain
        view = fold(array.shape)
        assert view is not None
        count = min(MAX_STRETCHED, known.left.shape[1])
        stretch = Stretch.along(known, count)
        matrix = view.matrix(rest.reshape(array.shape))
        matrix = matrix.copy() if np.may_share_memory(matrix, rest) else matrix
        stretch.undo(matrix)
        shortened = energy(matrix)
        spread = math.sqrt(shortened * stretch.noise)
        if spread >= plain.spread:
            return plain
        return cls(matrix.reshape(-1), left_out, plain.mark, math.sqrt(shortened / stretch.noise), spread, count)


class Sketcher:
    """What is left out of one update, ready to be sketched in any number of bytes."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        decoded: Mapping[str, Array],
        known: Mapping[str, KnownDirections] | None,
        seed: int,
        threads: int = 1,
    ) -> None:
        """`tensors` are in the order of the payload, `decoded` is what its sections make of them.

        `known` are the directions of the payload's shared basis, if it has one. Updates that differ have random numbers
        of their own, also with the same seed.
        """
        self.threads = threads
        floats = [tensor for tensor in tensors if tensor.spec.is_float]
        sketched = [tensor for tensor in floats if tensor.kind == QUANTIZED and tensor.spec.size]
        rests: list[Rest] = self._spread(
            lambda tensor: Rest.of(tensor.array, decoded[tensor.spec.name], (known or {}).get(tensor.spec.name)),
            sketched,
        )
        self.seed = seed
        for rest in rests:
            self.seed = int(stream_key(self.seed, rest.mark))
        self.seed >>= 32
        sizes = {t.spec.name: rest.size for t, rest in zip(sketched, rests) if 0.0 < rest.size < math.inf}
        largest = max(sizes.values(), default=0.0)
        if largest < SMALLEST_SIZE:
            sizes = {}
        self.scales = np.array([_as_byte(sizes.get(t.spec.name, 0.0), largest) for t in floats], np.uint8)
        counts = {t.spec.name: rest.stretched for t, rest in zip(sketched, rests) if t.spec.name in sizes}
        stretched = [] if known is None else [counts.get(t.spec.name, 0) for t in floats]
        self.stretched = np.array(stretched, np.uint8)
        self._largest = largest
        used = [rest.entries for t, rest in zip(sketched, rests) if t.spec.name in sizes]
        self._flat = np.empty(sum(entries.size for entries in used), np.float32)
        at = 0
        for entries, scale in zip(used, self.scales[self.scales > 0].tolist()):
            _divide(entries, largest * float(SCALES[scale]), self._flat[at : at + entries.size])
            at += entries.size
        self.entries = self._flat.size
        self.energy = sum(rest.energy for rest in rests)
        self._spread_of_all = sum(rest.spread for rest in rests)

    @property
    def fewest_blocks(self) -> int:
        return -(-self.entries // MOST_NUMBERS)

    def sketch(self, room: float) -> Sketch | None:
        """The sketch with about the most blocks that takes at most so many bytes; None if there is none.

        How many blocks fit is found with other dithers than those that are sent: these would no longer be random if
        they had a say in it.
        """
        if not self.entries:
            return None
        few, many = self.fewest_blocks - 1, self.entries + 1  # that fit, and that do not
        blocks = int(room / BYTES_PER_BLOCK)
        for _ in range(MAX_TRIALS):
            blocks = min(max(blocks, few + 1), many - 1)
            spare = room - SLACK * math.sqrt(blocks) - len(self._measure_lengths(blocks, stream=2).to_bytes())
            if spare >= 0:
                few = blocks
            else:
                many = blocks
            if many - few <= 1 + FREE_BLOCKS * few or 0 <= spare <= FREE_BLOCKS * room:
                break
            blocks += math.floor(spare / BYTES_PER_BLOCK)
        blocks = max(few, self.fewest_blocks)
        while len((fits := self._measure_lengths(blocks)).to_bytes()) > room:
            if blocks == self.fewest_blocks:
                return None
            blocks = max(self.fewest_blocks, int(SHRINK * blocks))
        return fits._replace(words=self._choose_words(blocks))

    def expected_error(self, room: float) -> float:
        """About the variance of a sketch in so many bytes."""
        return self.variance(min(self.entries, self.fewest_blocks + (room - self.smallest) / BYTES_PER_BLOCK))

    def variance(self, blocks: float) -> float:
        """That of a sketch in so many blocks, where they are alike (docs/theory.md)."""
        lengths = DITHERED * (self._spread_of_all**2 / blocks + ALONG * self.energy)
        return lengths / EXPECTED_LARGEST**2 - self.energy

    @cached_property
    def smallest(self) -> int:
        """The length of the shortest sketch. It takes a pass over all entries."""
        return 0 if not self.entries else len(self._measure_lengths(self.fewest_blocks).to_bytes())

    def _measure_lengths(self, blocks: int, stream: int = 1) -> Sketch:
        """The sketch in so many blocks, but for their directions."""
        lengths = np.zeros(blocks)
        _sum_squares(self._flat, lengths)
        np.sqrt(lengths, out=lengths)
        mean = float(lengths.mean())
        dithers = draw_dithers(self.seed, blocks, stream)
        levels = np.rint(lengths * (LENGTH / mean) + dithers) - np.rint(LENGTH + dithers)
        unit = self._largest * mean / (LENGTH * EXPECTED_LARGEST)
        tiles = encode_levels(levels.astype(np.int32), cut_into_tiles((blocks,)))
        unit = min(max(unit, float(np.finfo(np.float32).tiny)), float(np.finfo(np.float32).max))
        return Sketch(self.seed, unit, self.scales, self.stretched, np.zeros(blocks, np.uint8), tiles)

    def _choose_words(self, blocks: int) -> Array:
        whole, over = divmod(self.entries, blocks)  # the first blocks have a number more
        directions = make_directions(self.seed, whole + (over > 0))
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
def _subtract(h: Array, decoded: Array, rest: Array) -> tuple[float, np.uint64]:
    """What is left out; returns its energy and a hash of it (FNV-1a of its 32-bit words)."""
    energy, mark = 0.0, HASH_PRIME
    words = rest.view(np.uint32)
    for f in range(h.size):
        difference = np.float64(h[U(f)]) - np.float64(decoded[U(f)])
        rest[U(f)] = difference
        energy += difference * difference
        mark = (mark ^ np.uint64(words[U(f)])) * HASH_PRIME
    return energy, mark


@kernel
def _divide(entries: Array, size: float, divided: Array) -> None:
    """In float64, whose range is larger."""
    for f in range(entries.size):
        divided[U(f)] = np.float64(entries[U(f)]) / size


@kernel
def _sum_squares(flat: Array, sums: Array) -> None:
    """Of every block: entry f belongs to block f % blocks."""
    blocks = sums.size
    for start in range(0, flat.size, blocks):
        for b in range(min(blocks, flat.size - start)):
            entry = np.float64(flat[U(start + b)])
            sums[U(b)] += entry * entry


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
