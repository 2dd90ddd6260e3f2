"""`Codec`: an update in, the best payload that fits the budget out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from . import payload as pay
from .allocate import cgsa, exact, find_step
from .contexts import SHIFTS
from .errors import BudgetError
from .kernels import Array
from .layout import KEPT, QUANTIZED, Matrix, Spec, Tensor, Tile, raw_bytes, read
from .parallel import Spread, workers
from .quantize import (
    MAX_MAGNITUDE,
    Sparse,
    class_scales,
    deadzone,
    deadzone_levels,
    nonzero,
    stochastic,
    stochastic_levels,
    stream_key,
)
from .tile import Encoded, encode_tile

SAMPLE_CELLS = 1 << 18  # the step is first sought on about this many entries
SMALL = 1 << 21  # up to so many entries the budget is filled to 99%, beyond to 96%: trials take longer there
MAX_TRIALS = 8

# A level of a section of widths is one number: 1-2 for a width of 2 bits, 3-10 for 4 bits, 11-138 for 8 bits.
WIDTH_OFFSETS = np.array([0, 0, 0, 0, 2, 0, 0, 0, 10], np.int32)

KEEP = ("*running_mean", "*running_var")


class Codec:
    """Turns model updates into payloads of a given size. Stateless: one codec serves any number of updates.

    Exactly one of these says how large a payload may be:

    ratio               raw size / payload size, at least; raw is 4 bytes a floating-point entry, native bytes else
    bits_per_parameter  of the payload, per floating-point entry, at most
    max_bytes           of the payload
    step                no budget: this quantisation step, whatever it takes (waterfill only)
    claimed_ratio       B = 32 d / claimed_ratio bits of widths as the paper counts, whatever the payload takes
                        (exact and cgsa only)

    allocator  "waterfill" (one step for all that is sent: Eq. 23 with real-valued widths), or the paper's problem with
               widths {0, 2, 4, 8}: "exact" (its optimum) or "cgsa" (Algorithm 1)
    basis      "identity": the coefficients as they are
    rounding   "deadzone" or "stochastic" (unbiased, at many times the error below 2 bits a parameter). The default is
               "deadzone" for waterfill and "stochastic", as in the paper, for exact and cgsa
    layout     "full" puts names and shapes into the payload, "digest" 8 bytes that stand for them: decoding then needs
               `like=`
    keep       name patterns (as of `fnmatch`) of tensors sent as float16
    threads    tiles are coded in so many threads; the bytes do not depend on it
    """

    def __init__(
        self,
        *,
        ratio: float | None = None,
        bits_per_parameter: float | None = None,
        max_bytes: int | None = None,
        step: float | None = None,
        claimed_ratio: float | None = None,
        allocator: Literal["waterfill", "exact", "cgsa"] = "waterfill",
        basis: Literal["identity"] = "identity",
        rounding: Literal["deadzone", "stochastic"] | None = None,
        layout: Literal["full", "digest"] = "full",
        keep: Sequence[str] = KEEP,
        threads: int = 1,
    ) -> None:
        sizes = {
            "ratio": ratio,
            "bits_per_parameter": bits_per_parameter,
            "max_bytes": max_bytes,
            "step": step,
            "claimed_ratio": claimed_ratio,
        }
        given = [name for name, value in sizes.items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(sizes)}; got {', '.join(given) or 'none'}")
        value = sizes[given[0]]
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise TypeError(f"{given[0]} must be a number, got {value!r}")
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{given[0]} must be positive and finite, got {value!r}")
        _one_of("allocator", allocator, ("waterfill", "exact", "cgsa"))
        _one_of("basis", basis, ("identity",))
        _one_of("layout", layout, ("full", "digest"))
        if rounding is None:
            rounding = "deadzone" if allocator == "waterfill" else "stochastic"
        _one_of("rounding", rounding, ("deadzone", "stochastic"))
        if step is not None:
            if allocator != "waterfill":
                raise ValueError(f'step= goes with allocator="waterfill", not with {allocator!r}')
            with np.errstate(over="ignore"):
                rounded = np.float32(step)
            if not np.float32(0) < rounded < np.float32(np.inf):
                raise ValueError(f"step must be positive and finite as float32, got {step!r}")
        if claimed_ratio is not None and allocator == "waterfill":
            raise ValueError('claimed_ratio= goes with allocator="exact" or "cgsa", not with "waterfill"')
        if isinstance(keep, str):
            raise TypeError("keep must be a sequence of name patterns, not one string")
        if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
            raise ValueError(f"threads must be a positive integer, got {threads!r}")
        self.ratio = ratio
        self.bits_per_parameter = bits_per_parameter
        self.max_bytes = max_bytes
        self.step = step
        self.claimed_ratio = claimed_ratio
        self.allocator = allocator
        self.rounding = rounding
        self.layout = layout
        self.keep = tuple(keep)
        self.threads = threads

    def encode(self, update: Any, seed: int = 0) -> bytes:
        """The payload of `update`, a mapping from names to numpy arrays or torch tensors.

        Same update and seed: same bytes. Only stochastic rounding and cgsa draw random numbers.
        Raises `ValueError` for entries that are not finite and `BudgetError` for a budget that no payload fits.
        """
        return self.encode_tensors(read(update, self.keep), seed)

    def encode_tensors(self, tensors: list[Tensor], seed: int) -> bytes:
        """`encode`, for tensors that were read already."""
        quantized = [tensor for tensor in tensors if tensor.kind == QUANTIZED]
        with workers(self.threads) as spread:
            peak = max(spread(Tensor.peak, quantized), default=0.0)
            plan = _Plan(tensors, as_digest=self.layout == "digest")
            budget = self._budget(plan.layout)
            if budget is not None and budget < plan.minimum:
                raise BudgetError(budget, plan.minimum)
            if peak == 0.0:
                return plan.build({})
            if self.allocator == "waterfill":
                return self._waterfill(plan, quantized, peak, budget, seed, spread)
            return self._widths(plan, quantized, budget, seed)

    def _budget(self, layout: Sequence[Spec]) -> int | None:
        if self.ratio is not None:
            return int(raw_bytes(layout) / self.ratio)
        if self.bits_per_parameter is not None:
            return int(self.bits_per_parameter * sum(spec.size for spec in layout if spec.is_float) / 8)
        return None if self.max_bytes is None else int(self.max_bytes)

    # Water-filling

    def _waterfill(
        self, plan: _Plan, tensors: list[Tensor], peak: float, budget: int | None, seed: int, spread: Spread
    ) -> bytes:
        finest = float(np.nextafter(np.float32(peak / (MAX_MAGNITUDE - 2)), np.float32(np.inf)))
        coarsest = 2.0 * peak  # nothing is left with a dead zone, but every other peak with stochastic rounding
        if self.rounding == "stochastic":
            coarsest *= sum(tensor.spec.size for tensor in tensors)
        coarsest = min(coarsest, float(np.finfo(np.float32).max))
        jobs = [
            _Job(tensor, tile, stream_key(seed, number << 32 | k))
            for number, tensor in enumerate(tensors)
            for k, tile in enumerate(tensor.tiles)
        ]

        def attempt(step: float) -> bytes:
            tiles = spread(lambda job: self._encode_tile(job.matrix(), job.key, step), jobs)
            return plan.build(_by_tensor(jobs, tiles), step=step, shifts=self._shifts(tiles))

        if budget is None:
            assert self.step is not None
            step = float(np.float32(self.step))
            if step < finest:
                raise ValueError(f"step={self.step} is too fine: entries of {peak:.6g} need at least {finest:.6g}")
            return attempt(step)
        cells = sum(tensor.spec.size for tensor in tensors)
        tolerance = 0.01 if cells <= SMALL else 0.04
        samples = spread(lambda job: job.sample(cells / SAMPLE_CELLS), jobs)
        guess = _typical_step(samples, budget - plan.minimum)
        slope = -1.5

        def estimate(step: float) -> tuple[float, None]:
            sizes = spread(lambda sample: sample.size(self._encode_tile(sample.matrix, np.uint64(0), step)), samples)
            return plan.minimum + sum(sizes), None

        def fits(step: float) -> tuple[int, bytes]:
            result = attempt(step)
            return len(result), result

        if cells > SAMPLE_CELLS:
            trials = (finest, coarsest, guess, slope, tolerance / 2, MAX_TRIALS)
            guess, slope, _ = find_step(estimate, budget, *trials)
        _, _, best = find_step(fits, budget, finest, coarsest, guess, slope, tolerance, MAX_TRIALS)
        return best if best is not None else plan.build({})

    def _encode_tile(self, matrix: Matrix, key: np.uint64, step: float) -> Encoded | None:
        if self.rounding == "deadzone":
            sparse = deadzone(matrix, step)
        else:
            sparse = stochastic(matrix, step, key)
        return encode_tile(sparse, matrix.width, by_size=True) if sparse.levels.size else None

    def _shifts(self, tiles: Sequence[Encoded | None]) -> Array:
        """Reconstruction points: the mean of |h| / step - |level|, by group of contexts, in 1/256 of a step."""
        sums, counts = np.zeros(SHIFTS), np.zeros(SHIFTS, np.int64)
        for tile in tiles:
            if tile is not None:
                sums += tile.excess_sums
                counts += tile.excess_counts
        means = np.rint(sums / np.maximum(counts, 1) / pay.SHIFT_UNIT)
        return np.clip(means, -128, 127).astype(np.int8)

    # The paper's widths

    def _widths(self, plan: _Plan, tensors: list[Tensor], budget: int | None, seed: int) -> bytes:
        h = np.concatenate([tensor.array.reshape(-1).astype(np.float32) for tensor in tensors])

        def attempt(bits: int) -> bytes:
            widths = exact(h, bits) if self.allocator == "exact" else cgsa(h, min(bits, 8 * h.size), seed=seed)
            bodies, end = {}, 0
            for number, tensor in enumerate(tensors):
                start, end = end, end + tensor.spec.size
                section = self._width_section(tensor, h[start:end], widths[start:end], seed, number)
                bodies[tensor.spec.name] = section
            return plan.build(bodies)

        if budget is None:
            assert self.claimed_ratio is not None
            return attempt(int(32 * h.size / self.claimed_ratio))

        def fits(coarseness: float) -> tuple[int, bytes]:
            result = attempt(int(8 * h.size / coarseness))
            return len(result), result

        guess = max(1.0, h.size / budget)
        best = find_step(fits, budget, 1.0, 8.0 * h.size, guess, -1.0, 0.01, 2 * MAX_TRIALS)[2]
        return best if best is not None else plan.build({})

    def _width_section(self, tensor: Tensor, h: Array, widths: Array, seed: int, number: int) -> pay.Section:
        scales = class_scales(h, widths)
        if self.rounding == "stochastic":
            levels = stochastic_levels(h, widths, scales, seed, number)
        else:
            levels = deadzone_levels(h, widths, scales)
        codes = np.sign(levels) * (np.abs(levels).astype(np.int32) + WIDTH_OFFSETS[widths])
        tiles = [_encode_codes(codes, tile) for tile in tensor.tiles]
        if not any(tiles):
            return pay.Section(pay.ZERO)
        return pay.Section(pay.WIDTHS, scales[[2, 4, 8]].astype("<f4").tobytes() + pay.write_tiles(tiles))


class _Job(NamedTuple):
    """A tile to be coded, and the key of its random numbers."""

    tensor: Tensor
    tile: Tile
    key: np.uint64

    def matrix(self) -> Matrix:
        return self.tensor.matrix(self.tile)

    def sample(self, share: float) -> _Sample:
        """About one in `share` of its entries, from rows and columns alike as both have scales; small tiles whole."""
        matrix = self.matrix()
        rows = min(math.ceil(math.sqrt(max(share, 1.0))), max(1, matrix.height // 64))
        columns = min(math.ceil(math.sqrt(max(share, 1.0))), max(1, matrix.width // 64))
        return _Sample(matrix.sample(rows, columns), rows, columns)


class _Sample(NamedTuple):
    """Every so-many-th row and column of a tile."""

    matrix: Matrix
    rows: int
    columns: int

    def size(self, encoded: Encoded | None) -> float:
        """About the bytes that the whole tile will take, from what the sample takes.

        Coefficients grow with both sides, classes with one. (As many again for the header.)
        """
        if encoded is None:
            return 0.0
        class_bytes = encoded.class_bits / 8
        return (len(encoded.stream) - class_bytes) * self.rows * self.columns + class_bytes * max(
            self.rows, self.columns
        )


def _typical_step(samples: Sequence[_Sample], budget: int) -> float:
    """A first guess: the step that leaves about a non-zero entry for each byte of the budget."""
    sizes, weights = [], []
    for sample in samples:
        flat = sample.matrix.flat[:: 1 + sample.matrix.flat.size // 1024]
        sizes.append(np.abs(flat))
        weights.append(np.full(flat.size, sample.matrix.flat.size * sample.rows * sample.columns / flat.size))
    every = np.concatenate(sizes)
    order = np.argsort(-every)
    place = int(np.searchsorted(np.cumsum(np.concatenate(weights)[order]), max(budget, 1)))
    return 1.2 * float(every[order[min(place, every.size - 1)]]) or float(every.max()) or 1.0


class _Plan:
    """What does not depend on the step: the layout, and the sections of tensors that are not quantised."""

    def __init__(self, tensors: Sequence[Tensor], *, as_digest: bool) -> None:
        self.layout = [tensor.spec for tensor in tensors]
        self.as_digest = as_digest
        self.fixed = {tensor.spec.name: _fixed_section(tensor) for tensor in tensors if tensor.kind != QUANTIZED}
        self.minimum = len(self.build({}))

    def build(
        self,
        quantized: dict[str, pay.Section],
        step: float | None = None,
        shifts: Array | None = None,
    ) -> bytes:
        sections = [
            self.fixed.get(spec.name) or quantized.get(spec.name) or pay.Section(pay.ZERO) for spec in self.layout
        ]
        return pay.write(self.layout, sections, as_digest=self.as_digest, step=step, shifts=shifts)


def _fixed_section(tensor: Tensor) -> pay.Section:
    if tensor.kind == KEPT:
        return _kept_section(tensor)
    return pay.write_integers(tensor.array)


def _kept_section(tensor: Tensor) -> pay.Section:
    """float16, or float32 where float16 does not reach."""
    tensor.peak()
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(tensor.array, np.float32).reshape(-1)
        halves = values.astype("<f2")
    if not values.any():
        return pay.Section(pay.ZERO)
    if np.isfinite(halves).all():
        return pay.Section(pay.HALF, halves.tobytes())
    return pay.Section(pay.SINGLE, values.astype("<f4").tobytes())


def _by_tensor(jobs: Sequence[_Job], tiles: Sequence[Encoded | None]) -> dict[str, pay.Section]:
    """The plain sections, by tensor name."""
    grouped: dict[str, list[Encoded | None]] = {}
    for job, tile in zip(jobs, tiles):
        grouped.setdefault(job.tensor.spec.name, []).append(tile)
    return {name: pay.Section(pay.PLAIN, pay.write_tiles(group)) for name, group in grouped.items() if any(group)}


def _encode_codes(codes: Array, tile: Tile) -> Encoded | None:
    rows = np.lib.stride_tricks.as_strided(
        codes[tile.start :],
        (tile.height, tile.width),
        (tile.stride * codes.itemsize, codes.itemsize),
        writeable=False,
    )
    sparse: Sparse = nonzero(rows)
    return encode_tile(sparse, tile.width, by_size=False) if sparse.levels.size else None


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
