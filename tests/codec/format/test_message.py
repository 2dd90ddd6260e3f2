"""Messages: what is written is read, and nothing else is."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfq import PayloadError
from fedfq.codec.format.layout import Spec, digest
from fedfq.codec.format.message import (
    EXACT,
    HELD,
    MOST_STEPS,
    NOTHING,
    Message,
    Step,
    hash_model,
    read_exact,
    write_exact,
)
from fedfq.codec.tensors import specs
from tests.updates import assert_identical, network

MODEL = network() | {
    "mask": np.arange(5) % 2 == 0,
    "empty": np.zeros((0, 4), np.float32),
    "one": np.float32(3).reshape(()),
}


@given(
    st.sampled_from((HELD, NOTHING, EXACT)),
    st.integers(0, 2**40),
    st.integers(0, 100),
    st.lists(st.tuples(st.integers(0, 1000), st.binary(max_size=50)), max_size=5),
    st.integers(0, 2**40),
    st.binary(max_size=300),
)
def test_what_is_written_is_read(
    start: int, base: int, since: int, steps: list[tuple[int, bytes]], more: int, last: bytes
) -> None:
    base = 0 if start == NOTHING else base
    held, digest = (base + since, b"01234567") if start == HELD else (base, b"")
    chain, version = [], base
    for gap, payload in steps:
        version += gap
        chain.append(Step(version, payload))
    exact = b"a model" if start == EXACT else b""
    message = Message(start, held, digest, base, exact, chain, version + more, b"abcdefgh", last)
    assert Message.parse(message.to_bytes()) == message


def test_a_message_that_is_cut_damaged_or_of_another_kind_is_refused() -> None:
    data = Message(HELD, 4, bytes(8), 3, b"", [Step(5, b"payload")], 9, bytes(8), b"last").to_bytes()
    for size in range(len(data)):
        with pytest.raises(PayloadError):
            Message.parse(data[:size])
    for place in range(len(data)):
        with pytest.raises(PayloadError) as caught:
            Message.parse(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert caught.value.reason == ("magic" if place < 2 else "version" if place == 2 else "checksum")


def test_there_are_not_too_many_steps() -> None:
    """Each of them takes a client the time of a model."""
    steps = [Step(version, b"") for version in range(MOST_STEPS + 1)]
    message = Message(HELD, 0, bytes(8), 0, b"", steps[1:], 99, bytes(8), b"")
    assert len(Message.parse(message.to_bytes()).steps) == MOST_STEPS
    with pytest.raises(PayloadError, match="65 steps"):
        Message.parse(message._replace(steps=steps).to_bytes())


def test_all_bits_of_a_model_in_fewer_bytes() -> None:
    packed = write_exact(MODEL)
    assert_identical(dict(sorted(read_exact(packed, specs(MODEL)).items())), dict(sorted(MODEL.items())))
    large = {"w": np.random.default_rng(0).standard_normal((200, 200)).astype(np.float32)}
    assert len(write_exact(large)) < 0.9 * large["w"].nbytes


def test_a_model_of_another_size_or_with_what_is_no_number_is_refused() -> None:
    packed = write_exact(MODEL)
    for layout in (specs(MODEL)[1:], [*specs(MODEL), Spec("more", (1,), np.dtype(np.float32))]):
        with pytest.raises(PayloadError, match="not one whole compressed block"):
            read_exact(packed, layout)
    with pytest.raises(PayloadError, match="not finite"):
        read_exact(write_exact({"w": np.array([np.inf], np.float32)}), specs({"w": np.zeros(1, np.float32)}))
    with pytest.raises(PayloadError, match="neither true nor false"):
        read_exact(write_exact({"w": np.array([2], np.uint8)}), specs({"w": np.zeros(1, bool)}))


def test_the_digest_is_of_bits_names_and_shapes_whatever_their_order() -> None:
    backwards = dict(reversed(MODEL.items()))
    assert hash_model(MODEL) == hash_model(backwards)
    assert hash_model(MODEL | {"mask": ~MODEL["mask"]}) != hash_model(MODEL)
    assert hash_model({"w": np.array([0.0], np.float32)}) != hash_model({"w": np.array([-0.0], np.float32)})
    assert hash_model({"w": np.zeros((2, 3), np.float32)}) != hash_model({"w": np.zeros((3, 2), np.float32)})
    assert hash_model({"w": np.zeros(3, np.float32)}) != hash_model({"v": np.zeros(3, np.float32)})
    empty = {"w": np.zeros(0, np.float32)}
    assert hash_model(empty) == hashlib.sha256(digest(specs(empty))).digest()[:8]
