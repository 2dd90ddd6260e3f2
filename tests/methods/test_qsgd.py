"""QSGD: a payload by hand, the variance that the paper bounds and the size of Theorem 3.2."""

import math
import struct

import numpy as np
import pytest

from fedfq.methods import make
from tests.methods.cases import encode, payload_of
from tests.updates import draw


def test_a_payload_by_hand():
    """(3, -4) has norm 5, at s = 5 the levels 3, -4: two of them (3 in omega), gaps 1 and 1, signs 0 and 1, 3 and 4."""
    h = np.array([3, -4], np.float32)
    payload = payload_of(encode(make("qsgd", levels=5), {"h": h}))
    assert payload == struct.pack("<f", 5.0) + int("110" + "0" + "0" + "0" + "1" + "110" + "101000", 2).to_bytes(
        2, "big"
    )
    assert make("qsgd", levels=5).decode(payload, {"h": h})["h"].tolist() == [3, -4]


def test_buckets_end_with_their_tensor():
    update = {"a": np.full(5, 2, np.float32), "b": np.full(3, 1e6, np.float32)}
    made = make("qsgd", levels=1000, bucket=4)
    payload = payload_of(encode(made, update))
    norms = struct.unpack("<3f", payload[:12])
    np.testing.assert_allclose(norms, [4, 2, 1e6 * math.sqrt(3)], rtol=1e-6)
    for name, array in made.decode(payload, update).items():
        np.testing.assert_allclose(array, update[name], rtol=0.01)


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "constant"])
@pytest.mark.parametrize("n, levels", [(64, 1), (512, 1), (512, 16), (512, 22), (4096, 4)])
def test_the_variance_is_within_the_bound(kind: str, n: int, levels: int):
    """E ||Q(v) - v||^2 <= min(n / s^2, sqrt(n) / s) ||v||^2."""
    v = draw(kind, (n,))
    made = make("qsgd", levels=levels, bucket=n)
    errors = [
        np.square(made.decode(payload_of(encode(made, {"v": v}, seed)), {"v": v})["v"].astype(np.float64) - v).sum()
        for seed in range(60)
    ]
    bound = min(n / levels**2, math.sqrt(n) / levels) * np.square(v.astype(np.float64)).sum()
    assert np.mean(errors) < bound + 3 * np.std(errors) / math.sqrt(60)


@pytest.mark.parametrize("kind", ["normal", "laplace", "constant"])
@pytest.mark.parametrize("n, levels", [(10_000, 1), (10_000, 4), (4096, 16)])
def test_the_size_is_within_the_bound(kind: str, n: int, levels: int):
    """Theorem 3.2, without its o(1)."""
    v = draw(kind, (n,))
    sparse = levels * (levels + math.sqrt(n))
    bound = (3 + 1.5 * math.log2(2 * (levels**2 + n) / sparse)) * sparse + 32
    made = make("qsgd", levels=levels, bucket=n)
    bits = [8 * len(payload_of(encode(made, {"v": v}, seed))) for seed in range(20)]
    assert np.mean(bits) < bound


def test_what_is_claimed_is_what_it_takes_but_for_the_count():
    upload = encode(make("qsgd"), {"v": draw("normal", (100_000,))})
    assert 0 < 8 * len(payload_of(upload)) - upload.claimed_bits < 40
