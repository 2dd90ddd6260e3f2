"""Tensors with a step of their own: statistics of normalisation layers, and tensors whose range is out of the common.

Statistics are not weights: a variance that is off by half ruins what a layer computes, and their scale says nothing of
how much they matter. So each of these tensors is quantised relative to its own size, as finely as a share of the budget
allows. What all entries of a tensor have in common, such as the fall of all variances at the beginning of training, is
sent once, as an offset of its levels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fedfq.types import Array

from ..format.sections import MAX_OFFSET, OwnStepSection, PlainSection, Section, ZeroSection
from ..format.small import STEP_BIAS, matrix_spec, step_of
from ..format.tiles import cut_into_tiles
from ..kernels import Int, kernel
from ..tensors import Tensor
from .quantize import MAX_MAGNITUDE
from .tiles import encode_levels

# Statistics are given the first fineness at which all of them take no more than this share of the budget. At a fineness
# f, a bit is spent where it lowers the error as much as the last bit of steps of the root mean square over 2^f does.
# Below an error of some percent, a finer step is worth little. Where the last does not fit, what is worth most is sent.
# Half of the budget is not too much where they are coarse: networks of 70 k and 175 k parameters at 256x and 1024x that
# ended at 55% and 77% with a third of it, ended at 98% and 95% with half, and 98% and 97% with two thirds (FedAvg: 98%,
# 99%; digits, one seed). The share was chosen on just these.
FINENESS = (
    *((12.0, 0.02), (8.0, 0.02), (5.0, 0.2), (4.0, 0.3), (3.0, 0.4)),
    *((2.0, 0.5), (1.5, 0.5), (1.0, 0.5), (0.5, 0.5), (0.0, 0.5), (-0.5, 0.5), (-1.0, 0.5)),
)
DEFAULT_FINENESS = 5.0  # where there is no budget
EXPONENTS = np.arange(-2, 15)  # of 2, by which a step may be smaller than the root mean square
BIT_PRICE = math.log(2) / 6  # what one more bit per entry saves of the squared error of a step of 1
OWN_STEP_BITS = 12  # a step and an offset, about


class Statistics:
    """Statistics, none of them all zero: what each step that they might have would take, and how much would be lost."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.names = [tensor.spec.name for tensor in tensors]
        self.sizes = np.array([tensor.spec.size for tensor in tensors])
        flat, starts, variances = _join(tensors)
        shape = (len(tensors), EXPONENTS.size)
        self.steps, self.bits, self.lost = (np.empty(shape) for _ in range(3))
        self.finest = np.empty(len(tensors))
        _measure(flat, starts, variances, EXPONENTS, self.finest, self.steps, self.bits, self.lost)

    def choose(self, fineness: float, most: float = math.inf) -> dict[str, float]:
        """The best steps at the price of a bit that belongs to this fineness, near `most` at most.

        Tensors of which nothing would be left are not named.
        """
        rows, best = self._best(fineness)
        steps = self.steps[rows, best]
        if math.isfinite(most):
            steps = np.maximum(np.minimum(steps, nearest_step(most)), self.finest)
        return {self.names[row]: float(steps[row]) for row in rows[self.lost[rows, best] < self.sizes]}

    def estimate_bytes(self, fineness: float) -> float:
        """About what the steps take that `choose` would give."""
        return float(self.bits[self._best(fineness)].sum()) / 8

    def choose_within(self, room: float, fineness: float) -> dict[str, float]:
        """The steps of as many as fit into about so many bytes, those first that save most error per bit.

        Each has the best step at this fineness, or the best of those that still fit.
        """
        _, best = self._best(fineness)
        worth = ((self.sizes[:, None] - self.lost) / self.bits).max(axis=1)
        left, steps = 8 * room, {}
        for place in np.argsort(-worth, kind="stable").tolist():
            option, bits, lost = int(best[place]), self.bits[place], self.lost[place]
            if bits[option] > left or lost[option] >= self.sizes[place]:
                option = int(np.argmin(np.where(bits <= left, lost, math.inf)))
            if bits[option] <= left and lost[option] < self.sizes[place]:
                steps[self.names[place]] = float(self.steps[place, option])
                left -= bits[option]
        return steps

    def _best(self, fineness: float) -> tuple[Array, Array]:
        """The best step of each tensor, as indices of rows and columns."""
        best = np.argmin(self.lost + BIT_PRICE * 4.0**-fineness * self.bits, axis=1)
        return np.arange(best.size), best


def finest_step(peak: float) -> float:
    """The finest power of two for entries so large."""
    return nearest_step(2.0 * peak / MAX_MAGNITUDE)


def nearest_step(step: float) -> float:
    """The power of two that is nearest, of those that a small tensor may have."""
    return step_of(min(max(round(math.log2(step)) + STEP_BIAS, 1), 255))


def code(tensor: Tensor, step: float) -> Section:
    """The section of a tensor of its own."""
    levels, offsets = _quantize([tensor], [step])
    tiles, offset = encode_levels(levels, tensor.tiles), int(offsets[0])
    return OwnStepSection(step, offset, tiles) if offset or any(tiles) else ZeroSection()


def code_small(tensors: Sequence[Tensor], steps: Mapping[str, float]) -> tuple[dict[str, tuple[int, int]], Section]:
    """What small tensors with these steps share: the byte of each step and the offset, by name, and their section."""
    own = [steps[tensor.spec.name] for tensor in tensors]
    levels, offsets = _quantize(tensors, own)
    shared = matrix_spec([tensor.spec for tensor in tensors])
    padded = np.zeros(shared.size, np.int32)
    padded[: levels.size] = levels
    tiles = encode_levels(padded, cut_into_tiles(shared.shape))
    coded = zip((round(math.log2(step)) + STEP_BIAS for step in own), offsets.tolist())
    names = (tensor.spec.name for tensor in tensors)
    return dict(zip(names, coded)), PlainSection(tiles) if any(tiles) else ZeroSection()


def _quantize(tensors: Sequence[Tensor], steps: Sequence[float]) -> tuple[Array, Array]:
    """Levels of all, less the offset of each, one tensor after the other; and the offsets."""
    flat, starts, variances = _join(tensors)
    levels, offsets = np.empty(flat.size, np.int32), np.empty(len(tensors), np.int64)
    _quantize_each(flat, starts, variances, np.array(steps, np.float64), levels, offsets)
    return levels, offsets


def _join(tensors: Sequence[Tensor]) -> tuple[Array, Array, Array]:
    """All entries one after the other in float64, where each tensor starts, and whether it is a variance."""
    flat = np.concatenate([np.empty(0), *(tensor.array.reshape(-1) for tensor in tensors)]).astype(np.float64)
    starts = np.cumsum([0, *(tensor.spec.size for tensor in tensors)])
    return flat, starts, np.array(["var" in tensor.spec.name.lower() for tensor in tensors], np.bool_)


@kernel
def _round(size: float, is_variance: bool) -> float:
    """The nearest level; but for a variance's fall, the one below: |q| <= |h| keeps it above zero."""
    level = np.trunc(size) if is_variance and size < 0 else np.rint(size)
    return min(max(level, MAX_OFFSET - MAX_MAGNITUDE), MAX_MAGNITUDE - MAX_OFFSET)


@kernel
def _quantize_each(flat: Array, starts: Array, variances: Array, steps: Array, levels: Array, offsets: Array) -> None:
    for t in range(steps.size):
        own = levels[starts[t] : starts[t + 1]]
        for j in range(own.size):
            own[j] = np.int32(_round(flat[starts[t] + j] / steps[t], variances[t]))
        offsets[t] = 0
        if own.size:
            middle = _limit(np.int64(np.sort(own)[own.size // 2]))
            if _estimate_bits(own, middle) < _estimate_bits(own, 0):
                offsets[t] = middle
                for j in range(own.size):
                    own[j] -= np.int32(middle)


@kernel
def _measure(
    flat: Array,
    starts: Array,
    variances: Array,
    exponents: Array,
    finest: Array,
    steps: Array,
    bits: Array,
    lost: Array,
) -> None:
    """The finest step of every tensor, those that are tried, and what `_quantize_each` makes of it with each."""
    for t in range(starts.size - 1):
        h = flat[starts[t] : starts[t + 1]]
        peak = np.abs(h).max()
        energy = 0.0
        for j in range(h.size):
            energy += (h[j] / peak) ** 2  # squares of the smallest numbers would be zero
        root = np.rint(np.log2(peak * np.sqrt(energy / h.size)))
        least = min(max(np.rint(np.log2(2.0 * peak / MAX_MAGNITUDE)), 1 - STEP_BIAS), 255 - STEP_BIAS)
        finest[t] = 2.0**least
        levels = np.empty(h.size, np.int32)
        median = np.sort(h)[h.size // 2]  # rounding keeps the order, so its level is the median of the levels
        for k in range(exponents.size):
            step = 2.0 ** min(max(root - exponents[k], least), 255 - STEP_BIAS)
            error = 0.0
            for j in range(h.size):
                levels[j] = np.int32(_round(h[j] / step, variances[t]))
                error += (h[j] / peak - levels[j] * (step / peak)) ** 2
            steps[t, k] = step
            middle = _limit(np.int64(_round(median / step, variances[t])))
            bits[t, k] = OWN_STEP_BITS + min(_estimate_bits(levels, 0), _estimate_bits(levels, middle))
            lost[t, k] = h.size * error / energy


@kernel
def _limit(offset: Int) -> Int:
    return min(max(offset, -MAX_OFFSET), MAX_OFFSET)


@kernel
def _estimate_bits(levels: Array, offset: Int) -> float:
    """About what levels take, less the offset: which are not zero, signs, and magnitudes if they are geometric."""
    nonzeros = total = 0
    for j in range(levels.size):
        size = abs(np.int64(levels[j]) - offset)
        nonzeros += size > 0
        total += size
    if nonzeros == 0:
        return 0.0
    stop = nonzeros / total
    return levels.size * _entropy(nonzeros / levels.size) + nonzeros * (1.0 + _entropy(stop) / stop)


@kernel
def _entropy(share: float) -> float:
    if share <= 0.0 or share >= 1.0:
        return 0.0
    return -share * np.log2(share) - (1.0 - share) * np.log2(1.0 - share)
