"""Sections: one tensor's part of a payload. Each kind is one class: its bytes, its decoding, what `inspect` shows.

A section from a stranger is read in two steps. `from_bytes` checks lengths and headers and decodes no coefficients.
`jobs` then lists the pieces of work, which may run side by side; each gives a `Part`.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, NamedTuple

import numpy as np

from fedfq.types import Array

from ..errors import PayloadError
from ..kernels import FLOAT32_MAX
from .coefficients import NO_SHIFTS, decode_tile
from .directions import MAX_DIRECTIONS, KnownDirections
from .fold import fold, max_rank, unit_columns
from .layout import DTYPES, INTEGERS, Spec
from .parts import Part
from .reader import ByteReader, deflate, inflate, refuse_malformed, varint
from .tiles import CodedTile, Tile, cut_into_tiles, read_tiles, write_tiles

ZERO, PLAIN, OWN_STEP, WIDTHS, INTEGER, INTEGER_DEFLATED = range(6)
FACTORS, AND_PLAIN, RIGHT_KNOWN, LEFT_KNOWN = 16, 1, 2, 4  # a kind with factors is 16 and the sum of what it has
FACTOR_KINDS = range(FACTORS, FACTORS + 8)

# Level l of width b is a share of its scale, l / s with s = 2^(b-1) levels above zero (Eq. 5). Widths 2, 4 and 8 are
# numbered one after the other: levels 1-2 are those of 2 bits, 3-10 those of 4 bits, 11-138 those of 8 bits.
WIDTHS_SENT = (2, 4, 8)
LEVELS = tuple(0 if width == 0 else 2 ** (width - 1) for width in range(9))
WIDTH_OFFSETS = np.array([0, 0, 0, 0, LEVELS[2], 0, 0, 0, LEVELS[2] + LEVELS[4]], np.int32)
_SCALE_NUMBER = np.repeat(np.arange(3), [LEVELS[width] for width in WIDTHS_SENT])
_SCALE_SHARE = np.concatenate([np.arange(1, LEVELS[width] + 1) / LEVELS[width] for width in WIDTHS_SENT])


class Surroundings(NamedTuple):
    """What a section needs to know of its payload to be decoded."""

    gain: float
    step: float
    shifts: Array  # float32: |level| is reconstructed as |level| + shift, in steps
    known: KnownDirections | None = None  # of its tensor


Job = Callable[[], Part]


class Section(ABC):
    """One tensor's part of a payload: a kind and a body."""

    for_floats: ClassVar[bool] = True
    for_integers: ClassVar[bool] = False
    needs_step: ClassVar[bool] = False
    rank = 0

    def __init__(self, kind: int) -> None:
        self.kind = kind

    @cached_property
    def body(self) -> bytes | memoryview:
        return self._write_body()

    @abstractmethod
    def _write_body(self) -> bytes | memoryview: ...

    @classmethod
    @abstractmethod
    def from_bytes(cls, kind: int, body: bytes | memoryview, spec: Spec) -> Section:
        """The section of that tensor with this body, which comes from a stranger."""

    def to_bytes(self) -> bytes:
        """Kind, length of the body, body."""
        return bytes([self.kind]) + varint(len(self.body)) + self.body

    @property
    def size(self) -> int:
        """The length of `to_bytes`."""
        return 1 + len(varint(len(self.body))) + len(self.body)

    @abstractmethod
    def jobs(self, spec: Spec, around: Surroundings) -> list[Job]:
        """What is left to do to decode it."""

    @abstractmethod
    def nonzeros(self, spec: Spec) -> int:
        """How many numbers are sent that are not zero; of a section that sends every entry, all."""


class ZeroSection(Section):
    """All entries are 0."""

    for_integers = True
    size = 1  # the kind alone

    def __init__(self) -> None:
        super().__init__(ZERO)

    def _write_body(self) -> bytes:
        return b""

    @classmethod
    def from_bytes(cls, kind: int, body: bytes | memoryview, spec: Spec) -> ZeroSection:
        return cls()

    def to_bytes(self) -> bytes:
        return bytes([ZERO])

    def jobs(self, spec: Spec, around: Surroundings) -> list[Job]:
        return []

    def nonzeros(self, spec: Spec) -> int:
        return 0


class WholeSection(Section):
    """A body that holds every entry of its tensor."""

    def __init__(self, kind: int, body: bytes | memoryview) -> None:
        super().__init__(kind)
        self._body = body

    def _write_body(self) -> bytes | memoryview:
        return self._body

    @classmethod
    def from_bytes(cls, kind: int, body: bytes | memoryview, spec: Spec) -> WholeSection:
        return cls(kind, body)

    @abstractmethod
    def values(self, spec: Spec) -> Array:
        """The entries, flat."""

    def jobs(self, spec: Spec, around: Surroundings) -> list[Job]:
        return [lambda: Part(None, self.values(spec))]

    def nonzeros(self, spec: Spec) -> int:
        return spec.size


class IntegerSection(WholeSection):
    """Every entry of an integer or boolean tensor in the narrowest dtype that holds it, deflated if that is shorter."""

    for_floats, for_integers = False, True

    @staticmethod
    def of(values: Array) -> Section:
        """The section of these values."""
        if not values.any():
            return ZeroSection()
        flat = np.ascontiguousarray(values).reshape(-1)
        if flat.dtype != np.bool_:
            low, high = int(flat.min()), int(flat.max())
            names = sorted(DTYPES[5:], key=lambda name: np.dtype(name).itemsize)
            names = [name for name in names if np.can_cast(name, flat.dtype)]
            fits = [name for name in names if np.iinfo(name).min <= low and high <= np.iinfo(name).max]
            flat = flat.astype(np.dtype(fits[0]).newbyteorder("<"))
        data = flat.tobytes()
        code = bytes([DTYPES.index(flat.dtype.name)])
        packed = deflate(data)
        if len(packed) < len(data):
            return IntegerSection(INTEGER_DEFLATED, code + packed)
        return IntegerSection(INTEGER, code + data)

    def values(self, spec: Spec) -> Array:
        """The values in the layout's dtype, flat."""
        reader = ByteReader(self.body)
        code = reader.byte()
        if code not in INTEGERS:
            refuse_malformed(f"tensor {spec.name!r} is stored in a dtype that is not of integers (code {code})")
        dtype = np.dtype(DTYPES[code])
        if not np.can_cast(dtype, spec.dtype):
            raise PayloadError("layout", f"tensor {spec.name!r} holds {dtype}, which is not safely {spec.dtype}")
        data: bytes | memoryview = reader.rest()
        if self.kind == INTEGER_DEFLATED:
            data = inflate(data, spec.size * dtype.itemsize, f"tensor {spec.name!r}")
        if len(data) != spec.size * dtype.itemsize:
            refuse_malformed(f"tensor {spec.name!r}: {len(data)} bytes for {spec.size} entries of {dtype}")
        if dtype.kind == "b":
            return np.frombuffer(data, np.uint8).astype(np.bool_).astype(spec.dtype, copy=False)
        return np.frombuffer(data, dtype.newbyteorder("<")).astype(spec.dtype)


class PlainSection(Section):
    """Levels of one step, tile by tile."""

    needs_step = True

    def __init__(self, tiles: Sequence[CodedTile | None]) -> None:
        super().__init__(PLAIN)
        self.tiles = tiles

    def _write_body(self) -> bytes:
        return write_tiles(self.tiles)

    @classmethod
    def from_bytes(cls, kind: int, body: bytes | memoryview, spec: Spec) -> PlainSection:
        return cls(read_tiles(body, spec.shape))

    def jobs(self, spec: Spec, around: Surroundings) -> list[Job]:
        return _list_tile_jobs(self.tiles, spec, around)

    def nonzeros(self, spec: Spec) -> int:
        return _count_nonzeros(self.tiles)


def _list_tile_jobs(tiles: Sequence[CodedTile | None], spec: Spec, around: Surroundings) -> list[Job]:
    step = around.gain * around.step
    placed = zip(tiles, cut_into_tiles(spec.shape))
    return [partial(_decode_tile, coded, tile, step, around.shifts) for coded, tile in placed if coded is not None]


def _decode_tile(coded: CodedTile, tile: Tile, step: float, shifts: Array) -> Part:
    return Part(*decode_tile(coded, tile, step, shifts))


def _count_nonzeros(tiles: Sequence[CodedTile | None]) -> int:
    return sum(tile.header.nonzeros for tile in tiles if tile is not None)


MAX_OFFSET = 127  # of a tensor's levels, in either direction


class OwnStepSection(Section):
    """Levels of a step of its own, tile by tile, without shifts and gain; an offset is added to all of them."""

    def __init__(self, step: float, offset: int, tiles: Sequence[CodedTile | None]) -> None:
        super().__init__(OWN_STEP)
        self.step = step
        self.offset = offset
        self.tiles = tiles

    def _write_body(self) -> bytes:
        return struct.pack("<fb", self.step, self.offset) + write_tiles(self.tiles)

    @classmethod
    def from_bytes(cls, kind: int, body: bytes | memoryview, spec: Spec) -> OwnStepSection:
        reader = ByteReader(body)
        step = reader.float32()
        if not (math.isfinite(step) and step > 0):
            refuse_malformed(f"tensor {spec.name!r} has a step of {step}")
        (offset,) = struct.unpack("<b", reader.take(1))
        return cls(step, offset, read_tiles(reader.rest(), spec.shape))

    def jobs(self, spec: Spec, around: Surroundings) -> list[Job]:
        if self.offset:
            return [partial(self._decode_with_offset, spec)]
        return _list_tile_jobs(self.tiles, spec, Surroundings(1.0, self.step, NO_SHIFTS))

    def _decode_with_offset(self, spec: Spec) -> Part:
        levels = np.zeros(spec.size, np.float32)
        for job in _list_tile_jobs(self.tiles, spec, Surroundings(1.0, 1.0, NO_SHIFTS)):
            job().add_to(levels, spec.shape, 1.0)
        return Part(None, with_own_step(levels, self.offset, self.step))

    def nonzeros(self, spec: Spec) -> int:
        return _count_nonzeros(self.tiles)


def with_own_step(levels: Array, offset: int | Array, step: float | Array) -> Array:
    """(level + offset) step, kept within float32."""
    sizes = (levels.astype(np.float64) + offset) * step
    return np.clip(sizes, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)


class WidthsSection(Section):
    """The paper's scheme: a scale for each of the widths 2, 4 and 8, and levels of these (Eq. 5), tile by tile."""

    def __init__(self, scales: Array, tiles: Sequence[CodedTile | None]) -> None:
        super().__init__(WIDTHS)
        self.scales = scales  # for 2, 4 and 8 bits
        self.tiles = tiles

    def _write_body(self) -> bytes:
        return self.scales.astype("<f4").tobytes() + write_tiles(self.tiles)

    @classmethod
    def from_bytes(cls, kind: int, body: bytes | memoryview, spec: Spec) -> WidthsSection:
        reader = ByteReader(body)
        scales = np.frombuffer(reader.take(12), "<f4").astype(np.float32)
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            refuse_malformed("a scale is negative or not finite")
        return cls(scales, read_tiles(reader.rest(), spec.shape))

    def jobs(self, spec: Spec, around: Surroundings) -> list[Job]:
        placed = zip(self.tiles, cut_into_tiles(spec.shape))
        return [partial(self._decode_tile, coded, tile, around.gain) for coded, tile in placed if coded is not None]

    def _decode_tile(self, coded: CodedTile, tile: Tile, gain: float) -> Part:
        indices, levels = decode_tile(coded, tile)
        numbers = np.abs(levels).astype(np.int64) - 1
        if numbers.max() >= _SCALE_SHARE.size:
            refuse_malformed("a level that no width has")
        sizes = gain * self.scales.astype(np.float64)[_SCALE_NUMBER[numbers]] * _SCALE_SHARE[numbers]
        return Part(indices, np.clip(np.sign(levels) * sizes, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32))

    def nonzeros(self, spec: Spec) -> int:
        return _count_nonzeros(self.tiles)


class Side(NamedTuple):
    """One of the factors, coded: levels in so many known directions (0: none), and the others; None for all zero."""

    directions: int
    inside: CodedTile | None
    rest: CodedTile | None

    @property
    def tiles(self) -> list[CodedTile]:
        return [tile for tile in (self.inside, self.rest) if tile is not None]

    def to_bytes(self) -> bytes:
        out = bytearray()
        if self.directions:
            out += varint(self.directions) + _with_length(self.inside)
        return bytes(out + _with_length(self.rest))

    @classmethod
    def read(cls, reader: ByteReader, side: int, rank: int, known: bool) -> Side:
        directions, inside = 0, None
        if known:
            directions = reader.varint()
            if not 1 <= directions <= min(MAX_DIRECTIONS, side):
                refuse_malformed(f"{directions} known directions of {side} entries")
            data = reader.take(reader.varint())
            inside = CodedTile.from_bytes(data, directions * rank) if len(data) else None
        data = reader.take(reader.varint())
        rest = CodedTile.from_bytes(data, side * rank) if len(data) or inside is None else None
        return cls(directions, inside, rest)

    def decode(self, known: Array | None, side: int, rank: int) -> Array:
        """Levels, side x rank: those of its entries, and those in known directions, which need not be whole numbers."""
        held = 0 if known is None else known.shape[1]
        if self.directions > held:
            refuse_malformed(f"{self.directions} known directions, of which the shared basis has {held}")
        if self.inside is None:
            assert self.rest is not None
            return _decode_dense(self.rest, side, rank)
        assert known is not None
        made = known[:, : self.directions] @ _decode_dense(self.inside, self.directions, rank)
        return made if self.rest is None else made + _decode_dense(self.rest, side, rank)


def _with_length(tile: CodedTile | None) -> bytes:
    body = b"" if tile is None else tile.to_bytes()
    return varint(len(body)) + body


def _decode_dense(coded: CodedTile, height: int, width: int) -> Array:
    indices, levels = decode_tile(coded, Tile(0, width, height, width))
    dense = np.zeros(height * width, np.float32)
    dense[indices] = levels
    return dense.reshape(height, width)


class FactorsSection(Section):
    """A matrix as A V^T, V with unit columns and A in steps; perhaps with plain coefficients of the rest."""

    needs_step = True

    def __init__(self, rank: int, right: Side, left: Side, tiles: Sequence[CodedTile | None] | None) -> None:
        known = RIGHT_KNOWN * (right.directions > 0) + LEFT_KNOWN * (left.directions > 0)
        super().__init__(FACTORS + AND_PLAIN * (tiles is not None) + known)
        self.rank = rank
        self.right = right
        self.left = left
        self.tiles = tiles  # of the rest; None if it is not sent

    def _write_body(self) -> bytes:
        factors = varint(self.rank) + self.right.to_bytes() + self.left.to_bytes()
        return factors + (b"" if self.tiles is None else write_tiles(self.tiles))

    @classmethod
    def from_bytes(cls, kind: int, body: bytes | memoryview, spec: Spec) -> FactorsSection:
        view = fold(spec.shape)
        if view is None:
            refuse_malformed(f"a tensor of shape {spec.shape} has no factors")
        height, width = view.shape(spec.shape)
        reader = ByteReader(body)
        rank = reader.varint()
        if not 1 <= rank <= max_rank(height, width):
            refuse_malformed(f"factors of rank {rank} of a {height} x {width} matrix")
        right = Side.read(reader, width, rank, bool(kind & RIGHT_KNOWN))
        left = Side.read(reader, height, rank, bool(kind & LEFT_KNOWN))
        rest = reader.rest()
        if rest and not kind & AND_PLAIN:
            refuse_malformed(f"{len(rest)} bytes follow the factors")
        return cls(rank, right, left, read_tiles(rest, spec.shape) if kind & AND_PLAIN else None)

    def jobs(self, spec: Spec, around: Surroundings) -> list[Job]:
        product = partial(self._decode_product, spec, around)
        return [product, *_list_tile_jobs(self.tiles or (), spec, around)]

    def _decode_product(self, spec: Spec, around: Surroundings) -> Part:
        """A and V. (No shifts: the rest was made for just this.)"""
        view = fold(spec.shape)
        assert view is not None
        height, width = view.shape(spec.shape)
        known_left, known_right = (None, None) if around.known is None else around.known.sides
        rows = self.left.decode(known_left, height, self.rank)
        columns = self.right.decode(known_right, width, self.rank)
        step = around.gain * around.step
        largest = max(1.0, float(np.abs(rows).max()))  # in known directions, levels may be < 1
        if step * largest * self.rank > FLOAT32_MAX:
            refuse_malformed("factors whose product exceeds float32")
        return Part(None, rows, unit_columns(columns), step)

    def nonzeros(self, spec: Spec) -> int:
        return _count_nonzeros([*self.right.tiles, *self.left.tiles, *(self.tiles or ())])


SECTIONS: dict[int, type[Section]] = {
    **{ZERO: ZeroSection, PLAIN: PlainSection, OWN_STEP: OwnStepSection, WIDTHS: WidthsSection},
    **{INTEGER: IntegerSection, INTEGER_DEFLATED: IntegerSection},
    **{kind: FactorsSection for kind in FACTOR_KINDS},
}


@dataclass(frozen=True)
class RawSection:
    """One tensor's part of a payload, not yet looked into."""

    kind: int
    body: bytes | memoryview

    @classmethod
    def read_from(cls, reader: ByteReader) -> RawSection:
        kind = reader.byte()
        return cls(kind, b"" if kind == ZERO else reader.take(reader.varint()))

    def read(self, spec: Spec) -> Section:
        return SECTIONS[self.kind].from_bytes(self.kind, self.body, spec)

    @property
    def size(self) -> int:
        """Bytes in the payload: the kind, and unless it is zero the body and its length."""
        return 1 if self.kind == ZERO else 1 + len(varint(len(self.body))) + len(self.body)


def kind_name(kind: int) -> str:
    """What `inspect` calls a kind of section."""
    if kind in FACTOR_KINDS:
        known = "shared " if kind & (RIGHT_KNOWN | LEFT_KNOWN) else ""
        return f"{known}factors{' + plain' if kind & AND_PLAIN else ''}"
    names = {ZERO: "zero", PLAIN: "plain", OWN_STEP: "own step", WIDTHS: "widths"}
    return names.get(kind, "integer")


def needs_basis(kind: int) -> bool:
    """Whether a section of this kind is written in known directions."""
    return kind in FACTOR_KINDS and bool(kind & (RIGHT_KNOWN | LEFT_KNOWN))
