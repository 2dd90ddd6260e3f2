"""Bit streams: codes worked out by hand, lengths from the literature, and bytes that end too early."""

import numpy as np
import pytest

from fedfq.codec.errors import PayloadError
from fedfq.methods.bits import (
    BitReader,
    Codes,
    fields,
    golomb,
    golomb_bits,
    golomb_parameter,
    omega,
    read_fields,
    write,
)
from fedfq.methods.wire import Reader

# Elias (1975), as in any table of the code
OMEGA = {
    1: "0",
    2: "100",
    3: "110",
    4: "101000",
    5: "101010",
    7: "101110",
    8: "1110000",
    15: "1111110",
    16: "10100100000",
    17: "10100100010",
    100: "1011011001000",
}


def as_text(codes: Codes) -> str:
    return "".join(f"{value:0{length}b}" for value, length in zip(codes.values.tolist(), codes.lengths.tolist()))


def reader(text: str) -> BitReader:
    """Of these bits and the zeros that fill the last byte."""
    padded = text + "0" * (-len(text) % 8)
    return BitReader(Reader(bytes(int(padded[i : i + 8], 2) for i in range(0, len(padded), 8))))


@pytest.mark.parametrize("number, code", OMEGA.items())
def test_elias_omega(number: int, code: str):
    assert as_text(omega(np.array([number]))) == code
    assert reader(code).omega(1).tolist() == [number]


def test_elias_omega_of_many_numbers():
    numbers = np.concatenate([np.arange(1, 3000), 2 ** np.arange(32), 2 ** np.arange(1, 33) - 1])
    stream = BitReader(Reader(write(omega(numbers))))
    assert (stream.omega(numbers.size) == numbers).all()
    stream.close()


def test_golomb_by_hand():
    """Positions 0, 2, 7 are gaps less one of 0, 1, 4: with b = 1, 1|0, 1|1 and 001|0."""
    codes = golomb(np.array([0, 2, 7]), 1)
    assert as_text(codes) == "10" + "11" + "0010"
    assert write(codes) == bytes([0b10110010])
    assert reader("10110010").golomb(3, 1, 8).tolist() == [0, 2, 7]


def test_golomb_with_b_0_is_a_bitmap():
    assert as_text(golomb(np.array([1, 2, 5]), 0)) == "011001"


def test_golombs_parameter_and_length():
    """The formulas of STC; 2^b* - 1 < 0.48 / p < 2^b*."""
    assert [golomb_parameter(p) for p in (1, 0.5, 0.01, 1 / 400)] == [0, 0, 6, 8]
    assert golomb_bits(1 / 400) == pytest.approx(8 + 1 / (1 - 0.9975**256))
    for p in (0.4, 0.1, 0.01, 1 / 400):
        places = np.flatnonzero(np.random.default_rng(1).random(1_000_000) < p)
        bits = golomb(places, golomb_parameter(p)).bits
        assert bits / places.size == pytest.approx(golomb_bits(p), rel=0.02)
        entropy = -np.log2(p) - (1 - p) / p * np.log2(1 - p)
        assert entropy <= golomb_bits(p) < entropy + 0.25


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 10, 16, 23, 24])
@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_fields(width: int, count: int):
    values = np.random.default_rng(width).integers(0, 2**width, count)
    packed = write(fields(values, width))
    assert len(packed) == -(-width * count // 8)
    assert (read_fields(Reader(packed), count, width, 2**width - 1) == values).all()


def test_streams_follow_each_other():
    places, levels = np.array([3, 4, 900]), np.array([1, 17, 3])
    packed = write(golomb(places, 5), fields(np.array([1, 0, 1]), 1), omega(levels))
    payload = Reader(packed + b"rest")
    bits = BitReader(payload)
    assert bits.golomb(3, 5, 901).tolist() == places.tolist()
    assert bits.fields(3, 1).tolist() == [1, 0, 1]
    assert bits.omega(3).tolist() == levels.tolist()
    bits.close()
    assert payload.take(4) == b"rest"


def test_a_very_long_gap():
    places = np.array([5, 1_000_000])
    packed = write(golomb(places, 0))
    assert BitReader(Reader(packed)).golomb(2, 0, 1_000_001).tolist() == places.tolist()


@pytest.mark.parametrize(
    "reason, read",
    [
        ("truncated", lambda: reader("10110010").golomb(5, 1, 100)),
        ("truncated", lambda: reader("00000000").golomb(2, 1, 100)),
        ("malformed", lambda: reader("10110010").golomb(3, 1, 7)),
        ("malformed", lambda: reader("0" * 40 + "1" * 40).golomb(1, 30, 2**31)),
        ("truncated", lambda: reader("11111111").omega(1)),
        ("truncated", lambda: reader("00000000").omega(9)),
        ("malformed", lambda: reader("11" + "1111" + "1" * 16 + "1" * 64).omega(1)),
        ("truncated", lambda: reader("00000000").fields(2**60, 24)),
        ("malformed", lambda: read_fields(Reader(b"\x07"), 2, 4, 6)),
        ("malformed", lambda: read_fields(Reader(b"\x10\x01"), 3, 5, 31)),
        ("malformed", lambda: read_fields(Reader(b"\x01"), 1, 4, 15)),
    ],
)
def test_bits_that_no_writer_writes(reason, read):
    with pytest.raises(PayloadError) as caught:
        read()
    assert caught.value.reason == reason
