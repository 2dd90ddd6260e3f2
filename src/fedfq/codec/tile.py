"""One tile: a matrix of integer levels, mostly zero, to a byte stream and back.

The stream is built so that its length and its cost follow the non-zero levels:

*Scale classes.* |levels| of a weight matrix vary by row and by column, nearly as a product. Each row and each column
gets a class: the logarithm of its sum of |levels|, in steps of `spacing` half octaves, 0 for one that is all zero.
Classes are sent, coded by an adaptive table in the context of the class before. All-zero rows and columns end there.

*Blocks.* The columns, sorted by class, are cut into blocks of 8, and these into groups of 8 blocks. The expected
|level| in a block is the product of its classes; its logarithm in half octaves is the *context*. A block is coded as
its number of non-zeros (0-8, one adaptive table a context) and which of the equally many patterns it is. Where
non-zeros are sparse, the group is coded first, in the same way, as the pattern of its blocks that are not all zero,
and only those follow. As every context learns how clustered its non-zeros are, neighbours need no contexts of their
own.

*Levels.* Each non-zero is coded as sign and magnitude (one adaptive table a context): 1 to 8 as such, larger ones as
half an octave and its low bits.

Each row is coded as its blocks, then its levels.
"""

from __future__ import annotations

from itertools import pairwise
from math import comb, sqrt
from typing import NamedTuple

import numpy as np

from .entropy import (
    INCREMENT,
    LOWER_BOUND,
    TOTAL,
    rans_encode,
    rans_open,
    rans_undo,
    rebuild,
    relearn,
)
from .errors import PayloadError
from .kernels import Array, Int, kernel
from .layout import Tile
from .quantize import Sparse

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

EXCESS_ROWS = 64  # rows that the excess of entries over their levels is taken from, at least

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
_PATTERN_FLOORS = np.array([comb(8, k) for k in range(9)], np.int64)
_MAGNITUDE_FLOORS = np.ones(MAGNITUDE_SYMBOLS, np.int64)
# Three sets of tables for patterns of 8, one after the other: blocks, groups, and blocks known not to be all zero.
GROUP = CONTEXTS
NONZERO_BLOCK = 2 * CONTEXTS
_PATTERN_COUNTS, _PATTERN_CUMULATIVE = _tables(
    [_pattern_prior(c) for c in range(CONTEXTS)]
    + [_pattern_prior(min(c + 6, CONTEXTS - 1)) for c in range(CONTEXTS)]
    + [_pattern_prior(c) for c in range(CONTEXTS)],
    _PATTERN_FLOORS,
    TOTAL,
)
_MAGNITUDE_COUNTS, _MAGNITUDE_CUMULATIVE = _tables(
    [_magnitude_prior(c) for c in range(CONTEXTS)], _MAGNITUDE_FLOORS, SIGN_TOTAL
)

# Patterns of 8 sorted by their number of ones, then by value: those within the first w columns come first.
_PATTERNS = np.array(sorted(range(256), key=lambda m: (m.bit_count(), m)), np.uint8)
_ONES = np.array([m.bit_count() for m in range(256)], np.uint8)
_FIRST_PATTERN = np.array([sum(comb(8, j) for j in range(k)) for k in range(9)], np.int64)
_PATTERN_RANK = np.empty(256, np.int64)
for _i, _m in enumerate(_PATTERNS):
    _PATTERN_RANK[_m] = _i - _FIRST_PATTERN[_ONES[_m]]
_POSITIONS = np.zeros((256, 8), np.int64)
for _m in range(256):
    for _k, _j in enumerate(j for j in range(8) if _m >> j & 1):
        _POSITIONS[_m, _k] = _j
_CHOICES = np.array([[comb(w, k) for k in range(9)] for w in range(9)], np.int64)
# ceil(2^32 / choices), to divide by multiplying: exact for the numerators here, which are below 2^23
_RECIPROCAL = -(-(1 << 32) // np.maximum(_CHOICES, 1))
# A narrower last block expects less: half octaves of width / 8.
_NARROWER = np.array([0, -6, -4, -3, -2, -1, -1, 0, 0], np.int64)


class Header(NamedTuple):
    """What stands before the stream of a tile."""

    base: int  # the context of a block whose row and column are of class 1
    nonzeros: int
    row_spacing: int
    row_first: int  # smallest class in use
    row_last: int
    column_spacing: int
    column_first: int
    column_last: int


class Encoded(NamedTuple):
    """A coded tile, and how far its entries lie above their levels, by group of contexts (see `SHIFTS`)."""

    header: Header
    stream: bytes
    class_bits: float  # of the stream, what the classes take
    excess_sums: Array
    excess_counts: Array


@kernel
def _axis_gain(sums: Array, total: float, classes: Array, spacing: Int) -> float:
    """Bits that classes of this spacing save in the positions, less what they cost to send."""
    size = sums.size
    members = np.zeros(MAX_CLASS + 1)
    mass = np.zeros(MAX_CLASS + 1)
    for i in range(size):
        k = 0
        if sums[i] > 0:
            k = 1 + int(np.floor(2 * np.log2(sums[i]) / spacing + 0.5))
        classes[i] = k
        members[k] += 1
        mass[k] += sums[i]
    gain = 0.0
    for k in range(MAX_CLASS + 1):
        if members[k] > 0:
            gain += members[k] * np.log2(members[k] / size) * 0.8 - 4.0  # order-1 coding takes about 0.8 of order 0
            if mass[k] > 0:
                gain += mass[k] * np.log2(mass[k] / members[k] * size / total)
    return gain


@kernel
def _choose_classes(sums: Array, total: Int) -> tuple[Int, Array]:
    """The spacing (0: none) that saves most, and the classes."""
    best_gain = 16.0
    best_spacing = 0
    best = np.ones(sums.size, np.uint8)
    if sums.size > 1:
        for spacing in (1, 2, 4):
            classes = np.empty(sums.size, np.uint8)
            gain = _axis_gain(sums, float(total), classes, spacing)
            if gain > best_gain:
                best_gain = gain
                best_spacing = spacing
                best = classes
    return best_spacing, best


@kernel
def _class_range(classes: Array) -> tuple[Int, Int]:
    first: Int = MAX_CLASS
    last: Int = 1
    for k in classes:
        if k > 0:
            first = min(first, np.int64(k))
            last = max(last, np.int64(k))
    return first, last


@kernel
def _class_tables(symbols: Int) -> tuple[Array, Array, Array, Array, Array]:
    counts = np.full((symbols, symbols), CLASS_PRIOR, np.int64)
    cumulative = np.empty((symbols, symbols + 1), np.int64)
    floors = np.ones(symbols, np.int64)
    for k in range(symbols):
        rebuild(counts[k], floors, cumulative[k], TOTAL)
    return counts, floors, cumulative, np.zeros(symbols, np.int64), np.zeros(symbols, np.int64)


@kernel
def _emit_classes(classes: Array, first: Int, last: Int, operations: Array, n: Int, bits: float) -> tuple[Int, float]:
    symbols = last - first + 2
    counts, floors, cumulative, due, pause = _class_tables(symbols)
    previous = 0
    for k in classes:
        symbol = 0 if k == 0 else np.int64(k) - first + 1
        start = cumulative[previous, symbol]
        frequency = cumulative[previous, symbol + 1] - start
        operations[n] = (start << 16) | frequency
        n += 1
        bits += 16.0 - np.log2(float(frequency))
        counts[previous, symbol] += INCREMENT
        due[previous] -= 1
        if due[previous] < 0:
            relearn(counts, floors, cumulative, due, pause, previous, TOTAL)
        previous = symbol
    return n, bits


@kernel
def _sorted_columns(classes: Array) -> Array:
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
def _block_contexts(classes: Array, order: Array, spacing: Int) -> Array:
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
def _bounded(context: Int) -> Int:
    return min(max(context, 0), CONTEXTS - 1)


@kernel
def _pattern_operation(start: Int, frequency: Int, pattern: Int, ones: Int, width: Int) -> Int:
    """The part of the range that belongs to one pattern of `width` cells with so many `ones`.

    The c = C(width, ones) patterns share the frequency f of `ones` evenly: r has [ceil(r f/c), ceil((r+1) f/c)).
    """
    if ones == 0:
        return start << 16 | frequency
    choices, reciprocal = _CHOICES[width, ones], _RECIPROCAL[width, ones]
    rank = _PATTERN_RANK[pattern]
    lower = ((rank * frequency + choices - 1) * reciprocal) >> 32
    upper = (((rank + 1) * frequency + choices - 1) * reciprocal) >> 32
    return (start + lower) << 16 | (upper - lower)


@kernel
def _magnitude_symbol(v: Int) -> tuple[Int, Int]:
    """Symbol and number of low bits of v = magnitude - 1."""
    if v < 8:
        return v, 0
    octave = 3
    while v >> (octave + 1):
        octave += 1
    return 8 + 2 * (octave - 3) + ((v >> (octave - 1)) & 1), octave - 1


@kernel
def _encode(
    row_starts: Array,
    columns: Array,
    levels: Array,
    excess: Array,
    width: Int,
    by_size: bool,
    excess_sums: Array,
    excess_counts: Array,
) -> tuple[Array, float, tuple[Int, Int, Int, Int, Int, Int, Int, Int]]:
    height = row_starts.size - 1
    nonzeros = row_starts[height]
    row_sums = np.zeros(height, np.int64)
    column_sums = np.zeros(width, np.int64)
    total = 0
    for i in range(height):
        for t in range(row_starts[i], row_starts[i + 1]):
            size: Int = abs(np.int64(levels[t])) if by_size else 1
            row_sums[i] += size
            column_sums[columns[t]] += size
            total += size
    row_spacing, row_classes = _choose_classes(row_sums, total)
    column_spacing, column_classes = _choose_classes(column_sums, total)
    # log2 of the expected |level| of a cell whose row and column have class 1
    reference = np.log2(float(total))
    if row_spacing == 0:
        reference -= np.log2(total / height)
    if column_spacing == 0:
        reference -= np.log2(total / width)
    base = CONTEXT_OFFSET - int(np.floor(2 * reference + 0.5))
    base = max(-128, min(127, base))

    row_first, row_last = _class_range(row_classes)
    column_first, column_last = _class_range(column_classes)
    order = _sorted_columns(column_classes)
    kept = order.size
    blocks = (kept + 7) // 8
    position = np.zeros(width, np.int64)
    for p in range(order.size):
        position[order[p]] = p
    column_context = _block_contexts(column_classes, order, column_spacing)
    groups = (blocks + 7) // 8
    operations = np.empty(height + width + height * (blocks + groups) + 2 * nonzeros, np.uint32)
    n = 0
    bits = 0.0
    if row_spacing:
        n, bits = _emit_classes(row_classes, row_first, row_last, operations, n, bits)
    if column_spacing:
        n, bits = _emit_classes(column_classes, column_first, column_last, operations, n, bits)

    counts, cumulative = _PATTERN_COUNTS.copy(), _PATTERN_CUMULATIVE.copy()
    due, pause = np.zeros(3 * CONTEXTS, np.int64), np.zeros(3 * CONTEXTS, np.int64)
    size_counts, size_cumulative = _MAGNITUDE_COUNTS.copy(), _MAGNITUDE_CUMULATIVE.copy()
    size_due, size_pause = np.zeros(CONTEXTS, np.int64), np.zeros(CONTEXTS, np.int64)
    sampled = max(1, height // EXCESS_ROWS)
    group_masks = np.zeros(groups, np.uint8)
    masks = np.zeros(blocks, np.uint8)
    row_levels = np.empty(8 * blocks, np.int32)
    row_order = np.empty(8 * blocks + 2, np.int64)
    row_contexts = np.empty(8 * blocks + 2, np.int64)
    for i in range(height):
        if row_classes[i] == 0:
            continue
        for t in range(row_starts[i], row_starts[i + 1]):
            p = position[columns[t]]
            group_masks[p >> 6] |= np.uint8(1 << ((p >> 3) & 7))
            masks[p >> 3] |= np.uint8(1 << (p & 7))
            row_levels[p] = levels[t]
        row_context = base + row_spacing * (np.int64(row_classes[i]) - 1)
        if i % sampled == 0:
            for t in range(row_starts[i], row_starts[i + 1]):
                context = _bounded(row_context + column_context[position[columns[t]] >> 3])
                group = context // CONTEXTS_PER_SHIFT if abs(levels[t]) == 1 else SHIFTS - 1
                excess_sums[group] += excess[t]
                excess_counts[group] += 1
        found = 0
        for g in range(groups):
            table = _bounded(row_context + column_context[min(8 * g + 3, blocks - 1)])
            sparse = table < SPARSE_BELOW
            mask: Int = np.int64(group_masks[g])
            group_masks[g] = 0
            members = min(8, blocks - 8 * g)
            if sparse:
                table += GROUP
                ones: Int = np.int64(_ONES[mask])
                start = cumulative[table, ones]
                frequency = cumulative[table, ones + 1] - start
                operations[n] = _pattern_operation(start, frequency, mask, ones, members)
                n += 1
                counts[table, ones] += INCREMENT
                due[table] -= 1
                if due[table] < 0:
                    relearn(counts, _PATTERN_FLOORS, cumulative, due, pause, table, TOTAL)
            else:
                mask = (1 << members) - 1
            for q in range(_ONES[mask]):
                b = 8 * g + _POSITIONS[mask, q]
                context = _bounded(row_context + column_context[b])
                table = context + NONZERO_BLOCK * sparse
                pattern = np.int64(masks[b])
                masks[b] = 0
                ones = np.int64(_ONES[pattern])
                start = cumulative[table, ones]
                frequency = cumulative[table, ones + 1] - start
                operations[n] = _pattern_operation(start, frequency, pattern, ones, min(8, kept - 8 * b))
                n += 1
                counts[table, ones] += INCREMENT
                due[table] -= 1
                if due[table] < 0:
                    relearn(counts, _PATTERN_FLOORS, cumulative, due, pause, table, TOTAL)
                # Two are written in any case: whether there is one or two is hard to predict, a third is rare.
                for k in range(max(2, ones)):
                    row_order[found + k] = 8 * b + _POSITIONS[pattern, k]
                    row_contexts[found + k] = context
                found += ones
        for t in range(found):
            context = row_contexts[t]
            level = np.int64(row_levels[row_order[t]])
            symbol, low_bits = _magnitude_symbol(abs(level) - 1)
            start = size_cumulative[context, symbol]
            frequency = size_cumulative[context, symbol + 1] - start
            operations[n] = (start + SIGN_TOTAL * (level < 0)) << 16 | frequency
            n += 1
            if low_bits:
                low = (abs(level) - 1) & ((1 << low_bits) - 1)
                operations[n] = low << (32 - low_bits) | TOTAL >> low_bits
                n += 1
            size_counts[context, symbol] += INCREMENT
            size_due[context] -= 1
            if size_due[context] < 0:
                relearn(size_counts, _MAGNITUDE_FLOORS, size_cumulative, size_due, size_pause, context, SIGN_TOTAL)
    header = (
        base,
        nonzeros,
        row_spacing,
        row_first,
        row_last,
        column_spacing,
        column_first,
        column_last,
    )
    return operations[:n], bits, header


def encode_tile(sparse: Sparse, width: Int, *, by_size: bool) -> Encoded:
    """Code the non-zero levels of a matrix with `width` columns; there must be one.

    `by_size=False` when a level's number says nothing of its magnitude (the widths of Eq. 23), so that classes are
    made from counts.
    """
    excess_sums, excess_counts = np.zeros(SHIFTS), np.zeros(SHIFTS, np.int64)
    operations, class_bits, header = _encode(*sparse, width, by_size, excess_sums, excess_counts)
    return Encoded(Header(*header), rans_encode(operations), class_bits, excess_sums, excess_counts)


@kernel
def _take_classes(size: Int, first: Int, last: Int, classes: Array, x: Int, words: Array, at: Int) -> tuple[Int, Int]:
    counts, floors, cumulative, due, pause = _class_tables(last - first + 2)
    previous = 0
    for i in range(size):
        slot = x & 0xFFFF
        symbol = 0
        while slot >= cumulative[previous, symbol + 1]:
            symbol += 1
        start = cumulative[previous, symbol]
        x = rans_undo(x, start, cumulative[previous, symbol + 1] - start)
        if x < LOWER_BOUND and at < words.size:
            x = x << 32 | np.int64(words[at])
            at += 1
        classes[i] = 0 if symbol == 0 else symbol + first - 1
        counts[previous, symbol] += INCREMENT
        due[previous] -= 1
        if due[previous] < 0:
            relearn(counts, floors, cumulative, due, pause, previous, TOTAL)
        previous = symbol
    return x, at


@kernel
def _pattern_at(slot: Int, start: Int, frequency: Int, ones: Int, width: Int) -> tuple[Int, Int, Int]:
    """Rank, start and frequency of the pattern whose part of the range `slot` lies in: `_pattern_operation` undone.

    A rank of `choices` or more: no pattern of this width has so many ones.
    """
    choices, reciprocal = _CHOICES[width, ones], _RECIPROCAL[width, ones]
    if choices <= 1:
        return 1 - choices, start, frequency
    rank = np.int64(np.uint32((slot - start) * choices) // np.uint32(frequency))
    lower = ((rank * frequency + choices - 1) * reciprocal) >> 32
    upper = (((rank + 1) * frequency + choices - 1) * reciprocal) >> 32
    return rank, start + lower, upper - lower


@kernel
def _decode(
    header: tuple[Int, Int, Int, Int, Int, Int, Int, Int],
    height: Int,
    width: Int,
    x: Int,
    words: Array,
    offset: Int,
    stride: Int,
    indices: Array,
    levels: Array,
    contexts: Array,
) -> bool:
    base, nonzeros, row_spacing, row_first, row_last, column_spacing, column_first, column_last = header
    at = 0
    row_classes = np.ones(height, np.uint8)
    column_classes = np.ones(width, np.uint8)
    if row_spacing:
        x, at = _take_classes(height, row_first, row_last, row_classes, x, words, at)
    if column_spacing:
        x, at = _take_classes(width, column_first, column_last, column_classes, x, words, at)
    order = _sorted_columns(column_classes)
    kept = order.size
    blocks = (kept + 7) // 8
    groups = (blocks + 7) // 8
    column_context = _block_contexts(column_classes, order, column_spacing)

    counts, cumulative = _PATTERN_COUNTS.copy(), _PATTERN_CUMULATIVE.copy()
    due, pause = np.zeros(3 * CONTEXTS, np.int64), np.zeros(3 * CONTEXTS, np.int64)
    size_counts, size_cumulative = _MAGNITUDE_COUNTS.copy(), _MAGNITUDE_CUMULATIVE.copy()
    size_due, size_pause = np.zeros(CONTEXTS, np.int64), np.zeros(CONTEXTS, np.int64)
    n = 0
    for i in range(height):
        if row_classes[i] == 0:
            continue
        row_context = base + row_spacing * (np.int64(row_classes[i]) - 1)
        row_offset = offset + i * stride
        row_start = n
        for g in range(groups):
            table = _bounded(row_context + column_context[min(8 * g + 3, blocks - 1)])
            sparse = table < SPARSE_BELOW
            members = min(8, blocks - 8 * g)
            if sparse:
                table += GROUP
                slot = x & 0xFFFF
                ones = 0
                while slot >= cumulative[table, ones + 1]:
                    ones += 1
                start = cumulative[table, ones]
                frequency = cumulative[table, ones + 1] - start
                rank, start, frequency = _pattern_at(slot, start, frequency, ones, members)
                if rank >= _CHOICES[members, ones]:
                    return False
                x = rans_undo(x, start, frequency)
                if x < LOWER_BOUND and at < words.size:
                    x = x << 32 | np.int64(words[at])
                    at += 1
                counts[table, ones] += INCREMENT
                due[table] -= 1
                if due[table] < 0:
                    relearn(counts, _PATTERN_FLOORS, cumulative, due, pause, table, TOTAL)
                mask: Int = np.int64(_PATTERNS[_FIRST_PATTERN[ones] + rank])
            else:
                mask = (1 << members) - 1
            for q in range(_ONES[mask]):
                b = 8 * g + _POSITIONS[mask, q]
                context = _bounded(row_context + column_context[b])
                table = context + NONZERO_BLOCK * sparse
                cells = min(8, kept - 8 * b)
                slot = x & 0xFFFF
                ones = 0
                while slot >= cumulative[table, ones + 1]:
                    ones += 1
                start = cumulative[table, ones]
                frequency = cumulative[table, ones + 1] - start
                rank, start, frequency = _pattern_at(slot, start, frequency, ones, cells)
                if rank >= _CHOICES[cells, ones] or n + ones > nonzeros:
                    return False
                x = rans_undo(x, start, frequency)
                if x < LOWER_BOUND and at < words.size:
                    x = x << 32 | np.int64(words[at])
                    at += 1
                counts[table, ones] += INCREMENT
                due[table] -= 1
                if due[table] < 0:
                    relearn(counts, _PATTERN_FLOORS, cumulative, due, pause, table, TOTAL)
                pattern = np.int64(_PATTERNS[_FIRST_PATTERN[ones] + rank])
                for k in range(ones):
                    indices[n] = row_offset + order[8 * b + _POSITIONS[pattern, k]]
                    contexts[n] = context
                    n += 1
        for t in range(row_start, n):
            context = np.int64(contexts[t])
            sign = (x >> 15) & 1
            slot = x & 0x7FFF
            symbol = 0
            while slot >= size_cumulative[context, symbol + 1]:
                symbol += 1
            start = size_cumulative[context, symbol]
            frequency = size_cumulative[context, symbol + 1] - start
            x = rans_undo(x, start + (sign << 15), frequency)
            if x < LOWER_BOUND and at < words.size:
                x = x << 32 | np.int64(words[at])
                at += 1
            v = symbol
            if symbol >= 8:
                low_bits = 2 + ((symbol - 8) >> 1)
                low = (x & 0xFFFF) >> (16 - low_bits)
                x = rans_undo(x, low << (16 - low_bits), TOTAL >> low_bits)
                if x < LOWER_BOUND and at < words.size:
                    x = x << 32 | np.int64(words[at])
                    at += 1
                v = ((2 + ((symbol - 8) & 1)) << low_bits) | low
            size_counts[context, symbol] += INCREMENT
            size_due[context] -= 1
            if size_due[context] < 0:
                relearn(size_counts, _MAGNITUDE_FLOORS, size_cumulative, size_due, size_pause, context, SIGN_TOTAL)
            levels[t] = (v + 1) * (1 - 2 * sign)
    return n == nonzeros and x == 1 and at == words.size


def decode_tile(header: Header, stream: bytes | memoryview, tile: Tile) -> tuple[Array, Array, Array]:
    """The inverse of `encode_tile`: positions in the tensor, levels and contexts of the non-zeros.

    The caller has checked the header's ranges, and that it names no more non-zeros than there are cells: what is
    allocated and done here is bounded by the tile's size.
    """
    state, words = rans_open(stream)
    indices = np.empty(header.nonzeros, np.int64)
    levels = np.empty(header.nonzeros, np.int32)
    contexts = np.empty(header.nonzeros, np.uint8)
    ok = _decode(
        tuple(header),
        tile.height,
        tile.width,
        state,
        words,
        tile.start,
        tile.stride,
        indices,
        levels,
        contexts,
    )
    if not ok:
        raise PayloadError("malformed", "a coefficient stream is damaged")
    return indices, levels, contexts
