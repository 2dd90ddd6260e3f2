"""Mutated payloads: valid ones of every kind, and what an attacker may turn them into.

`corpus` makes the valid ones, `mutations` an endless seeded stream of mutants. Most keep a right checksum, as otherwise
no check behind it is ever reached. Everything runs inside `small_tiles`, so that a few kilobytes have many tiles.
"""

from __future__ import annotations

import math
import random
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from unittest import mock

import numpy as np

import fedfq
from fedfq.codec.encoder.quantize import nonzero
from fedfq.codec.encoder.tiles import encode_tile
from fedfq.codec.format import coefficients, tiles
from fedfq.codec.format.container import (
    HAS_BASIS,
    HAS_GAIN,
    HAS_SKETCH,
    HAS_STEP,
    HEAD,
    LAYOUT_IS_DIGEST,
    MAGIC,
    SHARES_SMALL,
    VERSION,
)
from fedfq.codec.format.entropy import rans_encode, rans_undo
from fedfq.codec.format.layout import DTYPES
from fedfq.codec.format.probability import MAX_CLASS, SPACINGS
from fedfq.codec.format.reader import ByteReader, varint
from fedfq.codec.format.sections import (
    AND_PLAIN,
    FACTOR_KINDS,
    INTEGER,
    INTEGER_DEFLATED,
    LEFT_KNOWN,
    OWN_STEP,
    PLAIN,
    RIGHT_KNOWN,
    SECTIONS,
    WIDTHS,
    ZERO,
)
from fedfq.codec.format.small import ROW, SMALL_ENTRIES
from fedfq.codec.format.tiles import CodedTile, Tile, TileHeader, cut_into_tiles

Array = np.ndarray[Any, np.dtype[Any]]
Body = bytes | list[bytes]  # of a section: as it is, or its pieces, which are those of `head` and its tiles

FACTORED = tuple(FACTOR_KINDS)
KNOWN = RIGHT_KNOWN | LEFT_KNOWN
SMALL_TILE_CELLS, SMALL_TILE_SIDE = 1 << 10, 1 << 5
FLOAT32_MAX = float(np.finfo(np.float32).max)

# Numbers that break careless arithmetic
NUMBERS = (
    *(0, 1, 2, 3, 7, 8, 9, 63, 64, 127, 128, 255, 256, 1023, 1024, 1025, 4096, 1 << 16, 1 << 20, 1 << 24),
    *((1 << k) + d for k in (31, 32, 40, 53, 58, 59, 60, 62) for d in (-1, 0, 1)),
    (1 << 63) - 1,
)
# Varints that no encoder writes: over-long, beyond 63 bits, without an end
BAD_VARINTS = (b"\x80\x00", b"\xff\x00", b"\x81\x80\x00", b"\x80" * 9 + b"\x01", b"\xff" * 9 + b"\x7f", b"\xff" * 20)
# Steps, gains and scales: zero, negative, not finite, subnormal, huge
FLOATS = (0.0, -0.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e-45, 1.2e-38, 1e30, FLOAT32_MAX, -FLOAT32_MAX)


@contextmanager
def small_tiles() -> Iterator[None]:
    """Tiles of 2^10 instead of 2^22 cells, for encoder and decoder alike."""
    with mock.patch.multiple(tiles, TILE_CELLS=SMALL_TILE_CELLS, TILE_SIDE=SMALL_TILE_SIDE):
        yield


# Payloads taken apart and put together, without any of the package's checks


@dataclass(frozen=True)
class SmallParts:
    """What small tensors share, in its pieces. `steps` is the stream before compression: steps, then offsets; nothing
    has the length 0."""

    steps: bytes = b""
    common: tuple[int, Body] = (ZERO, b"")
    own: tuple[int, Body] | None = None
    integers: tuple[int, Body] = (ZERO, b"")


@dataclass(frozen=True)
class SketchParts:
    """A sketch in its pieces; `scales` before compression, with numbers of directions behind them in a payload with a
    shared basis; `blocks` is their number if that is a lie."""

    seed: bytes
    unit: float
    scales: bytes
    words: bytes
    tiles: list[bytes]
    blocks: bytes | None = None


@dataclass(frozen=True)
class Parts:
    """A payload that can be given any lie. `table` is the layout before compression, or the digest."""

    flags: int
    table: bytes
    step: bytes
    sections: list[tuple[int, Body]]
    gain: bytes = b""
    basis: bytes = b""  # the digest of the shared basis
    version: int = VERSION
    small: SmallParts | None = None
    sketch: SketchParts | None = None


def seal(payload: bytes) -> bytes:
    """The payload with its checksum made right."""
    if len(payload) < HEAD.size:
        return payload
    return payload[:4] + struct.pack("<I", zlib.crc32(payload[8:], zlib.crc32(payload[:4]))) + payload[8:]


def deflated(data: bytes, window: int = -15) -> bytes:
    deflate = zlib.compressobj(9, zlib.DEFLATED, window)
    return deflate.compress(data) + deflate.flush()


def entry(name: bytes | str, dtype: int | str, *shape: int) -> bytes:
    """A tensor's entry in a layout's table."""
    name = name.encode() if isinstance(name, str) else name
    code = DTYPES.index(dtype) if isinstance(dtype, str) else dtype
    return varint(len(name)) + name + bytes([code, len(shape)]) + b"".join(map(varint, shape))


def step_bytes(step: float = 1.0, first: int = 1, last: int = 0, shifts: bytes = b"") -> bytes:
    return struct.pack("<fB", step, first << 4 | last) + shifts


def tile_bytes(
    stream: bytes, *, nonzeros: int | bytes = 1, base: int = 0, spacings: int = 0, ranges: bytes = b""
) -> bytes:
    number = nonzeros if isinstance(nonzeros, bytes) else varint(nonzeros)
    return struct.pack("<Bb", spacings, base) + number + ranges + stream


def join_tiles(tiles: list[bytes]) -> bytes:
    return b"".join(varint(len(tile)) + tile for tile in tiles[:-1]) + (tiles[-1] if tiles else b"")


def head(kind: int) -> str:
    """The pieces before a section's plain tiles: scales (s), step and offset (o), numbers (n), tiles with a length (t).

    Factors are the rank, V and A; a side in known directions is their number, their tile and that of the rest.
    """
    if kind not in FACTORED:
        return {WIDTHS: "s", OWN_STEP: "o"}.get(kind, "")
    return "n" + "".join("ntt" if kind & known else "t" for known in (RIGHT_KNOWN, LEFT_KNOWN))


def join_body(kind: int, body: list[bytes]) -> bytes:
    first = [varint(len(piece)) + piece if what == "t" else piece for what, piece in zip(head(kind), body)]
    return b"".join(first) + join_tiles(body[len(first) :])


def section(kind: int, body: Body) -> bytes:
    if isinstance(body, list):
        body = join_body(kind, body)
    return bytes([kind]) if kind == ZERO and not body else bytes([kind]) + varint(len(body)) + body


def packed_stream(data: bytes) -> bytes:
    """A compressed stream behind its length; nothing at all is the length 0."""
    stream = deflated(data) if data else b""
    return varint(len(stream)) + stream


def join_small(small: SmallParts, *, steps: bytes | None = None) -> bytes:
    """What small tensors share. `steps` replaces the compressed stream, length and all."""
    first = packed_stream(small.steps) if steps is None else steps
    own = b"" if small.own is None else section(*small.own)
    return first + section(*small.common) + own + section(*small.integers)


def join_sketch(sketch: SketchParts, *, scales: bytes | None = None) -> bytes:
    """A sketch. `scales` replaces the compressed stream, length and all."""
    head = sketch.seed + struct.pack("<f", sketch.unit) + (packed_stream(sketch.scales) if scales is None else scales)
    blocks = varint(len(sketch.words)) if sketch.blocks is None else sketch.blocks
    return head + blocks + sketch.words + join_tiles(sketch.tiles)


def assemble(parts: Parts, *, packed: bytes | None = None, small: bytes | None = None, tail: bytes = b"") -> bytes:
    """The bytes of a payload. `packed` replaces the compressed layout, length and all; `small` what small tensors
    share; `tail` follows the sections."""
    if packed is None:
        packed = parts.table
        if not parts.flags & LAYOUT_IS_DIGEST:
            compressed = deflated(parts.table)
            packed = varint(len(compressed)) + compressed
    sections = b"".join(section(*part) for part in parts.sections)
    if small is None:
        small = b"" if parts.small is None else join_small(parts.small)
    sketch = b"" if parts.sketch is None else join_sketch(parts.sketch)
    body = parts.gain + parts.basis + packed + parts.step + small + sections + sketch + tail
    return seal(HEAD.pack(MAGIC, parts.version & 255, parts.flags & 255, 0) + body)


def take_apart(payload: bytes, model: dict[str, Array]) -> Parts:
    """The inverse of `assemble` for a valid payload."""
    reader = ByteReader(payload)
    flags = bytes(reader.take(8))[3]
    gain = bytes(reader.take(4)) if flags & HAS_GAIN else b""
    basis = bytes(reader.take(8)) if flags & HAS_BASIS else b""
    if flags & LAYOUT_IS_DIGEST:
        table = bytes(reader.take(8))
        names = sorted(model)
    else:
        table = zlib.decompress(reader.take(reader.varint()), -15)
        names = list(model)
    step = b""
    if flags & HAS_STEP:
        step = bytes(reader.take(5))
        step += bytes(reader.take(max(0, (step[4] & 15) + 1 - (step[4] >> 4))))
    small = None
    if flags & SHARES_SMALL:
        small = _take_small(reader, [model[name] for name in names if model[name].size <= SMALL_ENTRIES])
        names = [name for name in names if model[name].size > SMALL_ENTRIES]
    sections = [_take_section(reader, model[name].shape) for name in names]
    sketch = _take_sketch(reader) if flags & HAS_SKETCH else None
    return Parts(flags, table, step, sections, gain, basis, small=small, sketch=sketch)


def _take_sketch(reader: ByteReader) -> SketchParts:
    seed, unit = bytes(reader.take(4)), reader.float32()
    scales = zlib.decompress(reader.take(reader.varint()), -15)
    words = bytes(reader.take(reader.varint()))
    number = len(cut_into_tiles((len(words),)))
    tiles = [bytes(reader.take(reader.varint())) for _ in range(number - 1)]
    return SketchParts(seed, unit, scales, words, [*tiles, bytes(reader.rest())])


def _take_section(reader: ByteReader, shape: tuple[int, ...]) -> tuple[int, Body]:
    kind = reader.byte()
    body = b"" if kind == ZERO else bytes(reader.take(reader.varint()))
    if kind in (OWN_STEP, WIDTHS) or SECTIONS[kind].needs_step:
        return kind, _split_tiles(body, kind, len(cut_into_tiles(shape)))
    return kind, body


def _take_small(reader: ByteReader, tensors: list[Array]) -> SmallParts:
    sizes = [array.size for array in tensors if array.dtype.kind == "f"]
    stream = reader.take(reader.varint())
    steps = zlib.decompress(stream, -15) if stream else b""
    common = _take_section(
        reader, small_shape(size for size, byte in zip(sizes, steps or bytes(len(sizes))) if not byte)
    )
    own = None
    if any(steps[: len(sizes)]):
        own = _take_section(reader, small_shape(size for size, byte in zip(sizes, steps) if byte))
    return SmallParts(steps, common, own, _take_section(reader, ()))


def small_shape(sizes: Iterable[int]) -> tuple[int, int]:
    """Of the matrix that holds tensors of these sizes."""
    return -(-sum(sizes) // ROW), ROW


def every_section(parts: Parts) -> list[tuple[int, Body]]:
    """Those of single tensors, then those that small tensors share."""
    small = parts.small
    return [*parts.sections, *([] if small is None else [small.common, *([] if small.own is None else [small.own])])]


def with_section(parts: Parts, at: int, changed: tuple[int, Body]) -> Parts:
    """The payload with another section at this place of `every_section`."""
    place = at - len(parts.sections)
    if place < 0:
        return replace(parts, sections=_replaced(parts.sections, at, changed))
    assert parts.small is not None
    return replace(parts, small=replace(parts.small, **{("common", "own")[place]: changed}))


def _split_tiles(body: bytes, kind: int, number: int) -> list[bytes]:
    reader = ByteReader(body)
    result = []
    for what in head(kind):
        if what == "n":
            result.append(varint(reader.varint()))
        else:
            result.append(bytes(reader.take({"s": 12, "o": 5}[what] if what in "so" else reader.varint())))
    if kind in FACTORED and not kind & AND_PLAIN:
        return result
    result += [bytes(reader.take(reader.varint())) for _ in range(number - 1)]
    return [*result, bytes(reader.take(reader.left()))]


# Streams that are valid by construction, whatever their header says


def wild_tile(header: TileHeader, tile: Tile, noise: random.Random) -> CodedTile | None:
    """A stream that decodes under this header (but for `nonzeros`, which is set), its symbols random.

    The decoder itself, uncompiled, reads noise and the symbols it sees are written down and coded. None where it met
    a pattern that does not fit its block, or no non-zero at all.
    """
    operations: list[int] = []

    def record(x: int, start: int, frequency: int) -> int:
        operations.append(int(start) << 16 | int(frequency))
        return rans_undo.py_func(int(x), int(start), int(frequency))

    cells = tile.height * tile.width
    levels = np.zeros(cells, np.float32)
    words = np.frombuffer(noise.randbytes(32 * cells + 64), "<u4")
    with mock.patch.multiple(coefficients, rans_undo=record, _take_classes=coefficients._take_classes.py_func):
        start = noise.getrandbits(62)
        coefficients._decode.py_func(
            tuple(header._replace(nonzeros=cells)),
            *(tile.height, tile.width, start, words, 0, tile.width, 1.0, coefficients.NO_SHIFTS.astype(np.float64)),
            *(np.zeros(cells, np.int64), levels),
        )
    header = header._replace(nonzeros=int(np.count_nonzero(levels)))
    found = CodedTile(header, rans_encode(np.array(operations, np.uint32)) if operations else b"")
    try:
        coefficients.decode_tile(found, tile)
    except fedfq.PayloadError:
        return None
    return found if header.nonzeros else None


def random_header(noise: random.Random) -> TileHeader:
    ranges = [sorted(noise.choices(range(1, MAX_CLASS + 1), k=2)) for _ in range(2)]
    row, column = noise.choice(SPACINGS), noise.choice(SPACINGS)
    (row_first, row_last), (column_first, column_last) = (r if s else (1, 1) for r, s in zip(ranges, (row, column)))
    base = noise.choice((-128, 127, noise.randrange(-128, 128), noise.randrange(0, 60)))
    return TileHeader(base, 1, row, row_first, row_last, column, column_first, column_last)


# The corpus


@dataclass(frozen=True)
class Entry:
    """A valid payload, the model it belongs to, the payload taken apart, and the shared basis it was made with."""

    name: str
    payload: bytes
    model: dict[str, Array]
    parts: Parts
    basis: fedfq.SharedBasis | None = None


def _updates(rng: np.random.Generator) -> dict[str, dict[str, Array]]:
    def normal(*shape: int) -> Array:
        return rng.normal(size=shape).astype(np.float32)

    scaled = normal(40, 70) * np.exp(rng.normal(size=(40, 1))) * np.exp(rng.normal(size=70))
    counters = {
        "steps": np.array(7, np.int64),
        "flags": rng.random(50) < 0.5,
        "table": rng.integers(-1000, 1000, (4, 9), np.int32),
        "repeats": np.full(300, 5, np.uint16),
        "largest": np.array([2**64 - 1, 0], np.uint64),
        "nothing": np.zeros((3, 0, 5), np.int8),
    }
    return {
        "matrix": {"weight": normal(16, 24), "bias": normal(24)},
        "factors": {
            "outer": np.outer(normal(20), normal(33)),
            "rest": np.outer(normal(24), normal(40)) + 9 * normal(24, 40) * (rng.random((24, 40)) < 0.03),
            "kernel": (normal(24, 2) @ normal(2, 24)).reshape(8, 3, 8, 3).transpose(0, 2, 1, 3),
        },
        "tiles": {"weight": scaled.astype(np.float32), "bias": normal(70), "long": normal(1500)},
        "shapes": {"scalar": normal(), "empty": normal(0, 4), "cube": normal(3, 4, 5), "thin": normal(2, 400)},
        "dtypes": {
            "half": normal(9, 9).astype(np.float16),
            "double": normal(30).astype(np.float64),
            "long double": normal(5, 6).astype(np.longdouble),  # written as float32
            **counters,
        },
        "kept": {"norm.running_mean": normal(40), "norm.running_var": np.float32(1e9) * normal(40), "w": normal(8, 8)},
        "small": {
            **{f"{k}.running_mean": normal(40) for k in range(2)},
            **{f"{k}.running_var": np.float32(10.0 ** (9 - 18 * k)) * normal(17) ** 2 for k in range(2)},
            **{f"{k}.num_batches_tracked": np.array(7 + k, np.int64) for k in range(2)},
            **{f"{k}.weight": normal(20, 30) for k in range(3)},  # more than one small tile
            **{"bias": normal(24), "scalar": normal(), "empty": normal(0, 4), "large": normal(35, 35)},
            **counters,
        },
        "statistics": {
            "big.running_var": rng.random(2000).astype(np.float32),
            "big.running_mean": np.float32(1e-20) * normal(1500),
            "weight": normal(40, 40),
            "bias": normal(40),
            "counts": rng.integers(0, 9, 1100),
        },
        "own": {"a.running_mean": normal(32), "a.running_var": np.float32(1e30) * normal(32), "n": np.array([1, 2])},
        "integers": counters,
        "zeros": {"weight": np.zeros((50, 50), np.float32), "count": np.zeros(3, np.int64), "é": normal(6)},
        "ones": {"a": np.ones(1, np.float32), "b": np.ones((1, 1), np.float64), "c": np.ones(2, np.float16)},
        "nothing": {},
    }


def corpus(seed: int = 0, wild: int = 60) -> list[Entry]:
    """Valid payloads: all section kinds, small tensors together and alone, one tile and several, both layouts, three
    allocators, with a shared basis and without; and wild tiles."""
    rng = np.random.default_rng(seed)
    codecs: dict[str, dict[str, Any]] = {
        "fine": {"step": 0.01, "basis": "identity"},
        "coarse": {"step": 1.5, "basis": "identity"},
        "stochastic": {"step": 0.7, "basis": "identity", "rounding": "stochastic"},
        "digest": {"step": 0.5, "basis": "identity", "layout": "digest"},
        "adaptive": {"step": 0.3},
        "gain": {"step": 0.8, "layout": "digest", "gain": True},
        "unbiased": {"step": 0.8, "unbiased": True},
        "unbiased digest": {"step": 2.0, "layout": "digest", "unbiased": True, "basis": "identity"},
        "exact": {"claimed_ratio": 12, "allocator": "exact"},
        "cgsa": {"claimed_ratio": 8, "allocator": "cgsa", "layout": "digest"},
    }
    result = []
    for name, update in _updates(rng).items():
        model = {key: np.zeros_like(as_decoded(value)) for key, value in update.items()}
        for title, options in codecs.items():
            payload = fedfq.encode(update, **options)
            result.append(Entry(f"{name}, {title}", payload, model, take_apart(payload, model)))
    noise = random.Random(seed)
    shared, brink = _shared(np.random.default_rng(seed)), _brink(rng)
    return [*result, *shared, *brink, *_wild_entries(noise, wild), *_wild_small(noise, wild // 3)]


def as_decoded(array: Array) -> Array:
    """The tensor in the dtype in which it comes back: float32 for a long double."""
    return array.astype(np.float32) if array.dtype == np.longdouble else array


def basis_of(drift: dict[str, Array]) -> fedfq.SharedBasis:
    """That of a model which has moved so from zero."""
    return fedfq.SharedBasis(drift, {name: np.zeros_like(array) for name, array in drift.items()})


def _shared(rng: np.random.Generator) -> Iterator[Entry]:
    """Updates in directions of the drift: of its rows and its columns, of one of them, of neither; and with more."""

    def normal(*shape: int) -> Array:
        return rng.normal(size=shape).astype(np.float32)

    def as_kernel(matrix: Array) -> Array:
        return matrix.reshape(8, 3, 8, 3).transpose(0, 2, 1, 3)

    left, right, small = normal(40, 4), normal(48, 4), normal(24, 2)
    drift, outer = left @ right.T, normal(40, 1) @ normal(1, 48)
    inside = {
        "both": left @ normal(4, 2) @ normal(2, 4) @ right.T,
        "rows": normal(40, 2) @ normal(2, 4) @ right.T,
        "columns": left @ normal(4, 2) @ normal(2, 48),
    }
    spikes = 3 * normal(40, 48) * (rng.random((40, 48)) < 0.02)
    update = {
        **inside,
        **{f"{name} and more": array + spikes for name, array in inside.items()},
        **{"nearly": inside["both"] + outer / 2, "neither": outer, "still": -outer},
        **{"kernel": as_kernel(small @ normal(2, 24)), "bias": normal(30), "steps": np.array([7, 8])},
    }
    model = {name: drift if array.shape == drift.shape else array for name, array in update.items()}
    model |= {"still": np.zeros_like(drift), "kernel": as_kernel(small @ normal(2, 24))}
    codecs: dict[str, dict[str, Any]] = {
        "fine": {"step": 0.05},
        "coarse": {"step": 2.0},
        "digest": {"step": 0.5, "layout": "digest", "gain": True},
        "budget": {"ratio": 30},
        "unbiased": {"ratio": 40, "unbiased": True},
    }
    groups = [(title, list(model), options) for title, options in codecs.items()]
    for title, names, options in [*groups, *((name, [name], codecs["coarse"]) for name in (*inside, "kernel"))]:
        moved = {name: model[name] for name in names}
        basis = basis_of(moved)
        payload = fedfq.encode({name: update[name] for name in names}, shared_basis=basis, **options)
        yield Entry(f"shared, {title}", payload, moved, take_apart(payload, moved), basis)


def tile_of(levels: Any) -> bytes:
    """These levels, coded."""
    levels = np.array(levels, np.int32)
    encoded = encode_tile(nonzero(levels), levels.shape[1])
    assert encoded is not None
    return encoded.coded.to_bytes()


def _brink(rng: np.random.Generator) -> Iterator[Entry]:
    """Values of the largest float32, which any weight above 1 takes beyond it."""
    model = {"w": np.kron([[1, 0], [0, 0]], np.ones((4, 4))).astype(np.float32)}
    basis = basis_of(model)
    plain, side = (tile_of(rng.integers(-1, 2, (8, width))) for width in (8, 1))
    inside = [b"\1", tile_of([[1]])]  # the one known direction, whose entries are 1/2 and 0
    for kind in (PLAIN, OWN_STEP, *FACTORED):
        right = [*inside, side] if kind & RIGHT_KNOWN else [side]
        left = [*inside, b""] if kind & LEFT_KNOWN else [side]
        body = [b"\1", *right, *left] if kind in FACTORED else [struct.pack("<fb", FLOAT32_MAX, 0)] * (kind == OWN_STEP)
        flags, known = (HAS_BASIS, basis) if kind in FACTORED and kind & KNOWN else (0, None)
        parts = Parts(
            HAS_STEP | flags,
            entry("w", "float32", 8, 8),
            step_bytes(FLOAT32_MAX),
            [(kind, [*body, plain] if kind & AND_PLAIN or kind not in FACTORED else body)],
            basis=basis.digest if flags else b"",
        )
        yield Entry(f"brink {kind}", assemble(parts), model, parts, known)


def _wild_body(tile: Tile, noise: random.Random, **fixed: int) -> bytes:
    """A tile of random content under a random header."""
    found = None
    while found is None:
        found = wild_tile(random_header(noise)._replace(**fixed), tile, noise)
    return found.to_bytes()


def _wild_side(kind: int, side: int, rank: int, held: int, noise: random.Random) -> list[bytes]:
    """The pieces of V or A: random content, in known directions or not (`kind` is 0); one tile of two may be empty."""
    rest = _wild_body(Tile(0, rank, side, rank), noise)
    if not kind:
        return [rest]
    directions = noise.randint(1, held)
    inside = _wild_body(Tile(0, rank, directions, rank), noise)
    return [varint(directions), *noise.choice(((inside, rest), (inside, b""), (b"", rest)))]


def _wild_entries(noise: random.Random, number: int) -> Iterator[Entry]:
    shapes = ((1, 1), (1, 64), (4, 8), (8, 64), (9, 70), (30, 33), (32, 32))
    rng = np.random.default_rng(noise.getrandbits(32))
    bases = {shape: basis_of({"w": rng.normal(size=shape)}) for shape in shapes}
    found = 0
    while found < number:
        factored = found % 3 == 0
        shape = noise.choice(shapes[3:] if factored else shapes)
        (tile,) = cut_into_tiles(shape)
        kind, body, known = PLAIN, [_wild_body(tile, noise)], noise.choice((bases[shape], None))
        if factored:
            kind, rank = noise.choice(FACTORED), noise.choice((1, 2, 7, 8))
            known = bases[shape] if kind & KNOWN else known
            held = bases[shape].held["w"].right.shape[1]
            right = _wild_side(kind & RIGHT_KNOWN, shape[1], rank, held, noise)
            left = _wild_side(kind & LEFT_KNOWN, shape[0], rank, held, noise)
            body = [varint(rank), *right, *left, *(body if kind & AND_PLAIN else [])]
        elif noise.random() < 0.2:
            own = noise.choice((1.0, 1e-45, 1e30, FLOAT32_MAX)), noise.choice((0, 1, -1, 127, -128))
            kind, body = OWN_STEP, [struct.pack("<fb", *own), *body]
        elif noise.random() < 0.25:
            scales = struct.pack("<3f", *noise.choices((0.0, 1e-45, 1.0, FLOAT32_MAX), k=3))
            kind, body = WIDTHS, [scales, _wild_body(tile, noise, base=-128)]  # small levels, mostly
        step = step_bytes(noise.choice((1.0, 1e-45, 1e30, FLOAT32_MAX)), 0, 15, noise.randbytes(16))
        gain = struct.pack("<f", noise.choice((1.0, 1e-45, 1e30, FLOAT32_MAX)))
        table = entry("w", noise.choice(DTYPES[:4]), *shape)
        flags, digest = (HAS_BASIS, known.digest) if known is not None else (0, b"")
        parts = Parts(HAS_STEP | HAS_GAIN | flags, table, step, [(kind, body)], gain, digest)
        payload = assemble(parts)
        with suppress(fedfq.PayloadError):  # a level that no width has, factors beyond float32
            yield Entry(f"wild {found}", payload, fedfq.decode(payload, shared_basis=known), parts, known)
            found += 1


def _wild_small(noise: random.Random, number: int) -> Iterator[Entry]:
    """Small tensors of random content in rows that they fill, with steps from the smallest to the largest."""
    found = 0
    while found < number:
        steps = bytes(noise.choice((0, 0, 1, 140, 254, 255, noise.randrange(256))) for _ in range(noise.randint(1, 5)))
        shapes = [noise.choice(((32,), (4, 8), (64,), (2, 4, 12), (16, 20))) for _ in steps]
        tensors = [entry(f"w{k}", noise.choice(DTYPES[:4]), *shape) for k, shape in enumerate(shapes)]
        tensors.insert(noise.randrange(len(tensors) + 1), entry("n", noise.choice(("int64", "uint64")), 3))
        sections: list[tuple[int, Body]] = []
        for own in (False, True):
            sizes = [math.prod(shape) for shape, byte in zip(shapes, steps) if bool(byte) == own]
            tiles = cut_into_tiles(small_shape(sizes))
            zero = not sizes or noise.random() < 0.1
            sections.append((ZERO, b"") if zero else (PLAIN, [_wild_body(tile, noise) for tile in tiles]))
        offsets = bytes(noise.choice((0, 1, 127, 128, 255)) if byte else 0 for byte in steps)
        numbers = INTEGER, bytes([DTYPES.index("int64")]) + noise.randbytes(24)
        small = SmallParts(steps + offsets, sections[0], sections[1] if any(steps) else None, numbers)
        step = step_bytes(noise.choice((1.0, 1e-45, 1e30, FLOAT32_MAX)), 0, 15, noise.randbytes(16))
        gain = struct.pack("<f", noise.choice((1.0, 1e-45, 1e30, FLOAT32_MAX)))
        flags = HAS_STEP | HAS_GAIN | SHARES_SMALL
        parts = Parts(flags, b"".join(tensors), step, [], gain, small=small)
        payload = assemble(parts)
        yield Entry(f"wild small {found}", payload, fedfq.decode(payload), parts)
        found += 1


# Mutations of bytes, which know nothing of the format


def flip_bits(data: bytes, other: bytes, noise: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(noise.choice((1, 1, 1, 2, 3, 8))):
        out[noise.randrange(len(out))] ^= 1 << noise.randrange(8)
    return bytes(out)


def set_bytes(data: bytes, other: bytes, noise: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(noise.choice((1, 1, 2, 4))):
        out[noise.randrange(len(out))] = noise.choice((0, 1, 0x7F, 0x80, 0xFF, noise.randrange(256)))
    return bytes(out)


def truncate(data: bytes, other: bytes, noise: random.Random) -> bytes:
    return data[: noise.randrange(len(data))]


def extend(data: bytes, other: bytes, noise: random.Random) -> bytes:
    return data + noise.choice((noise.randbytes(noise.randrange(1, 40)), bytes(noise.randrange(1, 40)), data))


def cut_out(data: bytes, other: bytes, noise: random.Random) -> bytes:
    a, b = sorted(noise.choices(range(len(data) + 1), k=2))
    return data[:a] + data[b:]


def insert(data: bytes, other: bytes, noise: random.Random) -> bytes:
    at = noise.randrange(len(data) + 1)
    a, b = sorted(noise.choices(range(len(data) + 1), k=2))
    return data[:at] + noise.choice((noise.randbytes(noise.randrange(1, 20)), data[a:b])) + data[at:]


def splice(data: bytes, other: bytes, noise: random.Random) -> bytes:
    return data[: noise.randrange(len(data) + 1)] + other[noise.randrange(len(other) + 1) :]


def garbage(data: bytes, other: bytes, noise: random.Random) -> bytes:
    return noise.choice((data[:8], data[:3], b"")) + noise.randbytes(noise.randrange(60))


BLIND = (flip_bits, flip_bits, set_bytes, set_bytes, truncate, extend, cut_out, insert, splice, garbage)


# Mutations of parts, which know where it hurts


def _varint(noise: random.Random) -> bytes:
    return noise.choice(BAD_VARINTS) if noise.random() < 0.2 else varint(noise.choice(NUMBERS))


def _any_float(noise: random.Random) -> float:
    return noise.choice((*FLOATS, noise.uniform(-2, 2)))


def _replaced(items: list[Any], at: int, item: Any) -> list[Any]:
    return [*items[:at], item, *items[at + 1 :]]


def order_of_sections(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """Swapped, repeated, left out, or another payload's."""
    sections = list(parts.sections) or [(ZERO, b"")]
    at = noise.randrange(len(sections))
    ways: list[list[tuple[int, Body]]] = [
        noise.sample(sections, len(sections)),
        [*sections, sections[at]],
        sections[:at] + sections[at + 1 :],
        _replaced(sections, at, noise.choice(other.sections or sections)),
        other.sections,
    ]
    return assemble(replace(parts, sections=noise.choice(ways)))


def kind_of_section(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    if not parts.sections:
        return assemble(parts, tail=noise.randbytes(3))
    at = noise.randrange(len(parts.sections))
    body = section(*parts.sections[at])
    kind = bytes([noise.choice((*range(8), *FACTORED, 24, 31, 255))])
    before = b"".join(section(*part) for part in parts.sections[:at])
    after = b"".join(section(*part) for part in parts.sections[at + 1 :])
    return assemble(replace(parts, sections=[]), tail=before + kind + body[1:] + after)


def length_of_section(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    at = noise.randrange(max(1, len(parts.sections)))
    kind, body = parts.sections[at] if parts.sections else (PLAIN, b"abc")
    plain = section(kind, body)
    reader = ByteReader(plain[1:] or b"\0")
    reader.varint()
    lie = bytes([kind]) + _varint(noise) + bytes(reader.take(reader.left()))
    after = b"".join(section(*part) for part in parts.sections[at + 1 :])
    return assemble(replace(parts, sections=parts.sections[:at]), tail=lie + after)


def body_of_section(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """A section's body cut, extended, or replaced by another kind of noise; its length is right."""
    sections = every_section(parts)
    if not sections:
        return assemble(replace(parts, sections=[(PLAIN, noise.randbytes(5))]))
    at = noise.randrange(len(sections))
    kind, _ = sections[at]
    body = section(*sections[at])[2:]
    values = struct.pack("<3f", *(_any_float(noise) for _ in range(3)))
    integers = bytes([noise.choice((*range(14), 255))])
    bomb = deflated(bytes(noise.choice((100, 10_000, 1 << 20))))
    ways = (
        body[: noise.randrange(len(body) + 1)],
        body + noise.randbytes(noise.randrange(1, 9)),
        values * noise.randrange(1, 14),
        values[:12] + body[12:],
        integers + body[1:],
        integers + bomb,
        integers + deflated(noise.randbytes(noise.choice((1, 8, 50, 72, 144, 300, 600)))) + noise.randbytes(3),
        noise.randbytes(noise.randrange(80)),
        values[:4] + body[4:],
        struct.pack("<f", noise.uniform(0, 2)) + body,
    )
    return assemble(with_section(parts, at, (kind, noise.choice(ways))))


def _tiled(parts: Parts, noise: random.Random) -> tuple[int, list[int], list[bytes]] | None:
    """A section with tiles: its place, the places of the tiles among its pieces, and these."""
    sections = every_section(parts)
    places = [k for k, (_, body) in enumerate(sections) if isinstance(body, list)]
    if not places:
        return None
    at = noise.choice(places)
    kind, body = sections[at]
    assert isinstance(body, list)
    return at, [k for k, _ in enumerate(body) if head(kind)[k : k + 1] in ("t", "")], body


def _some_tile(noise: random.Random) -> bytes:
    """A small tile of noise: any header, any stream."""
    row, column = noise.randrange(4), noise.randrange(4)
    header = {
        "base": noise.choice((-128, 127, 0, noise.randrange(-128, 128))),
        "spacings": row | column << 2 if noise.random() < 0.9 else noise.randrange(256),
        "nonzeros": noise.choice((varint(noise.randrange(1, 70)), _varint(noise))),
    }
    ranges = b""
    for spacing in (row, column):
        good = bytes(sorted(noise.choices(range(1, MAX_CLASS + 1), k=2)))
        if spacing:
            ranges += good if noise.random() < 0.8 else bytes(noise.choices((0, 1, 2, 79, 80, 81, 255), k=2))
    size = noise.choice((0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 40, 300))
    return tile_bytes(noise.choice((noise.randbytes, bytes))(size), ranges=ranges, **header)


def header_of_tile(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """The bytes before a stream: spacings, base, number of non-zeros, class ranges; the stream stays."""
    found = _tiled(parts, noise)
    if found is None:
        tile = _some_tile(noise)
        return assemble(replace(parts, flags=parts.flags | HAS_STEP, sections=[(PLAIN, [tile])]))
    at, places, body = found
    k = noise.choice(places)
    tile = bytearray(body[k] or b"\0\0\1\1")
    way = noise.randrange(5)
    if way == 0:
        tile[0] = noise.choice((*range(16), 16, 128, 255))
    elif way == 1:
        tile[1] = noise.choice((0, 1, 127, 128, 255, noise.randrange(256)))
    elif way == 2:
        reader = ByteReader(bytes(tile[2:]))
        reader.varint()
        tile[2:] = _varint(noise) + bytes(reader.take(reader.left()))
    elif way == 3:
        place = noise.randrange(2, min(8, len(tile)))
        tile[place] = noise.choice((0, 1, 2, 79, 80, 81, 127, 128, 255))
    else:
        tile[:] = _some_tile(noise)
    kind, _ = every_section(parts)[at]
    return assemble(with_section(parts, at, (kind, _replaced(body, k, bytes(tile)))))


def tiles_of_section(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """Tiles swapped, left out, emptied, repeated, with wrong lengths, or with damaged streams."""
    found = _tiled(parts, noise)
    if found is None:
        return order_of_sections(parts, other, noise)
    at, places, body = found
    kind, _ = every_section(parts)[at]
    k = noise.choice(places)
    tile = body[k]
    swapped = dict(zip(places, noise.sample(places, len(places))))
    cut = noise.randrange(len(tile) + 1)
    damaged = flip_bits(tile, b"", noise) if tile else b"\0"
    far = max(0, len(damaged) - 3)  # near the end, so that most of the stream decodes
    ways: list[Body] = [
        [body[swapped.get(j, j)] for j, _ in enumerate(body)],
        [*body[:k], *body[k + 1 :]],
        _replaced(body, k, b""),
        [*body, tile],
        _replaced(body, k, tile[:cut]),
        _replaced(body, k, tile + noise.randbytes(noise.randrange(1, 9))),
        _replaced(body, k, damaged),
        _replaced(body, k, damaged[:far] + noise.randbytes(3)),
        join_body(kind, [*body[:k], b""])[:-1] + _varint(noise) + b"".join(body[k:]),
    ]
    return assemble(with_section(parts, at, (kind, noise.choice(ways))))


def rank_of_factors(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """Another rank, or other V and A, in a section with factors (which it becomes, if it has tiles)."""
    found = _tiled(parts, noise)
    if found is None:
        return layout_entry(parts, other, noise)
    at, places, body = found
    rank, tiles = noise.choice((body[0], _varint(noise), varint(noise.randrange(1, 12)))), [body[k] for k in places]
    kind, _ = every_section(parts)[at]
    other_kind = noise.choice(FACTORED)

    def refilled(tile: Callable[[], bytes]) -> list[bytes]:
        return [rank, *(tile() if what == "t" else varint(noise.randrange(1, 5)) for what in head(other_kind)[1:])]

    ways = (
        (kind, [rank, *body[1:]] if head(kind) else [rank, *body]),
        (other_kind, refilled(lambda: noise.choice(tiles))[: noise.randrange(1, 9)]),
        (other_kind, [*refilled(lambda: _some_tile(noise)), *noise.choices(tiles, k=1)]),
    )
    return assemble(with_section(parts, at, noise.choice(ways)))


def dtype_of_integers(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """Integers that are said to be stored in another dtype, deflated or not."""
    places = [k for k, (kind, _) in enumerate(parts.sections) if kind in (INTEGER, INTEGER_DEFLATED)]
    if not places:
        return integers_of_small(parts, other, noise)
    at = noise.choice(places)
    kind, body = parts.sections[at]
    assert isinstance(body, bytes)
    numbers = zlib.decompress(body[1:], -15) if kind == INTEGER_DEFLATED else body[1:]
    code = bytes([noise.choice((*range(len(DTYPES)), len(DTYPES), 255))])
    numbers *= noise.choice((1, 1, 2, 4, 8))
    ways: list[tuple[int, Body]] = [(INTEGER, code + numbers), (INTEGER_DEFLATED, code + deflated(numbers))]
    return assemble(with_section(parts, at, noise.choice(ways)))


def step_of_section(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """A section with a step of its own, which one with tiles becomes: any step, cut, or another kind of head."""
    found = _tiled(parts, noise)
    if found is None:
        return order_of_sections(parts, other, noise)
    at, places, body = found
    tiles = [body[k] for k in places]
    step = struct.pack("<f", _any_float(noise)) if noise.random() < 0.8 else noise.randbytes(4)
    step += bytes([noise.choice((0, 0, 1, 127, 128, 255))])
    ways: list[tuple[int, Body]] = [
        (OWN_STEP, [step, *tiles]),
        (OWN_STEP, [step[: noise.randrange(5)], *tiles]),
        (OWN_STEP, step),
        (OWN_STEP, tiles),
        (WIDTHS, [3 * step[:4], *tiles]),
        (PLAIN, tiles),
        (PLAIN, [step, *tiles]),
    ]
    return assemble(with_section(parts, at, noise.choice(ways)))


def _small_of(parts: Parts, other: Parts) -> tuple[Parts, SmallParts]:
    """The payload with small tensors that share something: another's, or nothing, if it has none."""
    small = parts.small or other.small or SmallParts()
    return replace(parts, flags=parts.flags | SHARES_SMALL, small=small), small


def steps_of_small(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """The steps of small tensors: all or none of their own, too few, too many, any bytes, a bomb, a damaged stream."""
    parts, small = _small_of(parts, other)
    steps = small.steps or bytes(2 * noise.randrange(1, 9))
    half = len(steps) // 2
    ways = (
        *(steps[:half] + b"\x7f" * half, steps[:half] + b"\x80" * half, bytes(half) + steps[half:], steps[:half]),
        *(b"", bytes(len(steps)), b"\xff" * len(steps), b"\1" * len(steps), steps[:-1], steps + b"\0", steps + b"\1"),
        bytes(noise.choice((0, byte, 1, 140, 255)) for byte in steps),
        noise.randbytes(len(steps)),
        bytes(noise.sample(steps, len(steps))),
    )
    if noise.random() < 0.7:
        return assemble(replace(parts, small=replace(small, steps=noise.choice(ways))))
    return assemble(parts, small=join_small(small, steps=_damaged_stream(small.steps, noise)))


def _damaged_stream(data: bytes, noise: random.Random) -> bytes:
    """A compressed stream behind its length: with a wrong length, cut, extended, damaged, another's, a bomb."""
    stream = deflated(data)
    bomb = deflated(bytes(noise.choice((100, 10_000, 1 << 20))))
    ways = (
        _varint(noise) + stream,
        varint(max(0, len(stream) - 1)) + stream[:-1],
        *(varint(len(some)) + some for some in (stream + noise.randbytes(2), flip_bits(stream, b"", noise), bomb)),
        *(varint(len(some)) + some for some in (noise.randbytes(9), data, deflated(data, 15), deflated(b""))),
    )
    return noise.choice(ways)


def sections_of_small(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """The two sections of small tensors: of other kinds, swapped, left out, one too many, with a lie for a length."""
    parts, small = _small_of(parts, other)
    common, own = small.common, small.own or small.common
    kind = noise.choice((*range(8), *FACTORED, 24, 255))
    some_tile: tuple[int, Body] = (PLAIN, [_some_tile(noise)])
    ways = (
        *(replace(small, common=(kind, common[1])), replace(small, own=(kind, own[1]))),
        *(replace(small, common=own, own=common), replace(small, own=None), replace(small, own=own)),
        *(replace(small, common=(ZERO, b"")), replace(small, own=(ZERO, b""))),
        *(replace(small, common=some_tile), replace(small, own=some_tile)),
        *(replace(small, common=noise.choice(every_section(other) or [common])), other.small or small),
    )
    if noise.random() < 0.9:
        return assemble(replace(parts, small=noise.choice(ways)))
    lie = replace(small, own=None)
    return assemble(parts, small=packed_stream(lie.steps) + bytes([PLAIN]) + _varint(noise) + section(*common)[2:])


def padding_of_small(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """Both sections made anew from random levels, which may fill the last row behind the last tensor."""
    parts, small = _small_of(parts, other)
    sizes = [] if parts.flags & LAYOUT_IS_DIGEST else _small_sizes(parts.table)
    steps = small.steps[: len(sizes)] if len(small.steps) == 2 * len(sizes) else bytes(len(sizes))
    made: list[tuple[int, Body]] = []
    for own in (False, True):
        size = sum(size for size, byte in zip(sizes, steps) if bool(byte) == own)
        tiles = cut_into_tiles(small_shape([size]))
        if len(tiles) != 1:
            made.append((ZERO, b""))
            continue
        levels = np.array(noise.choices((0, 0, 1, -1, 2, 1 << 17), k=tiles[0].cells))
        levels[0] = 1
        levels[size:] = noise.choice((0, 0, 0, levels[size:]))
        made.append((PLAIN, [tile_of(levels.reshape(tiles[0].height, -1))]))
    common, own_section = made
    return assemble(replace(parts, small=replace(small, common=common, own=own_section if any(steps) else None)))


def _small_sizes(table: bytes) -> list[int]:
    """How many entries each small tensor of floats has."""
    sizes = [math.prod(shape) for _, code, shape in _split_table(table) if code < DTYPES.index("bool")]
    return [size for size in sizes if size <= SMALL_ENTRIES]


def integers_of_small(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """The section of small integers: out of range, too few, too many, none, any bytes or dtype, damaged, of others."""
    parts, small = _small_of(parts, other)
    block = bytes(8 * noise.randrange(9))
    if small.integers[0] in (INTEGER, INTEGER_DEFLATED):
        assert isinstance(small.integers[1], bytes)
        raw = small.integers[1][1:] if small.integers[0] == INTEGER else zlib.decompress(small.integers[1][1:], -15)
        stored = np.frombuffer(raw, np.dtype(DTYPES[small.integers[1][0]]))
        block = stored.astype("<i8").tobytes()
    extreme = (-(1 << 63), -(1 << 31) - 1, -32769, -129, -1, 0, 1, 2, 127, 128, 255, 256, 1 << 32, (1 << 63) - 1)
    words = np.frombuffer(block, "<i8").copy()
    if words.size:
        words[noise.randrange(words.size)] = noise.choice(extreme)
    ways = (
        words.tobytes(),
        np.array(noise.choices(extreme, k=words.size), "<i8").tobytes(),
        np.array(noise.choices((0, 1), k=words.size), "<i8").tobytes(),
        *(b"", block[:-1], block[:-8], block + b"\0", block + bytes(8), noise.randbytes(len(block))),
    )
    data, code = noise.choice(ways), bytes([noise.choice((8, 8, 8, 8, *range(len(DTYPES)), 255))])
    sections: tuple[tuple[int, Body], ...] = (
        *((INTEGER, code + data), (INTEGER_DEFLATED, code + deflated(data)), (ZERO, b"")),
        *((INTEGER_DEFLATED, code + data), (INTEGER_DEFLATED, code + deflated(data)[:-1]), (INTEGER, b"")),
        *((INTEGER_DEFLATED, code + deflated(bytes(1 << 20))), (noise.choice((*range(8), 16, 255)), code + data)),
    )
    return assemble(replace(parts, small=replace(small, integers=noise.choice(sections))))


def sketch_of_payload(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """The sketch: units, scales, blocks and their number, levels, a damaged stream; another's, twice, left out."""
    sketch = parts.sketch or other.sketch or SketchParts(bytes(4), 1.0, b"\xff", bytes(8), [b""])
    parts = replace(parts, flags=parts.flags | HAS_SKETCH, sketch=sketch)
    scales, words, tiles = sketch.scales, sketch.words, sketch.tiles
    levels = np.array(noise.choices((0, 0, 1, -1, 1 << 17, -(1 << 17)), k=max(1, len(words))))
    levels[0] = 1
    one_tile = [tile_of(levels[None, :])] if len(levels) <= SMALL_TILE_CELLS else [b""]
    ways = (
        replace(sketch, unit=_any_float(noise)),
        replace(sketch, unit=FLOAT32_MAX, tiles=one_tile),
        replace(sketch, seed=noise.randbytes(4)),
        replace(sketch, tiles=one_tile),
        replace(sketch, tiles=[_some_tile(noise)]),
        replace(sketch, tiles=[*tiles, b"\0"]),
        replace(sketch, tiles=[]),
        *(replace(sketch, scales=some) for some in (b"", scales[:-1], scales + b"\1", bytes(len(scales)))),
        *(replace(sketch, scales=noise.randbytes(len(scales))) for _ in range(2)),
        replace(sketch, scales=bytes(noise.choice((0, 1, byte, 255)) for byte in scales)),
        replace(
            sketch, scales=scales[: len(scales) // 2] + bytes(noise.choices((0, 1, 2, 32, 33), k=len(scales) // 2))
        ),
        *(replace(sketch, words=some) for some in (b"", words[:1], words[:-1], words + b"\0", 9 * words)),
        replace(sketch, words=noise.randbytes(len(words)), tiles=tiles),
        replace(sketch, words=words[:1], tiles=[b""]),
        replace(sketch, blocks=_varint(noise)),
        other.sketch or sketch,
    )
    way = noise.random()
    if way < 0.8:
        return assemble(replace(parts, sketch=noise.choice(ways)))
    if way < 0.9:
        return assemble(replace(parts, sketch=None), tail=join_sketch(sketch, scales=_damaged_stream(scales, noise)))
    if way < 0.95:
        return assemble(parts, tail=join_sketch(sketch))
    return assemble(replace(parts, sketch=None, flags=parts.flags ^ noise.choice((0, HAS_SKETCH))))


def known_directions(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """A side in known directions: their number, their tile, that of the rest; or the section is another tensor's."""
    places = [k for k, (kind, body) in enumerate(parts.sections) if kind in FACTORED and isinstance(body, list)]
    if not places:
        return basis_of_payload(parts, other, noise)
    at = noise.choice(places)
    kind, body = parts.sections[at]
    assert isinstance(body, list)
    sides = [k for k, what in enumerate(head(kind)) if what == "n" and k]
    other_kind = kind ^ noise.choice((RIGHT_KNOWN, LEFT_KNOWN, KNOWN))
    elsewhere = noise.randrange(len(parts.sections))
    ways: list[list[tuple[int, Body]]] = [
        _replaced(parts.sections, at, (other_kind, body)),
        _replaced(parts.sections, elsewhere, (kind, body)),
    ]
    if sides:
        k, rank = noise.choice(sides), ByteReader(body[0]).varint()
        number = noise.choice((0, 1, 2, 3, 4, 5, 8, 9, 30, 32, 33, 40, 41, 48, 49, 128, 129))
        inside = tile_of([[1] * rank, *(noise.choices(range(-2, 3), k=rank) for _ in range(number - 1))])
        changed = (
            [varint(number), inside, body[k + 2]],
            [varint(number), inside, b""],
            [varint(number), *body[k + 1 : k + 3]],
            [varint(number), b"", body[k + 2]],
            [_varint(noise), *body[k + 1 : k + 3]],
            [body[k], b"", body[k + 2]],
            [body[k], body[k + 1], b""],
            [body[k], b"", b""],
            [body[k], body[k + 2], body[k + 1]],
        )
        ways += [_replaced(parts.sections, at, (kind, [*body[:k], *side, *body[k + 3 :]])) for side in changed]
    return assemble(replace(parts, sections=noise.choice(ways)))


def basis_of_payload(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """The digest of the shared basis: another, cut, left out, or there without need; its flag with it or without."""
    bit = HAS_BASIS
    digest = noise.choice((noise.randbytes(8), bytes(8), other.basis, flip_bits(parts.basis or bytes(8), b"", noise)))
    ways = (
        (parts.flags | bit, digest),
        (parts.flags | bit, parts.basis[: noise.randrange(8)]),
        (parts.flags & ~bit, b""),
        (parts.flags ^ bit, parts.basis),
        (other.flags & bit | parts.flags & ~bit, other.basis),
    )
    flags, basis = noise.choice(ways)
    return assemble(replace(parts, flags=flags, basis=basis))


def step_and_shifts(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    span, shifts = noise.randrange(256), noise.randbytes(noise.randrange(18))
    step = struct.pack("<f", _any_float(noise)) if noise.random() < 0.8 else noise.randbytes(4)
    right = parts.step[4:] or b"\x10"
    block = step + noise.choice((right, bytes([span]) + shifts, bytes([0x0F]) + b"\x80" * 16, b"\x0f" + b"\x7f" * 16))
    flags, gain = parts.flags | HAS_STEP, parts.gain
    if noise.random() < 0.3:
        flags, gain = flags | HAS_GAIN, struct.pack("<f", noise.choice((_any_float(noise), noise.uniform(1, 2))))
        block = noise.choice((block, parts.step or block))
    return assemble(replace(parts, flags=flags, step=block, gain=gain))


def flags_and_version(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    if noise.random() < 0.3:
        return assemble(replace(parts, version=noise.choice((0, 2, 3, 255))))
    return assemble(replace(parts, flags=parts.flags ^ noise.choice((1, 2, 3, 4, 8, 16, 16, 32, 64, 128, 255))))


def layout_table(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """Entries of a full layout: names, dtype codes, numbers of dimensions, sizes."""
    table = parts.table if not parts.flags & LAYOUT_IS_DIGEST else entry("w", "float32", 4, 4)
    parts = replace(parts, flags=parts.flags & ~LAYOUT_IS_DIGEST)
    dimensions = noise.randrange(40)
    sizes = b"".join(_varint(noise) for _ in range(dimensions))
    name = noise.choice((b"w", b"\xff\xfe", b"\xed\xa0\x80", b"\0", b"weight", b"n" * 4096, b"n" * 4097))
    strange = varint(len(name)) + name + bytes([noise.choice((*range(14), 255)), dimensions]) + sizes
    zero = entry("zero", noise.choice(DTYPES), 0, *noise.choices(NUMBERS, k=noise.randrange(4)))
    ways = (
        table + table,
        table + strange,
        strange,
        zero,
        table[: noise.randrange(len(table) + 1)],
        table + _varint(noise),
        flip_bits(table or b"\0", b"", noise),
        set_bytes(table or b"\0", b"", noise),
        b"".join(entry(str(k), noise.randrange(13), *noise.choices((0, 1, 2, 3), k=2)) for k in range(300)),
        other.table if not other.flags & LAYOUT_IS_DIGEST else table,
    )
    chosen = noise.choice(ways)
    sections = noise.choice((parts.sections, [*parts.sections, (ZERO, b"")], [(ZERO, b"")] * 300))
    return assemble(replace(parts, table=chosen, sections=list(sections)))


def _split_table(table: bytes) -> list[tuple[bytes, int, list[int]]]:
    reader, result = ByteReader(table), []
    while reader.left():
        name, code = bytes(reader.take(reader.varint())), reader.byte()
        result.append((name, code, [reader.varint() for _ in range(reader.byte())]))
    return result


def layout_entry(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """One tensor's name, dtype or shape, with its section as it was."""
    if parts.flags & LAYOUT_IS_DIGEST or not parts.table:
        return assemble(replace(parts, table=noise.randbytes(8)))
    entries = _split_table(parts.table)
    at = noise.randrange(len(entries))
    name, code, shape = entries[at]
    way = noise.randrange(6)
    if way == 0:
        name = noise.choice((b"", name + b"x", noise.choice(entries)[0]))
    elif way == 1:
        code = noise.choice((*range(13), 13, 255))
    elif way == 2:
        shape = noise.choices((0, 1, *NUMBERS), k=noise.choice((1, 2, 3, 33)))
    elif way == 3:
        shape = noise.sample(shape, len(shape)) + [1] * noise.randrange(3)
    else:
        place = noise.randrange(len(shape) + 1)
        shape = [*shape[:place], noise.choice(NUMBERS), *shape[place + (way == 4) :]]
    if noise.random() < 0.3:  # an empty tensor may have any other sides
        code, shape = noise.randrange(13), [0, *shape]
    table = b"".join(entry(*item[:2], *item[2]) for item in _replaced(entries, at, (name, code, shape)))
    return assemble(replace(parts, table=table))


def layout_block(parts: Parts, other: Parts, noise: random.Random) -> bytes:
    """The compressed layout: its length, its end, bombs; or the digest."""
    if parts.flags & LAYOUT_IS_DIGEST:
        return assemble(parts, packed=noise.choice((noise.randbytes(8), bytes(8), parts.table[:5], other.table[:8])))
    packed = deflated(parts.table)
    stored = zlib.compressobj(0, zlib.DEFLATED, -15)
    ways = (
        _varint(noise) + packed,
        varint(len(packed) + 3) + packed + noise.randbytes(3),
        varint(max(0, len(packed) - 1)) + packed[:-1],
        varint(len(packed)) + flip_bits(packed, b"", noise),
        varint(len(parts.table)) + parts.table,
        varint(len(BOMB)) + BOMB if noise.random() < 0.1 else b"\0",
        (lambda whole: varint(len(whole)) + whole)(stored.compress(parts.table) + stored.flush()),
    )
    return assemble(parts, packed=noise.choice(ways))


BOMB = deflated(bytes(1 << 25))

Structural = Callable[[Parts, Parts, random.Random], bytes]
STRUCTURAL: tuple[Structural, ...] = (
    *(order_of_sections, kind_of_section, length_of_section, body_of_section),
    *(header_of_tile, header_of_tile, tiles_of_section, tiles_of_section),
    *(rank_of_factors, known_directions, known_directions, basis_of_payload, sketch_of_payload, sketch_of_payload),
    *(dtype_of_integers, step_of_section, steps_of_small, sections_of_small, padding_of_small, integers_of_small),
    *(step_and_shifts, flags_and_version, layout_table, layout_entry, layout_entry, layout_block),
)


def mutations(entries: list[Entry], seed: int = 0) -> Iterator[tuple[str, Entry, bytes]]:
    """Mutants without end: what was done, to which payload, and the bytes. Same entries and seed: same mutants."""
    for number in count():
        noise = random.Random(f"{seed} {number}")
        victim, other = noise.choice(entries), noise.choice(entries)
        if noise.random() < 0.45:
            blind = noise.choice(BLIND)
            name, data = blind.__name__, blind(victim.payload, other.payload, noise)
        else:
            structural = noise.choice(STRUCTURAL)
            name, data = structural.__name__, structural(victim.parts, other.parts, noise)
            if data and noise.random() < 0.15:
                data = noise.choice((flip_bits, set_bytes, truncate))(data, b"", noise)
        if noise.random() < 0.93:
            data = seal(data)
        yield name, victim, data
