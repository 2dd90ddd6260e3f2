"""Tiles: the rectangles of a tensor that are coded independently, and the frame of each in a section."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import PayloadError
from .probability import MAX_CLASS, SPACINGS
from .reader import ByteReader, refuse_malformed, varint

TILE_CELLS = 1 << 22  # a tile has at most this many entries
TILE_SIDE = 1 << 11  # a matrix that is too large is cut into tiles near this square
FLAT_WIDTH = 256  # a long vector is seen as rows of so many entries, with a scale each


class Tile(NamedTuple):
    """A rectangle of a tensor's two-dimensional view: rows of `width` entries, `stride` apart, from `start` on."""

    start: int
    stride: int
    height: int
    width: int

    @property
    def cells(self) -> int:
        return self.height * self.width


def cut_into_tiles(shape: tuple[int, ...]) -> list[Tile]:
    """The tiles of a tensor, row by row of the view (first dimension) x (all others).

    A vector of up to 1,024 entries is one row. A longer one becomes rows of 256 and a rest, as do matrices with
    fewer than four rows or columns.
    """
    size = math.prod(shape)
    if size == 0:
        return []
    height, width = (shape[0], size // shape[0]) if len(shape) > 1 else (1, size)
    if min(height, width) < 4:
        height, width = (size // FLAT_WIDTH, FLAT_WIDTH) if size > 4 * FLAT_WIDTH else (1, size)
    result = [
        Tile(top * width + left, width, bottom - top, right - left)
        for top, bottom in _cut_side(height, width)
        for left, right in _cut_side(width, height)
    ]
    rest = size - height * width
    if rest:
        result.append(Tile(height * width, rest, 1, rest))
    return result


def _cut_side(side: int, other: int) -> list[tuple[int, int]]:
    if side * other <= TILE_CELLS:
        return [(0, side)]
    pieces = -(-side // max(TILE_SIDE, TILE_CELLS // other))
    return [(k * side // pieces, (k + 1) * side // pieces) for k in range(pieces)]


class TileHeader(NamedTuple):
    """What stands before the stream of a tile."""

    base: int  # the context of a block whose row and column are of class 1
    nonzeros: int
    row_spacing: int
    row_first: int  # smallest class in use
    row_last: int
    column_spacing: int
    column_first: int
    column_last: int

    def to_bytes(self) -> bytes:
        row, column = SPACINGS.index(self.row_spacing), SPACINGS.index(self.column_spacing)
        out = struct.pack("<Bb", row | column << 2, self.base) + varint(self.nonzeros)
        if row:
            out += bytes([self.row_first, self.row_last])
        if column:
            out += bytes([self.column_first, self.column_last])
        return out

    @classmethod
    def read(cls, reader: ByteReader, cells: int) -> TileHeader:
        spacings, base = struct.unpack("<Bb", reader.take(2))
        if spacings > 15:
            refuse_malformed("unknown tile flags")
        nonzeros = reader.varint()
        if not 1 <= nonzeros <= cells:
            refuse_malformed(f"a tile of {cells} cells with {nonzeros} non-zeros")
        row, column = SPACINGS[spacings & 3], SPACINGS[spacings >> 2]
        row_range = _read_class_range(reader) if row else (1, 1)
        column_range = _read_class_range(reader) if column else (1, 1)
        return cls(base, nonzeros, row, *row_range, column, *column_range)


def _read_class_range(reader: ByteReader) -> tuple[int, int]:
    first, last = reader.byte(), reader.byte()
    if not 1 <= first <= last <= MAX_CLASS:
        refuse_malformed(f"scale classes from {first} to {last}")
    return first, last


class CodedTile(NamedTuple):
    """A tile that is not all zero, its stream still coded."""

    header: TileHeader
    stream: bytes | memoryview

    def to_bytes(self) -> bytes:
        return self.header.to_bytes() + self.stream

    @classmethod
    def from_bytes(cls, data: memoryview, cells: int) -> CodedTile:
        reader = ByteReader(data)
        header = TileHeader.read(reader, cells)
        if not reader.left():
            raise PayloadError("truncated", "a tile without a stream")
        return cls(header, reader.rest())


def write_tiles(tiles: Sequence[CodedTile | None]) -> bytes:
    """The tiles of a section one after the other; None for one that is all zero."""
    bodies = [b"" if tile is None else tile.to_bytes() for tile in tiles]
    return b"".join(varint(len(body)) + body for body in bodies[:-1]) + bodies[-1]


def read_tiles(body: bytes | memoryview, shape: tuple[int, ...]) -> list[CodedTile | None]:
    """The tiles of a tensor of this shape, their headers checked; None for one that is all zero."""
    size = math.prod(shape)
    if size == 0:
        refuse_malformed("an empty tensor has coefficients")
    if size > TILE_CELLS * (len(body) + 1):  # before they are listed: every tile but the last has a byte
        raise PayloadError("truncated", f"{len(body)} bytes cannot hold the tiles of {size} entries")
    reader = ByteReader(body)
    result: list[CodedTile | None] = []
    every = cut_into_tiles(shape)
    for k, tile in enumerate(every):
        data = reader.take(reader.varint() if k < len(every) - 1 else reader.left())
        result.append(CodedTile.from_bytes(data, tile.cells) if len(data) else None)
    return result
