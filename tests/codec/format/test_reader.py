"""Untrusted bytes: numbers come back as they were written, and nothing outside the bytes is ever read."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedfq import PayloadError
from fedfq.codec.format.reader import ByteReader, varint


@given(st.integers(0, 2**63 - 1))
@example(0)
@example(127)
@example(128)
@example(2**63 - 1)
def test_varint_round_trip(value: int) -> None:
    written = varint(value)
    assert len(written) == max(1, -(-value.bit_length() // 7))
    reader = ByteReader(written + b"\xff")
    assert (reader.varint(), reader.left()) == (value, 1)


def test_varint_examples() -> None:
    assert varint(0) == b"\x00"
    assert varint(300) == b"\xac\x02"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (b"\x80", "truncated"),
        (b"\x80\x00", "malformed"),  # 0, a byte too long
        (b"\xff\x80\x00", "malformed"),
        (b"\xff" * 9, "malformed"),  # more than 63 bits
        (b"\xff" * 20, "malformed"),
        (b"\x80" * 9 + b"\x01", "malformed"),
    ],
)
def test_numbers_that_no_encoder_writes(data: bytes, reason: str) -> None:
    with pytest.raises(PayloadError) as caught:
        ByteReader(data).varint()
    assert caught.value.reason == reason


def test_a_reader_stays_inside() -> None:
    reader = ByteReader(b"abc")
    assert bytes(reader.take(2)) == b"ab"
    with pytest.raises(PayloadError, match="2 bytes expected, 1 left"):
        reader.take(2)
    with pytest.raises(PayloadError, match="truncated|expected"):
        reader.take(2**62)
    assert reader.byte() == ord("c")
    with pytest.raises(PayloadError):
        reader.byte()
