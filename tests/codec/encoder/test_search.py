"""The search for a budget: few evaluations, and never more bytes than allowed, whatever the sizes do."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedfq.codec.encoder.search import LONGEST_LEAP, BudgetSearch, Solution

LOW, HIGH = 1e-6, 1e6
FLOAT32_MAX = float(np.finfo(np.float32).max)

Sizes = Callable[[float], float]


class Trials:
    """Sizes as a search meets them, and what it asked for. The outcome of a trial is its x and its size."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.met: list[tuple[float, float]] = []

    def __call__(self, x: float) -> tuple[float, tuple[float, float]]:
        self.met.append((x, self.sizes(x)))
        return self.met[-1][1], self.met[-1]


def power_law(at_one: float, slope: float) -> Sizes:
    return lambda x: at_one * x**slope


def solve(
    sizes: Sizes, budget: float, *, start: float = 1.0, slope: float = -2.5, tolerance: float = 0.01, trials: int = 8
) -> tuple[Solution[tuple[float, float]], list[tuple[float, float]]]:
    asked = Trials(sizes)
    return BudgetSearch(LOW, HIGH, slope, tolerance, trials).solve(asked, budget, start=start), asked.met


# --- Sizes as they are met ---------------------------------------------------------------------------------


def test_a_power_law_whose_slope_is_known_takes_two_evaluations() -> None:
    found, met = solve(power_law(1e6, -2.5), 1e5)
    assert len(met) == 2
    assert found.outcome is not None and 0.99e5 <= found.outcome[1] <= 1e5


@pytest.mark.parametrize("slope", [-0.3, -0.65, -1.0, -4.0])
def test_a_power_law_of_another_slope_takes_four(slope: float) -> None:
    """The first secant is exact, but for the longest leap."""
    found, met = solve(power_law(1e6, slope), 3e5)
    assert len(met) <= 4
    assert found.outcome is not None and 0.99 * 3e5 <= found.outcome[1] <= 3e5
    assert found.slope == pytest.approx(slope, rel=1e-3)


@pytest.mark.parametrize("start", [1e-30, LOW, 1e-3, 1.0, 1e4, HIGH, 1e30])
def test_any_start_will_do(start: float) -> None:
    found, _ = solve(power_law(1e4, -1.0), 1e3, start=start, trials=16)
    assert found.outcome is not None and 0.99e3 <= found.outcome[1] <= 1e3


@settings(max_examples=200)
@given(st.floats(-4.0, -0.3), st.floats(10.0, 1e8), st.floats(1e-2, 1e2), st.floats(0.05, 20.0))
def test_a_power_law_fills_any_budget(slope: float, budget: float, x: float, off: float) -> None:
    """`x` fills the budget; the first guess is `off` times that."""
    found, met = solve(lambda at: budget * (at / x) ** slope, budget, start=x * off)
    assert found.outcome is not None and len(met) <= 8
    assert 0.99 * budget <= found.outcome[1] <= budget
    assert found.outcome[0] == pytest.approx(x, rel=0.04)


# --- Sizes that leap, stay, or never fit -------------------------------------------------------------------


def test_a_leap_over_the_budget_is_closed_in_on_from_both_sides() -> None:
    """As where a whole rank drops out: nothing fills the budget, and the best is just behind the leap."""
    found, met = solve(lambda x: 900.0 if x > 2.0 else 5000.0, 1000.0, trials=16)
    assert len(met) == 16
    assert 2.0 < found.x < 2.1 and found.outcome == (pytest.approx(found.x), 900.0)


def test_flat_sizes_that_fit_are_sent_as_finely_as_allowed() -> None:
    found, met = solve(lambda x: 10.0, 1000.0, trials=8)
    assert found.outcome == (LOW, 10.0) and met[-1] == found.outcome


def test_what_fits_at_the_finest_is_the_finest() -> None:
    """More than enough budget is left over, and no evaluation is spent on it."""
    found, met = solve(power_law(1e3, -1.0), 1e12, start=LOW)
    assert met == [(LOW, pytest.approx(1e9))] and found.outcome == met[0]
    assert found.x == pytest.approx(LOW)


def test_what_never_fits_ends_at_the_coarsest_without_an_outcome() -> None:
    found, met = solve(power_law(1e30, -1.0), 1000.0, trials=16)
    assert found.outcome is None and found.x == HIGH
    assert met[-1][0] == HIGH and len(met) <= 1 + math.ceil(math.log(HIGH) / LONGEST_LEAP)


def test_the_first_trial_may_be_the_only_one() -> None:
    assert solve(power_law(1e6, -2.5), 1e5, trials=1)[0].outcome is None
    assert solve(power_law(1e6, -2.5), 1e7, trials=1)[0].outcome == (1.0, 1e6)


def test_nothing_fits_into_nothing_but_nothing() -> None:
    assert solve(power_law(1e6, -2.5), 0, trials=8)[0].outcome is None
    found, _ = solve(lambda x: 0.0 if x > 3.0 else 50.0, 0, trials=16)
    assert found.outcome is not None and found.outcome[1] == 0.0


def test_steps_up_to_the_largest_float32_are_tried_without_a_warning() -> None:
    """The next guess may lie beyond; as float32 it would be infinite."""
    asked = Trials(lambda x: 1001.0)
    with np.errstate(all="raise"):
        found = BudgetSearch(1e37, FLOAT32_MAX, -2.5, 0.01, 8).solve(asked, 1000.0, start=3e38)
    assert found.outcome is None and asked.met[-1][0] == FLOAT32_MAX


# --- Whatever the sizes do ---------------------------------------------------------------------------------


@st.composite
def any_sizes(draw: st.DrawFn) -> Sizes:
    """A power law with leaps up and down at any place, down to nothing and up to far too much."""
    at_one, slope = draw(st.floats(0.0, 1e9)), draw(st.floats(-5.0, 1.0))
    leaps = draw(st.lists(st.tuples(st.floats(LOW, HIGH), st.floats(0.0, 100.0)), max_size=5))
    return lambda x: at_one * x**slope * math.prod(factor for place, factor in leaps if x > place)


@settings(max_examples=300)
@given(
    any_sizes(),
    st.floats(0, 1e9),
    st.floats(1e-9, 1e9),
    st.floats(-5.0, -0.1),
    st.floats(0.0, 0.5),
    st.integers(1, 16),
)
@example(lambda x: 0.0, 0.0, 1.0, -1.0, 0.0, 16)
@example(lambda x: 1e300, 1e9, 1.0, -1.0, 0.0, 16)
def test_never_too_large_never_outside_never_too_many(
    sizes: Sizes, budget: float, start: float, slope: float, tolerance: float, trials: int
) -> None:
    found, met = solve(sizes, budget, start=start, slope=slope, tolerance=tolerance, trials=trials)
    assert 1 <= len(met) <= trials
    assert all(LOW <= x <= HIGH for x, _ in met)
    fitting = [trial for trial in met if trial[1] <= budget]
    if found.outcome is None:
        assert not fitting and found.x == HIGH
    else:
        assert found.outcome == min(fitting)  # the finest of what fits
        assert found.x == pytest.approx(found.outcome[0])
