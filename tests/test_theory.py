"""Theorem 4 and Corollary 5, watched on a small strongly convex problem.

Clients hold quadratics f_i(theta) = 1/2 (theta - c_i)^T H_i (theta - c_i) with different optima and curvatures, so that
clients drift apart as in federated learning, and gradients are noisy. Updates are quantised by Eq. 5 with a common
norm: unbiased, and of variance at most q ||h||^2 with q = d / 4^b (Lemma 1). Steps fall as 1 / t, as the theorem's do.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from fedfq.codec.quantize import dequantize_levels, stochastic_levels

D, CLIENTS, NOISE = 16, 8, 0.5
REPEATS = 8  # whose mean is taken for the expectation

_rng = np.random.default_rng(0)
CURVATURES = _rng.uniform(1.0, 3.0, (CLIENTS, D))  # mu = 1, L = 3
CENTRES = _rng.normal(size=(CLIENTS, D))
OPTIMUM = (CURVATURES * CENTRES).sum(0) / CURVATURES.sum(0)
START = np.full(D, 3.0)

Quantizer = Callable[[np.ndarray, int], np.ndarray]


def identity(h: np.ndarray, seed: int) -> np.ndarray:
    return h


def eq_5(bits: int) -> Quantizer:
    widths = np.full(D, bits, np.uint8)

    def quantize(h: np.ndarray, seed: int) -> np.ndarray:
        h = h.astype(np.float32)
        scales = np.full(9, np.nextafter(np.float32(np.linalg.norm(h)), np.float32(np.inf)), np.float32)
        return dequantize_levels(stochastic_levels(h, widths, scales, seed), widths, scales)

    return quantize


def federated(iterations: int, tau: int, quantize: Quantizer, seed: int) -> np.ndarray:
    """theta after T = `iterations` local steps of each client: Eqs. 2 and 4."""
    rng = np.random.default_rng(seed)
    theta = START
    for k in range(iterations // tau):
        eta = 2.0 / (k * tau + 8.0)
        local = np.tile(theta, (CLIENTS, 1))
        for _ in range(tau):
            gradients = CURVATURES * (local - CENTRES) + rng.normal(0.0, NOISE, local.shape)
            local = local - eta * gradients
        updates = local - theta
        theta = theta + np.mean(
            [quantize(h, (seed * iterations + k) * CLIENTS + i) for i, h in enumerate(updates)], axis=0
        )
    return theta


@cache
def error(iterations: int, tau: int, bits: int | None) -> float:
    """E ||theta - theta*||^2, about; no bits means q = 0."""
    quantize = identity if bits is None else eq_5(bits)
    thetas = [federated(iterations, tau, quantize, seed) for seed in range(REPEATS)]
    return float(np.mean([((theta - OPTIMUM) ** 2).sum() for theta in thetas]))


@pytest.mark.parametrize("bits", [None, 2])
def test_theorem_4_the_error_falls_as_iterations_grow(bits: int | None) -> None:
    errors = [error(iterations, 5, bits) for iterations in (100, 400, 1600)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]  # O(1 / T) gives a fourth each


def test_theorem_4_more_local_steps_cost_accuracy_at_the_same_number_of_iterations() -> None:
    errors = [error(400, tau, 2) for tau in (1, 5, 20)]
    assert errors == sorted(errors) and errors[2] > 2 * errors[0]


@pytest.mark.parametrize("iterations", [100, 400])
def test_corollary_5_the_error_rises_with_q(iterations: int) -> None:
    """q = d / 4^b: 4, 1, 1/4 and 0."""
    errors = [error(iterations, 5, bits) for bits in (1, 2, 3)] + [error(iterations, 5, None)]
    assert errors == sorted(errors, reverse=True) and errors[0] > 2 * errors[-1]


def test_corollary_5_the_excess_is_about_proportional_to_q() -> None:
    """The term k_1 q tau / T: from one bit to the next, q falls to a fourth."""
    excess = [error(400, 5, bits) - error(400, 5, None) for bits in (1, 2)]
    assert 2 < excess[0] / excess[1] < 8


def test_without_quantization_and_local_steps_it_is_parallel_sgd() -> None:
    rng = np.random.default_rng(0)
    theta = START
    for t in range(100):
        noise = rng.normal(0.0, NOISE, (CLIENTS, D))
        theta = theta - 2.0 / (t + 8.0) * np.mean(CURVATURES * (theta - CENTRES) + noise, axis=0)
    np.testing.assert_allclose(federated(100, 1, identity, 0), theta, rtol=1e-12)


def test_parallel_sgds_rate() -> None:
    """Error * T stays about the same: O(1 / T). With O(1 / sqrt(T)) it would grow by 4."""
    scaled = [iterations * error(iterations, 1, None) for iterations in (100, 400, 1600)]
    assert max(scaled) < 2 * min(scaled)
