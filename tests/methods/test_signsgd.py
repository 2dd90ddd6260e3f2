"""signSGD: the vote by hand, and the contraction of EF-signSGD."""

import struct

import numpy as np
import pytest

from fedfq.methods import make
from tests.methods.cases import encode, payload_of
from tests.updates import draw


def test_a_payload_by_hand():
    h = np.array([1, -2, 0, -5], np.float32)
    payload = payload_of(encode(make("signsgd"), {"h": h}))
    assert payload == struct.pack("<f", 2.0) + bytes([0b0101_0000])
    assert make("signsgd").decode(payload, {"h": h})["h"].tolist() == [2, -2, 2, -2]


def test_the_majority_decides():
    """Weights 1, 1, 3 and sizes 1, 2, 4: eta is their mean, 3; a tie is no step."""
    made, like = make("signsgd"), {"h": np.zeros(4, np.float32), "n": np.array(0)}
    server = made.server(like)
    votes = [([1, 1, -1, -1], 1.0), ([2, 2, -2, 2], 1.0), ([-4, 4, 4, 4], 3.0)]
    for client, (h, weight) in enumerate(votes):
        update = {"h": np.array(h, np.float32), "n": np.array(10)}
        server.receive(client, encode(made, update).payload, weight)
    change = server.finish(1.0)
    assert change["h"].tolist() == [-3, 3, 3, 3]
    assert change["n"] == 10
    for client, h in enumerate(([1, -1, 1, 1], [1, 1, -1, 1])):
        server.receive(client, encode(made, {"h": np.array(h, np.float32), "n": np.array(1)}).payload, 1.0)
    assert server.finish(1.0)["h"].tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("kind", ["normal", "laplace", "heavy tails", "sparse"])
def test_with_memory_it_contracts_as_the_paper_says(kind: str):
    """||p - C(p)||^2 = (1 - ||p||_1^2 / (d ||p||^2)) ||p||^2 (Karimireddy et al.), zeros apart."""
    p = draw(kind, (5000,))
    left = encode(make("signsgd", error_feedback=True), {"p": p}).memory["p"].astype(np.float64)
    energy = np.square(p.astype(np.float64)).sum()
    density = np.abs(p.astype(np.float64)).sum() ** 2 / (p.size * energy)
    assert np.square(left).sum() == pytest.approx((1 - density) * energy, rel=1e-4)


def test_with_memory_the_server_takes_the_mean():
    made = make("signsgd", error_feedback=True)
    server = made.server({"h": np.zeros(2, np.float32)})
    for client, h in enumerate(([1, 1], [-3, 3])):
        server.receive(client, encode(made, {"h": np.array(h, np.float32)}).payload, 1.0)
    assert server.finish(1.0)["h"].tolist() == [-1, 2]
