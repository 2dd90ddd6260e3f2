"""One tensor of an update: what it would take at a step, coded in each of the ways there are.

A tensor is coded as coefficients as they are (plain), as low-rank factors, or as factors and plain coefficients of what
these leave; the best has the smallest D + lambda R (error and bits, lambda being what a bit is worth at that step).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..format.directions import KnownDirections
from ..format.fold import Product, energy, fold
from ..format.random_numbers import stream_key
from ..format.sections import FactorsSection, PlainSection, Section, Side, ZeroSection
from ..tensors import SMALL, Matrix, Tensor
from .low_rank import PROBE_RANK, Columns, Factors, LowRank, affordable_rank
from .quantize import LAMBDA, MAX_MAGNITUDE, Sparse, deadzone, quantize
from .tiles import EncodedTile, encode_tile

PROBE_CELLS = 1 << 20  # entries; larger matrices are looked at with few columns first
PLAIN_SLOPE = -2.5  # of log(size) over log(step), as it was met for plain coefficients
PLAIN_COST_SLOPE = 0.9  # likewise, of log(cost)
PLAIN_GIVES_UP_BELOW = 0.5  # cost of factors / cost of plain: below it, plain coefficients are not tried again
REST_MUST_SAVE = 0.01  # of the cost: coefficients beside factors take a pass over the tensor
FACTORS_HEADER_BYTES = 16.0  # about what a section with factors takes besides its streams
REST_HEADER_BYTES = 8  # about what tiles of the rest take besides their streams
FACTOR_LEVELS_USED = 0.95  # of the largest level: singular values may be that large in steps


class Sample(NamedTuple):
    """Every so-many-th row and column of a tile."""

    matrix: Matrix
    rows: int
    columns: int
    energy: float

    def estimate_size(self, encoded: EncodedTile | None) -> float:
        """About the bytes that the whole tile will take: coefficients grow with both sides, classes with one."""
        if encoded is None:
            return 0.0
        classes = encoded.class_bits / 8
        coefficients = len(encoded.coded.stream) - classes
        return coefficients * self.rows * self.columns + classes * max(self.rows, self.columns)

    def estimate_error(self, sparse: Sparse, step: float) -> float:
        """About the squared error of the whole tile."""
        return max(self.energy * self.rows * self.columns - self.estimate_saving(sparse, step), 0.0)

    def estimate_saving(self, sparse: Sparse, step: float) -> float:
        """About by how much the levels lower the whole tile's squared error."""
        sizes = np.abs(sparse.levels) + sparse.excess
        saving = step**2 * (np.vdot(sizes, sizes) - np.vdot(sparse.excess, sparse.excess))
        return float(saving) * self.rows * self.columns


def take_sample(matrix: Matrix, share: float) -> Sample:
    """About one in `share` of the entries, from rows and columns alike as both have scales; small tiles whole."""
    every = math.ceil(math.sqrt(max(share, 1.0)))
    rows, columns = min(every, max(1, matrix.height // 64)), min(every, max(1, matrix.width // 64))
    return _make_sample(matrix.sample(rows, columns), rows, columns)


def _make_sample(matrix: Matrix, rows: int, columns: int) -> Sample:
    return Sample(matrix, rows, columns, energy(matrix.flat.reshape(matrix.height, matrix.width)))


class Coding(NamedTuple):
    """How a tensor is coded: with factors of some rank, each in so many known directions; with plain coefficients."""

    rank: int = 0
    left: int = 0
    right: int = 0
    plain: bool = True


class CodedTensor(NamedTuple):
    """A tensor coded in one way at a step: about what it takes, and its factors if it has any."""

    coding: Coding
    size: float  # bytes
    cost: float  # D + lambda R
    factors: Factors | None = None
    right: Side | None = None
    left: Side | None = None

    def section(self, tiles: Sequence[EncodedTile | None]) -> Section:
        """The tensor's section; `tiles` are those of its plain coefficients, of the rest if it has factors."""
        coded = [None if tile is None else tile.coded for tile in tiles]
        if self.factors is not None:
            assert self.right is not None and self.left is not None
            rank = self.factors.right.shape[1]
            return FactorsSection(rank, self.right, self.left, coded if self.coding.plain else None)
        return PlainSection(coded) if any(coded) else ZeroSection()


class TensorCoder:
    """Codes one tensor at any step: holds samples of its tiles, and its low-rank basis if it may have one."""

    def __init__(self, tensor: Tensor, number: int, share: float, rounding: str, known: KnownDirections | None) -> None:
        """`number` is the tensor's place in the update; about one in `share` of its entries is sampled."""
        self.tensor = tensor
        self.number = number
        self.rounding = rounding
        self.known = known
        self.samples = [take_sample(tensor.matrix(tile), share) for tile in tensor.tiles]
        self.low: LowRank | None = None
        self.low_sample: Sample | None = None
        self._last_plain: tuple[float, CodedTensor] | None = None
        self._last_factored: tuple[float, Coding, CodedTensor | None] | None = None
        self._plain_may_win = True

    def seek_basis(self, step: float, share: float, budget: float, seed: int) -> None:
        """Find the low-rank basis, unless a look with few columns shows that it cannot beat plain coefficients."""
        view = fold(self.tensor.spec.shape)
        if view is None or self.tensor.kind == SMALL:
            return
        h = view.matrix(self.tensor.array)
        if not energy(h) > 0.0:  # all zero, or as good as that beside what fills float32
            return
        most = affordable_rank(h.shape[0], h.shape[1], budget, self.known)
        key = stream_key(seed, ~self.number)
        if most > PROBE_RANK and h.size > PROBE_CELLS:
            probe = LowRank(h, PROBE_RANK, key, self.known)
            gains = np.maximum(probe.estimate(step).gains, 0.0)
            if probe.energy - gains.sum() - (most - gains.size) * gains[-1] > self.code_plain(step).cost:
                return
        self.low = LowRank(h, most, key, self.known)
        self.low_sample = take_sample(Matrix(h.reshape(-1), 0, h.shape[1], *h.shape), share)

    def code_plain(self, step: float) -> CodedTensor:
        """About what plain coefficients take, from the samples."""
        if self._last_plain is None or self._last_plain[0] != step:
            self._last_plain = (step, self._code_plain(step))
        return self._last_plain[1]

    def _code_plain(self, step: float) -> CodedTensor:
        size = error = 0.0
        for sample in self.samples:
            sparse = quantize(sample.matrix, step, self.rounding, np.uint64(0))
            size += sample.estimate_size(encode_tile(sparse, sample.matrix.width))
            error += sample.estimate_error(sparse, step)
        return CodedTensor(Coding(), size, error + LAMBDA * step**2 * 8 * size)

    def code_factors(self, step: float, coding: Coding) -> CodedTensor | None:
        """Factors in this coding, ready to be sent; None where nothing is left of them at this step."""
        coding = coding._replace(plain=False)
        if self._last_factored is None or self._last_factored[:2] != (step, coding):
            self._last_factored = (step, coding, self._code_factors(step, coding))
        return self._last_factored[2]

    def _code_factors(self, step: float, coding: Coding) -> CodedTensor | None:
        if self.low is None or coding.rank == 0 or step < self.finest:
            return None
        factors = self.low.quantize(step, coding.rank, coding.left, coding.right)
        right, left = _encode_side(factors.right_columns, coding.rank), _encode_side(factors.left_columns, coding.rank)
        if right is None or left is None:
            return None
        size = sum(len(tile.stream) for tile in (*right.tiles, *left.tiles)) + FACTORS_HEADER_BYTES
        cost = factors.error + LAMBDA * step**2 * 8 * size
        return CodedTensor(coding, size, cost, factors, right, left)

    def _code_best_factors(self, step: float) -> CodedTensor | None:
        if self.low is None:
            return None
        estimate = self.low.estimate(step)
        return self.code_factors(step, Coding(estimate.rank, estimate.left, estimate.right))

    @property
    def finest(self) -> float:
        """The finest step at which levels of factors, which may be as large as the first singular value, still fit."""
        return 0.0 if self.low is None else float(self.low.sigma[0]) / (FACTOR_LEVELS_USED * MAX_MAGNITUDE)

    def model(self, step: float) -> Callable[[float], tuple[float, float]]:
        """A function of the step: about the bytes and the cost there, without coding.

        Factors are estimated by the rate of Gaussians, plain coefficients from what they take at this step. Plain
        coefficients that are far behind here are not tried again.
        """
        plain, low = self.code_plain(step), self.low
        cost = math.inf if low is None else low.energy - float(np.maximum(low.estimate(step).gains, 0.0).sum())
        self._plain_may_win = cost > PLAIN_GIVES_UP_BELOW * plain.cost
        if low is not None and cost < plain.cost:
            return lambda at: _model_factors(low, at)
        return lambda at: (plain.size * (at / step) ** PLAIN_SLOPE, plain.cost * (at / step) ** PLAIN_COST_SLOPE)

    def choose(self, step: float) -> CodedTensor:
        """The best coding at this step."""
        low = self._code_best_factors(step)
        if low is None or low.factors is None:
            return self.code_plain(step)
        rest_size, rest_saving = self._estimate_rest(low.factors, step)
        cost = low.cost - rest_saving + LAMBDA * step**2 * 8 * rest_size
        if cost < (1 - REST_MUST_SAVE) * low.cost:
            low = low._replace(coding=low.coding._replace(plain=True), size=low.size + rest_size, cost=cost)
        return low if not self._plain_may_win or low.cost < self.code_plain(step).cost else self.code_plain(step)

    def _estimate_rest(self, factors: Factors, step: float) -> tuple[float, float]:
        """About the bytes of plain coefficients for what the factors leave, and what they save of its error."""
        assert self.low_sample is not None
        matrix, rows, columns, _ = self.low_sample
        made = factors.left[::rows] @ factors.right[::columns].T
        rest = _make_sample(matrix._replace(flat=matrix.flat - made.reshape(-1)), rows, columns)
        sparse = deadzone(rest.matrix, step)
        return rest.estimate_size(encode_tile(sparse, matrix.width)) + REST_HEADER_BYTES, rest.estimate_saving(
            sparse, step
        )

    def subtract(self, factors: Factors) -> Tensor:
        """What the factors leave of the tensor."""
        return Tensor(self.tensor.spec.name, Product(factors.left, factors.right).rest(self.tensor.array))


def _model_factors(low: LowRank, step: float) -> tuple[float, float]:
    estimate = low.estimate(step)
    return estimate.size, low.energy - float(np.maximum(estimate.gains, 0.0).sum())


def _encode_side(columns: Columns, rank: int) -> Side | None:
    """One of the factors, coded; None if nothing is left of it."""
    inside = None if columns.inside is None else encode_tile(columns.inside, rank)
    rest = encode_tile(columns.rest, rank)
    if inside is None and rest is None:
        return None
    return Side(columns.directions, inside and inside.coded, rest and rest.coded)
