"""The low-rank basis of a weight matrix: H = A V^T with few columns.

An update is a sum of few outer products (local steps x batch), so its matrices are nearly of low rank. With unit
columns in V, an error in an entry of A makes an error as large in H; and if column k of V is quantised as sigma_k v_k
with the step of everything else, so do its errors. One water level therefore serves coefficients of all kinds, and what
is best for a tensor, plain coefficients, factors, or factors and plain coefficients of the rest, is a matter of
D + lambda R.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from .kernels import LARGEST, Array, U, kernel
from .layout import TILE_CELLS, Matrix
from .quantize import LAMBDA, Sparse, deadzone, uniform

MAX_RANK = 64
PREFIXES = (16, 32, 64)  # numbers of known directions that are tried, beside none and all
MAX_DIRECTIONS = 128  # that both sides know of a matrix
OVERSAMPLING = 16
PROBE_RANK = 8  # a matrix is looked at with so many columns first
BLOCK_CELLS = 1 << 20  # products are made so many entries at a time
MIN_SIDE = 8  # smaller matrices are not worth factors
FINEST = 1e-5  # of the energy: an error below this is not seen from products in float32, nor are factors worth it
RIDGE = 1e-3  # keeps A small where quantised columns of V are nearly parallel


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
            total[at] = min(max(np.float64(total[at]) + made[U(i), U(j)], -LARGEST), LARGEST)


@kernel
def _subtract(flat: Array, rows: Array, columns: Array, made: Array, rest: Array) -> None:
    for i in range(rows.size):
        for j in range(columns.size):
            at = U(rows[i] + columns[U(j)])
            rest[at] = flat[at] - made[U(i), U(j)]


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
    return min(MAX_RANK, height, width, TILE_CELLS // max(height, width))


class Known(NamedTuple):
    """Directions of a matrix's columns and rows that both sides hold: orthonormal, the strongest first."""

    left: Array  # height x k
    right: Array  # width x k


def affordable_rank(height: int, width: int, budget: float, known: Known | None) -> int:
    """How many ranks so many bytes may pay for: they cost two bits an entry or more; in known directions, which are
    fewer, four."""
    entries = height + width if known is None else 2 * (height + known.right.shape[1])
    return min(max_rank(height, width), max(PROBE_RANK, int(min(4.0 * budget / entries, MAX_RANK))))


class Columns(NamedTuple):
    """One side of the factors, quantised: levels in known directions, if it is sent so, and of what these leave."""

    inside: Sparse | None
    rest: Sparse
    directions: int

    @classmethod
    def quantized(
        cls, columns: Array, step: float, known: Array | None, coefficients: Array | None = None
    ) -> tuple[Columns, Array]:
        """And what its levels make, side x rank. `coefficients` are those of the columns in the known directions, where
        they were computed before."""
        side, rank = columns.shape
        if known is None:
            rest = deadzone(_as_matrix(columns), step)
            return cls(None, rest, 0), dense(rest, side, rank)
        inside = deadzone(_as_matrix(known.T @ columns if coefficients is None else coefficients), step)
        made = known @ dense(inside, known.shape[1], rank)
        rest = deadzone(_as_matrix(columns - np.float32(step) * made), step)
        return cls(inside, rest, known.shape[1]), made + dense(rest, side, rank)


class Factors(NamedTuple):
    """H ~ left right^T, both quantised: what is sent, and what it makes."""

    right_columns: Columns  # of sigma_k v_k
    left_columns: Columns  # of A
    right: Array  # float32, unit columns
    left: Array  # float32
    error: float  # ||H - left right^T||^2


class Rates:
    """About what one side of the factors costs, by the rate of Gaussians of the scales of its coefficients.

    It may be sent as it is, or in the first 16, 32, 64 or 128 known directions and what these leave.
    """

    def __init__(self, side: int, sigma: Array, inside: Array | None) -> None:
        known = 0 if inside is None else inside.shape[0]
        self.directions = [0, *(count for count in PREFIXES if count < known), *([known] if known else [])]
        rest = [sigma**2]
        groups = []
        if inside is not None:
            for start, stop in pairwise(self.directions):
                groups.append(_energies(inside[start:stop]))
                rest.append(np.maximum(rest[-1] - groups[-1], 0.0))
        counts = [*(side for _ in rest), *(stop - start for start, stop in pairwise(self.directions))]
        self.counts = np.array(counts, np.float64)[:, None]
        self.scales = np.sqrt(np.array(rest + groups) / self.counts)

    def at(self, step: float) -> tuple[int, Array, Array]:
        """The best number of directions at this step; D + lambda R and bits of each rank with it."""
        scale = self.scales / step
        bits = _bits(scale)
        costs = self._options(self.counts * step**2 * np.minimum(scale**2, np.maximum(1 / 12 + LAMBDA * bits, 0.05)))
        best = int(np.argmin(costs.sum(1)))
        bits = np.maximum(bits, 0.0)
        bits[0] = np.maximum(bits[0], 0.3)
        return self.directions[best], costs[best], self._options(self.counts * bits)[best]

    def _options(self, parts: Array) -> Array:
        """What the rest and the groups before it take together, for each number of directions."""
        total = parts[: len(self.directions)].copy()
        total[1:] += np.cumsum(parts[len(self.directions) :], 0)
        return total


class Outlook(NamedTuple):
    """What factors would take at a step."""

    gains: Array  # by how much each rank lowers D + lambda R
    rank: int  # so many pay
    size: float  # their bytes
    left: int  # known directions in which they are sent best
    right: int


class LowRank:
    """The leading singular subspace of a matrix: H ~ A V^T, V with orthonormal columns and A with orthogonal ones.

    It does not depend on the step, and takes the memory of 80 rows and columns at most.
    """

    def __init__(self, h: Array, rank: int, key: np.uint64, known: Known | None = None) -> None:
        self.known = known
        self.energy = energy(h)
        v = _directions(h, min(rank + OVERSAMPLING, *h.shape), key, math.sqrt(self.energy / h.size))
        a = h @ v
        squares, vectors = _gram_vectors(a)
        self.sigma = np.sqrt(np.maximum(squares[::-1], 0.0))[:rank]
        turn = np.ascontiguousarray(vectors[:, ::-1], np.float32)
        self.a, self.v = a @ turn, v @ turn
        self._inside = None if known is None else known.right.T @ self._scaled(rank)
        self.left_rates = Rates(h.shape[0], self.sigma, None if known is None else known.left.T @ self.a[:, :rank])
        self.right_rates = Rates(h.shape[1], self.sigma, self._inside)
        self._last: tuple[float, Outlook] | None = None

    def at(self, step: float) -> Outlook:
        """The ranks that pay at this step, by the rate of Gaussians, and what they take."""
        if self._last is None or self._last[0] != step:
            left, left_cost, left_bits = self.left_rates.at(step)
            right, right_cost, right_bits = self.right_rates.at(step)
            gains = self.sigma**2 - left_cost - right_cost
            rank = int(np.argmin(gains > 0)) if not (gains > 0).all() else gains.size
            size = float((left_bits[:rank] + right_bits[:rank]).sum()) / 8
            self._last = (step, Outlook(gains, rank, size, left, right))
        return self._last[1]

    def _scaled(self, rank: int) -> Array:
        """sigma_k v_k."""
        scaled: Array = self.v[:, :rank] * self.sigma[:rank].astype(np.float32)
        return scaled

    def factors(self, step: float, rank: int, left_directions: int, right_directions: int) -> Factors:
        """Quantise V; then the best A for what V became; then quantise A."""
        known_left, known_right = self.known or (None, None)
        inside = None if self._inside is None else self._inside[:right_directions, :rank]
        right_columns, levels = Columns.quantized(
            self._scaled(rank), step, _first(known_right, right_directions), inside
        )
        right = unit_columns(levels)
        projected = (self.a @ (self.v.T @ right)).astype(np.float64)
        gram = right.T.astype(np.float64) @ right.astype(np.float64)
        solved = np.linalg.solve(gram + RIDGE * np.eye(rank), projected.T).T * right.any(0)
        solved = solved.astype(np.float32)
        left_columns, levels = Columns.quantized(solved, step, _first(known_left, left_directions))
        left = levels * np.float32(step)
        error = self.energy - 2 * np.vdot(left, projected) + np.vdot(left.astype(np.float64) @ gram, left)
        return Factors(right_columns, left_columns, right, left, max(float(error), FINEST * self.energy))


def _bits(scale: Array) -> Array:
    """Bits of a Gaussian coefficient whose deviation is so many steps, where it is sent at all."""
    return np.log2(np.maximum(scale, 1e-30)) + 2.05


def _first(known: Array | None, count: int) -> Array | None:
    return None if known is None or count == 0 else np.ascontiguousarray(known[:, :count])


def _energies(columns: Array) -> Array:
    return np.einsum("ij,ij->j", columns, columns, dtype=np.float64)


def unit_columns(levels: Array) -> Array:
    """Columns divided by their norm; a column of zeros stays so."""
    norms = np.sqrt(_energies(levels))
    return (levels / np.where(norms > 0, norms, 1.0)).astype(np.float32)


def energy(h: Array) -> float:
    """The sum of squares, by rows in float32 and over them in float64."""
    return float(np.einsum("ij,ij->i", h, h).sum(dtype=np.float64))


def _as_matrix(array: Array) -> Matrix:
    flat = np.ascontiguousarray(array, np.float32).reshape(-1)
    return Matrix(flat, 0, array.shape[1], *array.shape)


def dense(sparse: Sparse, height: int, width: int) -> Array:
    levels = np.zeros((height, width), np.float32)
    _fill(sparse.row_starts, sparse.columns, sparse.levels, levels)
    return levels


@kernel
def _fill(row_starts: Array, columns: Array, levels: Array, matrix: Array) -> None:
    for i in range(matrix.shape[0]):
        for t in range(row_starts[i], row_starts[i + 1]):
            matrix[i, columns[t]] = levels[t]


def _directions(h: Array, count: int, key: np.uint64, scale: float) -> Array:
    """An orthonormal basis of about the leading rows: a randomised range finder with one power iteration.

    Halko, Martinsson and Tropp (2011), Algorithm 4.3: products with few columns only. What float32 loses in the second
    one lies below a 10^-7th of the largest singular value's square. `scale` keeps the products near one.
    """
    signs = np.empty((h.shape[1], count), np.float32)
    _random_signs(key, signs)
    rows = h.T @ (h @ (signs / np.float32(scale)))
    squares, vectors = _gram_vectors(rows)
    kept = squares > 1e-12 * squares[-1]  # the others are made of rounding errors
    v = rows @ (vectors[:, kept] / np.sqrt(squares[kept])).astype(np.float32)
    # weak columns are orthogonal to about 1%: a step of Newton's method makes it 0.01%
    return v @ (1.5 * np.eye(v.shape[1], dtype=np.float32) - 0.5 * (v.T @ v))


def _gram_vectors(y: Array) -> tuple[Array, Array]:
    """Eigenvalues and eigenvectors of Y^T Y: the squared singular values and the right singular vectors of Y."""
    wide = y.astype(np.float64)
    values, vectors = np.linalg.eigh(wide.T @ wide)
    return values, vectors


@kernel
def _random_signs(key: np.uint64, signs: Array) -> None:
    for i in range(signs.shape[0]):
        for j in range(signs.shape[1]):
            signs[i, j] = 1.0 if uniform(key, i * signs.shape[1] + j) < 0.5 else -1.0
