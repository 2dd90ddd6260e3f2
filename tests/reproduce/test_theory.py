"""Theorem 4 and Corollary 5, watched on a small strongly convex problem and on one that is not convex."""

from itertools import islice

import numpy as np
import pytest

from fedfq.reproduce.theory import (
    CENTRES,
    CLIENTS,
    CURVATURES,
    NOISE,
    START,
    D,
    convex,
    errors,
    falling,
    q,
    quantizer,
    stationarity,
    train_federated,
    wavy,
)


@pytest.mark.parametrize("bits", [None, 2])
def test_theorem_4_the_error_falls_as_iterations_grow(bits: int | None) -> None:
    found = errors((100, 400, 1600), 5, bits)
    assert found[0] > 2 * found[1] > 4 * found[2]  # O(1 / T) gives a fourth each


def test_theorem_4_more_local_steps_cost_accuracy_at_the_same_number_of_iterations() -> None:
    found = [errors([400], tau, 2)[0] for tau in (1, 5, 20)]
    assert found == sorted(found) and found[2] > 2 * found[0]


def test_corollary_5_the_error_rises_with_q() -> None:
    """q = d / 4^b: 4, 1, 1/4 and 0."""
    widths = (1, 2, 3, None)
    assert [q(bits) for bits in widths] == [4, 1, 1 / 4, 0]
    for found in zip(*(errors((100, 400), 5, bits) for bits in widths)):
        assert list(found) == sorted(found, reverse=True) and found[0] > 2 * found[-1]


def test_corollary_5_the_excess_is_about_proportional_to_q() -> None:
    """The term k_1 q tau / T: from one bit to the next, q falls to a fourth."""
    one, two, without = (errors([400], 5, bits)[0] for bits in (1, 2, None))
    assert 2 < (one - without) / (two - without) < 8


def test_without_quantization_and_local_steps_it_is_parallel_sgd() -> None:
    rng = np.random.default_rng(0)
    theta = START
    for t in range(100):
        noise = rng.normal(0.0, NOISE, (CLIENTS, D))
        theta = theta - falling(t) * np.mean(CURVATURES * (theta - CENTRES) + noise, axis=0)
    *_, last = islice(train_federated(convex, falling, 1, quantizer(None), 0), 101)
    np.testing.assert_allclose(last, [theta], rtol=1e-12)


def test_parallel_sgds_rate() -> None:
    """Error * T stays about the same: O(1 / T). With O(1 / sqrt(T)) it would grow by 4."""
    iterations = (100, 400, 1600)
    scaled = [t * error for t, error in zip(iterations, errors(iterations, 1, None))]
    assert max(scaled) < 2 * min(scaled)


def test_the_wavy_problem_is_not_convex() -> None:
    """A convex function's slope never falls along a line; this one's does, for every client in every coordinate."""
    here, further = (wavy(np.full(D, at)) for at in (0.0, 0.2))
    assert (further < here).all()


@pytest.mark.parametrize("bits", [None, 2])
def test_theorem_4_without_convexity_gradients_fall_as_the_root_of_iterations(bits: int | None) -> None:
    """Eq. 16: their mean times sqrt(T) stays about the same; with 1 / T it would fall to a fourth."""
    iterations = (200, 800, 3200)
    scaled = [t**0.5 * mean for t, mean in zip(iterations, stationarity(iterations, 5, bits))]
    assert max(scaled) < 1.5 * min(scaled)


def test_corollary_5_without_convexity_gradients_rise_with_q() -> None:
    for found in zip(*(stationarity((100, 400), 5, bits) for bits in (1, 2, 3, None))):
        assert list(found) == sorted(found, reverse=True) and found[0] > 1.3 * found[-1]


def test_theorem_4_without_convexity_more_local_steps_cost() -> None:
    """The term k_2 (tau - 1) / T."""
    found = [stationarity([400], tau, None)[0] for tau in (1, 5, 20)]
    assert found == sorted(found)
