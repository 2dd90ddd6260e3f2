"""EDEN (Vargaftik et al., ICML 2022), with one bit DRIVE (NeurIPS 2021): rotate, quantise as a Gaussian, scale.

With R a random rotation, Rx / ||x|| * sqrt(d) is nearly normal whatever x is. Each entry becomes the nearest Lloyd-Max
centroid c of N(0, 1) at b bits, and the server takes S R^-1 c with S = ||x||^2 / <c, Rx>: the error is D / (1 - D) of
||x||^2, D being the distortion of the centroids (0.571 at one bit). R is H diag(signs) with the Hadamard matrix H and
signs from a seed that is sent. For a uniform rotation this is unbiased; for H it is nearly so on dense vectors, but not
on sparse ones (at one bit, (2, 1, 0, 0, ...) always becomes (2.5, 0, 0, ...)): hence `unbiased` is not promised.

As the authors do: all tensors as one vector; below one bit, a random part of it, times its share's inverse; between
whole numbers of bits, a part of the entries with one bit more. Deviations:
- They pad to a power of two, which for a million entries doubles the bits. We cut the vector into blocks that are
  powers of two, of at most 2^16 entries, with a scale each. Only the last block, below 2^7 entries, is padded.
- The part that is sent below one bit is exactly as large as the budget allows, not so in the mean only; and the entries
  with one bit more are the first of each block: after the rotation, all are alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from fedfq.codec.errors import BudgetError, PayloadError
from fedfq.codec.format.random_numbers import stream_key, uniform
from fedfq.codec.kernels import FLOAT32_MAX, Int, U, kernel
from fedfq.codec.ratio import check_ratio

from .bits import BitReader, Codes, fields, write
from .method import ANY_ROUND, RATIO, Array, Method, Order, RoundContext, State, Update, Upload
from .quantizer import energy, peak
from .sparse import sample
from .wire import (
    Reader,
    budget_bytes,
    carried_bytes,
    check_budget,
    divide,
    finite,
    join,
    lengths,
    split,
    unite,
)

SEED_BYTES, SCALE_BYTES = 8, 4
MAX_BITS = 8
LARGEST_BLOCK, SMALLEST_BLOCK = 1 << 16, 1 << 7  # entries
SIGNS, SAMPLE = 0, 1  # random sequences
NEWTON_STEPS = 20


class Block(NamedTuple):
    entries: int
    size: int  # the power of two that they are padded to
    bits: int  # of each code
    longer: int  # so many codes, the first ones, have one bit more


@dataclass(frozen=True)
class Eden(Method):
    ratio: Annotated[float, f"{RATIO}; one bit per parameter at 32, as in its paper"] = 32

    summary: ClassVar[str] = "a random rotation, after which every entry is rounded as a Gaussian one"
    paper: ClassVar[str] = "EDEN (Vargaftik et al. 2022)"
    claims: ClassVar[str] = "32 / ratio bits per parameter"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        parts = divide(update)
        x, seed = join(parts.vectors), order.seed % 2**64
        blocks = self._blocks(update)
        sent = sum(block.entries for block in blocks)
        if sent < x.size:
            x = x[sample(stream_key(seed, SAMPLE), x.size, sent)]
        signs = stream_key(seed, SIGNS)
        share = sent / max(1, sum(h.size for h in parts.vectors.values()))
        scales, codes, at = [], [], 0
        for block in blocks:
            scale, levels = _encode_block(x[at : at + block.entries], block, signs, at)
            scales.append(min(scale / share, FLOAT32_MAX))
            codes += levels
            at += block.entries
        head = seed.to_bytes(SEED_BYTES, "little") if blocks else b""
        payload = head + np.array(scales, "<f4").tobytes() + write(*codes) + parts.carried
        return Upload(payload, 32 / self.ratio * sum(h.size for h in parts.vectors.values()))

    def decode(self, payload: bytes, like: Update, context: RoundContext = ANY_ROUND) -> dict[str, Array]:
        sizes = lengths(like)
        try:
            whole, blocks = sum(sizes.values()), self._blocks(like)
        except BudgetError as error:  # of the model: no client can have sent this
            raise PayloadError("malformed", f"no update of this model has a payload of this ratio: {error}") from error
        reader = Reader(payload)
        seed = int.from_bytes(reader.take(SEED_BYTES), "little") if blocks else 0
        scales = reader.scales(len(blocks))
        bits = BitReader(reader)
        signs = stream_key(seed, SIGNS)
        sent, at = np.empty(sum(block.entries for block in blocks), np.float32), 0
        for block, scale in zip(blocks, scales):
            sent[at : at + block.entries] = _decode_block(bits, block, scale, signs, at)
            at += block.entries
        bits.close()
        x = sent
        if sent.size < whole:
            x = np.zeros(whole, np.float32)
            x[sample(stream_key(seed, SAMPLE), whole, sent.size)] = sent
        return unite(like, split(x, sizes), reader)

    def _blocks(self, like: Update) -> list[Block]:
        """What is sent, known to both sides: the payload is no larger than the ratio allows, to the bit."""
        size = sum(lengths(like).values())
        budget, carried = budget_bytes(like, self.ratio), carried_bytes(like)
        check_budget(budget, carried + (SEED_BYTES + SCALE_BYTES + 1 if size else 0))
        if size == 0:
            return []
        bits = 8 * (budget - carried - SEED_BYTES)
        whole = _cut(size)
        left = bits - 8 * SCALE_BYTES * len(whole)
        padded = sum(block_size for _, block_size in whole)
        if left < padded:
            return [Block(n, n, 1, 0) for n in _fill(size, bits)]
        width = min(MAX_BITS, left // padded)
        longer = left / padded - width if width < MAX_BITS else 0.0
        return [Block(n, block_size, width, int(longer * block_size)) for n, block_size in whole]


def _cut(size: int) -> list[tuple[int, int]]:
    """All entries in blocks: each with the power of two it is padded to."""
    blocks = []
    while size > 0:
        block = min(LARGEST_BLOCK, 1 << size.bit_length() - 1)
        if size < SMALLEST_BLOCK:
            block = 1 << (size - 1).bit_length()
        blocks.append((min(size, block), block))
        size -= block
    return blocks


def _fill(size: int, bits: int) -> list[int]:
    """Blocks of up to `size` entries, one bit each and one scale per block, that fill so many bits."""
    blocks: list[int] = []
    while True:
        room = min(size, bits - 8 * SCALE_BYTES, LARGEST_BLOCK)
        if room < (SMALLEST_BLOCK if blocks else 1):
            return blocks
        blocks.append(1 << room.bit_length() - 1)
        size -= blocks[-1]
        bits -= blocks[-1] + 8 * SCALE_BYTES


def _encode_block(x: Array, block: Block, signs: np.uint64, at: int) -> tuple[float, list[Codes]]:
    """S for an orthonormal rotation, and the codes."""
    largest = float(peak(x))
    if largest == 0.0:
        nothing = np.zeros(block.size, np.uint8)
        return 0.0, _codes(nothing, block)
    y = np.zeros(block.size, np.float32)
    y[: x.size] = x / np.float64(largest)  # squares of the entries themselves may overflow
    _flip(y, x.size, signs, at)
    _hadamard(y)
    squares = energy(y)
    levels = np.empty(block.size, np.uint8)
    unit = math.sqrt(block.size / squares)
    product = 0.0
    for part, bits in _parts(block):
        product += _quantize(y[part], unit, boundaries(bits), centroids(bits), levels[part])
    return largest * squares / (product * math.sqrt(block.size)), _codes(levels, block)


def _decode_block(reader: BitReader, block: Block, scale: float, signs: np.uint64, at: int) -> Array:
    y = np.empty(block.size, np.float32)
    for part, bits in _parts(block):
        y[part] = centroids(bits).astype(np.float32)[reader.fields(part.stop - part.start, bits)]
    _hadamard(y)
    _flip(y, block.entries, signs, at)
    return finite(y[: block.entries] * (np.float64(scale) / math.sqrt(block.size)))


def _parts(block: Block) -> list[tuple[slice, int]]:
    return [(slice(0, block.longer), block.bits + 1), (slice(block.longer, block.size), block.bits)]


def _codes(levels: Array, block: Block) -> list[Codes]:
    return [fields(levels[part], bits) for part, bits in _parts(block)]


@cache
def centroids(bits: int) -> Array:
    """The 2^bits Lloyd-Max centroids of N(0, 1), ascending: each is the mean of the numbers nearest to it.

    Newton's method on the positive half, from the quantiles of N(0, 3), which are right for many centroids.
    """
    count = 2 ** (bits - 1)
    quantile = NormalDist(0, math.sqrt(3)).inv_cdf
    c = np.array([quantile((count + i + 0.5) / (2 * count)) for i in range(count)])
    for _ in range(NEWTON_STEPS):
        t = np.concatenate([[0.0], (c[:-1] + c[1:]) / 2, [np.inf]])
        density = np.exp(-t * t / 2) / math.sqrt(2 * math.pi)
        mass = -np.diff([math.erfc(v / math.sqrt(2)) / 2 for v in t])
        mean = -np.diff(density) / mass
        # The mean of a cell moves with its ends, by +- density (t - mean) / mass, and these with half of two centroids
        below = np.append(0.0, density[1:-1] * (mean[1:] - t[1:-1]) / mass[1:] / 2)
        above = np.append(density[1:-1] * (t[1:-1] - mean[:-1]) / mass[:-1] / 2, 0.0)
        c = c - _solve(below, below + above - 1, above, mean - c)
    return np.concatenate([-c[::-1], c])


def _solve(below: Array, diagonal: Array, above: Array, right: Array) -> Array:
    """Linear equations with three diagonals, by elimination."""
    diagonal, right = diagonal.copy(), right.copy()
    for i in range(1, right.size):
        factor = below[i] / diagonal[i - 1]
        diagonal[i] -= factor * above[i - 1]
        right[i] -= factor * right[i - 1]
    for i in range(right.size - 1, -1, -1):
        right[i] = (right[i] - (above[i] * right[i + 1] if i + 1 < right.size else 0.0)) / diagonal[i]
    return right


@cache
def boundaries(bits: int) -> Array:
    """Halfway between the centroids."""
    c = centroids(bits)
    return (c[:-1] + c[1:]) / 2


@kernel
def _flip(y: Array, count: Int, key: np.uint64, at: Int) -> None:
    """Random signs, those from number `at` on of the sequence."""
    for i in range(count):
        if uniform(key, at + i) < 0.5:
            y[i] = -y[i]


@kernel
def _hadamard(y: Array) -> None:
    """The fast Walsh-Hadamard transform, in place, not normalised: applied twice, it multiplies by y.size."""
    half = 1
    while half < y.size:
        for start in range(0, y.size, 2 * half):
            for j in range(start, start + half):
                a, b = y[U(j)], y[U(j + half)]
                y[U(j)] = a + b
                y[U(j + half)] = a - b
        half *= 2


@kernel
def _quantize(y: Array, unit: float, edges: Array, values: Array, levels: Array) -> float:
    """The level of every unit * y, and <value, y>. Halving: 2^b - 1 edges have b halves."""
    product = 0.0
    for i in range(y.size):
        normal = y[i] * unit
        low, step = 0, values.size // 2
        while step:
            if normal >= edges[low + step - 1]:
                low += step
            step //= 2
        levels[i] = low
        product += values[low] * y[i]
    return product
