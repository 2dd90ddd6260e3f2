"""k entries of a vector: those of the largest magnitudes, or any at random; and the largest k that fits a budget."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedfq.codec.errors import BudgetError
from fedfq.codec.format.random_numbers import uniform
from fedfq.codec.kernels import Int, U, kernel
from fedfq.types import Array


class Ranked:
    """A vector, sorted once, so that its largest entries for one k after the other are a pass each."""

    def __init__(self, p: Array) -> None:
        self.p = p
        self._magnitudes = np.sort(np.abs(p))

    def top(self, k: int) -> Array:
        """The places of the k largest, ascending; among equals the first ones."""
        if k == 0:
            return np.empty(0, np.int64)
        cut = self._magnitudes[-k]
        above = self.p.size - int(np.searchsorted(self._magnitudes, cut, side="right"))
        places = np.empty(k, np.int64)
        _collect(self.p, cut, k - above, places)
        return places


@kernel
def _collect(p: Array, cut: float, equals: Int, places: Array) -> None:
    """The places of magnitudes above `cut`, and of the first so many that equal it."""
    found = 0
    for i in range(p.size):
        magnitude = abs(p[U(i)])
        if magnitude >= cut:
            if magnitude == cut:
                if equals == 0:
                    continue
                equals -= 1
            places[found] = i
            found += 1


def largest_that_fits(size_of: Callable[[int], int], most: int, budget: int) -> int:
    """The k in 1 ... most with size_of(k) <= budget, by halving: exactly the largest where sizes ascend."""
    smallest = size_of(1)
    if smallest > budget:
        raise BudgetError(budget, smallest)
    fits, beyond = 1, most + 1
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if size_of(middle) <= budget:
            fits = middle
        else:
            beyond = middle
    return fits


@kernel
def sample(key: np.uint64, size: Int, count: Int) -> Array:
    """`count` of the numbers below `size`, ascending, every subset as likely (Knuth, Algorithm 3.4.2 S).

    The server repeats it, so the random numbers are our own: those of numpy may change with its version.
    """
    chosen = np.empty(count, np.int64)
    taken = 0
    for i in range(size):
        if uniform(key, i) * (size - i) < count - taken:
            chosen[taken] = i
            taken += 1
            if taken == count:
                break
    return chosen
