"""Payloads: what is written is read back, and every way to be wrong has its reason. (tests/attacks has many more.)"""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfq import PayloadError, decode
from fedfq.codec.encoder.quantize import nonzero
from fedfq.codec.encoder.tiles import encode_tile
from fedfq.codec.format.container import parse
from fedfq.codec.format.layout import DTYPES, Spec, digest
from fedfq.codec.format.probability import SHIFTS
from fedfq.codec.format.reader import deflate, varint
from fedfq.codec.format.sections import INTEGER, INTEGER_DEFLATED, OWN_STEP, PLAIN, WIDTHS, ZERO
from fedfq.codec.format.tiles import CodedTile
from tests.payloads import write

SINGLE = np.dtype(np.float32)


# --- Write and parse ---------------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
shapes = st.lists(st.integers(0, 2**15), max_size=4).map(tuple)
bodies = st.binary(max_size=300)


@st.composite
def layouts(draw: st.DrawFn) -> list[Spec]:
    entries = draw(
        st.dictionaries(
            names, st.tuples(shapes, st.sampled_from([name for name in DTYPES if name != "bfloat16"])), max_size=6
        )
    )
    return [Spec(name, shape, np.dtype(dtype)) for name, (shape, dtype) in entries.items()]


@settings(max_examples=200)
@given(layouts(), st.data(), st.booleans())
def test_parse_undoes_write(layout: list[Spec], data: st.DataObject, as_digest: bool) -> None:
    step = data.draw(st.none() | st.floats(2.0**-120, 2.0**120, width=32))
    shifts = np.array(data.draw(st.lists(st.integers(-128, 127), min_size=SHIFTS, max_size=SHIFTS)), np.int8)
    sections = []
    for spec in layout:
        kinds = [ZERO, OWN_STEP, WIDTHS] if spec.is_float else [ZERO, INTEGER, INTEGER_DEFLATED]
        kinds += [PLAIN] if spec.is_float and step is not None else []
        kind = data.draw(st.sampled_from(kinds))
        sections.append((kind, b"" if kind == ZERO else data.draw(bodies)))
    written = write(layout, sections, as_digest=as_digest, step=step, shifts=shifts)
    like = layout if as_digest else None
    parsed = parse(written, like, max_bytes=2**62)
    order = sorted(layout, key=lambda spec: spec.name) if as_digest else layout
    assert parsed.layout == order
    assert parsed.digest == (digest(layout) if as_digest else None)
    assert parsed.step == (step or 0.0)
    np.testing.assert_array_equal(parsed.shifts, shifts / 256 if step is not None else np.zeros(SHIFTS))
    position = {spec.name: k for k, spec in enumerate(layout)}
    assert list(parsed.sections) == [spec.name for spec in order]
    for spec, section in zip(order, parsed.sections.values()):
        assert (section.kind, bytes(section.body)) == sections[position[spec.name]]


def test_shifts_at_the_ends_are_not_written() -> None:
    layout, shifts = [Spec("w", (3,), SINGLE)], np.zeros(SHIFTS, np.int8)
    bare = len(write(layout, [(ZERO, b"")], as_digest=False, step=1.0, shifts=shifts))
    shifts[[5, 7]] = -3
    assert len(write(layout, [(ZERO, b"")], as_digest=False, step=1.0, shifts=shifts)) == bare + 3


def test_a_digest_is_shorter_than_names() -> None:
    layout = [Spec(f"block.{k}.attention.weight", (64, 64), SINGLE) for k in range(100)]
    sections = [(ZERO, b"")] * 100
    assert len(write(layout, sections, as_digest=True)) == 8 + 8 + 100
    assert len(write(layout, sections, as_digest=False)) > 8 + 8 + 100 + 200


# --- Refusals ----------------------------------------------------------------------------------------------


def sealed(body: bytes, flags: int = 0, version: int = 1, magic: bytes = b"FQ") -> bytes:
    """A payload around a body, its checksum right."""
    head = magic + bytes([version, flags])
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body


def table(*entries: bytes) -> bytes:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = deflate.compress(b"".join(entries)) + deflate.flush()
    return varint(len(packed)) + packed


def entry(name: bytes = b"w", dtype: int = 0, shape: tuple[int, ...] = (3,)) -> bytes:
    return varint(len(name)) + name + bytes([dtype, len(shape)]) + b"".join(map(varint, shape))


def section(kind: int, body: bytes) -> bytes:
    return bytes([kind]) + varint(len(body)) + body


FLOATS, INTEGERS = table(entry()), table(entry(dtype=8))
STEP = struct.pack("<fB", 0.5, 0x10)


def coded(levels: list[int], by_size: bool = True) -> CodedTile:
    encoded = encode_tile(nonzero(np.array([levels])), len(levels), by_size=by_size)
    assert encoded is not None
    return encoded.coded


LEVELS = coded([1, 0, -2])
TILE = LEVELS.to_bytes()
EIGHT = struct.pack("<f", 8)
THREE = bytes(12)  # three scales, or three float32

VALID = {
    "zero": (sealed(FLOATS + b"\0"), [0, 0, 0]),
    "plain": (sealed(FLOATS + STEP + section(1, TILE), 2), [0.5, 0, -1.0]),
    "widths": (sealed(FLOATS + section(3, struct.pack("<fff", 4, 0, 0) + TILE)), [2.0, 0, -4.0]),
    "own step": (sealed(FLOATS + section(2, struct.pack("<fb", 8, 0) + TILE)), [8, 0, -16]),
    "own step and offset": (sealed(FLOATS + section(2, struct.pack("<fb", 8, -3) + TILE)), [-16, -24, -40]),
    "own step beside a gain": (
        sealed(struct.pack("<f", 3) + FLOATS + section(2, struct.pack("<fb", 8, 0) + TILE), 4),
        [8, 0, -16],
    ),
    "integer": (sealed(INTEGERS + section(4, b"\x05\x01\x02\xff")), [1, 2, -1]),
    "integer, deflated": (sealed(INTEGERS + section(5, b"\x05" + deflate(b"\x01\x02\xff"))), [1, 2, -1]),
}


@pytest.mark.parametrize("name", VALID)
def test_every_kind_of_section_written_by_hand(name: str) -> None:
    payload, values = VALID[name]
    assert decode(payload)["w"].tolist() == values


def tile_with(**changes: int) -> bytes:
    return LEVELS._replace(header=LEVELS.header._replace(**changes)).to_bytes()


def header_bytes(spacings: int = 0, base: int = 0, nonzeros: int = 1, *ranges: int) -> bytes:
    return struct.pack("<Bb", spacings, base) + varint(nonzeros) + bytes(ranges)


def plain(body: bytes) -> bytes:
    return sealed(FLOATS + STEP + section(1, body), 2)


# One example for every refusal of a payload, by reason
REFUSALS: dict[str, dict[str, bytes]] = {
    "truncated": {
        "nothing": b"",
        "a magic": b"FQ",
        "a head": VALID["zero"][0][:7],
        "no layout": sealed(b""),
        "half a layout": sealed(FLOATS[:4]),
        "no digest": sealed(b"1234", 1),
        "no section": sealed(FLOATS),
        "half a section": sealed(FLOATS + section(3, b"123456")[:5]),
        "no step": sealed(FLOATS, 2),
        "half an own step": sealed(FLOATS + section(2, b"123")),
        "half the shifts": sealed(FLOATS + struct.pack("<fB", 0.5, 0x0F) + b"123", 2),
        "half an entry": sealed(table(entry()[:3]) + b"\0"),
        "half the scales": sealed(FLOATS + section(3, THREE[:8])),
        "a tile without a header": plain(b"\x00"),
        "a tile without a stream": plain(header_bytes()),
        "integers without a dtype": sealed(INTEGERS + section(4, b"")),
    },
    "magic": {
        "another format": b"PK\x03\x04 something else",
        "one byte": b"G",
        "turned round": sealed(FLOATS + b"\0", magic=b"QF"),
    },
    "version": {
        "a later version": sealed(FLOATS + b"\0", version=2),
        "version 0": sealed(FLOATS + b"\0", version=0),
        "a reserved flag": sealed(FLOATS + b"\0", 64),
        "an unknown flag": sealed(FLOATS + b"\0", 128),
        "an unknown dtype": sealed(table(entry(dtype=13)) + b"\0"),
        "an unknown kind of section": sealed(FLOATS + section(7, b"abc")),
        "a reserved kind of section": sealed(FLOATS + section(24, b"abc")),
    },
    "checksum": {
        "a bit of the body": VALID["own step"][0][:-1] + b"\x01",
        "a bit of the flags": VALID["zero"][0][:3] + b"\x01" + VALID["zero"][0][4:],
        "a bit of the checksum": VALID["zero"][0][:4] + b"\x01" + VALID["zero"][0][5:],
        "bytes at the end": VALID["zero"][0] + b"\0",
    },
    "layout": {
        "a digest without like": sealed(b"12345678" + b"\0", 1),
        "integers too wide for the tensor": sealed(table(entry(dtype=5)) + section(4, b"\x08" + bytes(24))),
    },
    "limit": {
        "a model of zeros": sealed(table(entry(shape=(2**20, 2**20))) + b"\0"),
        "many integers": sealed(table(entry(dtype=8, shape=(2**28,))) + b"\0"),
    },
    "malformed": {
        "no deflated layout": sealed(varint(4) + b"\xff\xff\xff\xff" + b"\0"),
        "half a deflated layout": sealed(varint(5) + FLOATS[1:6] + b"\0"),
        "bytes after the deflated layout": sealed(varint(len(FLOATS)) + FLOATS[1:] + b"x" + b"\0"),
        "a name too long": sealed(table(entry(b"n" * 4097)) + b"\0"),
        "a name that is not UTF-8": sealed(table(entry(b"\xff")) + b"\0"),
        "a name twice": sealed(table(entry(), entry()) + b"\0\0"),
        "33 dimensions": sealed(table(entry(shape=(1,) * 33)) + b"\0"),
        "a shape of 2^60": sealed(table(entry(shape=(2**30, 2**30))) + b"\0"),
        "an empty shape of 2^63": sealed(table(entry(shape=(2**31, 0, 2**32))) + b"\0"),
        "a step of 0": sealed(FLOATS + struct.pack("<fB", 0.0, 0x10) + b"\0", 2),
        "a negative step": sealed(FLOATS + struct.pack("<fB", -1.0, 0x10) + b"\0", 2),
        "a step that is not a number": sealed(FLOATS + struct.pack("<fB", np.nan, 0x10) + b"\0", 2),
        "an infinite step": sealed(FLOATS + struct.pack("<fB", np.inf, 0x10) + b"\0", 2),
        "a plain section without a step": sealed(FLOATS + section(1, TILE)),
        "a float section for integers": sealed(INTEGERS + section(2, THREE)),
        "an integer section for floats": sealed(FLOATS + section(4, b"\x05abc")),
        "bytes after the last section": sealed(FLOATS + b"\0\0"),
        "coefficients of an empty tensor": sealed(table(entry(shape=(0,))) + STEP + section(1, TILE), 2),
        "unknown tile flags": plain(header_bytes(spacings=16) + b"\x01"),
        "no non-zeros": plain(header_bytes(nonzeros=0) + b"\x01"),
        "more non-zeros than cells": plain(header_bytes(nonzeros=4) + b"\x01"),
        "row class 0": plain(header_bytes(1, 0, 1, 0, 3) + b"\x01"),
        "row classes that fall": plain(header_bytes(1, 0, 1, 3, 2) + b"\x01"),
        "column class 81": plain(header_bytes(4, 0, 1, 1, 81) + b"\x01"),
        "a damaged stream": plain(TILE[:-1] + bytes([TILE[-1] ^ 0x40])),
        "another number of non-zeros": plain(tile_with(nonzeros=1)),
        "a negative scale": sealed(FLOATS + section(3, struct.pack("<fff", -1, 0, 0) + TILE)),
        "an infinite scale": sealed(FLOATS + section(3, struct.pack("<fff", np.inf, 0, 0) + TILE)),
        "a level that no width has": sealed(FLOATS + section(3, THREE + coded([0, 0, 139], by_size=False).to_bytes())),
        "an own step of 0": sealed(FLOATS + section(2, struct.pack("<fb", 0, 0) + TILE)),
        "a negative own step": sealed(FLOATS + section(2, struct.pack("<fb", -1, 0) + TILE)),
        "an infinite own step": sealed(FLOATS + section(2, struct.pack("<fb", np.inf, 0) + TILE)),
        "an own step that is not a number": sealed(FLOATS + section(2, struct.pack("<fb", np.nan, 0) + TILE)),
        "floats in an integer tensor": sealed(INTEGERS + section(4, b"\x00" + THREE)),
        "integers in an unknown dtype": sealed(INTEGERS + section(4, b"\x0dabc")),
        "too few integers": sealed(INTEGERS + section(4, b"\x05ab")),
        "no deflated integers": sealed(INTEGERS + section(5, b"\x05abcdef")),
        "too many deflated integers": sealed(INTEGERS + section(5, b"\x05" + deflate(bytes(1 << 20)))),
        "a number longer than it needs to be": sealed(FLOATS + b"\x02\x86\x00" + bytes(6)),
        "a number of more than 63 bits": sealed(b"\xff" * 10),
    },
}
EXAMPLES = [(reason, name) for reason, examples in REFUSALS.items() for name in examples]


@pytest.mark.parametrize(("reason", "name"), EXAMPLES)
def test_every_refusal_has_its_reason(reason: str, name: str) -> None:
    with pytest.raises(PayloadError) as caught:
        decode(REFUSALS[reason][name])
    assert caught.value.reason == reason, str(caught.value)
