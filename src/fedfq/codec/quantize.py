"""Scalar quantizers: the paper's stochastic one (Eq. 5) and the two roundings of a uniform step.

All randomness is a hash of (seed, stream, element index), so that a result does not depend on threads, on
chunks or on the version of a library's generator. All arithmetic is float64: the squares, ratios and products
of any two finite float32 numbers, subnormal ones included, neither overflow nor vanish there.
"""

import math
import operator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .kernels import LANES, Array, Int, U, kernel, large_lanes, lowest_bit
from .layout import Matrix

LEVELS = tuple(0 if width == 0 else 2 ** (width - 1) for width in range(9))
"""s = 2^(b-1), the paper's number of levels above zero, indexed by the width b. With the sign and zero, these
are 2^b + 1 symbols: one more than b bits can hold."""

_LEVELS = np.array(LEVELS, dtype=np.float64)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

MAX_MAGNITUDE = (1 << 17) - 1  # of a level of one step; what lies beyond is clipped
THETA = 0.62  # of a step: smaller entries become 0
LAMBDA = 0.1155  # error a bit is worth, in squares of a step: 2 ln 2 / 12, the slope at high rates
MIN_THRESHOLD, MAX_THRESHOLD = THETA, 1.45  # between which the choice of 0 or 1 moves
STATISTICS_ROWS = 64  # rows that column sums and the costs of a 1 are taken from, at least
MIN_SIDE = 8  # rows and columns needed for their sums to say something of an entry
BINS = 64  # expected numbers in half octaves,
OFFSET = 60  # of which this is 1
NEVER = -1000


@kernel
def _mix(x: np.uint64) -> np.uint64:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): a bijection that scatters 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


@kernel
def _derive_key(seed: np.uint64, stream: np.uint64) -> np.uint64:
    return _mix(_mix(seed + _GOLDEN) ^ (stream * _GOLDEN))


@kernel
def uniform(key: np.uint64, index: int) -> float:
    """Number `index` of the sequence of `key` (see `stream_key`), in [0, 1), a multiple of 2^-53.

    This is splitmix64 started at `key`, read at any position. 24 bits would not do: an entry of which 1e-9 of
    a level must be sent would be rounded up with probability 2^-24, sixty times too often.
    """
    return float(_mix(key + np.uint64(index) * _GOLDEN) >> np.uint64(11)) * 2.0**-53


def stream_key(seed: int, stream: int) -> np.uint64:
    """The key of one random sequence. Both numbers are taken modulo 2^64."""
    mask = 2**64 - 1
    return np.uint64(_derive_key(np.uint64(operator.index(seed) & mask), np.uint64(operator.index(stream) & mask)))


def class_scales(h: npt.NDArray[np.float32], widths: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The largest |h_j| of each width class, indexed by width: nine entries, 0 where there is none.

    The authors' code scales by this. Eq. 5 as printed scales by ||h||_2: an array with nine times the norm.
    """
    check_widths(h, widths)
    scales = np.zeros(9, dtype=np.float32)
    _class_scales(h, widths, scales)
    return scales


def stochastic_levels(
    h: npt.NDArray[np.float32],
    widths: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    seed: int,
    stream: int = 0,
    *,
    offset: int = 0,
) -> npt.NDArray[np.int16]:
    """The signed level of every entry: Eq. 5's sign(h_j) * s * xi_j, with s = 2^(b_j - 1).

    With x = s |h_j| / scales[b_j], the level is floor(x), plus 1 with probability x - floor(x): unbiased
    (Lemma 1) for b_j > 0 and |h_j| <= scales[b_j]. Width 0 drops the entry (level 0), which is *not*
    unbiased: Theorem 2 needs b_j > 0. An entry above its scale is clipped to s. A level of s = 128 is why the
    result is not int8.

    `offset` is the index of h[0] in the whole vector: quantizing in chunks gives the levels of the whole.
    """
    check_widths(h, widths)
    _check_scales(scales)
    levels = np.empty(h.size, dtype=np.int16)
    _stochastic_levels(h, widths, scales, stream_key(seed, stream), offset, levels)
    return levels


def deadzone_levels(
    h: npt.NDArray[np.float32], widths: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]
) -> npt.NDArray[np.int16]:
    """As `stochastic_levels`, but rounded down below THETA of a level and up from there on: no longer unbiased."""
    check_widths(h, widths)
    _check_scales(scales)
    finest = np.where(scales > 0, _LEVELS / np.maximum(scales.astype(np.float64), 1e-300), 0.0)
    sizes = np.abs(h).astype(np.float64) * finest[widths]
    levels = np.minimum(np.floor(sizes + (1.0 - THETA)), _LEVELS[widths])
    return np.copysign(levels, h).astype(np.int16)


def dequantize_levels(
    levels: npt.NDArray[np.int16], widths: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Q(h)_j = scales[b_j] * level_j / s of Eq. 5; 0 for width 0."""
    check_widths(levels, widths)
    _check_scales(scales)
    values = np.empty(levels.size, dtype=np.float32)
    _dequantize_levels(levels, widths, scales, values)
    return values


class Sparse(NamedTuple):
    """The non-zero levels of a matrix, row by row."""

    row_starts: Array  # where each row begins in the arrays below, and where the last one ends
    columns: Array
    levels: Array
    excess: Array  # |h_j| / step - |level|: what the reconstruction points are learnt from


def deadzone(matrix: Matrix, step: float) -> Sparse:
    """Levels of one step with a dead zone: reverse water-filling, Eq. 23 with real-valued widths.

    A level is floor(|h|/step + 1 - THETA), except for the choice between 0 and 1, which weighs the error against
    the bits: 1 is kept where 2 |h|/step - 1 >= LAMBDA dR, with dR the bits by which a 1 costs more than a 0 among
    entries of its row and column. So thresholds are higher where non-zeros are rare, and rows and columns with
    next to nothing drop out.
    """
    columns = np.empty(matrix.height * matrix.width, np.int32)
    values = np.empty(matrix.height * matrix.width, np.float32)
    row_starts = np.empty(matrix.height + 1, np.int64)
    _gather(*matrix, np.float32(MIN_THRESHOLD * step), row_starts, columns, values)
    n = row_starts[-1]
    levels = np.empty(n, np.int32)
    _deadzone(row_starts, columns, values, matrix.width, step, levels)
    n = row_starts[-1]
    return Sparse(row_starts, columns[:n], levels[:n], values[:n])


def stochastic(matrix: Matrix, step: float, key: np.uint64) -> Sparse:
    """Levels of one step by unbiased rounding: h / step to one of its neighbours, with expectation h / step.

    Entry (i, j) draws number i * width + j of the sequence of `key`.
    """
    columns = np.empty(matrix.height * matrix.width, np.int32)
    levels = np.empty(matrix.height * matrix.width, np.int32)
    row_starts = np.empty(matrix.height + 1, np.int64)
    _stochastic(*matrix, step, key, row_starts, columns, levels)
    n = row_starts[-1]
    return Sparse(row_starts, columns[:n], levels[:n], np.zeros(n, np.float32))


def nonzero(levels: Array) -> Sparse:
    """The non-zeros of a dense matrix of levels."""
    rows, columns = np.nonzero(levels)
    row_starts = np.zeros(levels.shape[0] + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=levels.shape[0]), out=row_starts[1:])
    return Sparse(
        row_starts,
        columns.astype(np.int32),
        levels[rows, columns].astype(np.int32),
        np.zeros(rows.size, np.float32),
    )


@kernel
def _gather(
    flat: Array,
    start: int,
    stride: int,
    height: int,
    width: int,
    cut: float,
    row_starts: Array,
    columns: Array,
    values: Array,
) -> None:
    """All entries of at least `cut`: sixteen are compared at once, then only the large ones looked at."""
    cut_bits = np.array([cut], np.float32).view(np.int32)[0]
    n = 0
    for i in range(height):
        row_starts[i] = n
        first = start + i * stride
        whole = width - width % LANES
        for j in range(0, whole, LANES):
            lanes: Int = large_lanes(flat, first + j, cut_bits)
            while lanes:
                column = j + lowest_bit(lanes)
                lanes &= lanes - 1
                columns[U(n)] = column
                values[U(n)] = flat[U(first + column)]
                n += 1
        for j in range(whole, width):
            columns[n] = j
            values[n] = flat[first + j]
            n += abs(flat[first + j]) >= cut
    row_starts[height] = n


@kernel
def _half_octaves(total: int) -> int:
    return int(np.floor(2 * np.log2(float(total)) + 0.5)) if total > 0 else NEVER


@kernel
def _deadzone(row_starts: Array, columns: Array, values: Array, width: int, step: float, levels: Array) -> None:
    height = row_starts.size - 1
    inverse = 1.0 / step
    every = max(1, height // STATISTICS_ROWS)
    # How many entries are expected at (i, j): its row's number times its column's over all, in half octaves.
    rows, sides = np.zeros(height, np.int16), np.zeros(width, np.int16)
    if height >= MIN_SIDE and width >= MIN_SIDE:
        counts = np.zeros(width, np.int64)
        total = 0
        for i in range(0, height, every):
            total += row_starts[i + 1] - row_starts[i]
            for t in range(row_starts[i], row_starts[i + 1]):
                counts[U(columns[U(t)])] += 1
        for i in range(height):
            rows[i] = _half_octaves(row_starts[i + 1] - row_starts[i])
        for j in range(width):
            sides[j] = _half_octaves(counts[j]) - _half_octaves(total)
    thresholds = _thresholds(row_starts, columns, rows, sides, every)

    n = 0
    for i in range(height):
        first, last = row_starts[i], row_starts[i + 1]
        row_starts[i] = n
        row = rows[i] + OFFSET
        for t in range(first, last):
            value, column = values[U(t)], columns[U(t)]
            size = abs(value) * inverse
            level = max(int(min(size + (1.0 - THETA), MAX_MAGNITUDE)), 1)
            kept = size >= thresholds[U(min(max(row + sides[U(column)], 0), BINS - 1))]
            columns[U(n)] = column
            levels[U(n)] = level if value > 0 else -level
            values[U(n)] = size - level
            n += kept
    row_starts[height] = n


@kernel
def _thresholds(row_starts: Array, columns: Array, rows: Array, sides: Array, every: int) -> Array:
    """From which |h|/step on a 1 is worth its bits, by expected number, from one in `every` of the rows."""
    row_counts, side_counts = np.zeros(2 * BINS), np.zeros(2 * BINS)
    for i in range(0, rows.size, every):
        row_counts[min(max(rows[i], 0), 2 * BINS - 1)] += 1
    for k in sides:
        side_counts[min(max(k + BINS, 0), 2 * BINS - 1)] += 1
    cells, ones = np.zeros(BINS), np.zeros(BINS)
    for k in range(2 * BINS):
        if row_counts[k] > 0:
            for m in range(2 * BINS):
                cells[min(max(k + m - BINS + OFFSET, 0), BINS - 1)] += row_counts[k] * side_counts[m]
    for i in range(0, rows.size, every):
        for t in range(row_starts[i], row_starts[i + 1]):
            k = min(max(rows[i] + sides[columns[t]] + OFFSET, 0), BINS - 1)
            ones[k] += 1
    thresholds = np.empty(BINS)
    for k in range(BINS):
        p = min((ones[k] + 0.3) / (cells[k] + 2.6), 0.97)
        bits = np.log2((1 - p) / p) + 1.3  # 1.3: the sign, and that it is a 1
        thresholds[k] = min(max((1 + LAMBDA * bits) / 2, MIN_THRESHOLD), MAX_THRESHOLD)
    return thresholds


@kernel
def _stochastic(
    flat: Array,
    start: int,
    stride: int,
    height: int,
    width: int,
    step: float,
    key: np.uint64,
    row_starts: Array,
    columns: Array,
    levels: Array,
) -> None:
    n = 0
    for i in range(height):
        row_starts[i] = n
        first = start + i * stride
        for j in range(width):
            size = min(abs(np.float64(flat[first + j])) / step, MAX_MAGNITUDE)
            level = _round_up_or_down(size, key, i * width + j)
            columns[n] = j
            levels[n] = np.int32(math.copysign(level, flat[first + j]))
            n += level > 0
    row_starts[height] = n


@kernel
def _class_scales(h: npt.NDArray[np.float32], widths: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> None:
    for j in range(h.size):
        if widths[j] > 0:
            scales[widths[j]] = max(scales[widths[j]], abs(h[j]))


@kernel
def _round_up_or_down(x: float, key: np.uint64, index: int) -> float:
    """floor(x) or floor(x) + 1, with expectation x."""
    low = np.floor(x)
    return low + 1.0 if uniform(key, index) < x - low else low


@kernel
def _stochastic_levels(
    h: npt.NDArray[np.float32],
    widths: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    key: np.uint64,
    offset: int,
    levels: npt.NDArray[np.int16],
) -> None:
    for j in range(h.size):
        s = _LEVELS[widths[j]]
        scale = np.float64(scales[widths[j]])
        magnitude = abs(np.float64(h[j]))
        level = 0.0
        if s > 0.0 and scale > 0.0:
            # For |h_j| <= scale the rounded quotient is at most s, and exactly s, not random, at equality.
            level = _round_up_or_down(min(s * magnitude / scale, s), key, offset + j)
        levels[j] = np.int16(math.copysign(level, h[j]))


@kernel
def _dequantize_levels(
    levels: npt.NDArray[np.int16],
    widths: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    values: npt.NDArray[np.float32],
) -> None:
    for j in range(levels.size):
        if widths[j] > 0 and levels[j] != 0:
            values[j] = np.float64(scales[widths[j]]) * levels[j] / _LEVELS[widths[j]]
        else:
            values[j] = 0.0


def check_widths(values: npt.NDArray[np.float32] | npt.NDArray[np.int16], widths: npt.NDArray[np.uint8]) -> None:
    """The kernels index tables of nine entries by width, unchecked: refuse what would read past them."""
    if values.ndim != 1 or values.shape != widths.shape or widths.dtype != np.uint8:
        raise ValueError(f"expected flat vectors of one length, widths in uint8: {values.shape}, {widths.shape}")
    if widths.size and widths.max() > 8:
        raise ValueError(f"width {widths.max()} exceeds 8 bits")


def _check_scales(scales: npt.NDArray[np.float32]) -> None:
    if scales.shape != (9,):
        raise ValueError(f"scales must have nine entries, one a width 0..8, got shape {scales.shape}")
