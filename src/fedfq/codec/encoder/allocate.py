"""Width allocation: the paper's problem (Eq. 23), its annealing repaired (Algorithm 1), and the optimum.

The problem: given a flat float32 vector h (all finite) and B bits, choose b_j in {0, 2, 4, 8} so that
sum_j h_j^2 4^-b_j is least while sum_j b_j <= B.
"""

import math

import numpy as np
import numpy.typing as npt

from ..format.random_numbers import stream_key, uniform
from ..kernels import kernel
from .width_levels import check_widths

WIDTHS = (0, 2, 4, 8)

_WIDTHS = np.array(WIDTHS, dtype=np.uint8)
_ERROR = 0.25 ** np.arange(9)  # 4^-b, indexed by the width b
_NEXT = np.array([2, 0, 4, 0, 8, 0, 0, 0, 0], dtype=np.uint8)  # the width above; 0 where there is none

# The three raises 0->2, 2->4, 4->8. All widths are even, so the unit of cost is two bits.
_COST = np.array([1, 1, 2])
_GAIN = np.array([15 / 16, 15 / 256, 255 / 65536])  # decrease of the objective, over h_j^2
_GAIN_PER_UNIT = _GAIN / _COST


def objective(h: npt.NDArray[np.float32], widths: npt.NDArray[np.uint8]) -> float:
    """sum_j h_j^2 4^-b_j, in float64: Eq. 23 without its factor d / ||h||_2^2, which no b changes."""
    check_widths(h, widths)
    return float(_objective(h, widths))


def exact(h: npt.NDArray[np.float32], budget_bits: int) -> npt.NDArray[np.uint8]:
    """The optimum of Eq. 23 with sum_j b_j <= B, in O(d): three thresholds on |h_j| and at most one exchange.

    The gain per bit falls along 0->2->4->8, so raises taken greedily by gain per bit are optimal whenever
    they fill the budget; `_spend_last_unit` says what is left to do when they do not. Which raises the greedy
    order takes follows from the gain of the first one that it leaves out, found by radix selection without
    sorting.

    Of equal magnitudes the lower index is served first. Zeros get no bits, as they need none; apart from
    that, B is spent up to an odd bit, or up to three bits when every other width is already 4 or 8.
    """
    _check(h, budget_bits)
    units = budget_bits // 2
    if units >= 4 * np.count_nonzero(h):
        return np.where(h != 0, np.uint8(8), np.uint8(0))
    gain, spare = _find_first_gain_left_out(h, units)
    widths = np.empty(h.size, dtype=np.uint8)
    spare = _take_gains(h, gain, spare, widths)
    if spare:
        _spend_last_unit(h, widths)
    return widths


def cgsa(
    h: npt.NDArray[np.float32],
    budget_bits: int,
    *,
    seed: int,
    initial_temperature: float = 1000.0,
    cooling: float = 0.95,
    min_temperature: float = 1e-3,
    max_iterations: int = 100,
) -> npt.NDArray[np.uint8]:
    """Constraint-guided simulated annealing: the paper's Algorithm 1, repaired as far as it needs to run.

    Start: the B/2 largest |h_j| get 2 bits. (Above 2 bits per entry, fill up to 4, then to 8, in that order.)
    Move: pick ranks i < j by magnitude; raise b_i to the next width and lower b_j by as many bits, if it can.

    Printed wrongly, repaired here:
    - The condition `b_i > 0 and b_j < 8` is inverted: it doubles b_i = 8 and halves b_j = 0. Meant: b_i < 8
      and b_j > 0.
    - `* 2` and `/ 2` leave the set of widths (8 -> 16, 2 -> 1).
    - They do not keep sum_j b_j either: (2, 2) -> (4, 1). Here the start's sum is kept. It is B, up to an odd
      bit, or up to three bits above 4 bits per entry.
    - The objective of line 2 lacks Eq. 23's 1 / ||h||^2, so that the units of h decide what is accepted. Here
      it is Eq. 23's, and only the change that a move makes is computed.

    Kept as printed:
    - What is called `best_value` is overwritten by every accepted state, so the last one is returned, not the
      best.
    - T0 = 1000 is far above the change that a move makes, and after 100 iterations T is still 5.9:
      practically every valid move is accepted, for better or worse. `exact` is never worse and needs no sort.

    Raises ValueError for B > 8 d, which no widths can spend.
    """
    _check(h, budget_bits)
    if budget_bits > 8 * h.size:
        raise ValueError(f"{budget_bits} bits are more than 8 for each of {h.size} entries")
    by_rank = _sort_by_magnitude(h.view(np.uint32))
    ranked = _assign_first_widths(h.size, budget_bits)
    _anneal(
        h[by_rank],
        ranked,
        stream_key(seed, 0),
        initial_temperature,
        cooling,
        min_temperature,
        max_iterations,
    )
    widths = np.empty_like(ranked)
    widths[by_rank] = ranked
    return widths


def _check(h: npt.NDArray[np.float32], budget_bits: int) -> None:
    if h.ndim != 1 or h.dtype != np.float32:
        raise ValueError(f"h must be a flat float32 vector, got {h.dtype} of shape {h.shape}")
    if budget_bits < 0:
        raise ValueError(f"budget_bits must not be negative, got {budget_bits}")


def _assign_first_widths(size: int, budget_bits: int) -> npt.NDArray[np.uint8]:
    """Algorithm 1's initial widths, by rank (largest magnitude first)."""
    ranked = np.zeros(size, dtype=np.uint8)
    spare = budget_bits // 2
    for width, cost in zip(WIDTHS[1:], _COST.tolist(), strict=True):
        raised = min(spare // cost, size)
        ranked[:raised] = width
        spare -= raised * cost
    return ranked


@kernel
def _sort_by_magnitude(patterns: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """Indices from the largest magnitude to the least, of equal ones the lower first; line 1 of Algorithm 1.

    Magnitudes order as the 31 bits of their float32 patterns do. These are flipped, the index is put behind them, and
    they are sorted by 11 bits at a time, the lowest first: linear in d.
    """
    size = patterns.size
    entries = np.empty(size, dtype=np.uint64)
    others = np.empty(size, dtype=np.uint64)
    starts = np.zeros((3, 2049), dtype=np.int64)
    for j in range(size):
        key = ~np.uint64(patterns[j]) & np.uint64(0x7FFFFFFF)
        entries[j] = key << np.uint64(33) | np.uint64(j)
        for digit in range(3):
            starts[digit, np.int64(key >> np.uint64(11 * digit) & np.uint64(2047)) + 1] += 1
    for digit in range(3):
        next_ = np.cumsum(starts[digit])
        shift = np.uint64(33 + 11 * digit)
        for entry in entries:
            value = np.int64(entry >> shift & np.uint64(2047))
            others[next_[value]] = entry
            next_[value] += 1
        entries, others = others, entries
    for j in range(size):
        entries[j] &= np.uint64(2**33 - 1)
    return entries.view(np.int64)


@kernel
def _objective(h: npt.NDArray[np.float32], widths: npt.NDArray[np.uint8]) -> float:
    total = 0.0
    for j in range(h.size):
        total += np.float64(h[j]) * np.float64(h[j]) * _ERROR[widths[j]]
    return total


@kernel
def _anneal(
    h: npt.NDArray[np.float32],
    widths: npt.NDArray[np.uint8],
    key: np.uint64,
    temperature: float,
    cooling: float,
    min_temperature: float,
    max_iterations: int,
) -> float:
    """Lines 8-25 of Algorithm 1, in place on `widths`, with |h| descending. Returns the final `objective`."""
    size = h.size
    value = _objective(h, widths)
    norm = _objective(h, np.zeros_like(widths))  # ||h||^2
    if size < 2 or norm == 0.0:
        return value
    for iteration in range(max_iterations):
        if temperature <= min_temperature:
            break
        first = int(uniform(key, 3 * iteration) * size)
        second = int(uniform(key, 3 * iteration + 1) * (size - 1))
        second += second >= first  # any rank but the first
        i, j = min(first, second), max(first, second)
        bits = int(_NEXT[widths[i]]) - int(widths[i])
        lowered = int(widths[j]) - bits
        if bits > 0 and (lowered == 0 or lowered == 2 or lowered == 4):
            delta = np.float64(h[i]) ** 2 * (_ERROR[widths[i] + bits] - _ERROR[widths[i]])
            delta += np.float64(h[j]) ** 2 * (_ERROR[lowered] - _ERROR[widths[j]])
            scaled = delta * size / norm  # the change of Eq. 23's q_f
            if scaled < 0.0 or uniform(key, 3 * iteration + 2) < math.exp(-scaled / temperature):
                widths[i] += bits
                widths[j] = lowered
                value += delta
        temperature *= cooling
    return value


@kernel
def _find_first_gain_left_out(h: npt.NDArray[np.float32], units: int) -> tuple[float, int]:
    """The gain per unit at which the greedy order runs out, and the units then left for raises of that gain.

    The raises with a greater gain cost at most `units`; together with those of equal gain they cost more.
    Positive floats order as their bit patterns do, so the gain is selected 13 bits at a time from the top.
    """
    prefix = np.uint64(0)
    for shift in (52, 39, 26, 13, 0):
        costs = np.zeros(8192, dtype=np.int64)
        for j in range(h.size):
            square = np.float64(h[j]) * np.float64(h[j])
            for k in range(3):
                pattern = np.float64(square * _GAIN_PER_UNIT[k]).view(np.uint64) >> np.uint64(shift)
                if pattern >> np.uint64(13) == prefix:
                    costs[pattern & np.uint64(8191)] += _COST[k]
        digit = 8191
        while costs[digit] <= units:
            units -= costs[digit]
            digit -= 1
        prefix = (prefix << np.uint64(13)) | np.uint64(digit)
    return np.uint64(prefix).view(np.float64), units


@kernel
def _take_gains(h: npt.NDArray[np.float32], gain: float, spare: int, widths: npt.NDArray[np.uint8]) -> int:
    """Take all raises with more than `gain` per unit, then those with just `gain` while `spare` lasts.

    Of the latter, the cheap raises go first and lower indices go first. Returns the units left: 0 or 1.
    """
    for j in range(h.size):
        square = np.float64(h[j]) * np.float64(h[j])
        taken = 0
        for k in range(3):
            taken += square * _GAIN_PER_UNIT[k] > gain
        widths[j] = _WIDTHS[taken]
    for k in range(3):
        for j in range(h.size):
            if spare < _COST[k]:
                break
            if np.float64(h[j]) * np.float64(h[j]) * _GAIN_PER_UNIT[k] == gain:
                widths[j] = _WIDTHS[k + 1]
                spare -= _COST[k]
    return spare


@kernel
def _spend_last_unit(h: npt.NDArray[np.float32], widths: npt.NDArray[np.uint8]) -> None:
    """Finish greedy widths that leave one unit because the next raise in order, 4->8 with gain c, costs two.

    Either the unit goes to the best cheap raise left, or c is taken and the weakest cheap raise taken is
    undone; nothing else can be better. Proof: let a_1 >= a_2 >= ... be the gains of the cheap raises (0->2,
    2->4), c_1 >= ... those of 4->8, and K the budget. With m raises 4->8 the best total is f(m) = c_1 + .. +
    c_m + a_1 + .. + a_(K-2m), concave in m. Greedy stopped with m of them and k = K-2m-1 cheap ones. All
    raises taken gain at least c/2 per unit and all others at most that: c_m >= c = c_(m+1) and a_k >= c/2 >=
    a_(k+1). So f(m) - f(m-1) = c_m - a_(k+2) - a_(k+3) >= c - c = 0 and f(m+2) - f(m+1) = c_(m+2) - a_(k-1) -
    a_(k-2) <= c - c = 0: the maximum is f(m) or f(m+1). f ignores that an entry is raised in order, but no
    maximum breaks it: an entry's earlier raise costs no more and gains more.
    """
    cheap = eight = weakest = -1
    cheap_gain = eight_gain = 0.0
    loss = np.inf
    for j in range(h.size):
        square = np.float64(h[j]) * np.float64(h[j])
        if widths[j] <= 2 and square * _GAIN[widths[j] // 2] > cheap_gain:
            cheap, cheap_gain = j, square * _GAIN[widths[j] // 2]
        if widths[j] == 4 and square * _GAIN[2] > eight_gain:
            eight, eight_gain = j, square * _GAIN[2]
        if (widths[j] == 2 or widths[j] == 4) and square * _GAIN[widths[j] // 2 - 1] <= loss:
            weakest, loss = j, square * _GAIN[widths[j] // 2 - 1]
    # `weakest` is never `eight` here: undoing an entry's own 2->4 loses fifteen times what its 4->8 gains.
    if eight_gain - loss > cheap_gain:
        widths[eight] = 8
        widths[weakest] -= 2
    elif cheap >= 0:
        widths[cheap] = _NEXT[widths[cheap]]
