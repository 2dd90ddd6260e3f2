"""Matrices with factors: which tensors have them, how a tensor is seen as a matrix, and products of factors.

A tensor H of low rank is sent as H = A V^T with few columns, of which those of V have unit length.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from fedfq.types import Array

from ..kernels import FLOAT32_MAX, Int, U, kernel
from .tiles import TILE_CELLS

MAX_RANK = 64
MIN_SIDE = 8  # smaller matrices have no factors
BLOCK_CELLS = 1 << 18  # entries of a product that are made at a time: fewer, and BLAS packs V too often
UNIT = 2.0**24  # entries of V are whole numbers of 1 / UNIT, which float32 holds


class Fold(NamedTuple):
    """How a tensor is seen as a matrix: its dimensions in another order, the first `rows` of them being rows."""

    order: tuple[int, ...]
    rows: int

    def shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        sides = [shape[d] for d in self.order]
        return math.prod(sides[: self.rows]), math.prod(sides[self.rows :])

    def matrix(self, array: Array) -> Array:
        """The tensor as this matrix, in float32: the tensor itself where it is that already."""
        flat = np.ascontiguousarray(array, np.float32)
        if flat.ndim == 2:
            return flat
        result = np.empty(self.shape(array.shape), np.float32)
        _gather(flat.reshape(-1), *self.places(array.shape), result)
        return result

    def places(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Where in the flat tensor the matrix's entries lie: entry (i, j) at the first's i-th number plus the second's
        j-th."""
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]

        def along(dimensions: tuple[int, ...]) -> Array:
            at = np.zeros(1, np.int64)
            for d in dimensions:
                at = (at[:, None] + strides[d] * np.arange(shape[d])).reshape(-1)
            return at

        return along(self.order[: self.rows]), along(self.order[self.rows :])

    def add_to(self, total: Array, shape: tuple[int, ...], matrix: Array, weight: float) -> None:
        """total += weight matrix, kept within float32; `total` is the tensor, flat."""
        _add_rows(total, *self.places(shape), matrix, weight)


class Product(NamedTuple):
    """scale left right^T for a tensor that `fold` sees as a matrix.

    With levels on the left and `unit_columns` on the right, every sum is a whole number of 2^-24 below 2^23: exact in
    float64, in whatever order it is made, with fused operations or without. So every machine decodes the same bits.
    """

    left: Array  # float32, height x rank
    right: Array  # float32, width x rank
    scale: float = 1.0

    def add_to(self, total: Array, shape: tuple[int, ...]) -> None:
        """total += the product, kept within float32; `total` is the tensor, flat."""
        view = fold(shape)
        assert view is not None
        rows, columns = view.places(shape)
        right = self.right.T.astype(np.float64)
        count = max(1, BLOCK_CELLS // columns.size)
        for at in range(0, rows.size, count):
            made = self.left[at : at + count].astype(np.float64) @ right
            _add_rows(total, rows[at : at + count], columns, made, self.scale)

    def rest(self, array: Array) -> Array:
        """The tensor less the product, as float32."""
        rest = np.array(array, np.float32, order="C").reshape(-1)
        self._replace(scale=-self.scale).add_to(rest, array.shape)
        return rest.reshape(array.shape)


@kernel
def _gather(flat: Array, rows: Array, columns: Array, result: Array) -> None:
    for i in range(rows.size):
        for j in range(columns.size):
            result[U(i), U(j)] = flat[U(rows[i] + columns[U(j)])]


@kernel
def _add_rows(total: Array, rows: Array, columns: Array, made: Array, scale: float) -> None:
    for i in range(rows.size):
        _add_row(total, rows[i], columns, made[i], scale)


@kernel
def _add_row(total: Array, first: Int, columns: Array, made: Array, scale: float) -> None:
    width = columns.size
    if columns[width - 1] == width - 1:  # one after the other, as in every matrix that is not a kernel
        for j in range(width):
            at = U(first + j)
            total[at] = min(max(np.float64(total[at]) + scale * made[U(j)], -FLOAT32_MAX), FLOAT32_MAX)
    else:
        for j in range(width):
            at = U(first + columns[U(j)])
            total[at] = min(max(np.float64(total[at]) + scale * made[U(j)], -FLOAT32_MAX), FLOAT32_MAX)


@lru_cache(1024)  # a model has few different shapes
def fold(shape: tuple[int, ...]) -> Fold | None:
    """The view with the shortest columns and rows, where a rank costs least; None for tensors not worth factors.

    The first dimension belongs to the rows and the second to the columns. Those of a kernel (out, in, a, b) are divided
    so that the sides differ least: (out a) x (in b).
    """
    if not 2 <= len(shape) <= 6 or 0 in shape:
        return None
    best: Fold | None = None
    for sides in product((0, 1), repeat=len(shape) - 2):
        rows = (0, *(d + 2 for d, side in enumerate(sides) if side == 0))
        columns = (1, *(d + 2 for d, side in enumerate(sides) if side == 1))
        candidate = Fold(rows + columns, len(rows))
        if best is None or sum(candidate.shape(shape)) < sum(best.shape(shape)):
            best = candidate
    assert best is not None
    return best if min(best.shape(shape)) >= MIN_SIDE else None


def max_rank(height: int, width: int) -> int:
    """The largest rank that factors of a matrix may have."""
    return min(MAX_RANK, height, width, TILE_CELLS // max(height, width))


def column_energies(columns: Array) -> Array:
    """The sum of squares of each column, in float64."""
    return np.einsum("ij,ij->j", columns, columns, dtype=np.float64)


def unit_columns(levels: Array) -> Array:
    """Columns divided by their norm, in whole numbers of 2^-24; a column of zeros stays so."""
    unit = np.empty(levels.shape, np.float32)
    _divide_by_norms(levels, unit)
    return unit


@kernel
def _divide_by_norms(levels: Array, unit: Array) -> None:
    """Squares of float32 numbers are exact in float64. Their sums are made row by row, and exact for whole numbers."""
    height, width = levels.shape
    norms = np.zeros(width, np.float64)
    for i in range(height):
        for j in range(width):
            norms[j] += np.float64(levels[i, j]) * np.float64(levels[i, j])
    for j in range(width):
        norms[j] = np.sqrt(norms[j]) if norms[j] > 0 else 1.0
    for i in range(height):
        for j in range(width):
            unit[i, j] = np.rint(np.float64(levels[i, j]) * UNIT / norms[j]) / UNIT


def energy(h: Array) -> float:
    """The sum of squares, by rows in float32 and over them in float64."""
    return float(np.einsum("ij,ij->i", h, h).sum(dtype=np.float64))
