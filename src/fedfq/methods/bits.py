"""Bits in a byte string, the first bit the highest: fields of one width, Golomb codes, Elias codes.

Codes are written an array at a time: a value, and the number of bits it takes, with zeros in front. So q zeros and a
one (a unary number) are the value 1 in q + 1 bits, however large q is. Reading never goes beyond the last byte, and
allocates no more than eight bytes for every bit that is there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedfq.codec.errors import PayloadError
from fedfq.codec.kernels import Int, U, kernel
from fedfq.types import Array

from .wire import Reader

MAX_FIELD_BITS = 24  # of a field: shifted by up to 7 it must fit into a window of 32
MAX_NUMBER_BITS = 32  # of a number in Elias' code: no index of a tensor needs more
ENDED, MALFORMED = -1, -2
GOLDEN_RATIO = (math.sqrt(5) + 1) / 2


class Codes(NamedTuple):
    """Values and the bits each takes."""

    values: Array
    lengths: Array

    @property
    def bits(self) -> int:
        return int(self.lengths.sum())


def fields(values: Array, width: int) -> Codes:
    """Every value in `width` bits."""
    return Codes(values.astype(np.uint64), np.full(values.size, width, np.int64))


def golomb_parameter(p: float) -> int:
    """b* for gaps between entries that are sent with probability p: 2^b* is near 0.7 / p."""
    if not 0 < p < 1:
        return 0
    return max(0, 1 + math.floor(math.log2(math.log(GOLDEN_RATIO - 1) / math.log1p(-p))))


def golomb_bits(p: float) -> float:
    """The expected bits of a position: b* + 1 / (1 - (1 - p)^(2^b*))."""
    b = golomb_parameter(p)
    return b + 1 / -math.expm1(2.0**b * math.log1p(-p)) if p < 1 else 1.0


def golomb(positions: Array, b: int) -> Codes:
    """Ascending positions as gaps: gap - 1 = q 2^b + r becomes q zeros, a one, and r in b bits."""
    gaps: Array = np.diff(positions.astype(np.int64), prepend=-1) - 1
    return Codes((gaps & (2**b - 1) | 1 << b).astype(np.uint64), (gaps >> b) + 1 + b)


def omega(numbers: Array) -> Codes:
    """Elias' recursive code (omega) of numbers from 1 on: the number and a 0; in front its length less 1, and so on."""
    values, lengths = np.empty(numbers.size, np.uint64), np.empty(numbers.size, np.int64)
    _omega(numbers.astype(np.int64), values, lengths)
    return Codes(values, lengths)


@kernel
def _omega(numbers: Array, values: Array, lengths: Array) -> None:
    for i in range(numbers.size):
        number, value, length = numbers[i], 0, 1
        while number > 1:
            value |= number << length
            width = 0
            while number >> width:
                width += 1
            length += width
            number = width - 1
        values[i], lengths[i] = value, length


def write(*streams: Codes) -> bytes:
    """These codes one after the other, filled up with zeros to a whole byte."""
    out = np.zeros(-(-sum(codes.bits for codes in streams) // 8), np.uint8)
    at = 0
    for values, lengths in streams:
        at = _write(values, lengths, at, out)
    return out.tobytes()


@kernel
def _write(values: Array, lengths: Array, at: Int, out: Array) -> Int:
    for i in range(values.size):
        at += lengths[i]
        rest = values[i] << np.uint64(-at & 7)
        byte = (at - 1) >> 3
        while rest:
            out[byte] |= np.uint8(rest & np.uint64(255))
            rest >>= np.uint64(8)
            byte -= 1
    return at


class BitReader:
    """The bits of a reader from where it stands; `close` moves it behind them."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        left = reader.payload[reader.at :]
        self._data = np.frombuffer(left + bytes(4), np.uint8)  # a window of four bytes may look beyond the end
        self._end = 8 * len(left)
        self._at = 0

    def fields(self, count: int, width: int) -> Array:
        """So many numbers of `width` bits (up to 24)."""
        self._need(count * width)
        out = np.empty(count, np.uint32)
        _read_fields(self._data, self._at, width, out)
        self._at += count * width
        return out

    def golomb(self, count: int, b: int, size: int) -> Array:
        """So many ascending positions below `size`."""
        self._need(count * (b + 1))
        out = np.empty(count, np.int64)
        self._move(_read_golomb(self._data, self._at, self._end, b, size, out))
        return out

    def omega(self, count: int) -> Array:
        """So many numbers from 1 on."""
        self._need(count)
        out = np.empty(count, np.int64)
        self._move(_read_omega(self._data, self._at, self._end, out))
        return out

    def close(self) -> None:
        whole = -(-self._at // 8)
        if self._at % 8 and self._data[whole - 1] << self._at % 8 & 255:
            raise PayloadError("malformed", "the bits that fill the last byte are not zero")
        self._reader.take(whole)

    def _need(self, bits: int) -> None:
        if bits > self._end - self._at:
            raise PayloadError("truncated", f"{bits:,} bits are needed where {self._end - self._at:,} are left")

    def _move(self, at: int) -> None:
        if at == ENDED:
            raise PayloadError("truncated", "the bits end within a code")
        if at == MALFORMED:
            raise PayloadError("malformed", "a code for a number that is too large")
        self._at = at


def read_fields(reader: Reader, count: int, width: int, most: int) -> Array:
    """So many numbers of `width` bits, none above `most`, and the zeros that fill the last byte."""
    bits = BitReader(reader)
    numbers = bits.fields(count, width)
    bits.close()
    if numbers.max(initial=0) > most:
        raise PayloadError("malformed", f"a number above {most:,}")
    return numbers


@kernel
def _read_fields(data: Array, at: Int, width: Int, out: Array) -> None:
    mask = np.uint32((1 << width) - 1)
    for i in range(out.size):
        byte = U(at >> 3)
        window = np.uint32(data[byte]) << np.uint32(24) | np.uint32(data[byte + U(1)]) << np.uint32(16)
        window |= np.uint32(data[byte + U(2)]) << np.uint32(8) | np.uint32(data[byte + U(3)])
        out[i] = window >> np.uint32(32 - width - (at & 7)) & mask
        at += width


@kernel
def _read_golomb(data: Array, at: Int, end: Int, b: Int, size: Int, out: Array) -> Int:
    position = -1
    for i in range(out.size):
        quotient = 0
        while at < end and not data[at >> 3] >> (7 - (at & 7)) & 1:
            quotient += 1
            at += 1
        at += 1
        if at + b > end:
            return ENDED
        if quotient > size >> b:  # also keeps the shift below from overflowing
            return MALFORMED
        rest = 0
        for _ in range(b):
            rest = rest << 1 | (data[at >> 3] >> (7 - (at & 7)) & 1)
            at += 1
        position += (quotient << b | rest) + 1
        if position >= size:
            return MALFORMED
        out[i] = position
    return at


@kernel
def _read_omega(data: Array, at: Int, end: Int, out: Array) -> Int:
    for i in range(out.size):
        number = 1
        while True:
            if at >= end:
                return ENDED
            bit = data[at >> 3] >> (7 - (at & 7)) & 1
            at += 1
            if not bit:
                break
            if number >= MAX_NUMBER_BITS:
                return MALFORMED
            if at + number > end:
                return ENDED
            value = 1
            for _ in range(number):
                value = value << 1 | (data[at >> 3] >> (7 - (at & 7)) & 1)
                at += 1
            number = value
        out[i] = number
    return at
