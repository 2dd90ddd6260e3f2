"""Width allocation: `exact` against dynamic programming, Algorithm 1 against what it promises."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfq.codec.encoder import allocate
from fedfq.codec.encoder.allocate import WIDTHS, cgsa, exact, objective
from fedfq.codec.format.random_numbers import stream_key

Vector = npt.NDArray[np.float32]


def optimum(h: Vector, budget_bits: int) -> float:
    """The least objective with sum of widths <= budget, by dynamic programming over the bits spent."""
    best = np.zeros(budget_bits + 1)
    for square in h.astype(np.float64) ** 2:
        choices = np.full((len(WIDTHS), budget_bits + 1), np.inf)
        for row, width in enumerate(WIDTHS):
            choices[row, width:] = best[: max(budget_bits + 1 - width, 0)] + square * 0.25**width
        best = choices.min(axis=0)
    return float(best[budget_bits])


def assert_optimal(h: Vector, budget_bits: int) -> None:
    widths = exact(h, budget_bits)
    assert np.isin(widths, WIDTHS).all()
    assert widths.sum(dtype=np.int64) <= budget_bits
    assert objective(h, widths) == pytest.approx(optimum(h, budget_bits), rel=1e-13, abs=0.0)


def sample(name: str, size: int, rng: np.random.Generator) -> Vector:
    draws: dict[str, Callable[[], npt.NDArray[np.floating]]] = {
        "normal": lambda: rng.normal(size=size),
        "laplace": lambda: rng.laplace(size=size),
        "wide": lambda: np.exp(rng.normal(scale=2.5, size=size)) * rng.choice([-1, 1], size),
        "ties": lambda: rng.choice([0.25, 1.0, -1.0, 4.0, 22.0], size),
        "powers of two": lambda: 2.0 ** rng.integers(-6, 7, size),
        "sparse": lambda: rng.laplace(size=size) * (rng.random(size) < 0.5),
        "equal": lambda: np.full(size, -0.3),
        "zero": lambda: np.zeros(size),
    }
    return draws[name]().astype(np.float32)


KINDS = ["normal", "laplace", "wide", "ties", "powers of two", "sparse", "equal", "zero"]


@pytest.mark.parametrize("kind", KINDS)
def test_exact_equals_dynamic_programming(kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(400):
        h = sample(kind, int(rng.integers(1, 13)), rng)
        assert_optimal(h, int(rng.integers(0, 9 * h.size + 3)))


def test_exact_equals_dynamic_programming_at_every_budget() -> None:
    for kind in ("wide", "ties", "laplace"):
        h = sample(kind, 9, np.random.default_rng(7))
        for budget_bits in range(8 * h.size + 12):
            assert_optimal(h, budget_bits)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=7),
    st.integers(0, 60),
)
def test_exact_equals_dynamic_programming_on_any_finite_floats(values: list[float], budget_bits: int) -> None:
    assert_optimal(np.array(values, dtype=np.float32), budget_bits)


def test_the_last_two_bits_go_either_way() -> None:
    """Greedy reaches (4, 2, 0) with two bits left; next in order is 4->8 of the first, four bits for 1.88."""
    # 1.88 - 0.96 for (8, 0, 0) beats 0.23 for (4, 2, 2) ...
    assert exact(np.array([22.0, 1.01, 0.5], dtype=np.float32), 8).tolist() == [8, 0, 0]
    # ... but not 0.94.
    assert exact(np.array([22.0, 1.01, 0.999], dtype=np.float32), 8).tolist() == [4, 2, 2]


def test_exact_serves_the_lower_index_first_among_equals() -> None:
    h = np.array([1, -1, 1, -1, 1, -1], dtype=np.float32)
    assert exact(h, 5).tolist() == [2, 2, 0, 0, 0, 0]
    assert exact(h, 16).tolist() == [4, 4, 2, 2, 2, 2]
    assert exact(h, 32).tolist() == [8, 8, 4, 4, 4, 4]


def test_exact_gives_zeros_nothing_and_stops_at_eight_bits() -> None:
    h = np.array([0.0, 3.0, -0.0, -1.0], dtype=np.float32)
    assert exact(h, 1000).tolist() == [0, 8, 0, 8]
    assert exact(np.zeros(4, dtype=np.float32), 8).tolist() == [0, 0, 0, 0]
    assert exact(np.zeros(0, dtype=np.float32), 8).tolist() == []


@pytest.mark.parametrize("exponent", [-149, -140, -100, 100, 116])
def test_exact_is_scale_free_from_subnormal_to_huge(exponent: int) -> None:
    integers = np.random.default_rng(3).integers(1, 2000, size=500).astype(np.float32)
    scaled = np.ldexp(integers, exponent)
    for budget_bits in (100, 501, 1000, 1999, 3001):
        np.testing.assert_array_equal(exact(scaled, budget_bits), exact(integers, budget_bits))


def test_exact_spends_the_budget_and_is_a_threshold_on_the_magnitude() -> None:
    h = sample("laplace", 100_000, np.random.default_rng(5))
    for budget_bits in (25_000, 100_001, 400_000):
        widths = exact(h, budget_bits)
        assert widths.sum(dtype=np.int64) == budget_bits // 2 * 2
        assert (np.diff(widths[np.argsort(np.abs(h))].astype(int)) >= 0).all()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["laplace", "normal"]),
    st.integers(1_000, 100_000),
    st.sampled_from([1.0, 0.5, 0.25]),
    st.integers(0, 2**32 - 1),
)
def test_exact_is_never_worse_than_annealing(kind: str, size: int, bits_each: float, seed: int) -> None:
    h = sample(kind, size, np.random.default_rng(seed))
    budget_bits = int(bits_each * size)
    annealed = cgsa(h, budget_bits, seed=seed)
    assert np.isin(annealed, WIDTHS).all()
    assert annealed.sum(dtype=np.int64) == budget_bits // 2 * 2
    assert objective(h, exact(h, budget_bits)) <= objective(h, annealed)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40), st.data(), st.integers(0, 2**32 - 1))
def test_annealing_keeps_the_widths_and_the_sum_at_any_budget(size: int, data: st.DataObject, seed: int) -> None:
    budget_bits = data.draw(st.integers(0, 8 * size))
    h = sample("wide", size, np.random.default_rng(seed))
    annealed = cgsa(h, budget_bits, seed=seed, max_iterations=2000, min_temperature=0.0)
    start = cgsa(h, budget_bits, seed=seed, max_iterations=0)
    assert np.isin(annealed, WIDTHS).all()
    assert annealed.sum() == start.sum()
    unspent = budget_bits - int(start.sum())
    assert 0 <= unspent <= (1 if budget_bits <= 4 * size else 3)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_those_of_a_stable_sort(kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    for size in (1, 2, 5000):
        h = sample(kind, size, rng)
        ranks = allocate._sort_by_magnitude(h.view(np.uint32))
        np.testing.assert_array_equal(ranks, np.argsort(-np.abs(h), kind="stable"))


def test_annealing_starts_with_two_bits_for_the_largest() -> None:
    h = np.array([0.1, -5.0, 2.0, 3.0], dtype=np.float32)
    assert cgsa(h, 5, seed=0, max_iterations=0).tolist() == [0, 2, 0, 2]
    assert cgsa(h, 12, seed=0, max_iterations=0).tolist() == [2, 4, 2, 4]
    assert cgsa(h, 24, seed=0, max_iterations=0).tolist() == [4, 8, 4, 8]
    assert cgsa(h, 32, seed=0, max_iterations=0).tolist() == [8, 8, 8, 8]


def test_annealing_is_deterministic_and_follows_its_seed() -> None:
    h = sample("laplace", 1000, np.random.default_rng(0))
    np.testing.assert_array_equal(cgsa(h, 2000, seed=11), cgsa(h, 2000, seed=11))
    assert (cgsa(h, 2000, seed=11) != cgsa(h, 2000, seed=12)).any()
    np.testing.assert_array_equal(cgsa(h, 2000, seed=11), cgsa(np.ldexp(h, 20), 2000, seed=11))


@pytest.mark.parametrize("temperature", [1e-9, 1.0, 1000.0])
def test_annealing_keeps_its_objective_up_to_date(temperature: float) -> None:
    h = -np.sort(-np.abs(sample("wide", 300, np.random.default_rng(1))))
    widths = allocate._assign_first_widths(h.size, 700)
    before = widths.copy()
    value = allocate._anneal(h, widths, stream_key(5, 0), temperature, 0.9999, 0.0, 20_000)
    assert (widths != before).any()
    assert value == pytest.approx(objective(h, widths), rel=1e-9)


def test_cold_annealing_climbs_towards_the_optimum_and_the_printed_schedule_accepts_everything() -> None:
    h = sample("laplace", 1000, np.random.default_rng(2))
    start = objective(h, cgsa(h, 1000, seed=3, max_iterations=0))
    cold = objective(h, cgsa(h, 1000, seed=3, initial_temperature=1e-9, min_temperature=0.0, max_iterations=50_000))
    assert objective(h, exact(h, 1000)) <= cold < 0.95 * start
    printed = cgsa(h, 1000, seed=3)
    hot = cgsa(h, 1000, seed=3, initial_temperature=1e30, cooling=1.0)
    np.testing.assert_array_equal(printed, hot)


def printed_move(b_i: int, b_j: int) -> tuple[float, float]:
    """Lines 12-15 of Algorithm 1, as printed."""
    return (b_i * 2, b_j / 2) if b_i > 0 and b_j < 8 else (b_i, b_j)


def test_the_printed_move_is_defective() -> None:
    assert printed_move(2, 2) == (4, 1)  # 1 is no width, and the sum went from 4 to 5
    assert printed_move(8, 4) == (16, 2)  # nor is 16: the condition guards the wrong entry
    assert printed_move(0, 8) == (0, 8)  # and it keeps the large entry from getting its first bits


def test_the_repaired_move_stays_in_the_set() -> None:
    h = np.array([2.0, 1.0], dtype=np.float32)  # one pair of ranks, so one iteration makes the one valid move
    assert cgsa(h, 4, seed=0, max_iterations=1).tolist() == [4, 0]  # from (2, 2)
    assert cgsa(h, 8, seed=0, max_iterations=1).tolist() == [8, 0]  # from (4, 4)
    assert cgsa(h, 12, seed=0, max_iterations=1).tolist() == [8, 4]  # from (8, 4): none


def test_bad_arguments_are_refused() -> None:
    h = np.ones(3, dtype=np.float32)
    with pytest.raises(ValueError, match="more than 8"):
        cgsa(h, 25, seed=0)
    with pytest.raises(ValueError, match="negative"):
        exact(h, -1)
    with pytest.raises(ValueError, match="flat float32"):
        exact(h.astype(np.float64), 4)
    with pytest.raises(ValueError, match="flat float32"):
        cgsa(h.reshape(1, 3), 4, seed=0)
    with pytest.raises(ValueError, match="exceeds 8"):
        objective(h, np.full(3, 9, dtype=np.uint8))
