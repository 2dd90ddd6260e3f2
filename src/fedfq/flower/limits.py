"""How much one reply may count: no update far longer, and no weight far larger, than is usual in its round.

What is usual is the lower median, which stays that of honest replies as long as fewer than half are not. Honest norms
of non-IID clients differ tenfold, longest to shortest, and sizes of their data sevenfold, largest to median (a
Dirichlet split with 0.1 among 50 clients). So ten times the median hardly touches an honest reply, and it is not
dropped but cut to that. With fewer than three replies a round says nothing of what is usual: then the last ones of
earlier rounds do, and where there are no three either, nothing is cut.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .arrays import NDArray

DEFAULT_MULTIPLE = 10.0  # of the usual norm or weight
MIN_FOR_MEDIAN = 3  # numbers of which a median says what is usual
REMEMBERED_REPLIES = 30  # of earlier rounds
BLOCK_ENTRIES = 1 << 16  # that are squared at a time, in float64


class Pair(NamedTuple):
    """A number for the floating-point tensors and one for those of integers: norms, or scales.

    They are judged apart: a counter of batches is longer than all weights together. Booleans need no limit.
    """

    floats: float
    integers: float


UNSCALED = Pair(1.0, 1.0)


def energies(array: NDArray) -> Pair:
    """The sum of squares of a tensor."""
    if array.dtype.kind == "f":
        return Pair(_energy(array), 0.0)
    return Pair(0.0, _energy(_view_signed(array)) if array.dtype.kind in "iu" else 0.0)


def norms(found: Iterable[Pair]) -> Pair:
    """The Euclidean norms of an update, of its tensors' energies."""
    floats, integers = zip(Pair(0.0, 0.0), *found)
    return Pair(math.sqrt(sum(floats)), math.sqrt(sum(integers)))


def scale(update: Mapping[str, NDArray], by: Pair) -> None:
    """Make an update shorter, in its own memory."""
    for array in update.values():
        if array.dtype.kind == "f" and by.floats != 1.0:
            array *= by.floats
        elif array.dtype.kind in "iu" and by.integers != 1.0:
            signed = _view_signed(array)
            signed[...] = np.rint(signed * by.integers)


def by_tensor(model: Mapping[str, NDArray], scales: Pair) -> dict[str, float]:
    """The scale of every tensor, for `Accumulator.add`."""
    kinds = {"f": scales.floats, "i": scales.integers, "u": scales.integers}
    return {name: kinds.get(array.dtype.kind, 1.0) for name, array in model.items()}


def _view_signed(array: NDArray) -> NDArray:
    """Updates of integers without a sign wrap round: 255 is one step down."""
    return array.view(f"i{array.dtype.itemsize}") if array.dtype.kind == "u" else array


def _energy(array: NDArray) -> float:
    flat, total = array.reshape(-1), 0.0
    for start in range(0, flat.size, BLOCK_ENTRIES):
        block = flat[start : start + BLOCK_ENTRIES].astype(np.float64)
        total += float(np.dot(block, block))
    return total


class Usual:
    """The lower median of one number of every reply."""

    def __init__(self) -> None:
        self._earlier: deque[float] = deque(maxlen=REMEMBERED_REPLIES)

    def median(self, numbers: Sequence[float]) -> float | None:
        """That of a round's replies; with fewer than three, that of earlier ones; None where these are too few."""
        known = numbers if len(numbers) >= MIN_FOR_MEDIAN else list(self._earlier)
        self._earlier.extend(numbers)
        return sorted(known)[(len(known) - 1) // 2] if len(known) >= MIN_FOR_MEDIAN else None


class Limits:
    """What was usual in a training so far, and what that allows."""

    def __init__(self, norm_multiple: float | None, weight_multiple: float | None) -> None:
        self._norm_multiple = norm_multiple
        self._weight_multiple = weight_multiple
        self._floats, self._integers, self._with_sketch, self._weights = Usual(), Usual(), Usual(), Usual()

    def scales(self, found: Sequence[Pair], with_sketch: Sequence[float] | None = None) -> list[Pair]:
        """By how much each of a round's updates is to be made shorter, by the norms of what is in their sections.

        `with_sketch` are the norms of floats including the noise of sketches, which makes them several times longer;
        None if nobody sends one.
        They are judged beside the sections and not instead: sections that are far too long could hide in that noise.
        """
        floats = _usual_length(self._floats, [pair.floats for pair in found])
        with_sketch = [pair.floats for pair in found] if with_sketch is None else with_sketch
        whole = _usual_length(self._with_sketch, with_sketch)
        integers = self._integers.median([pair.integers for pair in found])
        limit = self._norm_multiple
        return [
            Pair(
                min(_share(pair.floats, floats, limit), _share(norm, whole, limit)),
                _share(pair.integers, integers, limit),
            )
            for pair, norm in zip(found, with_sketch)
        ]

    def weights(self, claimed: Sequence[float]) -> list[float]:
        """What a round's replies count by."""
        median = self._weights.median([float(weight) for weight in claimed])
        if median is None or self._weight_multiple is None:
            return list(claimed)
        most: Any = self._weight_multiple * median
        if most >= 1 and all(isinstance(weight, int) for weight in claimed):
            most = int(most)
        return [min(weight, most) for weight in claimed]


def _usual_length(usual: Usual, norms: Sequence[float]) -> float | None:
    """Clients without a step of training do not say how long updates are. Where they are most, the shortest update of
    the others is what is usual, as their median may be that of a hostile few. (Integers that nobody else moves are
    usual as they are.)"""
    moving = sorted(norm for norm in norms if norm > 0)
    median = usual.median(moving)
    return moving[0] if moving and 2 * len(moving) <= len(norms) else median


def _share(norm: float, median: float | None, multiple: float | None) -> float:
    if median is None or multiple is None or norm <= multiple * median:
        return 1.0
    return multiple * median / norm
