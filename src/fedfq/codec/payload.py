"""The payload format, version 1: docs/FORMAT.md says it in words.

This is the only module that reads untrusted bytes outside the coefficient streams themselves (tile.py). Nothing is
allocated from a number in the payload before that number was checked against the bytes that are there, the layout or
the caller's limit.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np

from . import layout as lay
from .basis import MAX_DIRECTIONS, fold, max_rank
from .contexts import MAX_CLASS, SHIFTS, SPACINGS
from .errors import PayloadError
from .kernels import Array
from .layout import Spec, Tile, tiles
from .tile import Encoded, Header

MAGIC = b"FQ"
VERSION = 1
HEAD = struct.Struct("<2sBBI")  # magic, version, flags, checksum

LAYOUT_IS_DIGEST = 1
HAS_STEP = 2
HAS_GAIN = 4
HAS_BASIS = 8

ZERO, PLAIN, WIDTHS, HALF, SINGLE, INTEGER, INTEGER_DEFLATED = range(7)
FACTORS, AND_PLAIN, RIGHT_KNOWN, LEFT_KNOWN = 16, 1, 2, 4  # a kind with factors is 16 and the sum of what it has
FACTOR_KINDS = range(FACTORS, FACTORS + 8)
STEPPED_KINDS = (PLAIN, *FACTOR_KINDS)
FLOAT_KINDS = (ZERO, WIDTHS, HALF, SINGLE, *STEPPED_KINDS)
INTEGER_KINDS = (ZERO, INTEGER, INTEGER_DEFLATED)
KIND_NAMES = {
    **{ZERO: "zero", PLAIN: "plain", WIDTHS: "widths", HALF: "float16", SINGLE: "float32"},
    **{INTEGER: "integer", INTEGER_DEFLATED: "integer"},
    **{kind: "factors" for kind in (FACTORS, FACTORS + AND_PLAIN)},
    **{kind: "shared factors" for kind in FACTOR_KINDS if kind & (RIGHT_KNOWN | LEFT_KNOWN)},
}
KIND_NAMES |= {kind: KIND_NAMES[kind] + " + plain" for kind in FACTOR_KINDS if kind & AND_PLAIN}

SHIFT_UNIT = 1 / 256  # of a step

MAX_NAME = 1 << 12
MAX_DIMENSIONS = 32
MAX_ENTRIES = 1 << 59  # below this, numpy can shape even an empty array of 16-byte entries
MAX_TENSORS = 1 << 17  # the largest mixtures of experts have 10^5
MAX_LAYOUT_BYTES = 1 << 24
LAYOUT_SLACK = 1 << 16  # so much more than the model's is inflated of a layout, to say what differs
DEFAULT_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Section:
    """One tensor's part of a payload."""

    kind: int
    body: bytes | memoryview = b""


@dataclass(frozen=True)
class Payload:
    """A payload taken apart, nothing decoded. `layout` is None where it is a digest and no model was given."""

    layout: list[Spec] | None
    digest: bytes | None
    basis: bytes | None  # the digest of the shared basis it was made with
    gain: float  # what all quantised tensors are multiplied with
    step: float
    shifts: Array  # float32: reconstruction of |level| is |level| + shift, in steps
    sections: list[Section]


@dataclass(frozen=True)
class CodedTile:
    """One tile of a section, its stream still coded."""

    tile: Tile
    header: Header
    stream: bytes | memoryview


class Side(NamedTuple):
    """One of the factors, coded: levels in so many known directions (0: none), and the others; None for all zero."""

    directions: int
    inside: Encoded | None
    rest: Encoded | None

    @property
    def size(self) -> int:
        """Bytes of its streams."""
        return sum(len(tile.stream) for tile in (self.inside, self.rest) if tile is not None)


@dataclass(frozen=True)
class CodedSide:
    """One of the factors of a section, its streams still coded."""

    directions: int
    inside: CodedTile | None
    rest: CodedTile | None

    @property
    def nonzeros(self) -> int:
        return sum(tile.header.nonzeros for tile in (self.inside, self.rest) if tile is not None)


# Writing


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first, the top bit set on all but the last."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def write(
    layout: Sequence[Spec],
    sections: Sequence[Section],
    *,
    as_digest: bool,
    with_gain: bool = False,
    basis: bytes | None = None,
    step: float | None = None,
    shifts: Array | None = None,
) -> bytes:
    """The bytes of a payload; `sections` in the order of `layout`.

    A digest does not tell the order of names, so sections then follow their sorted order. A gain is 1 until `set_gain`.
    """
    flags = 0
    body = bytearray()
    if with_gain:
        flags |= HAS_GAIN
        body += struct.pack("<f", 1.0)
    if basis is not None:
        flags |= HAS_BASIS
        body += basis
    if as_digest:
        flags |= LAYOUT_IS_DIGEST
        body += lay.digest(layout)
        position = {spec.name: k for k, spec in enumerate(layout)}
        sections = [sections[position[spec.name]] for spec in lay.by_name(layout)]
    else:
        table = _write_layout(layout)
        body += varint(len(table)) + table
    if step is not None and shifts is not None:
        flags |= HAS_STEP
        used = np.flatnonzero(shifts)
        first, last = (int(used[0]), int(used[-1])) if used.size else (1, 0)
        body += struct.pack("<fB", step, first << 4 | last) + shifts[first : last + 1].tobytes()
    for section in sections:
        body.append(section.kind)
        if section.kind != ZERO:
            body += varint(len(section.body)) + section.body
    return _sealed(HEAD.pack(MAGIC, VERSION, flags, 0)[:4], body)


def _sealed(head: bytes, body: bytes | bytearray) -> bytes:
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + bytes(body)


def set_gain(payload: bytes, gain: float) -> bytes:
    """The same payload, written with a gain, with this one."""
    return _sealed(payload[:4], struct.pack("<f", gain) + payload[HEAD.size + 4 :])


def _write_layout(layout: Sequence[Spec]) -> bytes:
    if len(layout) > MAX_TENSORS:
        raise ValueError(f'a layout has at most {MAX_TENSORS} tensors, not {len(layout)}: use layout="digest"')
    table = bytearray()
    for spec in layout:
        name = spec.name.encode()
        if len(name) > MAX_NAME or len(spec.shape) > MAX_DIMENSIONS:
            limits = f"at most {MAX_NAME} bytes of name and {MAX_DIMENSIONS} dimensions"
            raise ValueError(f"tensor {spec.name[:40]!r} does not fit the format, which has {limits}")
        table += varint(len(name)) + name + bytes([lay.DTYPES.index(spec.dtype.name), len(spec.shape)])
        for side in spec.shape:
            table += varint(side)
    if len(table) > MAX_LAYOUT_BYTES:
        raise ValueError(f'names and shapes take more than {MAX_LAYOUT_BYTES} bytes: use layout="digest"')
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    return deflate.compress(table) + deflate.flush()


def write_tiles(tiles: Sequence[Encoded | None]) -> bytes:
    """The body of a section's tiles; None for one that is all zero."""
    bodies = [_write_tile(tile) for tile in tiles]
    return b"".join(varint(len(body)) + body for body in bodies[:-1]) + bodies[-1]


def write_factors(rank: int, right: Side, left: Side) -> bytes:
    """The head of a section with factors: rank, V, A."""
    out = bytearray(varint(rank))
    for side in (right, left):
        if side.directions:
            inside = _write_tile(side.inside)
            out += varint(side.directions) + varint(len(inside)) + inside
        rest = _write_tile(side.rest)
        out += varint(len(rest)) + rest
    return bytes(out)


def _write_tile(tile: Encoded | None) -> bytes:
    return b"" if tile is None else _write_header(tile.header) + tile.stream


def _write_header(header: Header) -> bytes:
    row, column = SPACINGS.index(header.row_spacing), SPACINGS.index(header.column_spacing)
    out = struct.pack("<Bb", row | column << 2, header.base) + varint(header.nonzeros)
    if row:
        out += bytes([header.row_first, header.row_last])
    if column:
        out += bytes([header.column_first, header.column_last])
    return out


# Reading


def _malformed(message: str) -> NoReturn:
    raise PayloadError("malformed", message)


class Reader:
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

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value = 0
        for shift in range(0, 63, 7):
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if byte == 0 and shift:
                    _malformed("a number is longer than it needs to be")
                return value
        _malformed("a number exceeds 63 bits")

    def single(self) -> float:
        return float(struct.unpack("<f", self.take(4))[0])


def parse(data: bytes | memoryview, like: list[Spec] | None, max_bytes: int = DEFAULT_MAX_BYTES) -> Payload:
    """Take a payload apart. With `like`, another layout is refused here, before anything is allocated."""
    flags, reader = _open(data)
    gain = reader.single() if flags & HAS_GAIN else 1.0
    if not (math.isfinite(gain) and gain > 0):
        _malformed(f"a gain of {gain}")
    basis = bytes(reader.take(8)) if flags & HAS_BASIS else None
    digest = None
    layout = like
    if flags & LAYOUT_IS_DIGEST:
        digest = bytes(reader.take(8))
        if like is not None:
            if lay.digest(like) != digest:
                raise PayloadError("layout", "the payload's layout digest is not that of the given model")
            layout = lay.by_name(like)
    else:
        table = _inflate_layout(reader.take(reader.varint()), like)
        entries = _read_layout(table, most=min(len(data), MAX_TENSORS))
        layout = list(entries) if like is None else _as_in_model(entries, like)
    if layout is not None and like is None and (size := decoded_bytes(layout)) > max_bytes:
        raise PayloadError("limit", f"the update takes {size} bytes decoded, more than the limit of {max_bytes}")
    step, shifts = _read_step(reader) if flags & HAS_STEP else (0.0, np.zeros(SHIFTS, np.float32))
    sections = []
    for k in range(len(layout)) if layout is not None else range(len(data)):
        if layout is None and reader.left() == 0:
            break
        sections.append(_read_section(reader, None if layout is None else layout[k], flags))
    if reader.left():
        _malformed(f"{reader.left()} bytes follow the last section")
    return Payload(layout, digest, basis, gain, step, shifts, sections)


def decoded_bytes(layout: Sequence[Spec]) -> int:
    return sum(spec.size * max(4, spec.dtype.itemsize) for spec in layout)


def _open(data: bytes | memoryview) -> tuple[int, Reader]:
    reader = Reader(data)
    if bytes(reader.data[:2]) != MAGIC[: len(reader.data)]:
        raise PayloadError("magic", "this is not a fedfq payload")
    _, version, flags, checksum = HEAD.unpack(reader.take(HEAD.size))
    if version != VERSION:
        raise PayloadError("version", f"payload version {version} is not supported (this release reads {VERSION})")
    if zlib.crc32(reader.data[8:], zlib.crc32(reader.data[:4])) != checksum:
        raise PayloadError("checksum", "the payload is damaged: its checksum does not match")
    if flags & ~(LAYOUT_IS_DIGEST | HAS_STEP | HAS_GAIN | HAS_BASIS):
        raise PayloadError("version", f"the payload uses features this release does not know (flags {flags:#04x})")
    return flags, reader


def _inflate_layout(packed: memoryview, like: list[Spec] | None) -> bytes:
    limit = MAX_LAYOUT_BYTES
    if like is not None:  # of UTF-8 a character has up to 4 bytes, of a varint a dimension up to 9
        limit = min(limit, LAYOUT_SLACK + sum(4 * len(spec.name) + 9 * len(spec.shape) + 4 for spec in like))
    inflate = zlib.decompressobj(-15)
    try:
        table = inflate.decompress(packed, limit + 1)
    except zlib.error as error:
        raise PayloadError("malformed", "the layout cannot be decompressed") from error
    if len(table) > limit and limit < MAX_LAYOUT_BYTES:
        raise PayloadError("layout", "the payload's layout is larger than the model's")
    if len(table) > limit or not inflate.eof or inflate.unused_data:
        _malformed("the layout is not one whole compressed block of acceptable size")
    return table


def _read_layout(table: bytes, most: int) -> Iterator[Spec]:
    reader = Reader(table)
    names: set[str] = set()
    while reader.left():
        size = reader.varint()
        if size > MAX_NAME:
            _malformed(f"a tensor name of {size} bytes")
        try:
            name = bytes(reader.take(size)).decode()
        except UnicodeDecodeError as error:
            raise PayloadError("malformed", "a tensor name is not UTF-8") from error
        if name in names:
            _malformed(f"two tensors are named {name!r}")
        names.add(name)
        if len(names) > most:
            _malformed(f"more than {most} tensors")
        code, dimensions = reader.byte(), reader.byte()
        if code >= len(lay.DTYPES):
            raise PayloadError("version", f"tensor {name!r} has an unknown dtype (code {code})")
        if dimensions > MAX_DIMENSIONS:
            _malformed(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reader.varint() for _ in range(dimensions))
        if math.prod(side for side in shape if side) >= MAX_ENTRIES:
            _malformed(f"tensor {name!r} has an impossible shape {shape}")
        yield Spec(name, shape, np.dtype(lay.DTYPES[code]))


def _as_in_model(entries: Iterable[Spec], like: list[Spec]) -> list[Spec]:
    """The payload's tensors in its order with the model's dtypes, or a refusal that names the first difference.

    Entries are taken one by one, so a payload of other tensors costs no more than the model's own.
    """
    model = {spec.name: spec for spec in like}
    layout = []
    for spec in entries:
        if spec.name not in model:
            raise PayloadError("layout", f"the payload has a tensor {spec.name!r} that the model lacks")
        if spec.shape != model[spec.name].shape:
            expected = model[spec.name].shape
            raise PayloadError("layout", f"tensor {spec.name!r} has shape {spec.shape}, the model's is {expected}")
        layout.append(model[spec.name])
    if len(layout) != len(model):
        found = {spec.name for spec in layout}
        missing = next(name for name in model if name not in found)
        raise PayloadError("layout", f"the payload lacks the model's tensor {missing!r}")
    return layout


def _read_step(reader: Reader) -> tuple[float, Array]:
    step = reader.single()
    if not (math.isfinite(step) and step > 0):
        _malformed(f"a step of {step}")
    span = reader.byte()
    first, last = span >> 4, span & 15
    shifts = np.zeros(SHIFTS, np.float32)
    packed = reader.take(max(0, last + 1 - first))
    shifts[first : first + len(packed)] = np.frombuffer(packed, np.int8) * np.float32(SHIFT_UNIT)
    return step, shifts


def _read_section(reader: Reader, spec: Spec | None, flags: int) -> Section:
    kind = reader.byte()
    if kind not in KIND_NAMES:
        raise PayloadError("version", f"a section of unknown kind {kind}")
    if spec is not None and kind not in (FLOAT_KINDS if spec.is_float else INTEGER_KINDS):
        _malformed(f"tensor {spec.name!r} of dtype {spec.dtype} cannot have a {KIND_NAMES[kind]} section")
    if kind in STEPPED_KINDS and not flags & HAS_STEP:
        _malformed(f"a {KIND_NAMES[kind]} section in a payload without a step")
    if kind in FACTOR_KINDS and kind & (RIGHT_KNOWN | LEFT_KNOWN) and not flags & HAS_BASIS:
        _malformed(f"a {KIND_NAMES[kind]} section in a payload without a shared basis")
    return Section(kind) if kind == ZERO else Section(kind, reader.take(reader.varint()))


def read_factors(section: Section, shape: tuple[int, ...]) -> tuple[int, CodedSide, CodedSide, memoryview]:
    """Rank, V and A (still coded) of a section with factors, and the rest of its body."""
    view = fold(shape)
    if view is None:
        _malformed(f"a tensor of shape {shape} has no factors")
    height, width = view.shape(shape)
    reader = Reader(section.body)
    rank = reader.varint()
    if not 1 <= rank <= max_rank(height, width):
        _malformed(f"factors of rank {rank} of a {height} x {width} matrix")
    right = _read_side(reader, width, rank, bool(section.kind & RIGHT_KNOWN))
    left = _read_side(reader, height, rank, bool(section.kind & LEFT_KNOWN))
    rest = reader.take(reader.left())
    if rest and not section.kind & AND_PLAIN:
        _malformed(f"{len(rest)} bytes follow the factors")
    return rank, right, left, rest


def _read_side(reader: Reader, side: int, rank: int, known: bool) -> CodedSide:
    directions, inside = 0, None
    if known:
        directions = reader.varint()
        if not 1 <= directions <= min(MAX_DIRECTIONS, side):
            _malformed(f"{directions} known directions of {side} entries")
        data = reader.take(reader.varint())
        inside = _read_tile(data, Tile(0, rank, directions, rank)) if len(data) else None
    data = reader.take(reader.varint())
    rest = _read_tile(data, Tile(0, rank, side, rank)) if len(data) or inside is None else None
    return CodedSide(directions, inside, rest)


def read_tiles(body: bytes | memoryview, shape: tuple[int, ...]) -> list[CodedTile]:
    """The non-zero tiles of a tensor's section, their headers checked."""
    size = math.prod(shape)
    if size == 0:
        _malformed("an empty tensor has coefficients")
    if size > lay.TILE_CELLS * (len(body) + 1):  # before they are listed: every tile but the last has a byte
        raise PayloadError("truncated", f"{len(body)} bytes cannot hold the tiles of {size} entries")
    reader = Reader(body)
    result = []
    every = tiles(shape)
    for k, tile in enumerate(every):
        part = Reader(reader.take(reader.varint() if k < len(every) - 1 else reader.left()))
        if part.left():
            result.append(_read_tile(part.data, tile))
    return result


def _read_tile(data: memoryview, tile: Tile) -> CodedTile:
    reader = Reader(data)
    header = _read_header(reader, tile.height * tile.width)
    if not reader.left():
        raise PayloadError("truncated", "a tile without a stream")
    return CodedTile(tile, header, reader.take(reader.left()))


def _read_header(reader: Reader, cells: int) -> Header:
    spacings, base = struct.unpack("<Bb", reader.take(2))
    if spacings > 15:
        _malformed("unknown tile flags")
    nonzeros = reader.varint()
    if not 1 <= nonzeros <= cells:
        _malformed(f"a tile of {cells} cells with {nonzeros} non-zeros")
    row, column = SPACINGS[spacings & 3], SPACINGS[spacings >> 2]
    row_range = _read_class_range(reader) if row else (1, 1)
    column_range = _read_class_range(reader) if column else (1, 1)
    return Header(base, nonzeros, row, *row_range, column, *column_range)


def _read_class_range(reader: Reader) -> tuple[int, int]:
    first, last = reader.byte(), reader.byte()
    if not 1 <= first <= last <= MAX_CLASS:
        _malformed(f"scale classes from {first} to {last}")
    return first, last


def read_scales(section: Section) -> tuple[Array, memoryview]:
    """The three scales of a section of widths (for 2, 4 and 8 bits), and the rest of its body."""
    reader = Reader(section.body)
    scales = np.frombuffer(reader.take(12), "<f4").astype(np.float32)
    if not (np.isfinite(scales).all() and (scales >= 0).all()):
        _malformed("a scale is negative or not finite")
    return scales, reader.take(reader.left())


def read_floats(section: Section, spec: Spec) -> Array:
    """The values of a float16 or float32 section."""
    dtype = np.dtype("<f2" if section.kind == HALF else "<f4")
    if len(section.body) != spec.size * dtype.itemsize:
        _malformed(f"tensor {spec.name!r}: {len(section.body)} bytes for {spec.size} entries of {dtype}")
    values = np.frombuffer(section.body, dtype).astype(np.float32)
    if not np.isfinite(values).all():
        _malformed(f"tensor {spec.name!r} has entries that are not finite")
    return values


def write_integers(values: Array) -> Section:
    """Integers in the narrowest dtype that holds them, deflated where that is shorter."""
    if not values.any():
        return Section(ZERO)
    flat = np.ascontiguousarray(values).reshape(-1)
    if flat.dtype != np.bool_:
        low, high = int(flat.min()), int(flat.max())
        names = [name for name in lay.DTYPES[5:] if np.dtype(name).kind == flat.dtype.kind]
        fits = [name for name in names if np.iinfo(name).min <= low and high <= np.iinfo(name).max]
        flat = flat.astype(np.dtype(fits[0]).newbyteorder("<"))
    data = flat.tobytes()
    code = bytes([lay.DTYPES.index(flat.dtype.name)])
    packed = zlib.compress(data, 6)
    if len(packed) < len(data):
        return Section(INTEGER_DEFLATED, code + packed)
    return Section(INTEGER, code + data)


def read_integers(section: Section, spec: Spec) -> Array:
    """The values of an integer section in the layout's dtype, flat."""
    reader = Reader(section.body)
    code = reader.byte()
    if code >= len(lay.DTYPES):
        _malformed(f"tensor {spec.name!r} is stored in an unknown dtype (code {code})")
    dtype = np.dtype(lay.DTYPES[code])
    if dtype.kind not in "biu" or not np.can_cast(dtype, spec.dtype):
        raise PayloadError("layout", f"tensor {spec.name!r} holds {dtype}, which is not safely {spec.dtype}")
    data: bytes | memoryview = reader.take(reader.left())
    if section.kind == INTEGER_DEFLATED:
        inflate = zlib.decompressobj()
        try:
            data = inflate.decompress(data, spec.size * dtype.itemsize + 1)
        except zlib.error as error:
            raise PayloadError("malformed", f"tensor {spec.name!r} cannot be decompressed") from error
        if not inflate.eof or inflate.unused_data:
            _malformed(f"tensor {spec.name!r} is not one whole compressed block of its size")
    if len(data) != spec.size * dtype.itemsize:
        _malformed(f"tensor {spec.name!r}: {len(data)} bytes for {spec.size} entries of {dtype}")
    if dtype.kind == "b":
        return np.frombuffer(data, np.uint8).astype(np.bool_)
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(spec.dtype)
