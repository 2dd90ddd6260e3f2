"""Parts: adding up what was decoded of a payload is the same as decoding it."""

import numpy as np

from fedfq import Accumulator, decode, encode, inspect
from tests.updates import low_rank


def test_accumulating_factors_equals_decoding_them() -> None:
    shape = (40, 30, 5, 5)
    updates = [{"w": low_rank(200, 150, 5, 0.1, seed).reshape(shape)} for seed in range(3)]
    payloads = [encode(update, ratio=50) for update in updates]
    assert any(inspect(payload).tensors[0].rank for payload in payloads)
    total = Accumulator(updates[0])
    for weight, payload in enumerate(payloads, 1):
        total.add(payload, weight)
    mean = sum(weight * decode(payload)["w"].astype(np.float64) for weight, payload in enumerate(payloads, 1)) / 6
    np.testing.assert_allclose(total.mean()["w"], mean, rtol=1e-4, atol=1e-5)
