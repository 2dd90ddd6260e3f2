"""AQG-style: the grid, the width, silence, and that both sides remember the same."""

import struct

import numpy as np
import pytest

from fedfq.methods import make
from fedfq.methods.aqg import MOTION, Remembering
from tests.methods.cases import encode, mixed, order, payload_of

AQG = make("aqg")
H = np.array([3.0, -1.0, 0.5, 0.0], np.float32)


def test_a_payload_by_hand():
    """r = 3 on a grid of two bits: -3, -1, 1, 3. A motion of 4 allows an error of d (r / 3)^2 = 4."""
    upload = AQG.encode({"h": H}, {}, order(announcement=MOTION.pack(4.0)))
    assert upload.payload == bytes([2]) + struct.pack("<f", 3.0) + bytes([0b11_01_10_10])
    assert AQG.decode(payload_of(upload), {"h": H})["h"].tolist() == [3, -1, 1, 1]
    assert upload.claimed_bits == 32 + 2 * 4


@pytest.mark.parametrize("motion, bits", [(0.0, 8), (0.001, 8), (0.17, 4), (3.9, 4), (4.1, 2)])
def test_the_width_is_the_smallest_within_the_motion(motion: float, bits: int):
    upload = AQG.encode({"h": H}, {}, order(announcement=MOTION.pack(motion)))
    assert payload_of(upload)[0] == bits


def test_an_update_that_did_not_change_is_not_sent_again():
    memory = encode(AQG, {"h": H}).memory
    again = AQG.encode({"h": H}, memory, order(round=2))
    assert again.payload is None and again.claimed_bits == 0 and again.memory is memory
    moved = AQG.encode({"h": H + 1}, memory, order(round=2))
    assert moved.payload is not None


def test_a_model_that_moves_far_allows_silence():
    memory = encode(AQG, {"h": H}).memory
    assert AQG.encode({"h": H + 1}, memory, order(round=2, announcement=MOTION.pack(3.0))).payload is not None
    assert AQG.encode({"h": H + 1}, memory, order(round=2, announcement=MOTION.pack(5.0))).payload is None


def test_silence_has_an_end():
    memory = encode(AQG, {"h": H}).memory
    assert AQG.encode({"h": H}, memory, order(round=100)).payload is None
    assert AQG.encode({"h": H}, memory, order(round=101)).payload is not None


def test_the_server_uses_a_silent_clients_last_update():
    server = AQG.server({"h": H})
    first = encode(AQG, {"h": H})
    server.receive(0, first.payload, 1.0)
    once = server.finish(1.0)
    server.receive(0, None, 1.0)
    np.testing.assert_array_equal(server.finish(1.0)["h"], once["h"])
    server.receive(1, None, 1.0)  # never heard of
    assert not server.finish(1.0)["h"].any()


def test_the_announced_motion_by_hand():
    """0.08 times the squares of the last ten changes, over the square of the number of clients."""
    server = AQG.server({"h": np.zeros(2, np.float32)})
    assert server.announce({0: 1.0}) == {0: MOTION.pack(0.0)}
    update = {"h": np.array([3.0, 4.0], np.float32)}
    memory = {}
    for number in range(12):
        upload = AQG.encode({"h": update["h"] + number}, memory, order(round=number))
        memory = upload.memory
        server.receive(0, upload.payload, 1.0)
        server.finish(1.0)
    squares = sum((3 + number) ** 2 + (4 + number) ** 2 for number in range(2, 12))
    told = server.announce({0: 1.0, 1: 1.0})
    assert MOTION.unpack(told[1])[0] == pytest.approx(0.08 * squares / 4, rel=1e-2)


def test_both_sides_remember_the_same_to_the_bit():
    """Also where a tensor is float16, and after refusals."""
    server = AQG.server(mixed())
    assert isinstance(server, Remembering)
    memory = {}
    for number in range(6):
        upload = AQG.encode(mixed(number), memory, order(round=number, announcement=server.announce({0: 1.0})[0]))
        if number == 3:  # lost on the way: both stay where they are
            continue
        server.receive(0, upload.payload, 1.0)
        server.finish(1.0)
        memory = upload.memory
        known = np.concatenate([server.state_dict()[f"0/{name}"].reshape(-1) for name in ("conv.weight", "half")])
        assert known.tobytes() == memory["sent"][: known.size].tobytes()


@pytest.mark.parametrize("told", [b"\0", b"\0" * 9, MOTION.pack(-1.0), MOTION.pack(float("nan"))])
def test_an_announcement_that_says_nothing_is_refused(told):
    with pytest.raises(ValueError, match="announced motion"):
        AQG.encode({"h": H}, {}, order(announcement=told))
