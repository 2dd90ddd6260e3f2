"""Untrusted bytes: a cursor that cannot leave them, and the numbers of variable length in them."""

from __future__ import annotations

import struct
import zlib
from typing import NoReturn

from ..errors import PayloadError


def varint(value: int) -> bytes:
    """A number as 7 bits per byte, the lowest first, the top bit set on all but the last."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def refuse_malformed(message: str) -> NoReturn:
    """Refuse what no encoder writes."""
    raise PayloadError("malformed", message)


def deflate(data: bytes, level: int = 9) -> bytes:
    """One raw DEFLATE stream."""
    stream = zlib.compressobj(level, zlib.DEFLATED, -15)
    return stream.compress(data) + stream.flush()


def inflate(packed: bytes | memoryview, size: int, what: str) -> bytes:
    """Just so many bytes, which one whole raw DEFLATE stream must hold."""
    stream = zlib.decompressobj(-15)
    try:
        data = stream.decompress(packed, size + 1)
    except zlib.error as error:
        raise PayloadError("malformed", f"{what} cannot be decompressed") from error
    if len(data) != size or not stream.eof or stream.unused_data:
        refuse_malformed(f"{what}: not one whole compressed block of {size} bytes")
    return data


class ByteReader:
    """A cursor over untrusted bytes that cannot leave them."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = memoryview(data)
        self.at = 0

    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, size: int) -> memoryview:
        if size > self.left():
            raise PayloadError("truncated", f"{size} bytes expected, {self.left()} left")
        self.at += size
        return self.data[self.at - size : self.at]

    def rest(self) -> memoryview:
        return self.take(self.left())

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value = 0
        for shift in range(0, 63, 7):
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if byte == 0 and shift:
                    refuse_malformed("a number is longer than it needs to be")
                return value
        refuse_malformed("a number exceeds 63 bits")

    def float32(self) -> float:
        return float(struct.unpack("<f", self.take(4))[0])
