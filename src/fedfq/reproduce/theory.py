"""Theorem 4 and Corollary 5 on two small problems, in seconds.

Theorem 4, for tau local steps per round and T = K tau steps in all. Strongly convex smooth f (Eq. 15):

    E ||theta_t - theta*||^2 <= k_0 tau^2 / T^2 + (k_1 q + c_1) tau / T
                                + k_2 (tau - 1)^2 / T + (k_3 q + c_3) (tau - 1) / T^2

so that the error falls as 1 / T in the end, with steps that fall as 1 / t. Non-convex smooth f (Eq. 16; its sum over k
is printed up to T - 1, and its tau as r):

    1/T sum_{k < K} sum_{t < tau} E ||grad f(mean of the clients' models)||^2
                             <= k_0 / sqrt(T) + (k_1 q + C_1) / sqrt(T) + k_2 (tau - 1) / T

with a step of the order of 1 / sqrt(T). Both grow with q, the bound on the quantizer's variance (Corollary 5).

Clients hold quadratics f_i(theta) = 1/2 (theta - c_i)^T H_i (theta - c_i) with different optima and curvatures, so that
they drift apart as in federated learning, and gradients are noisy. A common wave A cos(w theta) makes all of them
non-convex. Updates are quantised by Eq. 5 with a common norm: unbiased, and of variance at most q ||h||^2 with
q = d / 4^b (Lemma 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice

import numpy as np

from fedfq.codec.encoder.width_levels import dequantize_levels, stochastic_levels
from fedfq.types import Array

Quantizer = Callable[[Array, int, int], Array]  # of a round's updates, a row each, with a seed and the round's number

FIGURE = "theorem-4"  # the name of its files

D, CLIENTS, NOISE = 16, 8, 0.5
REPEATS = 8  # whose mean is taken for the expectation

_rng = np.random.default_rng(0)
CURVATURES = _rng.uniform(1.0, 3.0, (CLIENTS, D))  # mu = 1, L = 3
CENTRES = _rng.normal(size=(CLIENTS, D))
OPTIMUM = (CURVATURES * CENTRES).sum(0) / CURVATURES.sum(0)  # theta*
START = np.full(D, 3.0)
WAVE, FREQUENCY = 2.0 / 3.0, 3.0  # its curvature of up to 6 is more than the quadratics' 3
STEP = 1.0  # times 1 / sqrt(T)


def q(bits: int | None) -> float:
    """The bound of Lemma 1, d / 4^b; no bits: not quantised."""
    return 0.0 if bits is None else D / 4**bits


def quantizer(bits: int | None) -> Quantizer:
    """Eq. 5 with the same width for every entry, as ||h|| Q(h / ||h||), so that one call serves all clients."""
    if bits is None:
        return lambda updates, seed, k: updates
    widths = np.full(CLIENTS * D, bits, np.uint8)
    scales = np.full(9, np.nextafter(np.float32(1.0), np.float32(2.0)), np.float32)

    def quantize(updates: Array, seed: int, k: int) -> Array:
        norms = np.linalg.norm(updates, axis=1, keepdims=True)
        levels = stochastic_levels((updates / norms).astype(np.float32).ravel(), widths, scales, seed, k)
        return norms * dequantize_levels(levels, widths, scales).reshape(updates.shape)

    return quantize


def convex(theta: Array) -> Array:
    """The gradient of every client's f_i, without noise; `theta` is one model, or a row for every client."""
    return CURVATURES * (theta - CENTRES)


def wavy(theta: Array) -> Array:
    """The same for the non-convex problem."""
    return convex(theta) - WAVE * FREQUENCY * np.sin(FREQUENCY * theta)


def falling(t: int) -> float:
    """The step for Eq. 15."""
    return 2.0 / (t + 8.0)


def train_federated(
    gradients: Callable[[Array], Array], step_size: Callable[[int], float], tau: int, quantize: Quantizer, seed: int
) -> Iterator[Array]:
    """Eqs. 2 and 4, round by round: the mean of the clients' models before each of `tau` local steps.

    Before the first of them all clients have the global model.
    """
    rng = np.random.default_rng(seed)
    theta = START
    for k in count():
        eta = step_size(k * tau)
        local = np.tile(theta, (CLIENTS, 1))
        means = []
        for _ in range(tau):
            means.append(local.mean(0))
            local = local - eta * (gradients(local) + rng.normal(0.0, NOISE, local.shape))
        yield np.array(means)
        theta = theta + quantize(local - theta, seed, k).mean(0)


def errors(iterations: Sequence[int], tau: int, bits: int | None) -> list[float]:
    """Eq. 15: E ||theta - theta*||^2, about, after each of these numbers T of local steps: multiples of `tau`."""
    rounds = max(iterations) // tau + 1
    runs = [[means[0] for means in _rounds(rounds, convex, falling, tau, bits, seed)] for seed in range(REPEATS)]
    squares = ((np.array(runs) - OPTIMUM) ** 2).sum(-1).mean(0)
    return [float(squares[t // tau]) for t in iterations]


def stationarity(iterations: Sequence[int], tau: int, bits: int | None) -> list[float]:
    """Eq. 16: the mean of E ||grad f||^2 over T steps, about, for each of these T, with steps of their own size."""

    def mean(t: int, seed: int) -> float:
        path = np.concatenate(_rounds(t // tau, wavy, lambda _: STEP / t**0.5, tau, bits, seed))
        slopes = wavy(path[:, None, :]).mean(1)  # of f, the mean of all f_i
        return float((slopes**2).sum(-1).mean())

    return [float(np.mean([mean(t, seed) for seed in range(REPEATS)])) for t in iterations]


def _rounds(
    rounds: int,
    gradients: Callable[[Array], Array],
    step_size: Callable[[int], float],
    tau: int,
    bits: int | None,
    seed: int,
) -> list[Array]:
    return list(islice(train_federated(gradients, step_size, tau, quantizer(bits), seed), rounds))
