"""The coefficient coder: a matrix of integer levels, mostly zero, to a byte stream and back.

The stream is built so that its length and its cost follow the non-zero levels:

*Scale classes.* |levels| of a weight matrix vary by row and by column, nearly as a product. Each row and each column
gets a class: the logarithm of its sum of |levels|, in steps of `spacing` half octaves, 0 for one that is all zero.
Classes are sent, coded by an adaptive table in the context of the class before. All-zero rows and columns end there.

*Blocks.* The columns, sorted by class, are cut into blocks of 8, and these into groups of 8 blocks. The expected
|level| in a block is the product of its classes; its logarithm in half octaves is the *context*. A block is coded as
its number of non-zeros (0-8, one adaptive table per context) and which of the equally many patterns it is. Where
non-zeros are sparse, the group is coded first, in the same way, as the pattern of its blocks that are not all zero,
and only those follow. As every context learns how clustered its non-zeros are, neighbours need no contexts of their
own.

*Levels.* Each non-zero is coded as sign and magnitude (one adaptive table per context): 1 to 8 as such, larger ones as
half an octave and its low bits.

Each row is coded as its blocks, then its levels.
"""

from __future__ import annotations

import numpy as np

from fedfq.types import Array

from ..errors import PayloadError
from ..kernels import FLOAT32_MAX, Int, U, kernel
from .entropy import INCREMENT, LOWER_BOUND, TOTAL, rans_open, rans_undo, relearn
from .probability import (
    CHOICES,
    CONTEXTS,
    CONTEXTS_PER_SHIFT,
    FIRST_PATTERN,
    GROUP,
    MAGNITUDE_COUNTS,
    MAGNITUDE_CUMULATIVE,
    MAGNITUDE_FLOORS,
    NONZERO_BLOCK,
    ONES,
    PATTERN_COUNTS,
    PATTERN_CUMULATIVE,
    PATTERN_FLOORS,
    PATTERNS,
    POSITIONS,
    SHIFTS,
    SIGN_TOTAL,
    SPARSE_BELOW,
    block_contexts,
    clamp_context,
    class_tables,
    magnitude_symbol,
    pattern_at,
    pattern_operation,
    sorted_columns,
)
from .tiles import CodedTile, Tile

NO_SHIFTS = np.zeros(SHIFTS, np.float32)


@kernel
def _emit_classes(classes: Array, first: Int, last: Int, operations: Array, n: Int, bits: float) -> tuple[Int, float]:
    symbols = last - first + 2
    counts, floors, cumulative, due, pause = class_tables(symbols)
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
def list_operations(
    row_starts: Array,
    columns: Array,
    levels: Array,
    width: Int,
    header: tuple[Int, Int, Int, Int, Int, Int, Int, Int],
    row_classes: Array,
    column_classes: Array,
) -> tuple[Array, float]:
    """What `rans_encode` codes of a tile with this header (a `TileHeader`), and about how many bits its classes take.

    Levels are given row by row: those of row i, and their columns, from row_starts[i] to row_starts[i + 1].
    """
    base, nonzeros, row_spacing, row_first, row_last, column_spacing, column_first, column_last = header
    height = row_starts.size - 1
    order = sorted_columns(column_classes)
    kept = order.size
    blocks = (kept + 7) // 8
    position = np.zeros(width, np.int64)
    for p in range(order.size):
        position[order[p]] = p
    column_context = block_contexts(column_classes, order, column_spacing)
    groups = (blocks + 7) // 8
    operations = np.empty(height + width + height * (blocks + groups) + 2 * nonzeros, np.uint32)
    n = 0
    bits = 0.0
    if row_spacing:
        n, bits = _emit_classes(row_classes, row_first, row_last, operations, n, bits)
    if column_spacing:
        n, bits = _emit_classes(column_classes, column_first, column_last, operations, n, bits)

    counts, cumulative = PATTERN_COUNTS.copy(), PATTERN_CUMULATIVE.copy()
    due, pause = np.zeros(3 * CONTEXTS, np.int64), np.zeros(3 * CONTEXTS, np.int64)
    size_counts, size_cumulative = MAGNITUDE_COUNTS.copy(), MAGNITUDE_CUMULATIVE.copy()
    size_due, size_pause = np.zeros(CONTEXTS, np.int64), np.zeros(CONTEXTS, np.int64)
    group_masks = np.zeros(groups, np.uint8)
    masks = np.zeros(blocks, np.uint8)
    row_levels = np.empty(8 * blocks, np.int32)
    row_order = np.empty(8 * blocks + 2, np.int64)
    row_contexts = np.empty(8 * blocks + 2, np.int64)
    for i in range(height):
        if row_classes[i] == 0:
            continue
        for t in range(row_starts[i], row_starts[i + 1]):
            p = position[U(columns[U(t)])]
            group_masks[U(p >> 6)] |= np.uint8(1 << ((p >> 3) & 7))
            masks[U(p >> 3)] |= np.uint8(1 << (p & 7))
            row_levels[U(p)] = levels[U(t)]
        row_context = base + row_spacing * (np.int64(row_classes[i]) - 1)
        found = 0
        for g in range(groups):
            table = clamp_context(row_context + column_context[min(8 * g + 3, blocks - 1)])
            sparse = table < SPARSE_BELOW
            mask: Int = np.int64(group_masks[g])
            group_masks[g] = 0
            members = min(8, blocks - 8 * g)
            if sparse:
                table += GROUP
                ones: Int = np.int64(ONES[mask])
                start = cumulative[U(table), U(ones)]
                frequency = cumulative[U(table), U(ones + 1)] - start
                operations[U(n)] = pattern_operation(start, frequency, mask, ones, members)
                n += 1
                counts[U(table), U(ones)] += INCREMENT
                due[U(table)] -= 1
                if due[U(table)] < 0:
                    relearn(counts, PATTERN_FLOORS, cumulative, due, pause, table, TOTAL)
            else:
                mask = (1 << members) - 1
            for q in range(ONES[mask]):
                b = 8 * g + POSITIONS[U(mask), U(q)]
                context = clamp_context(row_context + column_context[U(b)])
                table = context + NONZERO_BLOCK * sparse
                pattern = np.int64(masks[U(b)])
                masks[U(b)] = 0
                ones = np.int64(ONES[U(pattern)])
                start = cumulative[U(table), U(ones)]
                frequency = cumulative[U(table), U(ones + 1)] - start
                operations[U(n)] = pattern_operation(start, frequency, pattern, ones, min(8, kept - 8 * b))
                n += 1
                counts[U(table), U(ones)] += INCREMENT
                due[U(table)] -= 1
                if due[U(table)] < 0:
                    relearn(counts, PATTERN_FLOORS, cumulative, due, pause, table, TOTAL)
                # Two are written in any case: whether there is one or two is hard to predict, a third is rare.
                for k in range(max(2, ones)):
                    row_order[U(found + k)] = 8 * b + POSITIONS[U(pattern), U(k)]
                    row_contexts[U(found + k)] = context
                found += ones
        for t in range(found):
            context = row_contexts[U(t)]
            level = np.int64(row_levels[U(row_order[U(t)])])
            symbol, low_bits = magnitude_symbol(abs(level) - 1)
            start = size_cumulative[U(context), U(symbol)]
            frequency = size_cumulative[U(context), U(symbol + 1)] - start
            operations[U(n)] = (start + SIGN_TOTAL * (level < 0)) << 16 | frequency
            n += 1
            if low_bits:
                low = (abs(level) - 1) & ((1 << low_bits) - 1)
                operations[U(n)] = low << (32 - low_bits) | TOTAL >> low_bits
                n += 1
            size_counts[U(context), U(symbol)] += INCREMENT
            size_due[U(context)] -= 1
            if size_due[U(context)] < 0:
                relearn(size_counts, MAGNITUDE_FLOORS, size_cumulative, size_due, size_pause, context, SIGN_TOTAL)
    return operations[:n], bits


@kernel
def _take_classes(size: Int, first: Int, last: Int, classes: Array, x: Int, words: Array, at: Int) -> tuple[Int, Int]:
    counts, floors, cumulative, due, pause = class_tables(last - first + 2)
    previous = 0
    for i in range(size):
        slot = x & 0xFFFF
        symbol = 0
        while slot >= cumulative[U(previous), U(symbol + 1)]:
            symbol += 1
        start = cumulative[U(previous), U(symbol)]
        x = rans_undo(x, start, cumulative[U(previous), U(symbol + 1)] - start)
        if x < LOWER_BOUND and at < words.size:
            x = x << 32 | np.int64(words[at])
            at += 1
        classes[i] = 0 if symbol == 0 else symbol + first - 1
        counts[U(previous), U(symbol)] += INCREMENT
        due[previous] -= 1
        if due[previous] < 0:
            relearn(counts, floors, cumulative, due, pause, previous, TOTAL)
        previous = symbol
    return x, at


@kernel
def _decode(
    header: tuple[Int, Int, Int, Int, Int, Int, Int, Int],
    height: Int,
    width: Int,
    x: Int,
    words: Array,
    offset: Int,
    stride: Int,
    step: float,
    shifts: Array,
    indices: Array,
    values: Array,
) -> bool:
    base, nonzeros, row_spacing, row_first, row_last, column_spacing, column_first, column_last = header
    at = 0
    row_classes = np.ones(height, np.uint8)
    column_classes = np.ones(width, np.uint8)
    if row_spacing:
        x, at = _take_classes(height, row_first, row_last, row_classes, x, words, at)
    if column_spacing:
        x, at = _take_classes(width, column_first, column_last, column_classes, x, words, at)
    order = sorted_columns(column_classes)
    kept = order.size
    blocks = (kept + 7) // 8
    groups = (blocks + 7) // 8
    column_context = block_contexts(column_classes, order, column_spacing)

    counts, cumulative = PATTERN_COUNTS.copy(), PATTERN_CUMULATIVE.copy()
    due, pause = np.zeros(3 * CONTEXTS, np.int64), np.zeros(3 * CONTEXTS, np.int64)
    size_counts, size_cumulative = MAGNITUDE_COUNTS.copy(), MAGNITUDE_CUMULATIVE.copy()
    size_due, size_pause = np.zeros(CONTEXTS, np.int64), np.zeros(CONTEXTS, np.int64)
    row_contexts = np.empty(kept, np.int64)
    n = 0
    for i in range(height):
        if row_classes[i] == 0:
            continue
        row_context = base + row_spacing * (np.int64(row_classes[i]) - 1)
        row_offset = offset + i * stride
        row_start = n
        for g in range(groups):
            table = clamp_context(row_context + column_context[min(8 * g + 3, blocks - 1)])
            sparse = table < SPARSE_BELOW
            members = min(8, blocks - 8 * g)
            if sparse:
                table += GROUP
                slot = x & 0xFFFF
                ones = 0
                while slot >= cumulative[U(table), U(ones + 1)]:
                    ones += 1
                start = cumulative[U(table), U(ones)]
                frequency = cumulative[U(table), U(ones + 1)] - start
                rank, start, frequency = pattern_at(slot, start, frequency, ones, members)
                if rank >= CHOICES[members, ones]:
                    return False
                x = rans_undo(x, start, frequency)
                if x < LOWER_BOUND and at < words.size:
                    x = x << 32 | np.int64(words[at])
                    at += 1
                counts[U(table), U(ones)] += INCREMENT
                due[U(table)] -= 1
                if due[U(table)] < 0:
                    relearn(counts, PATTERN_FLOORS, cumulative, due, pause, table, TOTAL)
                mask: Int = np.int64(PATTERNS[FIRST_PATTERN[ones] + rank])
            else:
                mask = (1 << members) - 1
            for q in range(ONES[mask]):
                b = 8 * g + POSITIONS[U(mask), U(q)]
                context = clamp_context(row_context + column_context[U(b)])
                table = context + NONZERO_BLOCK * sparse
                cells = min(8, kept - 8 * b)
                slot = x & 0xFFFF
                ones = 0
                while slot >= cumulative[U(table), U(ones + 1)]:
                    ones += 1
                start = cumulative[U(table), U(ones)]
                frequency = cumulative[U(table), U(ones + 1)] - start
                rank, start, frequency = pattern_at(slot, start, frequency, ones, cells)
                if rank >= CHOICES[cells, ones] or n + ones > nonzeros:
                    return False
                x = rans_undo(x, start, frequency)
                if x < LOWER_BOUND and at < words.size:
                    x = x << 32 | np.int64(words[at])
                    at += 1
                counts[U(table), U(ones)] += INCREMENT
                due[U(table)] -= 1
                if due[U(table)] < 0:
                    relearn(counts, PATTERN_FLOORS, cumulative, due, pause, table, TOTAL)
                pattern = np.int64(PATTERNS[FIRST_PATTERN[ones] + rank])
                for k in range(ones):
                    indices[U(n)] = row_offset + order[U(8 * b + POSITIONS[U(pattern), U(k)])]
                    row_contexts[U(n - row_start)] = context
                    n += 1
        for t in range(row_start, n):
            context = row_contexts[U(t - row_start)]
            sign = (x >> 15) & 1
            slot = x & 0x7FFF
            symbol = 0
            while slot >= size_cumulative[U(context), U(symbol + 1)]:
                symbol += 1
            start = size_cumulative[U(context), U(symbol)]
            frequency = size_cumulative[U(context), U(symbol + 1)] - start
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
            size_counts[U(context), U(symbol)] += INCREMENT
            size_due[U(context)] -= 1
            if size_due[U(context)] < 0:
                relearn(size_counts, MAGNITUDE_FLOORS, size_cumulative, size_due, size_pause, context, SIGN_TOTAL)
            group = context // CONTEXTS_PER_SHIFT if v == 0 else SHIFTS - 1
            value = min((v + 1 + shifts[group]) * step, FLOAT32_MAX)
            values[U(t)] = value * (1 - 2 * sign)
    return n == nonzeros and x == 1 and at == words.size


def decode_tile(coded: CodedTile, tile: Tile, step: float = 1.0, shifts: Array = NO_SHIFTS) -> tuple[Array, Array]:
    """The positions in the tensor and the values of a tile's non-zeros.

    A level l becomes sign(l) (|l| + shift) step, but no more than float32 holds; by default, l itself.
    The caller has checked the header's ranges, and that it names no more non-zeros than there are cells: what is
    allocated and done here is bounded by the tile's size.
    """
    state, words = rans_open(coded.stream)
    indices = np.empty(coded.header.nonzeros, np.int64)
    values = np.empty(coded.header.nonzeros, np.float32)
    if not _decode(
        *(tuple(coded.header), tile.height, tile.width, state, words),
        *(tile.start, tile.stride, step, shifts.astype(np.float64), indices, values),
    ):
        raise PayloadError("malformed", "a coefficient stream is damaged")
    return indices, values
