"""The low-rank basis of a weight matrix: H = A V^T with few columns.

An update is a sum of few outer products (local steps x batch), so its matrices are nearly of low rank. With unit
columns in V, an error in an entry of A makes an error as large in H; and if column k of V is quantised as sigma_k v_k
with the step of everything else, so do its errors. One water level therefore serves coefficients of all kinds, and what
is best for a tensor, plain coefficients, factors, or factors and plain coefficients of the rest, is a matter of
D + lambda R.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fedfq.types import Array

from ..format.directions import KnownDirections
from ..format.fold import MAX_RANK, column_energies, energy, max_rank, unit_columns
from ..format.random_numbers import uniform
from ..kernels import kernel
from ..tensors import Matrix
from .quantize import LAMBDA, Sparse, deadzone

PREFIXES = (16, 32, 64)  # numbers of known directions that are tried, beside none and all
OVERSAMPLING = 16
PROBE_RANK = 8  # a matrix is looked at with so many columns first
FINEST_ERROR = 1e-5  # of the energy: an error below this is not seen from products in float32, nor are factors worth it
RIDGE = 1e-3  # keeps A small where quantised columns of V are nearly parallel


def affordable_rank(height: int, width: int, budget: float, known: KnownDirections | None) -> int:
    """How many ranks so many bytes may pay for.

    They cost two bits per entry or more; in known directions, which are fewer, four.
    """
    entries = height + width if known is None else 2 * (height + known.right.shape[1])
    return min(max_rank(height, width), max(PROBE_RANK, int(min(4.0 * budget / entries, MAX_RANK))))


class Columns(NamedTuple):
    """One side of the factors, quantised: levels in known directions, if it is sent so, and of what these leave."""

    inside: Sparse | None
    rest: Sparse
    directions: int

    @classmethod
    def quantize(
        cls, columns: Array, step: float, known: Array | None, coefficients: Array | None = None
    ) -> tuple[Columns, Array]:
        """Quantise columns. Returns them and what their levels make, side x rank.

        `coefficients` are those of the columns in the known directions, where they were computed before.
        """
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


class SideRates:
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
                groups.append(column_energies(inside[start:stop]))
                rest.append(np.maximum(rest[-1] - groups[-1], 0.0))
        counts = [*(side for _ in rest), *(stop - start for start, stop in pairwise(self.directions))]
        self.counts = np.array(counts, np.float64)[:, None]
        self.scales = np.sqrt(np.array(rest + groups) / self.counts)

    def choose(self, step: float) -> tuple[int, Array, Array]:
        """The best number of directions at this step; D + lambda R and bits of each rank with it."""
        scale = self.scales / step
        bits = _rate(scale)
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


class RankEstimate(NamedTuple):
    """About what factors would take at a step, without coding them."""

    gains: Array  # by how much each rank lowers D + lambda R
    rank: int  # number of factor columns whose gain exceeds their cost
    size: float  # about their bytes
    left: int  # known directions in which they are sent best
    right: int


class LowRank:
    """The leading singular subspace of a matrix: H ~ A V^T, V with orthonormal columns and A with orthogonal ones.

    It does not depend on the step, and takes the memory of 80 rows and columns at most.
    """

    def __init__(self, h: Array, rank: int, key: np.uint64, known: KnownDirections | None = None) -> None:
        self.known = known
        self.energy = energy(h)
        v = _find_leading_rows(h, min(rank + OVERSAMPLING, *h.shape), key, math.sqrt(self.energy / h.size))
        a = h @ v
        squares, vectors = _decompose_gram(a)
        self.sigma = np.sqrt(np.maximum(squares[::-1], 0.0))[:rank]
        turn = np.ascontiguousarray(vectors[:, ::-1], np.float32)
        self.a, self.v = a @ turn, v @ turn
        self._inside = None if known is None else known.right.T @ self._scale_right(rank)
        self.left_rates = SideRates(h.shape[0], self.sigma, None if known is None else known.left.T @ self.a[:, :rank])
        self.right_rates = SideRates(h.shape[1], self.sigma, self._inside)
        self._last: tuple[float, RankEstimate] | None = None

    def estimate(self, step: float) -> RankEstimate:
        """The ranks that pay at this step, by the rate of Gaussians, and what they take."""
        if self._last is None or self._last[0] != step:
            left, left_cost, left_bits = self.left_rates.choose(step)
            right, right_cost, right_bits = self.right_rates.choose(step)
            gains = self.sigma**2 - left_cost - right_cost
            rank = int(np.argmin(gains > 0)) if not (gains > 0).all() else gains.size
            size = float((left_bits[:rank] + right_bits[:rank]).sum()) / 8
            self._last = (step, RankEstimate(gains, rank, size, left, right))
        return self._last[1]

    def _scale_right(self, rank: int) -> Array:
        """sigma_k v_k."""
        scaled: Array = self.v[:, :rank] * self.sigma[:rank].astype(np.float32)
        return scaled

    def quantize(self, step: float, rank: int, left_directions: int, right_directions: int) -> Factors:
        """Quantise V; then the best A for what V became; then quantise A."""
        known_left, known_right = (None, None) if self.known is None else self.known.sides
        inside = None if self._inside is None else self._inside[:right_directions, :rank]
        right_columns, levels = Columns.quantize(
            self._scale_right(rank), step, _take_first(known_right, right_directions), inside
        )
        right = unit_columns(levels)
        projected = (self.a @ (self.v.T @ right)).astype(np.float64)
        gram = right.T.astype(np.float64) @ right.astype(np.float64)
        solved = np.linalg.solve(gram + RIDGE * np.eye(rank), projected.T).T * right.any(0)
        solved = solved.astype(np.float32)
        left_columns, levels = Columns.quantize(solved, step, _take_first(known_left, left_directions))
        left = levels * np.float32(step)
        error = self.energy - 2 * np.vdot(left, projected) + np.vdot(left.astype(np.float64) @ gram, left)
        return Factors(right_columns, left_columns, right, left, max(float(error), FINEST_ERROR * self.energy))


def _rate(scale: Array) -> Array:
    """Bits of a Gaussian coefficient whose deviation is so many steps, where it is sent at all."""
    return np.log2(np.maximum(scale, 1e-30)) + 2.05


def _take_first(known: Array | None, count: int) -> Array | None:
    return None if known is None or count == 0 else np.ascontiguousarray(known[:, :count])


def _as_matrix(array: Array) -> Matrix:
    flat = np.ascontiguousarray(array, np.float32).reshape(-1)
    return Matrix(flat, 0, array.shape[1], *array.shape)


def dense(sparse: Sparse, height: int, width: int) -> Array:
    levels = np.zeros((height, width), np.float32)
    _scatter(sparse.row_starts, sparse.columns, sparse.levels, levels)
    return levels


@kernel
def _scatter(row_starts: Array, columns: Array, levels: Array, matrix: Array) -> None:
    for i in range(matrix.shape[0]):
        for t in range(row_starts[i], row_starts[i + 1]):
            matrix[i, columns[t]] = levels[t]


def _find_leading_rows(h: Array, count: int, key: np.uint64, scale: float) -> Array:
    """An orthonormal basis of about the leading rows: a randomised range finder with one power iteration.

    Halko, Martinsson and Tropp (2011), Algorithm 4.3: products with few columns only. What float32 loses in the second
    one lies below a 10^-7th of the largest singular value's square. `scale` keeps the products near one.
    """
    signs = np.empty((h.shape[1], count), np.float32)
    _fill_with_random_signs(key, signs)
    rows = h.T @ (h @ (signs / np.float32(scale)))
    squares, vectors = _decompose_gram(rows)
    kept = squares > 1e-12 * squares[-1]  # the others are made of rounding errors
    v = rows @ (vectors[:, kept] / np.sqrt(squares[kept])).astype(np.float32)
    # weak columns are orthogonal to about 1%: a step of Newton's method makes it 0.01%
    return v @ (1.5 * np.eye(v.shape[1], dtype=np.float32) - 0.5 * (v.T @ v))


def _decompose_gram(y: Array) -> tuple[Array, Array]:
    """Eigenvalues and eigenvectors of Y^T Y: the squared singular values and the right singular vectors of Y."""
    wide = y.astype(np.float64)
    values, vectors = np.linalg.eigh(wide.T @ wide)
    return values, vectors


@kernel
def _fill_with_random_signs(key: np.uint64, signs: Array) -> None:
    for i in range(signs.shape[0]):
        for j in range(signs.shape[1]):
            signs[i, j] = 1.0 if uniform(key, i * signs.shape[1] + j) < 0.5 else -1.0
