"""The search for what fills a byte budget: a step, or the number of bits that the paper's widths share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

Outcome = TypeVar("Outcome")

FLATTEST_SLOPE = -0.1  # of log(size) over log(x): a secant that is flatter says nothing
LONGEST_LEAP = 3.0  # of log(x), while only too large or only fitting sizes are known
INNER_MARGIN = 0.05  # of the interval between what is too large and what fits: trials keep so far away from its ends


class Solution(NamedTuple, Generic[Outcome]):
    """The best x that fits (the largest allowed if none was met), the slope there, and what came with its size."""

    x: float
    slope: float  # of log(size) over log(x)
    outcome: Outcome | None  # None: no x was met that fits


@dataclass(frozen=True)
class BudgetSearch:
    """Find the x in [low, high] whose size fills a budget, by few evaluations.

    Over the logarithm of x, the logarithm of the size falls almost linearly: this is the secant method, kept inside
    what is known to be too large and what is known to fit.
    """

    low: float
    high: float
    slope: float  # of log(size) over log(x), before two trials tell
    tolerance: float  # share of the budget that may stay unused
    max_trials: int

    def solve(
        self, size_at: Callable[[float], tuple[float, Outcome]], budget: float, *, start: float
    ) -> Solution[Outcome]:
        """`size_at` returns the size at x in bytes, and whatever the caller wants to have of the best one."""
        target = math.log(max(budget, 1) * (1.0 - self.tolerance / 2))
        too_large = fits = last = None  # (log x, log size)
        outcome: Outcome | None = None
        slope = self.slope
        log_x = math.log(self._keep_within(start))
        for _ in range(self.max_trials):
            x = self._keep_within(float(np.float32(self._keep_within(math.exp(log_x)))))
            size, result = size_at(x)
            here = (math.log(x), math.log(max(size, 1.0)))
            if size > budget:
                too_large = here if too_large is None else max(too_large, here)
            elif fits is None or here < fits:
                fits, outcome = here, result
            if size <= budget and (size >= budget * (1.0 - self.tolerance) or x <= self.low):
                break
            if last is not None and last[0] != here[0]:
                slope = min((here[1] - last[1]) / (here[0] - last[0]), FLATTEST_SLOPE)
            last = here
            log_x = here[0] + (target - here[1]) / slope
            if too_large is not None and fits is not None:
                margin = INNER_MARGIN * (fits[0] - too_large[0])
                log_x = min(max(log_x, too_large[0] + margin), fits[0] - margin)
            else:
                log_x = min(max(log_x, here[0] - LONGEST_LEAP), here[0] + LONGEST_LEAP)
            if size > budget and x >= self.high:
                break
        return Solution(math.exp(fits[0]) if fits else self.high, slope, outcome)

    def _keep_within(self, x: float) -> float:
        return min(max(x, self.low), self.high)
