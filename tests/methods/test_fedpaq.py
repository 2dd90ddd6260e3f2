"""FedPAQ: a payload by hand, its bits and its variance."""

import math
import struct

import numpy as np
import pytest

from fedfq.methods import make
from tests.methods.cases import encode, payload_of
from tests.updates import draw


def test_a_payload_by_hand():
    """(3, -4) has norm 5; with s = 5 the levels are 3 and -4, sent as 8 and 1 in four bits each."""
    h = np.array([3, -4], np.float32)
    payload = payload_of(encode(make("fedpaq", levels=5), {"h": h}))
    assert payload == struct.pack("<f", 5.0) + b"\x81"
    assert make("fedpaq", levels=5).decode(payload, {"h": h})["h"].tolist() == [3, -4]


@pytest.mark.parametrize("levels, bits", [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (8, 5), (127, 8)])
def test_symbols_take_the_bits_they_need(levels: int, bits: int):
    assert bits == math.ceil(math.log2(2 * levels + 1))
    upload = encode(make("fedpaq", levels=levels), {"h": draw("normal", (800,))})
    assert upload.claimed_bits == 8 * len(payload_of(upload)) == 32 + 800 * bits


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "constant"])
@pytest.mark.parametrize("levels", [1, 7, 40])
def test_the_variance_is_within_the_bound(kind: str, levels: int):
    """q ||h||^2 with q = min(n / s^2, sqrt(n) / s)."""
    h = draw(kind, (500,))
    made = make("fedpaq", levels=levels)
    errors = [
        np.square(made.decode(payload_of(encode(made, {"h": h}, seed)), {"h": h})["h"].astype(np.float64) - h).sum()
        for seed in range(60)
    ]
    bound = min(500 / levels**2, math.sqrt(500) / levels) * np.square(h.astype(np.float64)).sum()
    assert np.mean(errors) < bound + 3 * np.std(errors) / math.sqrt(60)


def test_the_largest_magnitude_as_norm_is_never_clipped_and_better():
    h = draw("laplace", (20_000,))
    errors = {}
    for norm in ("l2", "max"):
        made = make("fedpaq", norm=norm)
        errors[norm] = np.square(made.decode(payload_of(encode(made, {"h": h})), {"h": h})["h"] - h).mean()
    assert errors["max"] < np.abs(h).max() ** 2 / (4 * 7**2)
    assert errors["max"] < 0.2 * errors["l2"]
