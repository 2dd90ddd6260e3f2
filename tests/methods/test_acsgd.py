"""AC-SGD: how a budget is spent, in both forms."""

import math

import numpy as np
import pytest

from fedfq.methods import make
from tests.methods.cases import encode, order, payload_of
from tests.updates import draw

SIMPLECNN = 1_068_298


def test_the_variant_of_fedfqs_table():
    """C = ceil(1.024 d) for SimpleCNN: v = log2(2 ln 2 C) / 2 = 10.27, so 10 bits for each of C / v entries."""
    budget = math.ceil(1.024 * SIMPLECNN)
    v = 0.5 * math.log2(2 * math.log(2) * budget)
    spent = make("acsgd-topk")._split(SIMPLECNN)
    assert (spent.bits, spent.entries, spent.levels) == (10, math.floor(budget / v), 511)
    assert spent.entries == 106_557
    h = draw("laplace", (10_000,))
    assert encode(make("acsgd-topk"), {"h": h}).claimed_bits == 10_240


def test_the_variant_sends_the_largest_and_keeps_the_rest():
    h = draw("laplace", (10_000,))
    made = make("acsgd-topk")
    upload = encode(made, {"h": h})
    q = made.decode(payload_of(upload), {"h": h})["h"]
    assert np.abs(h[q == 0]).max() <= np.sort(np.abs(h))[-made._split(h.size).entries]
    np.testing.assert_allclose(q + upload.memory["h"], h, atol=1e-6)
    assert np.abs(upload.memory["h"][q != 0]).max() <= np.abs(h).max() / made._split(h.size).levels


def test_the_authors_budget_at_the_end_of_training():
    """C = 1.024 d: b = floor(log2(C) / 2 + 1/4) = 10 bits, k = (C - 32) / (b + log2 d)."""
    made = make("acsgd", rounds=50)
    budget = 1.024 * SIMPLECNN
    spent = made._split(SIMPLECNN, 1.0, 50)
    assert (spent.bits, spent.entries) == (10, int((budget - 32) / (10 + math.log2(SIMPLECNN))))
    assert made._split(SIMPLECNN, 1.0, 70) == spent


@pytest.mark.parametrize("rounds_left, norm", [(0, 1.0), (20, 1.0), (20, 0.5), (99, 3.0)])
def test_the_claim_is_the_budget(rounds_left: int, norm: float):
    """r d alpha^((N - n) / 2) ||h|| / ||first h||, to within one entry."""
    h = draw("laplace", (20_000,))
    made = make("acsgd", rounds=100, alpha=0.98)
    memory = made.encode({"h": h}, {}, order()).memory
    upload = made.encode({"h": np.float32(norm) * h}, memory, order(round=100 - rounds_left))
    budget = 1.024 * h.size * 0.98 ** (rounds_left / 2) * norm
    assert budget - 40 < upload.claimed_bits <= budget
    assert 8 * len(payload_of(upload)) < upload.claimed_bits


def test_entries_are_drawn_anew_for_every_seed_and_scaled_up():
    h = np.ones(5000, np.float32)
    made = make("acsgd")
    first, second = (made.decode(payload_of(encode(made, {"h": h}, seed)), {"h": h})["h"] for seed in (1, 2))
    assert (first != 0).sum() == (second != 0).sum() < 1000
    assert ((first != 0) & (second != 0)).sum() < 100
    assert first.mean() == pytest.approx(1, rel=0.1)
