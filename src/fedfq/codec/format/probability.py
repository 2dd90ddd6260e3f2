"""The probability model of a tile: scale classes, contexts, patterns, and the initial counts of the tables.

Everything here that a stream depends on is integer arithmetic, or IEEE double precision with products, quotients and
square roots only: the same on every machine.
"""

from __future__ import annotations

from itertools import pairwise
from math import comb, sqrt

import numpy as np

from fedfq.types import Array

from ..kernels import Int, U, kernel
from .entropy import INCREMENT, TOTAL, rebuild

CONTEXTS = 60
CONTEXT_OFFSET = 22  # context of an expected |level| of 1; context 0 is 2^-11 and below
MAX_CLASS = 80
MAGNITUDE_SYMBOLS = 36
SIGN_TOTAL = TOTAL // 2  # magnitudes share the range with the sign, so that both are one operation
CLASS_PRIOR = 3
SPARSE_BELOW = 16  # groups are coded in contexts below this one (an expected |level| of 1/8)
PRIOR_SYMBOLS = 2  # the priors below weigh as much as this many symbols

CONTEXTS_PER_SHIFT = 4
SHIFTS = CONTEXTS // CONTEXTS_PER_SHIFT + 1  # reconstruction points: |level| = 1 by context, and all larger levels

SPACINGS = (0, 1, 2, 4)  # half octaves; 0: no classes on this side


def _power(base: float, exponent: int) -> float:
    """base ** exponent by multiplications only, so that it is the same on every machine (pow is not)."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _expected_level(context: int) -> float:
    return _power(sqrt(2.0 if context >= CONTEXT_OFFSET else 0.5), abs(context - CONTEXT_OFFSET))


def _as_counts(probabilities: list[float]) -> list[int]:
    return [max(1, int(PRIOR_SYMBOLS * INCREMENT * p)) for p in probabilities]


def _pattern_prior(context: int) -> list[int]:
    """Non-zeros in a block of 8, before anything was seen: binomial."""
    p = _expected_level(context) / (1 + _expected_level(context))
    return _as_counts([comb(8, k) * _power(p, k) * _power(1 - p, 8 - k) for k in range(9)])


def _magnitude_prior(context: int) -> list[int]:
    """Magnitudes before anything was seen: geometric."""
    decay = max(0.2, _expected_level(context) / (1 + _expected_level(context)))
    starts = [_first_magnitude(s) for s in range(MAGNITUDE_SYMBOLS + 1)]
    return _as_counts([_power(decay, a - 1) - _power(decay, b - 1) for a, b in pairwise(starts)])


def _first_magnitude(symbol: int) -> int:
    if symbol < 8:
        return symbol + 1
    octave, half = divmod(symbol - 8, 2)
    return (8 << octave) + (half * 4 << octave) + 1


def _tables(priors: list[list[int]], floors: Array, total: int) -> tuple[Array, Array]:
    counts = np.array(priors, np.int64)
    cumulative = np.zeros((len(priors), counts.shape[1] + 1), np.int64)
    for k in range(len(priors)):
        rebuild.py_func(counts[k], floors, cumulative[k], total)
    return counts, cumulative


# A count of ones must have room for each of its patterns.
PATTERN_FLOORS = np.array([comb(8, k) for k in range(9)], np.int64)
MAGNITUDE_FLOORS = np.ones(MAGNITUDE_SYMBOLS, np.int64)
# Three sets of tables for patterns of 8, one after the other: blocks, groups, and blocks known not to be all zero.
GROUP = CONTEXTS
NONZERO_BLOCK = 2 * CONTEXTS
PATTERN_COUNTS, PATTERN_CUMULATIVE = _tables(
    [_pattern_prior(c) for c in range(CONTEXTS)]
    + [_pattern_prior(min(c + 6, CONTEXTS - 1)) for c in range(CONTEXTS)]
    + [_pattern_prior(c) for c in range(CONTEXTS)],
    PATTERN_FLOORS,
    TOTAL,
)
MAGNITUDE_COUNTS, MAGNITUDE_CUMULATIVE = _tables(
    [_magnitude_prior(c) for c in range(CONTEXTS)], MAGNITUDE_FLOORS, SIGN_TOTAL
)

# Patterns of 8 sorted by their number of ones, then by value: those within the first w columns come first.
PATTERNS = np.array(sorted(range(256), key=lambda m: (m.bit_count(), m)), np.uint8)
ONES = np.array([m.bit_count() for m in range(256)], np.uint8)
FIRST_PATTERN = np.array([sum(comb(8, j) for j in range(k)) for k in range(9)], np.int64)
_PATTERN_RANK = np.empty(256, np.int64)
for _i, _m in enumerate(PATTERNS):
    _PATTERN_RANK[_m] = _i - FIRST_PATTERN[ONES[_m]]
POSITIONS = np.zeros((256, 8), np.int64)
for _m in range(256):
    for _k, _j in enumerate(j for j in range(8) if _m >> j & 1):
        POSITIONS[_m, _k] = _j
CHOICES = np.array([[comb(w, k) for k in range(9)] for w in range(9)], np.int64)
# ceil(2^32 / choices), to divide by multiplying: exact for the numerators here, which are below 2^23
_RECIPROCAL = -(-(1 << 32) // np.maximum(CHOICES, 1))
# A narrower last block expects less: half octaves of width / 8.
_NARROWER = np.array([0, -6, -4, -3, -2, -1, -1, 0, 0], np.int64)


@kernel
def class_tables(symbols: Int) -> tuple[Array, Array, Array, Array, Array]:
    counts = np.full((symbols, symbols), CLASS_PRIOR, np.int64)
    cumulative = np.empty((symbols, symbols + 1), np.int64)
    floors = np.ones(symbols, np.int64)
    for k in range(symbols):
        rebuild(counts[k], floors, cumulative[k], TOTAL)
    return counts, floors, cumulative, np.zeros(symbols, np.int64), np.zeros(symbols, np.int64)


@kernel
def sorted_columns(classes: Array) -> Array:
    """Columns by falling class, in their own order within one; all-zero columns are left out."""
    place = np.zeros(MAX_CLASS + 2, np.int64)
    for k in classes:
        place[k] += 1
    n = 0
    for k in range(MAX_CLASS, 0, -1):
        n, place[k] = n + place[k], n
    order = np.empty(n, np.int64)
    for j in range(classes.size):
        k = classes[j]
        if k > 0:
            order[place[k]] = j
            place[k] += 1
    return order


@kernel
def block_contexts(classes: Array, order: Array, spacing: Int) -> Array:
    """A block's column share of its context, from the class of its fourth column."""
    blocks = (order.size + 7) // 8
    result = np.empty(blocks, np.int64)
    for b in range(blocks):
        middle = min(8 * b + 3, order.size - 1)
        result[b] = spacing * (np.int64(classes[order[middle]]) - 1)
    if blocks > 0:
        result[-1] += _NARROWER[order.size - 8 * (blocks - 1)]
    return result


@kernel
def clamp_context(context: Int) -> Int:
    return min(max(context, 0), CONTEXTS - 1)


@kernel
def pattern_operation(start: Int, frequency: Int, pattern: Int, ones: Int, width: Int) -> Int:
    """The part of the range that belongs to one pattern of `width` cells with so many `ones`.

    The c = C(width, ones) patterns share the frequency f of `ones` evenly: r has [ceil(r f/c), ceil((r+1) f/c)).
    """
    if ones == 0:
        return start << 16 | frequency
    choices, reciprocal = CHOICES[U(width), U(ones)], _RECIPROCAL[U(width), U(ones)]
    rank = _PATTERN_RANK[U(pattern)]
    lower = ((rank * frequency + choices - 1) * reciprocal) >> 32
    upper = (((rank + 1) * frequency + choices - 1) * reciprocal) >> 32
    return (start + lower) << 16 | (upper - lower)


@kernel
def magnitude_symbol(v: Int) -> tuple[Int, Int]:
    """Symbol and number of low bits of v = magnitude - 1."""
    if v < 8:
        return v, 0
    octave = 3
    while v >> (octave + 1):
        octave += 1
    return 8 + 2 * (octave - 3) + ((v >> (octave - 1)) & 1), octave - 1


@kernel
def pattern_at(slot: Int, start: Int, frequency: Int, ones: Int, width: Int) -> tuple[Int, Int, Int]:
    """Rank, start and frequency of the pattern whose part of the range `slot` lies in: `pattern_operation` undone.

    A rank of `choices` or more: no pattern of this width has so many ones.
    """
    choices, reciprocal = CHOICES[U(width), U(ones)], _RECIPROCAL[U(width), U(ones)]
    if choices <= 1:
        return 1 - choices, start, frequency
    rank = np.int64(np.uint32((slot - start) * choices) // np.uint32(frequency))
    lower = ((rank * frequency + choices - 1) * reciprocal) >> 32
    upper = (((rank + 1) * frequency + choices - 1) * reciprocal) >> 32
    return rank, start + lower, upper - lower
