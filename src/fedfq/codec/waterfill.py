"""Water-filling: one step for everything that is sent, in the basis where it takes least, sought for a byte budget.

At a given step, every tensor is coded in the way with the smallest D + lambda R (error and bits, lambda being what a
bit is worth at that step): coefficients as they are, low-rank factors, or factors and the coefficients of the rest.
The step for a budget is first sought on a sample of the entries; then one or two encodings of everything settle it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from . import payload as pay
from .allocate import find_step
from .basis import PROBE_RANK, Columns, Factors, Known, LowRank, Product, affordable_rank, energy, fold
from .contexts import SHIFTS
from .kernels import LARGEST, Array
from .layout import Matrix, Tensor
from .parallel import Spread
from .plan import Plan
from .quantize import LAMBDA, MAX_MAGNITUDE, Sparse, deadzone, stochastic, stream_key
from .tile import Encoded, encode_tile

SAMPLE_CELLS = 1 << 17  # the step is first sought on about this many entries
SMALL = 1 << 21  # up to so many entries the budget is filled to 99%, beyond to 96%: trials take longer there
MAX_TRIALS = 8
PROBE_CELLS = 1 << 20  # larger matrices are looked at with few columns first
PLAIN_SLOPE, FACTORS_SLOPE = -2.5, -0.65  # of the size over the step, both in logarithms, as they were met
HOPELESS = 0.5  # plain coefficients at twice the cost of factors will not catch up
WORTH = 0.99  # coefficients beside factors must save a percent: they take a pass over the tensor
CLOSE = 0.04  # ways are decided where sizes are within so much of the budget
COARSE = 0.25  # of the largest entry: a step above it leaves next to nothing of plain coefficients
FILLED = 0.5  # of what a budget has above the smallest payload: a coarse step that fills less is not the best one
SAFE = (1e-15, 1e15)  # peaks between which squares and products of matrices stay within float32


class Sample(NamedTuple):
    """Every so-many-th row and column of a tile."""

    matrix: Matrix
    rows: int
    columns: int
    energy: float

    def whole_size(self, encoded: Encoded | None) -> float:
        """About the bytes that the whole tile will take: coefficients grow with both sides, classes with one."""
        if encoded is None:
            return 0.0
        classes = encoded.class_bits / 8
        coefficients = len(encoded.stream) - classes
        return coefficients * self.rows * self.columns + classes * max(self.rows, self.columns)

    def whole_error(self, sparse: Sparse, step: float) -> float:
        """About the squared error of the whole tile."""
        return max(self.energy * self.rows * self.columns - self.whole_saving(sparse, step), 0.0)

    def whole_saving(self, sparse: Sparse, step: float) -> float:
        """About by how much the levels lower the whole tile's squared error."""
        sizes = np.abs(sparse.levels) + sparse.excess
        saving = step**2 * (np.vdot(sizes, sizes) - np.vdot(sparse.excess, sparse.excess))
        return float(saving) * self.rows * self.columns


def take_sample(matrix: Matrix, share: float) -> Sample:
    """About one in `share` of the entries, from rows and columns alike as both have scales; small tiles whole."""
    every = math.ceil(math.sqrt(max(share, 1.0)))
    rows, columns = min(every, max(1, matrix.height // 64)), min(every, max(1, matrix.width // 64))
    return sampled(matrix.sample(rows, columns), rows, columns)


def sampled(matrix: Matrix, rows: int, columns: int) -> Sample:
    return Sample(matrix, rows, columns, energy(matrix.flat.reshape(matrix.height, matrix.width)))


class Way(NamedTuple):
    """How a tensor is coded: with factors of some rank, each in so many known directions; with plain coefficients."""

    rank: int = 0
    left: int = 0
    right: int = 0
    plain: bool = True

    @property
    def kind(self) -> int:
        """The kind of its section."""
        if self.rank == 0:
            return pay.PLAIN
        known = pay.RIGHT_KNOWN * (self.right > 0) + pay.LEFT_KNOWN * (self.left > 0)
        return pay.FACTORS + pay.AND_PLAIN * self.plain + known


class Choice(NamedTuple):
    """A tensor coded in one way at a step: about what it takes, and its factors if it has any."""

    way: Way
    size: float
    cost: float  # D + lambda R
    factors: Factors | None = None
    right: pay.Side | None = None
    left: pay.Side | None = None


class Source:
    """A tensor to be coded: samples of its tiles, and its low-rank basis if it may have one."""

    def __init__(self, tensor: Tensor, number: int, share: float, rounding: str, known: Known | None) -> None:
        self.tensor = tensor
        self.number = number
        self.rounding = rounding
        self.known = known
        self.samples = [take_sample(tensor.matrix(tile), share) for tile in tensor.tiles]
        self.low: LowRank | None = None
        self.low_sample: Sample | None = None
        self._last_plain: tuple[float, Choice] | None = None
        self._last_factored: tuple[float, Way, Choice | None] | None = None
        self._plain_may_win = True

    def seek_basis(self, step: float, share: float, budget: float, seed: int) -> None:
        """Find the low-rank basis, unless a look with few columns shows that it cannot beat plain coefficients."""
        view = fold(self.tensor.spec.shape)
        if view is None:
            return
        h = view.matrix(self.tensor.array)
        if not energy(h) > 0.0:  # all zero, or as good as that beside what fills float32
            return
        most = affordable_rank(h.shape[0], h.shape[1], budget, self.known)
        key = stream_key(seed, ~self.number)
        if most > PROBE_RANK and h.size > PROBE_CELLS:
            probe = LowRank(h, PROBE_RANK, key, self.known)
            gains = np.maximum(probe.at(step).gains, 0.0)
            if probe.energy - gains.sum() - (most - gains.size) * gains[-1] > self.plain(step).cost:
                return
        self.low = LowRank(h, most, key, self.known)
        self.low_sample = take_sample(Matrix(h.reshape(-1), 0, h.shape[1], *h.shape), share)

    def plain(self, step: float) -> Choice:
        if self._last_plain is None or self._last_plain[0] != step:
            self._last_plain = (step, self._plain(step))
        return self._last_plain[1]

    def _plain(self, step: float) -> Choice:
        size = error = 0.0
        for sample in self.samples:
            sparse = quantized(sample.matrix, step, self.rounding, np.uint64(0))
            size += sample.whole_size(coded(sparse, sample.matrix.width))
            error += sample.whole_error(sparse, step)
        return Choice(Way(), size, error + LAMBDA * step**2 * 8 * size)

    def factored(self, step: float, way: Way) -> Choice | None:
        """Factors in this way, ready to be sent; None where nothing is left of them at this step."""
        way = way._replace(plain=False)
        if self._last_factored is None or self._last_factored[:2] != (step, way):
            self._last_factored = (step, way, self._factored(step, way))
        return self._last_factored[2]

    def _factored(self, step: float, way: Way) -> Choice | None:
        if self.low is None or way.rank == 0 or step < self.finest:
            return None
        factors = self.low.factors(step, way.rank, way.left, way.right)
        right, left = coded_side(factors.right_columns, way.rank), coded_side(factors.left_columns, way.rank)
        if right is None or left is None:
            return None
        size = right.size + left.size + 16.0
        cost = factors.error + LAMBDA * step**2 * 8 * size
        return Choice(way, size, cost, factors, right, left)

    def _best_factors(self, step: float) -> Choice | None:
        if self.low is None:
            return None
        outlook = self.low.at(step)
        return self.factored(step, Way(outlook.rank, outlook.left, outlook.right))

    @property
    def finest(self) -> float:
        """The finest step at which levels of factors, which may be as large as the first singular value, still fit."""
        return 0.0 if self.low is None else float(self.low.sigma[0]) / (0.95 * MAX_MAGNITUDE)

    def size_model(self, step: float) -> Callable[[float], float]:
        """About the bytes at any step, without coding: of factors by the rate of Gaussians, of plain coefficients from
        their size at this step. Plain coefficients that are far behind here are not looked at again."""
        plain, low = self.plain(step), self.low
        cost = math.inf if low is None else low.energy - float(np.maximum(low.at(step).gains, 0.0).sum())
        self._plain_may_win = cost > HOPELESS * plain.cost
        if low is not None and cost < plain.cost:
            return lambda at: low.at(at).size
        return lambda at: plain.size * (at / step) ** PLAIN_SLOPE

    def choose(self, step: float) -> Choice:
        """The best way at this step."""
        low = self._best_factors(step)
        if low is None or low.factors is None:
            return self.plain(step)
        rest_size, rest_saving = self._rest(low.factors, step)
        cost = low.cost - rest_saving + LAMBDA * step**2 * 8 * rest_size
        if cost < WORTH * low.cost:
            low = low._replace(way=low.way._replace(plain=True), size=low.size + rest_size, cost=cost)
        return low if not self._plain_may_win or low.cost < self.plain(step).cost else self.plain(step)

    def _rest(self, factors: Factors, step: float) -> tuple[float, float]:
        """About the bytes of plain coefficients for what the factors leave, and what they save of its error."""
        assert self.low_sample is not None
        matrix, rows, columns, _ = self.low_sample
        made = factors.left[::rows] @ factors.right[::columns].T
        rest = sampled(matrix._replace(flat=matrix.flat - made.reshape(-1)), rows, columns)
        sparse = deadzone(rest.matrix, step)
        return rest.whole_size(coded(sparse, matrix.width)) + 8, rest.whole_saving(sparse, step)

    def rest(self, factors: Factors) -> Tensor:
        """What the factors leave of the tensor."""
        return Tensor(self.tensor.spec.name, Product(factors.left, factors.right).rest(self.tensor.array))


def quantized(matrix: Matrix, step: float, rounding: str, key: np.uint64) -> Sparse:
    return deadzone(matrix, step) if rounding == "deadzone" else stochastic(matrix, step, key)


def coded(sparse: Sparse, width: int) -> Encoded | None:
    return encode_tile(sparse, width, by_size=True) if sparse.levels.size else None


def coded_side(columns: Columns, rank: int) -> pay.Side | None:
    inside = None if columns.inside is None else coded(columns.inside, rank)
    rest = coded(columns.rest, rank)
    return None if inside is None and rest is None else pay.Side(columns.directions, inside, rest)


class Waterfill:
    """The tensors of one update, ready to be coded at any step."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        peak: float,
        rounding: str,
        basis: str,
        seed: int,
        spread: Spread,
        known: Mapping[str, Known],
    ) -> None:
        self.peak = peak
        self.rounding = rounding
        self.adaptive = basis == "adaptive" and SAFE[0] < peak < SAFE[1]
        self.seed = seed
        self.spread = spread
        self.cells = sum(tensor.spec.size for tensor in tensors)
        self.share = self.cells / SAMPLE_CELLS
        self.sources: list[Source] = spread(
            lambda item: Source(item[1], item[0], self.share, rounding, known.get(item[1].spec.name)),
            list(enumerate(tensors)),
        )
        # the finest step whose levels still fit, and one at which nothing is left (or, rounded at random, little)
        self.finest = float(np.nextafter(np.float32(peak / (MAX_MAGNITUDE - 2)), np.float32(np.inf)))
        self.coarsest = min(2.0 * peak * (1 if rounding == "deadzone" else self.cells), LARGEST)

    def at_step(self, plan: Plan, step: float) -> bytes:
        if step < self.finest:
            raise ValueError(f"step={step:.6g} is too fine: entries of {self.peak:.6g} need at least {self.finest:.6g}")
        ways = [Way()] * len(self.sources)
        if self.adaptive:
            self._seek_bases(step, math.inf)
            ways = [choice.way for choice in self._choose(step)]
        return self._encode(plan, step, ways)

    def in_budget(self, plan: Plan, budget: int) -> bytes:
        """The payload with the smallest step that fits."""
        tolerance = 0.01 if self.cells <= SMALL else 0.04
        limits = (self.finest, self.coarsest)
        guess, slope = self._typical_step(budget - plan.minimum), PLAIN_SLOPE
        ways = [Way()] * len(self.sources)

        def plainly(step: float) -> tuple[float, None]:
            choices = self.spread(lambda source: source.plain(step), self.sources)
            return plan.minimum + sum(choice.size for choice in choices), None

        def exactly(step: float) -> tuple[int, bytes]:
            result = self._encode(plan, step, ways)
            return len(result), result

        if self.adaptive:
            guess = find_step(plainly, budget, *limits, guess, slope, 0.25, 4)[0]
            self._seek_bases(guess, budget)
        if any(source.low is not None for source in self.sources):
            guess, slope, ways = self._decide(guess, max(budget - plan.minimum, 1))
            factored = [1.01 * source.finest for source, way in zip(self.sources, ways) if way.rank]
            limits = (max(self.finest, *factored, 0.0), self.coarsest)
        elif self.cells > SAMPLE_CELLS:
            guess, slope, _ = find_step(plainly, budget, *limits, guess, slope, tolerance / 2, MAX_TRIALS)
        step, _, best = find_step(exactly, budget, *limits, guess, slope, tolerance, MAX_TRIALS)
        spare = budget - plan.minimum
        if best is not None and (step < COARSE * self.peak or len(best) - plan.minimum >= FILLED * spare):
            return best
        return max(best or b"", self._in_what_is_left(plan, spare, ways), key=len)

    def _in_what_is_left(self, plan: Plan, spare: int, ways: Sequence[Way]) -> bytes:
        """For budgets near the smallest payload. There, sizes follow no line in logarithms but what they are above that
        one; and if even the coarsest factors are too large, fewer of them are sent, or plain coefficients."""
        longest = plan.build({})
        while True:
            sigmas = [float(source.low.sigma[0]) for source, way in zip(self.sources, ways) if source.low and way.rank]

            def above(step: float, ways: Sequence[Way] = ways) -> tuple[int, bytes]:
                result = self._encode(plan, step, ways)
                return len(result) - plan.minimum, result

            high = max(self.coarsest, *(2.0 * sigma for sigma in sigmas), 0.0)
            best = find_step(above, spare, self.finest, high, high / 4, PLAIN_SLOPE, 0.01, 2 * MAX_TRIALS)[2]
            longest = max(longest, best or b"", key=len)
            if len(longest) - plan.minimum >= FILLED * spare or not sigmas:
                return longest
            ways = [way._replace(rank=way.rank // 2) if way.rank > 1 else Way() for way in ways]

    def _seek_bases(self, step: float, budget: float) -> None:
        self.spread(lambda source: source.seek_basis(step, self.share, budget, self.seed), self.sources)

    def _choose(self, step: float) -> list[Choice]:
        return self.spread(lambda source: source.choose(step), self.sources)

    def _decide(self, step: float, budget: int) -> tuple[float, float, list[Way]]:
        """About the step for a budget, the slope and every tensor's way there, given a step for plain coefficients.

        The step comes from a model of the sizes, then from up to three codings of samples. Ways change by leaps, so
        the budget need not be met closely; in these ways it will be.
        """
        models = [source.size_model(step) for source in self.sources]
        fine, coarse = step / 32, step * 8
        while coarse > 1.1 * fine:
            middle = math.sqrt(fine * coarse)
            if sum(model(middle) for model in models) > budget:
                fine = middle
            else:
                coarse = middle
        x, slope = math.log(coarse), -1.0
        last: tuple[float, float] | None = None
        best: tuple[float, float, list[Choice]] | None = None  # how far off, step, choices
        for _ in range(3):
            at = min(max(float(np.float32(math.exp(x))), self.finest), self.coarsest)
            choices = self._choose(at)
            here = (math.log(at), math.log(max(sum(choice.size for choice in choices), 1.0) / budget))
            if best is None or abs(here[1]) < best[0]:
                best = (abs(here[1]), at, choices)
            if abs(here[1]) < CLOSE:
                break
            if last is not None and last[0] != here[0]:
                slope = min((here[1] - last[1]) / (here[0] - last[0]), -0.3)
            elif last is None:
                slope = _slope(choices) - 0.4  # as ranks grow as well
            last = here
            x = here[0] + min(max(-here[1] / slope, -1.5), 1.5)
        assert best is not None
        return best[1], _slope(best[2]), [choice.way for choice in best[2]]

    def _encode(self, plan: Plan, step: float, ways: Sequence[Way]) -> bytes:
        """Everything at this step, each tensor in its way, for good."""
        coded_ways = self.spread(lambda item: item[0].factored(step, item[1]), list(zip(self.sources, ways)))
        choices = [
            Choice(Way(), 0.0, 0.0) if low is None else low._replace(way=way) for low, way in zip(coded_ways, ways)
        ]
        # A job is one tile, but all tiles of a rest: it takes a tensor's memory, and is gone when they are coded.
        jobs: list[tuple[Source, Factors | None, range]] = []
        for source, choice in zip(self.sources, choices):
            every = range(len(source.tensor.tiles))
            if choice.factors is None:
                jobs += [(source, None, every[k : k + 1]) for k in every]
            elif choice.way.plain:
                jobs.append((source, choice.factors, every))

        def encode_job(job: tuple[Source, Factors | None, range]) -> list[Encoded | None]:
            source, factors, numbers = job
            tensor = source.tensor if factors is None else source.rest(factors)
            found = []
            for k in numbers:
                matrix, key = tensor.matrix(tensor.tiles[k]), stream_key(self.seed, source.number << 32 | k)
                found.append(coded(quantized(matrix, step, self.rounding, key), matrix.width))
            return found

        tiles: list[list[Encoded | None]] = [[] for _ in self.sources]
        for job, encoded in zip(jobs, self.spread(encode_job, jobs)):
            tiles[job[0].number] += encoded
        sections = {}
        for source, choice, group in zip(self.sources, choices, tiles):
            if choice.factors is not None:
                assert choice.right is not None and choice.left is not None
                rank = choice.factors.right.shape[1]
                body = pay.write_factors(rank, choice.right, choice.left)
                if choice.way.plain:
                    body += pay.write_tiles(group)
                sections[source.tensor.spec.name] = pay.Section(choice.way.kind, body)
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


def _slope(choices: Sequence[Choice]) -> float:
    """How the size falls with the step, in logarithms: that of factors by a bit an entry, twice the step."""
    factors = sum(c.size for c in choices if c.factors is not None and not c.way.plain)
    every = sum(choice.size for choice in choices)
    return PLAIN_SLOPE + (FACTORS_SLOPE - PLAIN_SLOPE) * factors / max(every, 1.0)


def _shifts(tiles: Sequence[Encoded | None]) -> Array:
    """Reconstruction points: the mean of |h| / step - |level|, by group of contexts, in 1/256 of a step."""
    sums, counts = np.zeros(SHIFTS), np.zeros(SHIFTS, np.int64)
    for tile in tiles:
        if tile is not None:
            sums += tile.excess_sums
            counts += tile.excess_counts
    means = np.rint(sums / np.maximum(counts, 1) / pay.SHIFT_UNIT)
    return np.clip(means, -128, 127).astype(np.int8)
