"""Water-filling: one step for everything that is sent, in the basis where it takes least, sought for a byte budget.

At a given step, every tensor is coded in the way with the smallest D + lambda R (`tensor_coder.py`). The step for a
budget is first sought on a sample of the entries; then one or two encodings of everything settle it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedfq.types import Array

from ..format.container import SHIFT_UNIT, Encoding
from ..format.probability import SHIFTS
from ..format.random_numbers import stream_key
from ..kernels import FLOAT32_MAX
from ..tensors import SMALL
from .low_rank import Factors
from .quantize import LAMBDA, MAX_MAGNITUDE, quantize
from .request import Request
from .search import BudgetSearch
from .tensor_coder import PLAIN_SLOPE, CodedTensor, Coding, TensorCoder
from .tiles import EncodedTile, encode_tile

SAMPLE_CELLS = 1 << 17  # the step is first sought on about this many entries
SMALL_CELLS = 1 << 21  # updates of up to so many entries fill their budget more closely: trials take less time
SMALL_TOLERANCE, LARGE_TOLERANCE = 0.01, 0.04  # shares of the budget that may stay unused
ROUGH_TOLERANCE, ROUGH_TRIALS = 0.25, 4  # of the step at which bases are sought
MAX_TRIALS = 8
FACTORS_SLOPE = -0.65  # of log(size) over log(step), as it was met for factors
CODINGS_TOLERANCE = 0.04  # codings are decided where sizes are within this share of the budget
CODINGS_TRIALS = 3
COARSE_STEP = 0.25  # of the largest entry: a step above it leaves next to nothing of plain coefficients
COARSE_MUST_FILL = 0.5  # of what a budget has above the smallest payload: a coarse step that fills less is not the best
SAFE_PEAKS = (1e-15, 1e15)  # between which squares and products of matrices stay within float32
UNSAFE_SHARE = 0.5  # of a budget, where a sketch takes the rest and squares cannot tell how much of it is best


class TileJob(NamedTuple):
    """Tiles of one tensor that are coded in one go, after its factors were subtracted."""

    coder: TensorCoder
    factors: Factors | None
    tiles: range


class Decision(NamedTuple):
    """About the step that fills a budget, the slope of the size there, and every tensor's coding."""

    step: float
    slope: float
    codings: list[Coding]


class Waterfill:
    """The tensors of one update, ready to be coded at any step."""

    def __init__(self, request: Request) -> None:
        self.container = request.container
        self.peak = request.peak
        self.rounding = request.rounding
        is_safe = SAFE_PEAKS[0] < request.peak < SAFE_PEAKS[1]
        self.adaptive = request.adaptive and is_safe
        self.sketch_bytes = request.sketch_bytes
        self.divides = request.sketch_bytes > 0 and is_safe
        self.share_of_budget = UNSAFE_SHARE if request.sketch_bytes and not is_safe else 1.0
        self.seed = request.seed
        self.spread = request.spread
        self.cells = request.cells
        self.share = self.cells / SAMPLE_CELLS
        self.coders: list[TensorCoder] = self.spread(
            lambda item: TensorCoder(item[1], item[0], self.share, self.rounding, request.directions_of(item[1])),
            list(enumerate(request.tensors)),
        )
        # the finest step whose levels still fit, and one at which nothing is left (or, rounded at random, little)
        self.finest = float(np.nextafter(np.float32(self.peak / (MAX_MAGNITUDE - 2)), np.float32(np.inf)))
        self.coarsest = min(2.0 * self.peak * (1 if self.rounding == "deadzone" else self.cells), FLOAT32_MAX)

    def encode_at_step(self, step: float) -> Encoding:
        """Everything at this step, whatever it takes."""
        if step < self.finest:
            raise ValueError(f"step={step:.6g} is too fine: entries of {self.peak:.6g} need at least {self.finest:.6g}")
        codings = [Coding()] * len(self.coders)
        if self.adaptive:
            self._seek_bases(step, math.inf)
            codings = [coded.coding for coded in self._choose_codings(step)]
        return self._encode(step, codings)

    def encode_in_budget(self, budget: int) -> Encoding:
        """The encoding with the smallest step that fits so many bytes."""
        tolerance = SMALL_TOLERANCE if self.cells <= SMALL_CELLS else LARGE_TOLERANCE
        minimum = self.container.minimum
        budget = minimum + int(self.share_of_budget * (budget - minimum))
        finest, slope = self.finest, PLAIN_SLOPE
        step = self._guess_step(budget - minimum)
        codings = [Coding()] * len(self.coders)

        def estimate_plain(step: float) -> tuple[float, None]:
            coded = self.spread(lambda coder: coder.code_plain(step), self.coders)
            return minimum + self._wanted([(each.size, each.cost) for each in coded], step), None

        def encode(step: float) -> tuple[int, Encoding]:
            encoding = self._encode(step, codings)
            return self.container.size(encoding), encoding

        if self.adaptive:
            rough = BudgetSearch(finest, self.coarsest, slope, ROUGH_TOLERANCE, ROUGH_TRIALS)
            step = rough.solve(estimate_plain, budget, start=step).x
            self._seek_bases(step, budget)
        if any(coder.low is not None for coder in self.coders):
            step, slope, codings = self._decide_codings(step, max(budget - minimum, 1))
        elif self.cells > SAMPLE_CELLS or self.divides:
            sampled = BudgetSearch(finest, self.coarsest, slope, tolerance / 2, MAX_TRIALS)
            step, slope, _ = sampled.solve(estimate_plain, budget, start=step)
        if self.divides:  # the sketch takes what is left
            budget = max(budget - self.sketch_bytes, minimum)
            size, encoding = encode(step)
            if size <= budget:
                return encoding
        search = BudgetSearch(finest, self.coarsest, slope, tolerance, MAX_TRIALS)
        step, _, best = search.solve(encode, budget, start=step)
        spare = budget - minimum
        if best is not None and (step < COARSE_STEP * self.peak or self._spent(best) >= COARSE_MUST_FILL * spare):
            return best
        return max(best or Encoding(), self._encode_in_little(spare, codings), key=self._spent)

    def _spent(self, encoding: Encoding) -> int:
        """Bytes above the smallest payload."""
        return self.container.size(encoding) - self.container.minimum

    def _encode_in_little(self, spare: int, codings: Sequence[Coding]) -> Encoding:
        """For budgets near the smallest payload: what fits into `spare` bytes above it.

        There, sizes follow no line in logarithms but what they are above that one; and if even the coarsest factors
        are too large, fewer of them are sent, or plain coefficients.
        """
        longest = Encoding()
        while True:
            factored = [coder.low for coder, coding in zip(self.coders, codings) if coder.low and coding.rank]

            def encode(step: float, codings: Sequence[Coding] = codings) -> tuple[int, Encoding]:
                encoding = self._encode(step, codings)
                return self._spent(encoding), encoding

            high = max(self.coarsest, *(2.0 * float(low.sigma[0]) for low in factored), 0.0)
            search = BudgetSearch(self.finest, high, PLAIN_SLOPE, 0.01, 2 * MAX_TRIALS)
            best = search.solve(encode, spare, start=high / 4).outcome
            longest = max(longest, best or Encoding(), key=self._spent)
            if self._spent(longest) >= COARSE_MUST_FILL * spare or not factored:
                return longest
            codings = [each._replace(rank=each.rank // 2) if each.rank > 1 else Coding() for each in codings]

    def _seek_bases(self, step: float, budget: float) -> None:
        self.spread(lambda coder: coder.seek_basis(step, self.share, budget, self.seed), self.coders)

    def _choose_codings(self, step: float) -> list[CodedTensor]:
        return self.spread(lambda coder: coder.choose(step), self.coders)

    def _decide_codings(self, step: float, budget: int) -> Decision:
        """Every tensor's coding near the step for a budget, given a step for plain coefficients.

        The step comes from a model of the sizes, then from up to three codings of samples. Codings change by leaps, so
        the budget need not be met closely; in these codings it will be.
        """
        log_step, slope = math.log(self._model_step(step, budget)), -1.0
        last: tuple[float, float] | None = None
        best: tuple[float, float, list[CodedTensor]] | None = None  # how far off, step, tensors
        for _ in range(CODINGS_TRIALS):
            at = min(max(float(np.float32(math.exp(log_step))), self.finest), self.coarsest)
            coded = self._choose_codings(at)
            wanted = self._wanted([(each.size, each.cost) for each in coded], at)
            here = (math.log(at), math.log(max(wanted, 1.0) / budget))
            if best is None or abs(here[1]) < best[0]:
                best = (abs(here[1]), at, coded)
            if abs(here[1]) < CODINGS_TOLERANCE:
                break
            if last is not None and last[0] != here[0]:
                slope = min((here[1] - last[1]) / (here[0] - last[0]), -0.3)
            elif last is None:
                slope = _mix_slopes(coded) - 0.4  # as ranks grow as well
            last = here
            log_step = here[0] + min(max(-here[1] / slope, -1.5), 1.5)
        assert best is not None
        return Decision(best[1], _mix_slopes(best[2]), [each.coding for each in best[2]])

    def _wanted(self, coded: Sequence[tuple[float, float]], step: float) -> float:
        """The bytes of tensors at this step and, with a sketch, those that are best given to it, from sizes and costs.

        The sketch's variance is about D / S times a constant, for an error D and S bytes. One byte more for the
        sections takes 8 LAMBDA step^2 of D: it is worth as much as one more for the sketch where D = 8 LAMBDA step^2 S.
        """
        sizes = sum(size for size, _ in coded)
        if not self.divides:
            return sizes
        return max(sum(cost for _, cost in coded) / (8 * LAMBDA * step**2), sizes + self.sketch_bytes)

    def _model_step(self, step: float, budget: int) -> float:
        """The step for a budget by a model of the sizes, without coding anything."""
        models = [coder.model(step) for coder in self.coders]
        fine, coarse = step / 32, step * 8
        while coarse > 1.1 * fine:
            middle = math.sqrt(fine * coarse)
            if self._wanted([model(middle) for model in models], middle) > budget:
                fine = middle
            else:
                coarse = middle
        return coarse

    def _encode(self, step: float, codings: Sequence[Coding]) -> Encoding:
        """Everything at this step, each tensor in its coding, for good."""
        factored = self.spread(lambda item: item[0].code_factors(step, item[1]), list(zip(self.coders, codings)))
        plain = CodedTensor(Coding(), 0.0, 0.0)
        coded = [plain if each is None else each._replace(coding=coding) for each, coding in zip(factored, codings)]
        jobs = self._list_jobs(coded)
        tiles: list[list[EncodedTile | None]] = [[] for _ in self.coders]
        for job, encoded in zip(jobs, self.spread(lambda job: self._encode_tiles(job, step), jobs)):
            tiles[job.coder.number] += encoded
        sections, small = {}, None
        for coder, each, group in zip(self.coders, coded, tiles):
            if coder.tensor.kind == SMALL:
                small = each.section(group)
            else:
                sections[coder.tensor.spec.name] = each.section(group)
        return Encoding(sections, step, _find_shifts([tile for group in tiles for tile in group]), small)

    def _list_jobs(self, coded: Sequence[CodedTensor]) -> list[TileJob]:
        """A job is one tile, but all tiles of a rest: that takes a tensor's memory, and is gone when they are coded."""
        jobs = []
        for coder, each in zip(self.coders, coded):
            every = range(len(coder.tensor.tiles))
            if each.factors is None:
                jobs += [TileJob(coder, None, every[k : k + 1]) for k in every]
            elif each.coding.plain:
                jobs.append(TileJob(coder, each.factors, every))
        return jobs

    def _encode_tiles(self, job: TileJob, step: float) -> list[EncodedTile | None]:
        tensor = job.coder.tensor if job.factors is None else job.coder.subtract(job.factors)
        found = []
        for k in job.tiles:
            matrix, key = tensor.matrix(tensor.tiles[k]), stream_key(self.seed, job.coder.number << 32 | k)
            found.append(encode_tile(quantize(matrix, step, self.rounding, key), matrix.width))
        return found

    def _guess_step(self, budget: int) -> float:
        """The step that leaves about one non-zero entry for each byte of the budget."""
        sizes, weights = [], []
        for sample in (sample for coder in self.coders for sample in coder.samples):
            flat = sample.matrix.flat[:: 1 + sample.matrix.flat.size // 1024]
            sizes.append(np.abs(flat))
            weights.append(np.full(flat.size, sample.matrix.flat.size * sample.rows * sample.columns / flat.size))
        every = np.concatenate(sizes)
        order = np.argsort(-every)
        place = int(np.searchsorted(np.cumsum(np.concatenate(weights)[order]), max(budget, 1)))
        return 1.2 * float(every[order[min(place, every.size - 1)]]) or float(every.max()) or 1.0


def _mix_slopes(coded: Sequence[CodedTensor]) -> float:
    """How the size falls with the step, in logarithms: that of factors by one bit per entry at twice the step."""
    factors = sum(each.size for each in coded if each.factors is not None and not each.coding.plain)
    every = sum(each.size for each in coded)
    return PLAIN_SLOPE + (FACTORS_SLOPE - PLAIN_SLOPE) * factors / max(every, 1.0)


def _find_shifts(tiles: Sequence[EncodedTile | None]) -> Array:
    """Reconstruction points: the mean of |h| / step - |level|, by group of contexts, in 1/256 of a step."""
    sums, counts = np.zeros(SHIFTS), np.zeros(SHIFTS, np.int64)
    for tile in tiles:
        if tile is not None:
            sums += tile.excess_sums
            counts += tile.excess_counts
    means = np.rint(sums / np.maximum(counts, 1) / SHIFT_UNIT)
    return np.clip(means, -128, 127).astype(np.int8)
