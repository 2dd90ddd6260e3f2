"""Matrices with factors: which tensors have them, how a tensor is seen as a matrix, and products of factors.

A tensor H of low rank is sent as H = A V^T with few columns, of which those of V have unit length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from fedfq.types import Array

from ..kernels import FLOAT32_MAX, U, kernel
from .tiles import TILE_CELLS

MAX_RANK = 64
MIN_SIDE = 8  # smaller matrices have no factors
BLOCK_CELLS = 1 << 20  # products are made so many entries at a time


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


class Product(NamedTuple):
    """left right^T for a tensor that `fold` sees as a matrix, made some rows at a time."""

    left: Array
    right: Array

    def add_to(self, total: Array, shape: tuple[int, ...]) -> None:
        """total += the product, kept within float32; `total` is the tensor, flat."""
        for rows, columns, made in self._blocks(shape):
            _add(total, rows, columns, made)

    def rest(self, array: Array) -> Array:
        """The tensor less the product, as float32."""
        flat = np.ascontiguousarray(array, np.float32).reshape(-1)
        rest = np.empty_like(flat)
        for rows, columns, made in self._blocks(array.shape):
            _subtract(flat, rows, columns, made, rest)
        return rest.reshape(array.shape)

    def _blocks(self, shape: tuple[int, ...]) -> Iterator[tuple[Array, Array, Array]]:
        """Some rows at a time: the places of these rows and of the columns in the flat tensor, and the product."""
        view = fold(shape)
        assert view is not None
        rows, columns = view.places(shape)
        together = rows.size // shape[0]  # rows of one index of the first dimension
        cells = together * columns.size
        count = BLOCK_CELLS // cells * together if cells <= BLOCK_CELLS else max(1, BLOCK_CELLS // columns.size)
        for at in range(0, rows.size, count):
            yield rows[at : at + count], columns, self.left[at : at + count] @ self.right.T


@kernel
def _gather(flat: Array, rows: Array, columns: Array, result: Array) -> None:
    for i in range(rows.size):
        for j in range(columns.size):
            result[U(i), U(j)] = flat[U(rows[i] + columns[U(j)])]


@kernel
def _add(total: Array, rows: Array, columns: Array, made: Array) -> None:
    for i in range(rows.size):
        for j in range(columns.size):
            at = U(rows[i] + columns[U(j)])
            total[at] = min(max(np.float64(total[at]) + made[U(i), U(j)], -FLOAT32_MAX), FLOAT32_MAX)


@kernel
def _subtract(flat: Array, rows: Array, columns: Array, made: Array, rest: Array) -> None:
    for i in range(rows.size):
        for j in range(columns.size):
            at = U(rows[i] + columns[U(j)])
            rest[at] = flat[at] - made[U(i), U(j)]


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
    """Columns divided by their norm; a column of zeros stays so."""
    norms = np.sqrt(column_energies(levels))
    return (levels / np.where(norms > 0, norms, 1.0)).astype(np.float32)


def energy(h: Array) -> float:
    """The sum of squares, by rows in float32 and over them in float64."""
    return float(np.einsum("ij,ij->i", h, h).sum(dtype=np.float64))
