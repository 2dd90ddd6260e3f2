"""Water-filling: one step for everything that is sent, in the basis where it takes least, sought for a byte budget.

At a given step, every tensor is coded in the way with the smallest D + lambda R (error and bits, lambda being what a
bit is worth at that step): coefficients as they are, low-rank factors, or factors and the coefficients of the rest.
The step for a budget is first sought on a sample of the entries; then one or two encodings of everything settle it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from . import payload as pay
from .allocate import find_step
from .basis import PROBE_RANK, Factors, LowRank, fold, max_rank
from .contexts import SHIFTS
from .kernels import Array
from .layout import Matrix, Tensor, Tile
from .parallel import Spread
from .plan import Plan
from .quantize import LAMBDA, MAX_MAGNITUDE, Sparse, deadzone, stochastic, stream_key
from .tile import LARGEST, Encoded, encode_tile

SAMPLE_CELLS = 1 << 17  # the step is first sought on about this many entries
SMALL = 1 << 21  # up to so many entries the budget is filled to 99%, beyond to 96%: trials take longer there
MAX_TRIALS = 8
PROBE_CELLS = 1 << 18  # larger matrices are looked at with few columns first
SAFE = (1e-15, 1e15)  # peaks between which squares and products of matrices stay within float32


class Sample(NamedTuple):
    """Every so-many-th row and column of a tile."""

    matrix: Matrix
    rows: int
    columns: int

    def whole_size(self, encoded: Encoded | None) -> float:
        """About the bytes that the whole tile will take: coefficients grow with both sides, classes with one."""
        if encoded is None:
            return 0.0
        classes = encoded.class_bits / 8
        coefficients = len(encoded.stream) - classes
        return coefficients * self.rows * self.columns + classes * max(self.rows, self.columns)

    def whole_error(self, sparse: Sparse, step: float) -> float:
        """About the squared error of the whole tile."""
        every = np.square(self.matrix.flat, dtype=np.float64).sum()
        kept = np.square((np.abs(sparse.levels) + sparse.excess) * step, dtype=np.float64).sum()
        error = max(every - kept, 0.0) + step**2 * np.square(sparse.excess, dtype=np.float64).sum()
        return float(error) * self.rows * self.columns


def take_sample(matrix: Matrix, share: float) -> Sample:
    """About one in `share` of the entries, from rows and columns alike as both have scales; small tiles whole."""
    every = math.ceil(math.sqrt(max(share, 1.0)))
    rows, columns = min(every, max(1, matrix.height // 64)), min(every, max(1, matrix.width // 64))
    return Sample(matrix.sample(rows, columns), rows, columns)


class Choice(NamedTuple):
    """How a tensor is coded at a step: about what it takes, and its factors if it has any."""

    kind: int
    size: float
    cost: float  # D + lambda R
    factors: Factors | None = None
    right: Encoded | None = None
    left: Encoded | None = None


class Source:
    """A tensor to be coded: samples of its tiles, and its low-rank basis if it may have one."""

    def __init__(self, tensor: Tensor, number: int, share: float) -> None:
        self.tensor = tensor
        self.number = number
        self.samples = [take_sample(tensor.matrix(tile), share) for tile in tensor.tiles]
        self.low: LowRank | None = None
        self.low_sample: Sample | None = None

    def seek_basis(self, step: float, share: float, plain: Choice, seed: int) -> None:
        """Find the low-rank basis, unless a look with few columns shows that it cannot beat plain coefficients."""
        view = fold(self.tensor.spec.shape)
        if view is None:
            return
        h = np.ascontiguousarray(view.matrix(self.tensor.array), np.float32)
        if not h.any():
            return
        most = max_rank(*h.shape)
        key = stream_key(seed, ~self.number)
        if most > PROBE_RANK and h.size > PROBE_CELLS:
            probe = LowRank(h, PROBE_RANK, key, iterations=1)
            gains = np.maximum(probe.gains(step), 0.0)
            if probe.energy - gains.sum() - (most - gains.size) * gains[-1] > plain.cost:
                return
        self.low = LowRank(h, most, key, iterations=1)
        self.low_sample = take_sample(Matrix(h.reshape(-1), 0, h.shape[1], *h.shape), share)

    def plain(self, step: float, rounding: str) -> Choice:
        size = error = 0.0
        for sample in self.samples:
            sparse = quantized(sample.matrix, step, rounding, np.uint64(0))
            size += sample.whole_size(coded(sparse, sample.matrix.width))
            error += sample.whole_error(sparse, step)
        return Choice(pay.PLAIN, size, error + LAMBDA * step**2 * 8 * size)

    def choose(self, step: float, rounding: str) -> Choice:
        plain = self.plain(step, rounding)
        factors = self.low.factors(step) if self.low is not None else None
        if self.low is None or self.low_sample is None or factors is None:
            return plain
        right = coded(factors.right_sparse, factors.right.shape[1])
        left = coded(factors.left_sparse, factors.left.shape[1])
        if right is None or left is None:
            return plain
        bit = LAMBDA * step**2
        size = len(right.stream) + len(left.stream) + 16.0
        low = Choice(pay.FACTORS, size, factors.error + bit * 8 * size, factors, right, left)
        rest_size, rest_error = self._rest(factors, step)
        cost = rest_error + bit * 8 * (size + rest_size)
        if cost < low.cost:
            low = low._replace(kind=pay.FACTORS_AND_PLAIN, size=size + rest_size, cost=cost)
        return min(plain, low, key=lambda choice: choice.cost)

    def _rest(self, factors: Factors, step: float) -> tuple[float, float]:
        """About the bytes and the error of plain coefficients for what the factors leave."""
        assert self.low_sample is not None
        matrix, rows, columns = self.low_sample
        made = factors.left[::rows] @ factors.right[::columns].T
        rest = self.low_sample._replace(matrix=matrix._replace(flat=matrix.flat - made.reshape(-1)))
        sparse = deadzone(rest.matrix, step)
        return rest.whole_size(coded(sparse, matrix.width)) + 8, rest.whole_error(sparse, step)

    def rest(self, factors: Factors) -> Tensor:
        """What the factors leave of the tensor."""
        view = fold(self.tensor.spec.shape)
        assert view is not None
        made = view.tensor(factors.left @ factors.right.T, self.tensor.spec.shape)
        return Tensor(self.tensor.spec.name, np.asarray(self.tensor.array, np.float32) - made)


def quantized(matrix: Matrix, step: float, rounding: str, key: np.uint64) -> Sparse:
    return deadzone(matrix, step) if rounding == "deadzone" else stochastic(matrix, step, key)


def coded(sparse: Sparse, width: int) -> Encoded | None:
    return encode_tile(sparse, width, by_size=True) if sparse.levels.size else None


class Waterfill:
    """The tensors of one update, ready to be coded at any step."""

    def __init__(
        self, tensors: Sequence[Tensor], peak: float, rounding: str, basis: str, seed: int, spread: Spread
    ) -> None:
        self.peak = peak
        self.rounding = rounding
        self.adaptive = basis == "adaptive" and SAFE[0] < peak < SAFE[1]
        self.seed = seed
        self.spread = spread
        self.cells = sum(tensor.spec.size for tensor in tensors)
        self.share = self.cells / SAMPLE_CELLS
        self.sources: list[Source] = spread(lambda item: Source(item[1], item[0], self.share), list(enumerate(tensors)))
        self._choices: dict[float, list[Choice]] = {}
        # the finest step whose levels still fit, and one at which nothing is left (or, rounded at random, little)
        self.finest = float(np.nextafter(np.float32(peak / (MAX_MAGNITUDE - 2)), np.float32(np.inf)))
        self.coarsest = min(2.0 * peak * (1 if rounding == "deadzone" else self.cells), LARGEST)

    def at_step(self, plan: Plan, step: float) -> bytes:
        if step < self.finest:
            raise ValueError(f"step={step:.6g} is too fine: entries of {self.peak:.6g} need at least {self.finest:.6g}")
        self._seek_bases(step)
        return self._encode(plan, step)

    def in_budget(self, plan: Plan, budget: int) -> bytes:
        """The payload with the smallest step that fits."""
        tolerance = 0.01 if self.cells <= SMALL else 0.04
        guess = self._typical_step(budget - plan.minimum)
        slope = -2.5

        def about(step: float) -> tuple[float, None]:
            return plan.minimum + sum(choice.size for choice in self._choose(step)), None

        def exactly(step: float) -> tuple[int, bytes]:
            result = self._encode(plan, step)
            return len(result), result

        if self.adaptive:
            guess = find_step(about, budget, self.finest, self.coarsest, guess, slope, 0.2, 3)[0]
            self._seek_bases(guess)
        if self.adaptive or self.cells > SAMPLE_CELLS:
            limits = (self.finest, self.coarsest)
            guess, slope, _ = find_step(about, budget, *limits, guess, slope, tolerance / 2, MAX_TRIALS)
        best = find_step(exactly, budget, self.finest, self.coarsest, guess, slope, tolerance, MAX_TRIALS)[2]
        return best if best is not None else plan.build({})

    def _seek_bases(self, step: float) -> None:
        if self.adaptive:
            for source, plain in zip(
                self.sources, self._choose(step)
            ):  # in turn: matrix products have their own threads
                source.seek_basis(step, self.share, plain, self.seed)
            self._choices.clear()

    def _choose(self, step: float) -> list[Choice]:
        if step not in self._choices:
            self._choices = {step: self.spread(lambda source: source.choose(step, self.rounding), self.sources)}
        return self._choices[step]

    def _encode(self, plan: Plan, step: float) -> bytes:
        """Everything at this step, for good."""
        if self.adaptive:
            choices = self._choose(step)
        else:
            choices = [Choice(pay.PLAIN, 0.0, 0.0)] * len(self.sources)
        jobs: list[tuple[int, Tensor, Tile, np.uint64]] = []
        for source, choice in zip(self.sources, choices):
            if choice.kind != pay.FACTORS:
                tensor = source.tensor if choice.factors is None else source.rest(choice.factors)
                keys = (stream_key(self.seed, source.number << 32 | k) for k in range(len(tensor.tiles)))
                jobs += [(source.number, tensor, tile, key) for tile, key in zip(tensor.tiles, keys)]

        def encode_job(job: tuple[int, Tensor, Tile, np.uint64]) -> Encoded | None:
            matrix = job[1].matrix(job[2])
            return coded(quantized(matrix, step, self.rounding, job[3]), matrix.width)

        tiles: list[list[Encoded | None]] = [[] for _ in self.sources]
        for job, encoded in zip(jobs, self.spread(encode_job, jobs)):
            tiles[job[0]].append(encoded)
        sections = {}
        for source, choice, group in zip(self.sources, choices, tiles):
            if choice.factors is not None:
                assert choice.right is not None and choice.left is not None
                rank = choice.factors.right.shape[1]
                body = pay.write_factors(rank, choice.right, choice.left)
                if choice.kind == pay.FACTORS_AND_PLAIN:
                    body += pay.write_tiles(group)
                sections[source.tensor.spec.name] = pay.Section(choice.kind, body)
            elif any(group):
                sections[source.tensor.spec.name] = pay.Section(pay.PLAIN, pay.write_tiles(group))
        return plan.build(sections, step=step, shifts=_shifts([tile for group in tiles for tile in group]))

    def _typical_step(self, budget: int) -> float:
        """A first guess: the step that leaves about a non-zero entry for each byte of the budget."""
        sizes, weights = [], []
        for sample in (sample for source in self.sources for sample in source.samples):
            flat = sample.matrix.flat[:: 1 + sample.matrix.flat.size // 1024]
            sizes.append(np.abs(flat))
            weights.append(np.full(flat.size, sample.matrix.flat.size * sample.rows * sample.columns / flat.size))
        every = np.concatenate(sizes)
        order = np.argsort(-every)
        place = int(np.searchsorted(np.cumsum(np.concatenate(weights)[order]), max(budget, 1)))
        return 1.2 * float(every[order[min(place, every.size - 1)]]) or float(every.max()) or 1.0


def _shifts(tiles: Sequence[Encoded | None]) -> Array:
    """Reconstruction points: the mean of |h| / step - |level|, by group of contexts, in 1/256 of a step."""
    sums, counts = np.zeros(SHIFTS), np.zeros(SHIFTS, np.int64)
    for tile in tiles:
        if tile is not None:
            sums += tile.excess_sums
            counts += tile.excess_counts
    means = np.rint(sums / np.maximum(counts, 1) / pay.SHIFT_UNIT)
    return np.clip(means, -128, 127).astype(np.int8)
