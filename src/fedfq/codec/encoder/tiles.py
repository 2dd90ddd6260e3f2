"""Tiles as they are sent: the choice of scale classes, and the statistics for reconstruction points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fedfq.types import Array

from ..format.coefficients import list_operations
from ..format.entropy import rans_encode
from ..format.probability import (
    CONTEXT_OFFSET,
    CONTEXTS_PER_SHIFT,
    MAX_CLASS,
    SHIFTS,
    block_contexts,
    clamp_context,
    sorted_columns,
)
from ..format.tiles import CodedTile, Tile, TileHeader
from ..kernels import Int, U, kernel
from .quantize import Sparse, nonzero

EXCESS_ROWS = 64  # rows that the excess of entries over their levels is taken from, at least
MIN_CLASS_GAIN_BITS = 16.0  # classes that save less are not sent


class EncodedTile(NamedTuple):
    """A coded tile, and how far its entries lie above their levels, by group of contexts (see `SHIFTS`)."""

    coded: CodedTile
    class_bits: float  # of the stream, about what the classes take
    excess_sums: Array
    excess_counts: Array


def encode_tile(sparse: Sparse, width: int, *, by_size: bool = True) -> EncodedTile | None:
    """Code the non-zero levels of a matrix with `width` columns; None if there are none.

    `by_size=False` when a level's number says nothing of its magnitude (the widths of Eq. 23), so that classes are
    made from counts.
    """
    if not sparse.levels.size:
        return None
    excess_sums, excess_counts = np.zeros(SHIFTS), np.zeros(SHIFTS, np.int64)
    operations, class_bits, header = _choose_and_list(*sparse, width, by_size, excess_sums, excess_counts)
    return EncodedTile(CodedTile(TileHeader(*header), rans_encode(operations)), class_bits, excess_sums, excess_counts)


def encode_levels(levels: Array, tiles: Sequence[Tile], *, by_size: bool = True) -> list[CodedTile | None]:
    """The tiles of a tensor whose levels are given, flat."""
    found = []
    for tile in tiles:
        strides = (tile.stride * levels.itemsize, levels.itemsize)
        rows = as_strided(levels[tile.start :], (tile.height, tile.width), strides, writeable=False)
        encoded = encode_tile(nonzero(rows), tile.width, by_size=by_size)
        found.append(None if encoded is None else encoded.coded)
    return found


@kernel
def _choose_and_list(
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
        row_sum: Int = 0
        for t in range(row_starts[i], row_starts[i + 1]):
            size: Int = abs(np.int64(levels[U(t)])) if by_size else 1
            row_sum += size
            column_sums[U(columns[U(t)])] += size
        row_sums[i] = row_sum
        total += row_sum
    row_spacing, row_classes = choose_classes(row_sums, total)
    column_spacing, column_classes = choose_classes(column_sums, total)
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
    header = (base, nonzeros, row_spacing, row_first, row_last, column_spacing, column_first, column_last)
    _sum_excess(row_starts, columns, levels, excess, header, row_classes, column_classes, excess_sums, excess_counts)
    operations, bits = list_operations(row_starts, columns, levels, width, header, row_classes, column_classes)
    return operations, bits, header


@kernel
def _sum_excess(
    row_starts: Array,
    columns: Array,
    levels: Array,
    excess: Array,
    header: tuple[Int, Int, Int, Int, Int, Int, Int, Int],
    row_classes: Array,
    column_classes: Array,
    sums: Array,
    counts: Array,
) -> None:
    """How far entries of some rows lie above their levels, by the shift that the decoder will add to them."""
    base, row_spacing, column_spacing = header[0], header[2], header[5]
    order = sorted_columns(column_classes)
    position = np.zeros(column_classes.size, np.int64)
    for p in range(order.size):
        position[order[p]] = p
    column_context = block_contexts(column_classes, order, column_spacing)
    height = row_starts.size - 1
    for i in range(0, height, max(1, height // EXCESS_ROWS)):
        if row_classes[i] == 0:
            continue
        row_context = base + row_spacing * (np.int64(row_classes[i]) - 1)
        for t in range(row_starts[i], row_starts[i + 1]):
            context = clamp_context(row_context + column_context[position[columns[t]] >> 3])
            group = context // CONTEXTS_PER_SHIFT if abs(levels[t]) == 1 else SHIFTS - 1
            sums[group] += excess[t]
            counts[group] += 1


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
def choose_classes(sums: Array, total: Int) -> tuple[Int, Array]:
    """The spacing (0: none) that saves most, and the classes."""
    best_gain = MIN_CLASS_GAIN_BITS
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
