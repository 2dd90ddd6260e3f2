"""Theorem 4 and Corollary 5, watched on a small strongly convex problem."""

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
    errors,
    federated,
    q,
    quantizer,
    step_size,
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
        theta = theta - step_size(t) * np.mean(CURVATURES * (theta - CENTRES) + noise, axis=0)
    *_, last = islice(federated(1, quantizer(None), 0), 100)
    np.testing.assert_allclose(last, theta, rtol=1e-12)


def test_parallel_sgds_rate() -> None:
    """Error * T stays about the same: O(1 / T). With O(1 / sqrt(T)) it would grow by 4."""
    iterations = (100, 400, 1600)
    scaled = [t * error for t, error in zip(iterations, errors(iterations, 1, None))]
    assert max(scaled) < 2 * min(scaled)
