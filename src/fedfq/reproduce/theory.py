"""Theorem 4 and Corollary 5 on a small strongly convex problem, in seconds.

Theorem 4, for strongly convex smooth f, tau local steps a round and T = K tau steps in all:

    E ||theta_t - theta*||^2 <= k_0 tau^2 / T^2 + (k_1 q + c_1) tau / T
                                + k_2 (tau - 1)^2 / T + (k_3 q + c_3) (tau - 1) / T^2

so that the error falls as 1 / T in the end, and (Corollary 5) grows with q, the bound on the quantizer's variance.

Clients hold quadratics f_i(theta) = 1/2 (theta - c_i)^T H_i (theta - c_i) with different optima and curvatures, so that
they drift apart as in federated learning, and gradients are noisy. Updates are quantised by Eq. 5 with a common norm:
unbiased, and of variance at most q ||h||^2 with q = d / 4^b (Lemma 1). Steps fall as 1 / t, as the theorem's do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import numpy as np

from fedfq.codec.quantize import dequantize_levels, stochastic_levels

Array = np.ndarray[Any, np.dtype[Any]]
Quantizer = Callable[[Array, int, int], Array]  # of an update, with a seed and the number of a stream

FIGURE = "theorem-4"  # the name of its files

D, CLIENTS, NOISE = 16, 8, 0.5
REPEATS = 8  # whose mean is taken for the expectation

_rng = np.random.default_rng(0)
CURVATURES = _rng.uniform(1.0, 3.0, (CLIENTS, D))  # mu = 1, L = 3
CENTRES = _rng.normal(size=(CLIENTS, D))
OPTIMUM = (CURVATURES * CENTRES).sum(0) / CURVATURES.sum(0)  # theta*
START = np.full(D, 3.0)


def q(bits: int | None) -> float:
    """The bound of Lemma 1, d / 4^b; no bits: not quantised."""
    return 0.0 if bits is None else D / 4**bits


def quantizer(bits: int | None) -> Quantizer:
    """Eq. 5 with the same width for every entry."""
    if bits is None:
        return lambda h, seed, stream: h
    widths = np.full(D, bits, np.uint8)

    def quantize(h: Array, seed: int, stream: int) -> Array:
        h = h.astype(np.float32)
        scales = np.full(9, np.nextafter(np.float32(np.linalg.norm(h)), np.float32(np.inf)), np.float32)
        return dequantize_levels(stochastic_levels(h, widths, scales, seed, stream), widths, scales)

    return quantize


def step_size(t: int) -> float:
    return 2.0 / (t + 8.0)


def federated(tau: int, quantize: Quantizer, seed: int) -> Iterator[Array]:
    """theta after every round of `tau` local steps of each client: Eqs. 2 and 4."""
    rng = np.random.default_rng(seed)
    theta = START
    for k in count():
        eta = step_size(k * tau)
        local = np.tile(theta, (CLIENTS, 1))
        for _ in range(tau):
            gradients = CURVATURES * (local - CENTRES) + rng.normal(0.0, NOISE, local.shape)
            local = local - eta * gradients
        updates = local - theta
        theta = theta + np.mean([quantize(h, seed, k * CLIENTS + i) for i, h in enumerate(updates)], axis=0)
        yield theta


def errors(iterations: Sequence[int], tau: int, bits: int | None) -> list[float]:
    """E ||theta - theta*||^2, about, after each of these numbers T of local steps: multiples of `tau`."""
    rounds = max(iterations) // tau
    runs = [list(islice(federated(tau, quantizer(bits), seed), rounds)) for seed in range(REPEATS)]
    squares = ((np.array(runs) - OPTIMUM) ** 2).sum(-1).mean(0)
    return [float(squares[t // tau - 1]) for t in iterations]
