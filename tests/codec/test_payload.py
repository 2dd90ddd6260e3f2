"""The format: what is written is read back, and every way to be wrong has its reason. (tests/attacks has many more.)"""

import pickle
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from fedfq.codec.contexts import SHIFTS
from fedfq.codec.layout import DTYPES, Spec, digest, tiles
from fedfq.codec.payload import Reader, Section, parse, varint, write
from fedfq.codec.quantize import nonzero
from fedfq.codec.tile import encode_tile
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedfq import BudgetError, FedFQError, PayloadError, decode
from fedfq.codec import payload as pay

SINGLE = np.dtype(np.float32)


# --- Numbers -----------------------------------------------------------------------------------------------


@given(st.integers(0, 2**63 - 1))
@example(0)
@example(127)
@example(128)
@example(2**63 - 1)
def test_varint_round_trip(value: int) -> None:
    written = varint(value)
    assert len(written) == max(1, -(-value.bit_length() // 7))
    reader = Reader(written + b"\xff")
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
        Reader(data).varint()
    assert caught.value.reason == reason


def test_a_reader_stays_inside() -> None:
    reader = Reader(b"abc")
    assert bytes(reader.take(2)) == b"ab"
    with pytest.raises(PayloadError, match="2 bytes expected, 1 left"):
        reader.take(2)
    with pytest.raises(PayloadError, match="truncated|expected"):
        reader.take(2**62)
    assert reader.byte() == ord("c")
    with pytest.raises(PayloadError):
        reader.byte()


# --- Write and parse ---------------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
shapes = st.lists(st.integers(0, 2**15), max_size=4).map(tuple)
bodies = st.binary(max_size=300)


@st.composite
def layouts(draw: st.DrawFn) -> list[Spec]:
    entries = draw(st.dictionaries(names, st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6))
    return [Spec(name, shape, np.dtype(dtype)) for name, (shape, dtype) in entries.items()]


@settings(max_examples=200)
@given(layouts(), st.data(), st.booleans())
def test_parse_undoes_write(layout: list[Spec], data: st.DataObject, as_digest: bool) -> None:
    step = data.draw(st.none() | st.floats(2.0**-120, 2.0**120, width=32))
    shifts = np.array(data.draw(st.lists(st.integers(-128, 127), min_size=SHIFTS, max_size=SHIFTS)), np.int8)
    sections = []
    for spec in layout:
        kinds = [pay.ZERO, pay.HALF, pay.SINGLE, pay.WIDTHS] if spec.is_float else list(pay.INTEGER_KINDS)
        kinds += [pay.PLAIN] if spec.is_float and step is not None else []
        kind = data.draw(st.sampled_from(kinds))
        sections.append(Section(kind) if kind == pay.ZERO else Section(kind, data.draw(bodies)))
    written = write(layout, sections, as_digest=as_digest, step=step, shifts=shifts)
    like = layout if as_digest else None
    parsed = parse(written, like, max_bytes=2**62)
    order = sorted(layout, key=lambda spec: spec.name) if as_digest else layout
    assert parsed.layout == order
    assert parsed.digest == (digest(layout) if as_digest else None)
    assert parsed.step == (step or 0.0)
    np.testing.assert_array_equal(parsed.shifts, shifts / 256 if step is not None else np.zeros(SHIFTS))
    position = {spec.name: k for k, spec in enumerate(layout)}
    for spec, section in zip(order, parsed.sections, strict=True):
        assert (section.kind, bytes(section.body)) == (
            sections[position[spec.name]].kind,
            bytes(sections[position[spec.name]].body),
        )


def test_shifts_at_the_ends_are_not_written() -> None:
    layout, shifts = [Spec("w", (3,), SINGLE)], np.zeros(SHIFTS, np.int8)
    bare = len(write(layout, [Section(pay.ZERO)], as_digest=False, step=1.0, shifts=shifts))
    shifts[[5, 7]] = -3
    assert len(write(layout, [Section(pay.ZERO)], as_digest=False, step=1.0, shifts=shifts)) == bare + 3


def test_a_digest_is_shorter_than_names() -> None:
    layout = [Spec(f"block.{k}.attention.weight", (64, 64), SINGLE) for k in range(100)]
    sections = [Section(pay.ZERO)] * 100
    assert len(write(layout, sections, as_digest=True)) == 8 + 8 + 100
    assert len(write(layout, sections, as_digest=False)) > 8 + 8 + 100 + 200


def test_what_the_format_cannot_hold_is_not_written() -> None:
    for spec in (Spec("n" * 4097, (3,), SINGLE), Spec("é" * 2049, (3,), SINGLE), Spec("w", (1,) * 33, SINGLE)):
        with pytest.raises(ValueError, match="does not fit the format"):
            write([spec], [Section(pay.ZERO)], as_digest=False)
    for spec in (Spec("n" * 4096, (3,), SINGLE), Spec("w", (1,) * 32, SINGLE)):
        assert parse(write([spec], [Section(pay.ZERO)], as_digest=False), None).layout == [spec]


@given(st.sampled_from(DTYPES[4:]), st.integers(1, 40), st.integers(0, 64), st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_integers_round_trip_in_the_narrowest_dtype(name: str, size: int, bits: int, seed: int) -> None:
    dtype = np.dtype(name)
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        values = rng.random(size) < 0.5
    else:
        info = np.iinfo(dtype)
        bound = min(2**bits, int(info.max))
        values = rng.integers(max(-bound, int(info.min)), bound, size, dtype, endpoint=True)
    section = pay.write_integers(values)
    if not values.any():
        assert section.kind == pay.ZERO
        return
    np.testing.assert_array_equal(pay.read_integers(section, Spec("n", (size,), dtype)), values)
    assert len(section.body) <= 1 + values.nbytes
    if dtype.kind != "b" and np.abs(values.astype(object)).max() < 100:
        assert len(section.body) <= 1 + size


def test_integers_at_the_ends_of_their_dtype() -> None:
    for name in DTYPES[5:]:
        info = np.iinfo(name)
        values = np.array([info.min, info.max, 0, 1], name)
        for arranged in (values, values.astype(np.dtype(name).newbyteorder(">")), np.repeat(values, 2)[::2]):
            section = pay.write_integers(arranged)
            np.testing.assert_array_equal(pay.read_integers(section, Spec("n", (4,), np.dtype(name))), values)


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
LEVELS = encode_tile(nonzero(np.array([[1, 0, -2]])), 3, by_size=True)
TILE = pay.write_tiles([LEVELS])
THREE = bytes(12)  # three scales, or three float32

VALID = {
    "zero": (sealed(FLOATS + b"\0"), [0, 0, 0]),
    "plain": (sealed(FLOATS + STEP + section(1, TILE), 2), [0.5, 0, -1.0]),
    "widths": (sealed(FLOATS + section(2, struct.pack("<fff", 4, 0, 0) + TILE)), [2.0, 0, -4.0]),
    "float16": (sealed(FLOATS + section(3, np.array([1, 2, 3], "<f2").tobytes())), [1, 2, 3]),
    "float32": (sealed(FLOATS + section(4, np.array([1, 2, 3], "<f4").tobytes())), [1, 2, 3]),
    "integer": (sealed(INTEGERS + section(5, b"\x05\x01\x02\xff")), [1, 2, -1]),
    "integer, deflated": (sealed(INTEGERS + section(6, b"\x05" + zlib.compress(b"\x01\x02\xff"))), [1, 2, -1]),
}


@pytest.mark.parametrize("name", VALID)
def test_every_kind_of_section_written_by_hand(name: str) -> None:
    payload, values = VALID[name]
    assert decode(payload)["w"].tolist() == values


def tile_with(**changes: int) -> bytes:
    return pay.write_tiles([LEVELS._replace(header=LEVELS.header._replace(**changes))])


def header_bytes(spacings: int = 0, base: int = 0, nonzeros: int = 1, *ranges: int) -> bytes:
    return struct.pack("<Bb", spacings, base) + varint(nonzeros) + bytes(ranges)


def plain(body: bytes) -> bytes:
    return sealed(FLOATS + STEP + section(1, body), 2)


# One example for every refusal in payload.py, by reason
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
        "half the shifts": sealed(FLOATS + struct.pack("<fB", 0.5, 0x0F) + b"123", 2),
        "half an entry": sealed(table(entry()[:3]) + b"\0"),
        "half the scales": sealed(FLOATS + section(2, THREE[:8])),
        "a tile without a header": plain(b"\x00"),
        "a tile without a stream": plain(header_bytes()),
        "integers without a dtype": sealed(INTEGERS + section(5, b"")),
    },
    "magic": {
        "another format": b"PK\x03\x04 something else",
        "one byte": b"G",
        "turned round": sealed(FLOATS + b"\0", magic=b"QF"),
    },
    "version": {
        "a later version": sealed(FLOATS + b"\0", version=2),
        "version 0": sealed(FLOATS + b"\0", version=0),
        "a reserved flag": sealed(FLOATS + b"\0", 16),
        "an unknown flag": sealed(FLOATS + b"\0", 128),
        "an unknown dtype": sealed(table(entry(dtype=13)) + b"\0"),
        "an unknown kind of section": sealed(FLOATS + section(7, b"abc")),
        "a reserved kind of section": sealed(FLOATS + section(24, b"abc")),
    },
    "checksum": {
        "a bit of the body": VALID["float16"][0][:-1] + b"\x01",
        "a bit of the flags": VALID["zero"][0][:3] + b"\x01" + VALID["zero"][0][4:],
        "a bit of the checksum": VALID["zero"][0][:4] + b"\x01" + VALID["zero"][0][5:],
        "bytes at the end": VALID["zero"][0] + b"\0",
    },
    "layout": {
        "a digest without like": sealed(b"12345678" + b"\0", 1),
        "integers too wide for the tensor": sealed(table(entry(dtype=5)) + section(5, b"\x08" + bytes(24))),
        "floats in an integer tensor": sealed(INTEGERS + section(5, b"\x00" + THREE)),
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
        "a float section for integers": sealed(INTEGERS + section(3, THREE[:6])),
        "an integer section for floats": sealed(FLOATS + section(5, b"\x05abc")),
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
        "a negative scale": sealed(FLOATS + section(2, struct.pack("<fff", -1, 0, 0) + TILE)),
        "an infinite scale": sealed(FLOATS + section(2, struct.pack("<fff", np.inf, 0, 0) + TILE)),
        "a level that no width has": sealed(
            FLOATS
            + section(2, THREE + pay.write_tiles([encode_tile(nonzero(np.array([[0, 0, 139]])), 3, by_size=False)]))
        ),
        "too few float16": sealed(FLOATS + section(3, bytes(4))),
        "too many float32": sealed(FLOATS + section(4, bytes(16))),
        "a float16 that is infinite": sealed(FLOATS + section(3, np.array([1, np.inf, 1], "<f2").tobytes())),
        "a float32 that is not a number": sealed(FLOATS + section(4, np.array([1, np.nan, 1], "<f4").tobytes())),
        "integers in an unknown dtype": sealed(INTEGERS + section(5, b"\x0dabc")),
        "too few integers": sealed(INTEGERS + section(5, b"\x05ab")),
        "no deflated integers": sealed(INTEGERS + section(6, b"\x05abcdef")),
        "too many deflated integers": sealed(INTEGERS + section(6, b"\x05" + zlib.compress(bytes(1 << 20)))),
        "a number longer than it needs to be": sealed(FLOATS + b"\x03\x86\x00" + bytes(6)),
        "a number of more than 63 bits": sealed(b"\xff" * 10),
    },
}
EXAMPLES = [(reason, name) for reason, examples in REFUSALS.items() for name in examples]


@pytest.mark.parametrize(("reason", "name"), EXAMPLES)
def test_every_refusal_has_its_reason(reason: str, name: str) -> None:
    with pytest.raises(PayloadError) as caught:
        decode(REFUSALS[reason][name])
    assert caught.value.reason == reason, str(caught.value)


MODEL = {"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.int64)}
DIFFERENT: dict[str, Callable[[], list[Spec]]] = {
    "another name": lambda: [Spec("c", (3, 4), SINGLE), Spec("b", (5,), SINGLE)],
    "another shape": lambda: [Spec("a", (4, 3), SINGLE), Spec("b", (5,), SINGLE)],
    "a tensor less": lambda: [Spec("a", (3, 4), SINGLE)],
    "a tensor more": lambda: [Spec("a", (3, 4), SINGLE), Spec("b", (5,), SINGLE), Spec("c", (), SINGLE)],
    "something huge": lambda: [Spec("a", (3, 4), SINGLE), Spec("b", (2**50,), SINGLE)],
    "nothing": lambda: [],
}


@pytest.mark.parametrize("as_digest", [False, True])
@pytest.mark.parametrize("name", DIFFERENT)
def test_another_layout_than_the_models_is_refused(name: str, as_digest: bool) -> None:
    layout = DIFFERENT[name]()
    payload = write(layout, [Section(pay.ZERO)] * len(layout), as_digest=as_digest)
    with pytest.raises(PayloadError) as caught:
        decode(payload, like=MODEL)
    assert caught.value.reason == "layout"


def test_too_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = [Spec(f"w{k}", (3,), SINGLE) for k in range(11)]
    payload = write(layout, [Section(pay.ZERO)] * 11, as_digest=False)
    monkeypatch.setattr(pay, "MAX_TENSORS", 10)
    with pytest.raises(PayloadError, match="more than 10 tensors"):
        decode(payload)
    with pytest.raises(ValueError, match='use layout="digest"'):
        write(layout, [Section(pay.ZERO)] * 11, as_digest=False)


def test_headers_of_tiles_round_trip() -> None:
    """Through `write_tiles` and `read_tiles`, all-zero tiles left out."""
    rng = np.random.default_rng(0)
    shape = (3000, 3000)
    layout = tiles(shape)
    encoded = []
    for k in range(len(layout)):
        levels = rng.integers(-1, 2, (30, 40)) * (np.arange(30)[:, None] < 8 * k)
        encoded.append(encode_tile(nonzero(levels), 40, by_size=True) if levels.any() else None)
    coded = pay.read_tiles(pay.write_tiles(encoded), shape)
    assert [part.tile for part in coded] == layout[1:]
    for part, expected in zip(coded, encoded[1:], strict=True):
        assert expected is not None
        assert (part.header, bytes(part.stream)) == (expected.header, expected.stream)
    assert coded[0].header.row_spacing and coded[0].header.row_first >= 1


# --- Errors ------------------------------------------------------------------------------------------------


def test_errors_can_be_told_apart_and_pickled() -> None:
    """They come back from worker processes as they were."""
    payload_error = pickle.loads(pickle.dumps(PayloadError("limit", "too large")))
    assert (payload_error.reason, str(payload_error)) == ("limit", "too large")
    budget_error = pickle.loads(pickle.dumps(BudgetError(10, 60)))
    assert (budget_error.budget, budget_error.minimum) == (10, 60)
    assert "10 bytes is too small" in str(budget_error) and "at least 60 bytes" in str(budget_error)
    for kind in (PayloadError, BudgetError):
        assert issubclass(kind, FedFQError) and issubclass(kind, ValueError)
