"""Quantisers of one step: with a dead zone, or unbiased.

All arithmetic is float64: the squares, ratios and products of any two finite float32 numbers, subnormal ones included,
neither overflow nor vanish there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedfq.types import Array

from ..format.random_numbers import uniform
from ..kernels import LANES, Int, U, kernel, large_lanes, lowest_bit
from ..tensors import Matrix

MAX_MAGNITUDE = (1 << 17) - 1  # of a level of one step; what lies beyond is clipped
THETA = 0.62  # of a step: smaller entries become 0
LAMBDA = 0.1155  # error that a bit is worth, in squares of a step: 2 ln 2 / 12, the slope at high rates
MIN_THRESHOLD, MAX_THRESHOLD = THETA, 1.45  # between which the choice of 0 or 1 moves
STATISTICS_ROWS = 64  # rows that column sums and the costs of a 1 are taken from, at least
MIN_SIDE = 8  # rows and columns needed for their sums to say something of an entry
BINS = 64  # expected numbers in half octaves,
OFFSET = 60  # of which this is 1
NEVER = -1000  # half octaves: below every bin, for rows and columns without entries


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
            level = round_up_or_down(size, key, i * width + j)
            columns[n] = j
            levels[n] = np.int32(math.copysign(level, flat[first + j]))
            n += level > 0
    row_starts[height] = n


@kernel
def round_up_or_down(x: float, key: np.uint64, index: int) -> float:
    """floor(x) or floor(x) + 1, with expectation x."""
    low = np.floor(x)
    return low + 1.0 if uniform(key, index) < x - low else low


def quantize(matrix: Matrix, step: float, rounding: str, key: np.uint64) -> Sparse:
    """Levels of one step: `deadzone` or `stochastic`."""
    return deadzone(matrix, step) if rounding == "deadzone" else stochastic(matrix, step, key)
