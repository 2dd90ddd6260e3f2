"""How much one reply may count."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfq.flower.limits import MIN_FOR_MEDIAN, Limits, Pair, Usual, by_tensor, energies, norms, scale


def update():
    return {
        "w": np.array([[3.0, 0.0], [0.0, 4.0]], np.float32),
        "steps": np.array(-12),
        "count": np.array([2**8 - 5], np.uint8),
        "mask": np.array([True, True]),
    }


def test_norms_are_of_floats_and_of_integers():
    """Those without a sign count by the shorter way round: 251 is five steps down."""
    assert norms(map(energies, update().values())) == Pair(5.0, 13.0)
    assert norms([]) == Pair(0.0, 0.0)


def test_the_largest_numbers_have_a_finite_norm():
    found = norms(map(energies, [np.full(200_000, -3.4e38, np.float32), np.full(3, 2**63, np.uint64)]))
    assert found.floats == pytest.approx(3.4e38 * math.sqrt(200_000), rel=1e-6)
    assert found.integers == pytest.approx(2.0**63 * math.sqrt(3))


def test_scaled_updates_are_as_long_as_was_asked():
    short = update()
    scale(short, Pair(0.1, 0.5))
    np.testing.assert_allclose(short["w"], update()["w"] / 10)
    assert (short["steps"], short["count"].tolist(), short["mask"].tolist()) == (-6, [256 - 2], [True, True])
    assert {name: value.dtype for name, value in short.items()} == {name: v.dtype for name, v in update().items()}
    assert by_tensor(update(), Pair(0.1, 0.5)) == {"w": 0.1, "steps": 0.5, "count": 0.5, "mask": 1.0}


def test_the_lower_median_is_usual_and_with_fewer_than_three_that_of_before():
    usual = Usual()
    assert usual.median([5.0, 1e38]) is None
    assert usual.median([7.0]) is None
    assert usual.median([100.0]) == 7.0
    assert usual.median([4.0, 1.0, 3.0, 2.0]) == 2.0
    assert usual.median([]) == 4.0  # of 1, 2, 3, 4, 5, 7, 100 and the large one


@given(st.permutations([1.0, 2.0, 4.0, 8.0, 1e38]))
def test_limits_do_not_depend_on_the_order_of_replies(order):
    found = dict(zip(order, Limits(10.0, 10.0).scales([Pair(norm, 0.0) for norm in order])))
    assert found == {1.0: (1, 1), 2.0: (1, 1), 4.0: (1, 1), 8.0: (1, 1), 1e38: (pytest.approx(40 / 1e38), 1)}
    weights = dict(zip(order, Limits(10.0, 10.0).weights(order)))
    assert weights == {1.0: 1.0, 2.0: 2.0, 4.0: 4.0, 8.0: 8.0, 1e38: 40.0}


def test_integers_are_judged_by_themselves():
    """A client with many examples has a large counter of batches, and no reason for shorter weights."""
    found = Limits(10.0, 10.0).scales([Pair(1.0, 50.0), Pair(1.0, 50.0), Pair(2.0, 5000.0)])
    assert found == [(1, 1), (1, 1), (1, 0.1)]


def test_integers_that_nobody_else_moves_stay_where_they_are():
    assert Limits(10.0, None).scales([Pair(1.0, 0.0), Pair(1.0, 0.0), Pair(1.0, 1.0)])[2] == (1, 0)


def test_clients_that_do_not_train_do_not_stop_the_others():
    assert Limits(10.0, None).scales(5 * [Pair(0.0, 0.0)] + 3 * [Pair(1.0, 0.0)])[-1] == (1, 1)


def test_weights_stay_whole_numbers_where_they_were():
    assert Limits(10.0, 2.5).weights([3, 3, 10**12]) == [3, 3, 7]
    assert Limits(10.0, 2.5).weights([3.0, 3, 10**12]) == [3, 3, 7.5]
    assert Limits(10.0, 10.0).weights([0.01, 0.01, 5]) == [0.01, 0.01, 0.1]


def test_without_multiples_nothing_is_limited():
    limits = Limits(None, None)
    assert limits.scales([Pair(1.0, 1.0), Pair(1.0, 1.0), Pair(1e38, 1e18)]) == 3 * [(1, 1)]
    assert limits.weights([1, 1, 10**12]) == [1, 1, 10**12]


def test_tenfold_norms_of_honest_clients_are_left_alone():
    rng = np.random.default_rng(0)
    for _ in range(200):
        count = int(rng.integers(MIN_FOR_MEDIAN, 20))
        honest = [Pair(float(norm), 0.0) for norm in 10 ** rng.uniform(0, 1, count)]
        assert Limits(10.0, 10.0).scales(honest) == count * [(1, 1)]


def test_where_most_do_not_move_a_few_cannot_say_what_is_usual():
    """Seven clients without a step, an honest one, and two that send 1e30."""
    found = [Pair(0.0, 0.0)] * 7 + [Pair(0.01, 0.0)] + [Pair(1e30, 0.0)] * 2
    scales = Limits(10, 10).scales(found)
    assert [pair.floats * by.floats for pair, by in zip(found, scales)] == pytest.approx([0.0] * 7 + [0.01, 0.1, 0.1])


def test_sketches_of_a_few_among_idle_clients() -> None:
    """The shortest of those that are not idle is what is usual, of sketches as of sections."""
    sections, whole = [Pair(0.0, 0.0)] * 10, [0.0] * 7 + [1.0, 1e6, 1e6]
    found = Limits(10.0, None).scales(sections, whole)
    assert [pair.floats for pair in found[7:]] == pytest.approx([1, 1e-5, 1e-5])


def test_sections_and_sketches_are_judged_apart() -> None:
    """Noise makes all updates five times longer: neither thirty times the sections hide in it, nor a sketch alone."""
    honest, sections, noise = Pair(1.0, 0.0), Pair(30.0, 0.0), Pair(0.0, 0.0)
    found = Limits(10.0, None).scales([honest, honest, honest, sections, noise], [5.0, 5.0, 5.0, 31.0, 5000.0])
    assert [pair.floats for pair in found] == pytest.approx([1, 1, 1, 1 / 3, 1 / 100])
