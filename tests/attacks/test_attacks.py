"""What a decoder refuses, one test a lie: read them as a list of the format's defences. README.md is the summary."""

from __future__ import annotations

import struct
import time
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest

import fedfq
from fedfq.codec.format import layout
from fedfq.codec.format.coefficients import decode_tile
from fedfq.codec.format.container import HAS_BASIS, HAS_GAIN, HAS_STEP, HEAD, MAGIC, SHARES_SMALL, VERSION
from fedfq.codec.format.layout import DTYPES, MAX_TABLE_BYTES, MAX_TENSORS, read_entries
from fedfq.codec.format.probability import PATTERN_CUMULATIVE, SPACINGS
from fedfq.codec.format.reader import varint
from fedfq.codec.format.sections import (
    AND_PLAIN,
    FACTORS,
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
from fedfq.codec.format.tiles import TILE_CELLS, Tile, TileHeader, cut_into_tiles, read_tiles
from tests.attacks.fuzz import fuzz
from tests.attacks.mutate import (
    BAD_VARINTS,
    FLOAT32_MAX,
    Array,
    Body,
    Parts,
    SmallParts,
    assemble,
    basis_of,
    corpus,
    deflated,
    entry,
    join_body,
    join_small,
    seal,
    small_tiles,
    step_bytes,
    take_apart,
    tile_bytes,
    tile_of,
    wild_tile,
)

UPDATE: dict[str, Array] = {
    "weight": np.random.default_rng(0).normal(size=(12, 20)).astype(np.float32),
    "bias": np.linspace(-1, 1, 20, dtype=np.float32),
    "steps": np.array([7, 8, 9], np.int64),
}
MODEL = {name: np.zeros_like(array) for name, array in UPDATE.items()}


def encode_one_by_one(update: dict[str, Array]) -> bytes:
    """A payload with a section for every tensor."""
    with mock.patch("fedfq.codec.encoder.frame.SHARED_FROM", 1 << 20):
        return fedfq.encode(update, step=0.1, basis="identity")


VALID = encode_one_by_one(UPDATE)
PARTS = take_apart(VALID, UPDATE)
fedfq.decode(VALID)  # compiled before anything is measured
WEIGHT_TILE = PARTS.sections[0][1][0]
MIB = 1 << 20


def refused(payload: bytes, reason: str, match: str | None = None, **options: Any) -> None:
    """decode refuses it for this reason, and so do the others, without a word about anything else."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(fedfq.PayloadError, match=match) as caught:
            fedfq.decode(payload, **options)
        assert caught.value.reason == reason


def one(
    shape: tuple[int, ...], kind: int, body: Body = b"", *, dtype: str | int = "float32", step: bytes = step_bytes()
) -> bytes:
    """A payload of one tensor."""
    return assemble(Parts(HAS_STEP if step else 0, entry("w", dtype, *shape), step, [(kind, body)]))


def with_table(table: bytes, sections: int = 1) -> bytes:
    """A payload of zeros with this layout."""
    return assemble(Parts(0, table, b"", [(ZERO, b"")] * sections))


def with_packed(packed: bytes, sections: int = 1) -> bytes:
    """The same, of a layout as it stands in the payload."""
    return assemble(Parts(0, b"", b"", [(ZERO, b"")] * sections), packed=packed)


@contextmanager
def at_most(size: int, seconds: float = 1.0) -> Iterator[None]:
    """No more memory than this at any moment, no more time."""
    tracemalloc.start()
    began = time.process_time()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= size
    assert time.process_time() - began <= seconds


def test_the_payload_that_is_attacked_here_is_valid() -> None:
    assert assemble(PARTS) == VALID
    for result in (fedfq.decode(VALID), fedfq.decode(VALID, like=MODEL)):
        assert {name: (a.shape, a.dtype) for name, a in result.items()} == {
            name: (a.shape, a.dtype) for name, a in UPDATE.items()
        }


# The head


@pytest.mark.parametrize("size", range(8))
def test_shorter_than_the_head(size: int) -> None:
    refused(VALID[:size], "truncated")


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\x00" * 20, b"FX\x01\x00", b"X"])
def test_another_kind_of_file(start: bytes) -> None:
    refused(start + bytes(20), "magic")


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version(version: int) -> None:
    refused(assemble(Parts(0, b"", b"", [], version=version)), "version")


@pytest.mark.parametrize("bit", [6, 7])
def test_a_feature_of_the_future(bit: int) -> None:
    refused(seal(VALID[:3] + bytes([VALID[3] | 1 << bit]) + VALID[4:]), "version", "features")


def test_any_damaged_byte() -> None:
    for at in range(len(VALID)):
        damaged = VALID[:at] + bytes([VALID[at] ^ 0x10]) + VALID[at + 1 :]
        refused(damaged, "magic" if at < 2 else "version" if at == 2 else "checksum")


def test_any_truncation_with_a_right_checksum() -> None:
    for size in range(len(VALID)):
        with pytest.raises(fedfq.PayloadError):
            fedfq.decode(seal(VALID[:size]))


def test_trailing_bytes() -> None:
    refused(assemble(PARTS, tail=b"\0"), "malformed", "follow the last section")


def test_a_section_too_few() -> None:
    refused(assemble(Parts(PARTS.flags, PARTS.table, PARTS.step, PARTS.sections[:-1])), "truncated")


@pytest.mark.parametrize("payload", [None, "FQ", 7, [1, 2]])
def test_what_is_not_bytes(payload: Any) -> None:
    for function in (fedfq.decode, fedfq.inspect, fedfq.Accumulator(MODEL).add):
        with pytest.raises(TypeError):
            function(payload)


# Numbers


@pytest.mark.parametrize("number", BAD_VARINTS)
def test_a_number_that_no_encoder_writes(number: bytes) -> None:
    tail = bytes([PLAIN]) + number + bytes(30)
    refused(assemble(Parts(2, entry("w", "float32", 4), step_bytes(), []), tail=tail), "malformed", "a number")


@pytest.mark.parametrize("size", [40, 1 << 31, 1 << 62, (1 << 63) - 1])
def test_a_length_beyond_the_end(size: int) -> None:
    tail = bytes([PLAIN]) + varint(size) + bytes(30)
    with at_most(MIB):
        refused(assemble(Parts(2, entry("w", "float32", 4), step_bytes(), []), tail=tail), "truncated")
        refused(with_packed(varint(size) + bytes(30)), "truncated")


# The layout


def test_a_layout_that_is_not_compressed() -> None:
    refused(with_packed(varint(5) + b"\xff" * 5), "malformed", "decompressed")


def test_a_layout_whose_compressed_bytes_end_early() -> None:
    packed = deflated(PARTS.table)[:-1]
    refused(with_packed(varint(len(packed)) + packed), "malformed", "whole")


def test_a_layout_with_bytes_behind_its_end() -> None:
    packed = deflated(entry("w", "float32", 4)) + b"more"
    refused(with_packed(varint(len(packed)) + packed), "malformed", "whole")


def test_a_zip_bomb_stops_at_16_mebibytes() -> None:
    bomb = deflated(bytes(1 << 28))
    with at_most(3 * MAX_TABLE_BYTES):
        refused(with_packed(varint(len(bomb)) + bomb), "malformed", "acceptable size")


def test_a_zip_bomb_in_front_of_a_model_stops_at_the_size_of_its_layout() -> None:
    bomb = deflated(bytes(1 << 28))
    payload = with_packed(varint(len(bomb)) + bomb)
    with at_most(MIB + len(payload)):
        refused(payload, "layout", "larger", like=MODEL)


def test_a_name_of_more_than_4096_bytes() -> None:
    refused(with_table(entry("n" * 4097, "float32", 4)), "malformed", "name of 4097 bytes")


def test_a_name_that_ends_after_the_layout() -> None:
    refused(with_table(varint(9) + b"weight"), "truncated")


@pytest.mark.parametrize("name", [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80"])
def test_a_name_that_is_not_unicode(name: bytes) -> None:
    refused(with_table(entry(name, "float32", 4)), "malformed", "UTF-8")


def test_two_tensors_of_one_name() -> None:
    refused(with_table(entry("w", "float32", 4) * 2, sections=2), "malformed", "two tensors")


@pytest.mark.parametrize("code", [13, 255])
def test_an_unknown_dtype(code: int) -> None:
    refused(with_table(entry("w", code, 4)), "version", "dtype")


def test_too_many_dimensions() -> None:
    assert fedfq.decode(with_table(entry("w", "float32", *[1] * 32)))["w"].ndim == 32
    refused(with_table(entry("w", "float32", *[1] * 33)), "malformed", "33 dimensions")


@pytest.mark.parametrize("shape", [(1 << 59,), (1 << 62, 1 << 62), ((1 << 63) - 1,) * 32, (0, 1 << 59)])
def test_a_shape_beyond_any_memory(shape: tuple[int, ...]) -> None:
    refused(with_table(entry("w", "float32", *shape)), "malformed", "impossible shape")


@pytest.mark.parametrize("code", range(len(DTYPES)))
def test_an_empty_tensor_with_the_largest_other_sides_is_one_that_numpy_can_make(code: int) -> None:
    shape = (0, (1 << 59) - 1)
    assert fedfq.decode(with_table(entry("w", code, *shape)))["w"].shape == shape


def test_more_tensors_than_bytes() -> None:
    """No known table compresses that well; the check bounds the work all the same."""
    table = b"".join(entry(str(k), "float32", 0) for k in range(100))
    assert len(list(read_entries(table, most_tensors=100))) == 100
    with pytest.raises(fedfq.PayloadError, match="more than 99 tensors"):
        list(read_entries(table, most_tensors=99))


def test_more_tensors_than_any_model_has() -> None:
    number = MAX_TENSORS + 1
    payload = with_table(b"".join(entry(f"{k:05x}", "float32", 0) for k in range(number)), sections=number)
    refused(payload, "malformed", f"more than {MAX_TENSORS} tensors")


def test_the_encoder_writes_no_layout_that_a_decoder_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_TENSORS", 2)
    with pytest.raises(ValueError, match="digest"):
        fedfq.encode(UPDATE, step=0.1, basis="identity")
    monkeypatch.setattr(layout, "MAX_TENSORS", 3)
    monkeypatch.setattr(layout, "MAX_TABLE_BYTES", len(PARTS.table) - 1)
    with pytest.raises(ValueError, match="digest"):
        fedfq.encode(UPDATE, step=0.1, basis="identity")
    monkeypatch.setattr(layout, "MAX_TABLE_BYTES", len(PARTS.table))
    assert encode_one_by_one(UPDATE) == VALID
    assert fedfq.decode(VALID).keys() == UPDATE.keys()


# Sizes: nothing is allocated on a stranger's word


def test_a_layout_of_2_to_the_40_entries() -> None:
    payloads = (
        with_table(entry("w", "float32", 1 << 20, 1 << 20)),
        one((1 << 20, 1 << 20), PLAIN, b"\0" * 9),
        one((1 << 40,), OWN_STEP, b"\0" * 9),
        one((1 << 40,), INTEGER_DEFLATED, b"\x05" + deflated(bytes(9)), dtype="int8"),
    )
    for payload in payloads:
        with at_most(MIB // 4):
            refused(payload, "limit")


def test_inspect_lists_no_more_tiles_than_there_are_bytes() -> None:
    payload = one((1 << 29, 1 << 29), PLAIN, b"\0" * 99)
    with at_most(MIB // 4), pytest.raises(fedfq.PayloadError) as caught:
        fedfq.inspect(payload)
    assert caught.value.reason == "truncated"


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
def test_a_small_payload_of_a_large_model_of_zeros_respects_the_limit(dtype: str) -> None:
    payload = with_table(entry("a", dtype, 256, 1024) + entry("b", dtype, 0) + entry("c", dtype), sections=3)
    size = (256 * 1024 + 1) * max(4, np.dtype(dtype).itemsize)
    assert len(payload) < 60
    assert sum(array.nbytes for array in fedfq.decode(payload, max_bytes=size).values()) <= size
    with at_most(MIB // 4):
        refused(payload, "limit", f"{size} bytes", max_bytes=size - 1)


def test_many_small_tensors_respect_the_limit() -> None:
    payload = with_table(b"".join(entry(f"{k}", "float32") for k in range(1000)), sections=1000)
    assert len(fedfq.decode(payload, max_bytes=4000)) == 1000
    refused(payload, "limit", max_bytes=3999)


def test_a_tile_that_claims_a_non_zero_everywhere_costs_one_tile() -> None:
    with at_most(24 * TILE_CELLS):
        payload = one((1 << 13, 1 << 13), PLAIN, [tile_bytes(b"\1", nonzeros=1 << 22)] * 16)
        refused(payload, "malformed", "damaged", max_bytes=1 << 28)


def test_the_time_of_a_large_tile_without_bytes_is_that_of_its_cells() -> None:
    for base, value in product((-128, 0, 127), (b"\0", b"\1", b"\xff" * 8)):
        body = [tile_bytes(value, nonzeros=1 << 22, base=base)]
        with at_most(24 * TILE_CELLS):
            refused(one((1 << 11, 1 << 11), PLAIN, body), "malformed")


# With a model


def other_layouts() -> dict[str, dict[str, Array]]:
    renamed = {("other" if name == "steps" else name): array for name, array in UPDATE.items()}
    return {
        "another name": renamed,
        "another shape": UPDATE | {"steps": np.zeros(4, np.int64)},
        "a tensor more": UPDATE | {"more": np.zeros(4, np.float32)},
        "a tensor less": {name: UPDATE[name] for name in ("weight", "bias")},
        "none": {},
    }


@pytest.mark.parametrize("layout", ["full", "digest"])
@pytest.mark.parametrize("what", other_layouts())
def test_a_layout_that_differs_from_the_model(what: str, layout: Any) -> None:
    payload = fedfq.encode(other_layouts()[what], step=0.1, basis="identity", layout=layout)
    refused(payload, "layout", like=MODEL)
    server = fedfq.Accumulator(MODEL)
    with pytest.raises(fedfq.PayloadError) as caught:
        server.add(payload)
    assert caught.value.reason == "layout"


@pytest.mark.parametrize("layout", ["full", "digest"])
def test_a_layout_that_differs_is_refused_before_anything_is_allocated(layout: Any) -> None:
    large = {f"layer{k}": np.zeros((1024, 1024), np.float32) for k in range(8)}
    payload = fedfq.encode(large | {"last": np.zeros(3, np.float32)}, step=1.0, layout=layout)
    server = fedfq.Accumulator(large | {"last": np.zeros(4, np.float32)})
    with at_most(MIB // 4):
        refused(payload, "layout", like=large | {"last": np.zeros(4, np.float32)})
        with pytest.raises(fedfq.PayloadError):
            server.add(payload)


def test_a_hundred_thousand_other_tensors_are_refused_at_the_first() -> None:
    payload = with_table(b"".join(entry(f"{k:05x}", "float32", 0) for k in range(100_000)), sections=100_000)
    with at_most(MIB // 2 + len(payload)):
        refused(payload, "layout", like=MODEL)


def test_a_digest_without_the_model() -> None:
    payload = fedfq.encode(UPDATE, step=0.1, basis="identity", layout="digest")
    refused(payload, "layout", "pass like=")
    refused(seal(payload[:8] + bytes(8) + payload[16:]), "layout", "digest", like=MODEL)


# The step


@pytest.mark.parametrize("step", [0.0, -0.0, -1.0, float("nan"), float("inf"), float("-inf")])
def test_a_step_that_is_not_positive_and_finite(step: float) -> None:
    payload = assemble(Parts(PARTS.flags, PARTS.table, step_bytes(step), PARTS.sections))
    refused(payload, "malformed", "a step of")


@pytest.mark.parametrize("step", [1e-45, 1.2e-38, 1e30, FLOAT32_MAX])
@pytest.mark.parametrize("shift", [b"\x80", b"\x7f"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_smallest_and_largest_step_give_finite_values(step: float, shift: bytes, dtype: str) -> None:
    payload = one((12, 20), PLAIN, [WEIGHT_TILE], dtype=dtype, step=step_bytes(step, 0, 15, shift * 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fedfq.decode(payload)["w"]
    assert np.isfinite(result).all()
    assert result.dtype == dtype


def test_a_plain_section_without_a_step() -> None:
    refused(one((12, 20), PLAIN, [WEIGHT_TILE], step=b""), "malformed", "without a step")


def test_shifts_that_end_early() -> None:
    refused(assemble(Parts(2, entry("w", "float32", 4), step_bytes(1.0, 0, 15, b"\0" * 9), [])), "truncated")


# Sections


@pytest.mark.parametrize("kind", [6, 7, 15, 24, 31, 255])
def test_a_section_of_unknown_kind(kind: int) -> None:
    refused(one((4,), kind, b"body"), "version", "kind")


@pytest.mark.parametrize("kind", [PLAIN, OWN_STEP, WIDTHS])
def test_floats_in_a_tensor_of_integers(kind: int) -> None:
    refused(one((2,), kind, bytes(8), dtype="int32"), "malformed", "cannot have")


@pytest.mark.parametrize("kind", [INTEGER, INTEGER_DEFLATED])
def test_integers_in_a_tensor_of_floats(kind: int) -> None:
    refused(one((2,), kind, b"\x05\0\0"), "malformed", "cannot have")


@pytest.mark.parametrize("step", [0.0, -0.0, -1.0, np.nan, np.inf, -np.inf])
def test_a_step_of_its_own_that_is_none(step: float) -> None:
    refused(one((3,), OWN_STEP, [struct.pack("<fb", step, 0), tile_of(np.ones((1, 3)))]), "malformed", "a step of")


def test_half_a_step_of_its_own() -> None:
    refused(one((3,), OWN_STEP, b"123"), "truncated")
    refused(one((3,), OWN_STEP, struct.pack("<f", 1.0)), "truncated")  # no offset


@pytest.mark.parametrize("offset", [-128, 127])
@pytest.mark.parametrize("step", [1e-45, 1.0, FLOAT32_MAX])
def test_the_largest_offsets_of_levels_give_finite_values(offset: int, step: float) -> None:
    tile = tile_of(np.array([[1 << 17, -(1 << 17), 0]]))
    decoded = fedfq.decode(one((3,), OWN_STEP, [struct.pack("<fb", step, offset), tile]))["w"]
    assert np.isfinite(decoded).all() and decoded[2] == np.clip(
        offset * float(np.float32(step)), -FLOAT32_MAX, FLOAT32_MAX
    )


def test_a_step_of_its_own_beyond_the_models_float16_is_clipped() -> None:
    payload = one((2,), OWN_STEP, [struct.pack("<fb", FLOAT32_MAX, 0), tile_of(np.array([[1, -7]]))])
    assert fedfq.decode(payload, like={"w": np.zeros(2, np.float16)})["w"].tolist() == [65504, -65504]
    assert fedfq.decode(payload)["w"].tolist() == [np.float32(FLOAT32_MAX), -np.float32(FLOAT32_MAX)]


# Small tensors that share sections


def sharing(small: SmallParts | bytes, *, flags: int = HAS_STEP, dtype: str = "int8") -> bytes:
    """A payload of two tensors of three floats and one of three integers, which share this."""
    table = entry("a", "float32", 3) + entry("b", "float32", 3) + entry("n", dtype, 3)
    parts = Parts(flags | SHARES_SMALL, table, step_bytes() if flags & HAS_STEP else b"", [])
    if isinstance(small, bytes):
        return assemble(parts, small=small)
    return assemble(replace(parts, small=small))


def row(*levels: int) -> tuple[int, Body]:
    """A section of one row of 32, which begins with these levels."""
    return PLAIN, [tile_of(np.array([[*levels, *[0] * (32 - len(levels))]]))]


def words(*values: int) -> tuple[int, Body]:
    """A section of integers as int64."""
    return INTEGER, bytes([DTYPES.index("int64")]) + np.array(values, "<i8").tobytes()


# 0x90: a step of 2; 0xff: an offset of -1
SHARED = SmallParts(b"\0\x90\0\xff", row(1, 0, -1), row(1, 4, 1), words(1, -2, 3))


def test_small_tensors_that_share_are_decoded() -> None:
    decoded = fedfq.decode(sharing(SHARED))
    assert {name: array.tolist() for name, array in decoded.items()} == {
        "a": [1, 0, -1],
        "b": [0, 6, 0],
        "n": [1, -2, 3],
    }


@pytest.mark.parametrize("steps", [b"\0\x90", b"\0\x90\0\0\0", bytes(1 << 20)], ids=["few", "many", "a bomb"])
def test_steps_of_small_tensors_of_the_wrong_number(steps: bytes) -> None:
    with at_most(MIB):
        refused(sharing(replace(SHARED, steps=steps)), "malformed", "steps of small tensors")


def test_steps_of_small_tensors_that_are_no_stream() -> None:
    refused(sharing(join_small(SHARED, steps=b"\x04\xff\xff\xff\xff")), "malformed", "decompressed")


def test_a_section_for_steps_that_no_small_tensor_has() -> None:
    refused(sharing(replace(SHARED, steps=bytes(4), common=row(1))), "malformed")


def test_an_offset_of_a_small_tensor_without_a_step_of_its_own() -> None:
    refused(sharing(replace(SHARED, steps=b"\0\x90\1\0")), "malformed", "an offset of a small tensor without")


def test_no_section_for_steps_that_small_tensors_have() -> None:
    refused(sharing(replace(SHARED, own=None)), "malformed", "cannot share")


@pytest.mark.parametrize("place", ["common", "own"])
@pytest.mark.parametrize("kind", [OWN_STEP, WIDTHS, INTEGER, INTEGER_DEFLATED, *range(16, 24)])
def test_small_tensors_share_a_section_of_a_kind_that_they_cannot(place: str, kind: int) -> None:
    refused(sharing(replace(SHARED, **{place: (kind, b"abc")})), "malformed", "cannot share")


@pytest.mark.parametrize("kind", [PLAIN, OWN_STEP, WIDTHS, *range(16, 24)])
def test_small_integers_in_a_section_that_is_not_of_integers(kind: int) -> None:
    refused(sharing(replace(SHARED, integers=(kind, b"abc"))), "malformed", "cannot share")


@pytest.mark.parametrize("kind", [6, 15, 24, 255])
def test_small_tensors_share_a_section_of_unknown_kind(kind: int) -> None:
    refused(sharing(replace(SHARED, common=(kind, b"abc"))), "version", "kind")


def test_small_tensors_of_the_payloads_step_without_one() -> None:
    refused(sharing(SHARED, flags=0), "malformed", "without a step")
    only_own = replace(SHARED, common=(ZERO, b""))
    assert fedfq.decode(sharing(only_own, flags=0))["b"].tolist() == [0, 6, 0]


@pytest.mark.parametrize("place", ["common", "own"])
def test_entries_behind_the_last_small_tensor(place: str) -> None:
    refused(sharing(replace(SHARED, **{place: row(1, 1, 1, 1)})), "malformed", "behind the last")


@pytest.mark.parametrize("byte", [1, 255])
def test_the_smallest_and_the_largest_step_of_a_small_tensor(byte: int) -> None:
    steps = bytes([byte, byte, 127, 128])
    payload = sharing(replace(SHARED, steps=steps, common=(ZERO, b""), own=row(1 << 17, 0, 0, -1)))
    assert all(np.isfinite(array).all() for array in fedfq.decode(payload).values())


@pytest.mark.parametrize("size", [0, 8, 23, 25, 32, 1 << 20])
def test_small_integers_of_the_wrong_number(size: int) -> None:
    code = bytes([DTYPES.index("int64")])
    for section in ((INTEGER, code + bytes(min(size, 99))), (INTEGER_DEFLATED, code + deflated(b"\1" * size))):
        with at_most(MIB // 2):
            refused(sharing(replace(SHARED, integers=section)), "malformed", "small integers")


@pytest.mark.parametrize(
    ("dtype", "word"), [("int8", 128), ("int8", -129), ("uint16", -1), ("int32", 1 << 40), ("bool", 2)]
)
def test_small_integers_that_their_dtype_lacks(dtype: str, word: int) -> None:
    refused(sharing(replace(SHARED, integers=words(0, word, 1)), dtype=dtype), "layout", "not of")


def test_a_few_bytes_that_claim_a_gigabyte() -> None:
    payload = one((1 << 14, 1 << 14), ZERO, b"", step=b"")
    with at_most(MIB // 4):
        refused(payload, "limit", "pass like=model")
    assert fedfq.inspect(payload).raw_bytes == 1 << 30


def integers(body: bytes, kind: int = INTEGER, dtype: str = "int32") -> bytes:
    return one((3,), kind, body, dtype=dtype, step=b"")


@pytest.mark.parametrize("code", [0, 1, 2, 3, 13, 255])  # float32, float64, float16, bfloat16, unknown ones
def test_integers_stored_in_a_dtype_that_is_not_of_integers(code: int) -> None:
    refused(integers(bytes([code]) + bytes(12)), "malformed", "not of integers")


@pytest.mark.parametrize("stored", ["int64", "uint32", "uint64"])
def test_integers_stored_in_a_dtype_that_the_tensor_cannot_hold(stored: str) -> None:
    size = np.dtype(stored).itemsize
    refused(integers(bytes([DTYPES.index(stored)]) + bytes(3 * size)), "layout", "not safely")


def test_integers_of_the_wrong_number() -> None:
    for size in (0, 2, 4, 12):
        refused(integers(b"\x05" + bytes(size)), "malformed", "bytes for 3 entries")
    refused(integers(b""), "truncated")


def test_deflated_integers_of_the_wrong_number() -> None:
    refused(integers(b"\x05" + deflated(bytes(2)), INTEGER_DEFLATED), "malformed", "of 3 bytes")
    refused(integers(b"\x05" + deflated(bytes(5)), INTEGER_DEFLATED), "malformed")


def test_deflated_integers_that_are_a_zip_bomb() -> None:
    body = b"\x05" + deflated(bytes(1 << 27))
    with at_most(MIB):
        refused(integers(body, INTEGER_DEFLATED), "malformed", "of 3 bytes")


def test_deflated_integers_that_are_damaged() -> None:
    whole = deflated(bytes(3))
    refused(integers(b"\x05" + whole[:-1], INTEGER_DEFLATED), "malformed", "whole")
    refused(integers(b"\x05" + whole + b"\0", INTEGER_DEFLATED), "malformed", "whole")
    refused(integers(b"\x05" + b"\xff" * 9, INTEGER_DEFLATED), "malformed", "decompressed")


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_a_scale_that_is_negative_or_not_finite(scale: float) -> None:
    refused(one((12, 20), WIDTHS, struct.pack("<3f", 1, scale, 1) + WEIGHT_TILE), "malformed", "a scale")


def test_scales_that_end_early() -> None:
    refused(one((12, 20), WIDTHS, bytes(11)), "truncated")


def test_a_level_that_no_width_has() -> None:
    tile = fedfq.encode({"w": np.full((4, 4), 139.0, np.float32)}, step=1.0)
    body = take_apart(tile, {"w": np.zeros((4, 4))}).sections[0][1][0]
    refused(one((4, 4), WIDTHS, struct.pack("<3f", 1, 1, 1) + body), "malformed", "no width")


# Tiles


def plain(*tiles: bytes, shape: tuple[int, ...] = (12, 20)) -> bytes:
    return one(shape, PLAIN, list(tiles))


def test_coefficients_of_an_empty_tensor() -> None:
    refused(plain(tile_bytes(b"\1"), shape=(0, 4)), "malformed", "empty tensor")


@pytest.mark.parametrize("spacings", [16, 0x80, 0xFF])
def test_unknown_tile_flags(spacings: int) -> None:
    refused(plain(tile_bytes(b"\1", spacings=spacings)), "malformed", "tile flags")


@pytest.mark.parametrize("nonzeros", [0, 241, 1 << 32, 1 << 62, (1 << 63) - 1])
def test_no_non_zeros_or_more_than_cells(nonzeros: int) -> None:
    payload = plain(tile_bytes(b"\1", nonzeros=nonzeros))
    with at_most(MIB // 4):
        refused(payload, "malformed", "non-zeros")


@pytest.mark.parametrize("ranges", [b"\x00\x01", b"\x05\x04", b"\x01\x51", b"\xff\xff"])
@pytest.mark.parametrize("spacings", [1, 4])
def test_scale_classes_out_of_range(ranges: bytes, spacings: int) -> None:
    refused(plain(tile_bytes(b"\1", spacings=spacings, ranges=ranges)), "malformed", "scale classes")


def test_a_tile_header_that_ends_early() -> None:
    whole = tile_bytes(b"", nonzeros=200, spacings=15, ranges=b"\1\2\1\2")
    for size in range(1, len(whole) + 1):
        refused(plain(whole[:size]), "truncated")


def test_tiles_that_end_early() -> None:
    with small_tiles():
        shape, tile = (40, 40), tile_bytes(b"\1")
        number = len(cut_into_tiles(shape))
        assert number > 2
        refused(plain(*[tile] * (number - 1), shape=shape), "truncated")
        refused(one(shape, PLAIN, varint(1 << 40) + tile), "truncated")
        refused(one(shape, PLAIN, b""), "truncated")


def test_tiles_too_many() -> None:
    with small_tiles():
        shape = (40, 40)
        refused(plain(*[b""] * (len(cut_into_tiles(shape)) + 1), shape=shape), "truncated")


def test_any_section_that_is_cut_or_extended() -> None:
    with small_tiles():
        for item in corpus(wild=0):
            if not item.name.startswith(("matrix", "factors", "tiles", "shared")):
                continue  # one tile and several, widths, factors, known directions
            for at, (kind, body) in enumerate(item.parts.sections):
                if isinstance(body, list):
                    whole = join_body(kind, body)
                    for changed in (whole[:-1], whole[:-5], whole[: len(whole) // 2], whole + b"\1"):
                        sections = [*item.parts.sections[:at], (kind, changed), *item.parts.sections[at + 1 :]]
                        payload = assemble(replace(item.parts, sections=sections))
                        with pytest.raises(fedfq.PayloadError):
                            fedfq.decode(payload, like=item.model, shared_basis=item.basis)


# Streams


def test_a_stream_that_is_cut_extended_or_replaced() -> None:
    for stream in (WEIGHT_TILE[:-1], WEIGHT_TILE[:-4], WEIGHT_TILE + b"\0", WEIGHT_TILE + b"\0" * 4):
        refused(plain(stream), "malformed", "damaged")
    head = WEIGHT_TILE[:-40]
    for noise in range(50):
        refused(plain(head + Random(noise).randbytes(40)), "malformed", "damaged")


def test_a_stream_with_another_number_of_non_zeros_than_it_says() -> None:
    (tile,) = read_tiles(WEIGHT_TILE, (12, 20))
    assert tile is not None
    header, stream = tile
    for nonzeros in (1, header.nonzeros - 1, header.nonzeros + 1, 240):
        refused(plain(header._replace(nonzeros=nonzeros).to_bytes() + stream), "malformed", "damaged")


def test_non_zeros_where_every_column_is_said_to_be_zero() -> None:
    for spacings, ranges in ((1, b"\1\1"), (4, b"\1\1"), (15, b"\1\1\1\1")):
        refused(plain(tile_bytes(b"\0", spacings=spacings, ranges=ranges)), "malformed", "damaged")


def test_a_pattern_wider_than_its_block() -> None:
    """With one cell in the block, the slots of two ones and more belong to nothing."""
    cumulative = PATTERN_CUMULATIVE[22]
    for ones in range(2, 9):
        state = struct.pack("<H", int(cumulative[ones]))
        refused(plain(tile_bytes(state, base=22), shape=(1,)), "malformed", "damaged")


@pytest.mark.parametrize("base", [-128, -1, 0, 15, 16, 59, 60, 127])
def test_any_context_and_scale_class_stays_within_its_tables(base: int) -> None:
    """Random streams that are valid under headers no encoder would write; NUMBA_BOUNDSCHECK=1 checks every index."""
    noise, tested = Random(base), 0
    for row, column in product(SPACINGS, SPACINGS):
        for first, last in ((1, 1), (1, 80), (80, 80)):
            rows, columns = (first, last) if row else (1, 1), (first, last) if column else (1, 1)
            header = TileHeader(base, 1, row, *rows, column, *columns)
            tries = (wild_tile(header, Tile(0, 64, 3, 64), noise) for _ in range(20))
            found = next((tile for tile in tries if tile is not None), None)
            if found is not None:
                indices, levels = decode_tile(found, Tile(1000, 64, 3, 64))
                assert (np.unique(indices).size, indices.min() >= 1000, indices.max() < 1192) == (indices.size, 1, 1)
                assert (np.abs(levels) >= 1).all() and (np.abs(levels) <= 1 << 17).all()
                tested += 1
    assert tested >= 40


# Factors


UNIT = [[1]] + [[0]] * 7  # of 8 x 1: V or A of rank 1


def factored(
    rank: int | bytes = 1,
    right: bytes | None = None,
    left: bytes | None = None,
    *,
    rest: bytes = b"",
    shape: tuple[int, ...] = (8, 8),
    kind: int = FACTORS,
    step: float = 1.0,
) -> bytes:
    number = rank if isinstance(rank, bytes) else varint(rank)
    right, left = (tile_of(UNIT) if tile is None else tile for tile in (right, left))
    body = number + varint(len(right)) + right + varint(len(left)) + left + rest
    return one(shape, kind, body, step=step_bytes(step))


def test_the_factors_that_are_attacked_here_are_valid() -> None:
    assert np.flatnonzero(fedfq.decode(factored())["w"]).tolist() == [0]
    rest = tile_of([[1] * 8] * 8)
    assert fedfq.decode(factored(kind=FACTORS | AND_PLAIN, rest=rest))["w"].ravel()[:2].tolist() == [2, 1]


@pytest.mark.parametrize("rank", [0, 9, 65, 1 << 40, (1 << 63) - 1])
def test_a_rank_of_zero_or_beyond_the_matrix(rank: int) -> None:
    payload = factored(rank)
    with at_most(MIB // 4):
        refused(payload, "malformed", "rank")


def test_a_rank_beyond_the_largest() -> None:
    refused(factored(65, shape=(100, 100)), "malformed", "rank 65")


def test_a_matrix_so_long_that_a_factor_exceeds_a_tile() -> None:
    payload = factored(2, shape=((1 << 21) + 1, 8))
    with at_most(MIB // 4):
        refused(payload, "malformed", "rank 2", max_bytes=1 << 27)


@pytest.mark.parametrize("shape", [(64,), (7, 9), (0, 8), (8, 0, 8), (2,) * 7, ()])
def test_a_tensor_that_has_no_factors(shape: tuple[int, ...]) -> None:
    refused(factored(shape=shape), "malformed", "no factors")


def test_factors_without_a_step() -> None:
    refused(one((8, 8), FACTORS, b"\1", step=b""), "malformed", "without a step")


def test_factors_in_a_tensor_of_integers() -> None:
    refused(one((8, 8), FACTORS, b"\1", dtype="int32"), "malformed", "cannot have")


def test_factors_that_end_early() -> None:
    body = b"\1" + b"".join(varint(len(tile)) + tile for tile in [tile_of(UNIT)] * 2)
    for size in range(len(body)):
        with pytest.raises(fedfq.PayloadError):
            fedfq.decode(one((8, 8), FACTORS, body[:size]))


def test_factors_that_are_empty() -> None:
    refused(factored(right=b""), "truncated")
    refused(factored(left=b""), "truncated")


def test_bytes_behind_the_factors() -> None:
    refused(factored(rest=b"\0"), "malformed", "follow the factors")


def test_factors_of_another_size() -> None:
    refused(factored(right=tile_of(UNIT + UNIT)), "malformed")
    refused(factored(2), "malformed")


@pytest.mark.parametrize("step, level", [(FLOAT32_MAX, 2), (1e38, 4), (3e33, 1 << 17)])
def test_factors_whose_product_exceeds_float32(step: float, level: int) -> None:
    refused(factored(left=tile_of(level * np.array(UNIT)), step=step), "malformed", "exceeds")


def test_the_largest_factors_stay_finite_whatever_the_weight() -> None:
    payload = factored(step=FLOAT32_MAX)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isfinite(fedfq.decode(payload)["w"]).all()
        server = fedfq.Accumulator({"w": np.zeros((8, 8), np.float32)})
        for weight in (1e-30, 1.0, 3.0, 1e30):
            server.add(payload, weight)
            assert np.isfinite(server.mean()["w"]).all()


# Factors in known directions


def moved(*shape: int) -> Array:
    """A drift of rank 2 whose directions are 0 in half of their entries."""
    drift = np.zeros(shape, np.float32)
    drift[: shape[0] // 2, : shape[1] // 2] = 2
    drift[0, 0] = 3
    return drift


BASIS = basis_of({"w": moved(8, 8)})
BOTH = FACTORS | RIGHT_KNOWN | LEFT_KNOWN
ONE = tile_of([[1]])  # of one direction, rank 1
HUGE = [1 << 31, 1 << 40, (1 << 63) - 1]


def side(directions: int | bytes = 1, inside: bytes = ONE, rest: bytes = b"") -> bytes:
    """V or A in known directions."""
    number = directions if isinstance(directions, bytes) else varint(directions)
    return number + varint(len(inside)) + inside + varint(len(rest)) + rest


def shared(
    right: bytes | None = None,
    left: bytes | None = None,
    *,
    rank: int = 1,
    kind: int = BOTH,
    rest: bytes = b"",
    flags: int = HAS_STEP | HAS_GAIN | HAS_BASIS,
    basis: bytes = BASIS.digest,
    dtype: str = "float32",
    shape: tuple[int, ...] = (8, 8),
    step: float = 1.0,
    gain: float = 1.0,
) -> bytes:
    right, left = (side() if part is None else part for part in (right, left))
    steps = step_bytes(step) if flags & HAS_STEP else b""
    sections: list[tuple[int, Body]] = [(kind, varint(rank) + right + left + rest)]
    return assemble(Parts(flags, entry("w", dtype, *shape), steps, sections, struct.pack("<f", gain), basis))


def plainly(tile: bytes) -> bytes:
    """V or A that is not in known directions."""
    return varint(len(tile)) + tile


def finite_or_refused(payload: bytes, basis: fedfq.SharedBasis) -> None:
    """Also in a server, whatever the weight."""
    server = fedfq.Accumulator({"w": np.zeros((8, 8), np.float32)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            assert np.isfinite(fedfq.decode(payload, shared_basis=basis)["w"]).all()
        except fedfq.PayloadError as error:
            assert error.reason == "malformed"
            return
        for weight in (1e-30, 1.0, 3.0, 1e30):
            server.add(payload, weight, shared_basis=basis)
            assert np.isfinite(server.mean()["w"]).all()


def test_the_known_directions_that_are_attacked_here_are_valid() -> None:
    held = BASIS.held["w"]
    assert held.left.shape == held.right.shape == (8, 2)
    expected = np.outer(held.left[:, 0], held.right[:, 0])
    for payload in (shared(), shared(kind=BOTH | AND_PLAIN), shared(gain=3.0, step=1 / 3)):
        np.testing.assert_allclose(fedfq.decode(payload, shared_basis=BASIS)["w"], expected, atol=1e-6)
    last = side(2, tile_of([[0], [1]]))
    expected = np.outer(held.left[:, 1], held.right[:, 1])
    np.testing.assert_allclose(fedfq.decode(shared(last, last), shared_basis=BASIS)["w"], expected, atol=1e-6)
    unit, e = tile_of(UNIT), np.array(UNIT)[:, 0]
    one_sided = {
        shared(plainly(unit), kind=BOTH ^ RIGHT_KNOWN): np.outer(held.left[:, 0], e),
        shared(left=plainly(unit), kind=BOTH ^ LEFT_KNOWN): np.outer(e, held.right[:, 0]),
        shared(side(inside=b"", rest=unit), side(rest=unit)): np.outer(held.left[:, 0] + e, e),
    }
    for payload, expected in one_sided.items():
        np.testing.assert_allclose(fedfq.decode(payload, shared_basis=BASIS)["w"], expected, atol=1e-6)
        assert fedfq.inspect(payload).tensors[0].kind == "shared factors"


@pytest.mark.parametrize("directions", [0, 9, 129, *HUGE])
@pytest.mark.parametrize("inside", [ONE, b""])
def test_no_directions_or_more_than_the_side_has_entries(directions: int, inside: bytes) -> None:
    lie = side(directions, inside, tile_of(UNIT))
    for payload in (shared(right=lie), shared(left=lie)):
        with at_most(MIB // 4):
            refused(payload, "malformed", f"{directions} known directions of 8 entries", shared_basis=BASIS)
        with pytest.raises(fedfq.PayloadError, match="known directions"):
            fedfq.inspect(payload)


@pytest.mark.parametrize("directions", [3, 8])
def test_more_directions_than_the_basis_has(directions: int) -> None:
    lie = side(directions, tile_of([[1]] * directions))
    for payload in (shared(right=lie), shared(left=lie), shared(lie, lie)):
        refused(payload, "malformed", f"{directions} known directions, of which .* has 2", shared_basis=BASIS)


def test_more_directions_than_any_basis_has() -> None:
    basis = basis_of({"w": np.random.default_rng(0).normal(size=(130, 130)).astype(np.float32)})
    assert basis.held["w"].right.shape == (130, 128)
    for directions, tile in ((128, [[1]] * 128), (129, [[1]] * 129)):
        payload = shared(side(directions, tile_of(tile)), basis=basis.digest, shape=(130, 130))
        if directions == 128:
            assert np.isfinite(fedfq.decode(payload, shared_basis=basis)["w"]).all()
        else:
            refused(payload, "malformed", "129 known directions of 130 entries", shared_basis=basis)


@pytest.mark.parametrize("number", BAD_VARINTS)
def test_a_number_of_directions_that_no_encoder_writes(number: bytes) -> None:
    refused(shared(right=side(number)), "malformed", "a number", shared_basis=BASIS)
    refused(shared(left=side(number)), "malformed", "a number", shared_basis=BASIS)


@pytest.mark.parametrize("size", HUGE)
def test_a_tile_of_known_directions_that_ends_after_the_payload(size: int) -> None:
    for payload in (shared(right=b"\1" + varint(size) + ONE), shared(left=b"\1" + plainly(ONE) + varint(size))):
        with at_most(MIB // 4):
            refused(payload, "truncated", shared_basis=BASIS)


def test_a_payload_made_with_a_shared_basis_that_is_not_given() -> None:
    refused(shared(), "basis", "pass shared_basis=")
    refused(assemble(Parts(HAS_BASIS, b"", b"", [], basis=bytes(8))), "basis")  # with no use for it


def test_a_payload_made_with_another_shared_basis() -> None:
    later = basis_of({"w": moved(8, 8) + np.eye(8, dtype=np.float32)})
    refused(shared(), "basis", "another round", shared_basis=later)
    for at in range(8):
        digest = bytes(byte ^ (k == at) for k, byte in enumerate(BASIS.digest))
        refused(shared(basis=digest), "basis", "another round", shared_basis=BASIS)


def test_a_layout_other_than_that_of_the_shared_basis_it_names() -> None:
    """The digest of a basis is no secret: a stranger may put it into any payload."""
    others = (
        shared(shape=(8, 9)),
        shared(shape=(1 << 12, 1 << 12)),
        replace_name(shared(), "v"),
        assemble(Parts(HAS_BASIS, b"", b"", [], basis=BASIS.digest)),
    )
    for payload in others:
        with at_most(MIB // 4):
            refused(payload, "basis", "another model", shared_basis=BASIS, max_bytes=1 << 27)


def replace_name(payload: bytes, name: str) -> bytes:
    parts = take_apart(payload, {"w": np.zeros((8, 8))})
    return assemble(replace(parts, table=entry(name, "float32", 8, 8)))


def test_a_payload_with_another_shared_basis_leaves_no_trace() -> None:
    server = fedfq.Accumulator({"w": moved(8, 8)})
    server.add(shared(), shared_basis=BASIS)
    before = server.mean()["w"].tobytes()
    for payload, basis in ((shared(), None), (shared(basis=bytes(8)), BASIS), (shared(side(3)), BASIS)):
        with pytest.raises(fedfq.PayloadError):
            server.add(payload, shared_basis=basis)
        assert (server.weight, server.mean()["w"].tobytes()) == (1.0, before)


def test_a_digest_of_a_shared_basis_that_ends_early() -> None:
    for size in range(8):
        refused(seal(HEAD.pack(MAGIC, VERSION, HAS_BASIS, 0) + bytes(size)), "truncated")


@pytest.mark.parametrize("kind", [18, 19, 20, 21, 22, 23])
def test_known_directions_in_a_payload_without_a_shared_basis(kind: int) -> None:
    payload = shared(kind=kind, flags=HAS_STEP | HAS_GAIN, basis=b"")
    for basis in (BASIS, None):
        refused(payload, "malformed", "without a shared basis", shared_basis=basis)


def test_a_shared_basis_that_a_payload_does_without() -> None:
    for payload in (VALID, factored()):
        without, given = fedfq.decode(payload), fedfq.decode(payload, shared_basis=BASIS)
        assert all(without[name].tobytes() == given[name].tobytes() for name in without)


def test_known_directions_of_a_tensor_that_has_not_moved() -> None:
    still = basis_of({"w": np.zeros((8, 8), np.float32)})
    assert not still.held
    for payload in (shared(basis=still.digest), shared(plainly(tile_of(UNIT)), kind=20, basis=still.digest)):
        refused(payload, "malformed", "1 known directions, of which the shared basis has 0", shared_basis=still)


@pytest.mark.parametrize("shape", [(64,), (7, 9), (0, 8), (2,) * 7, ()])
def test_known_directions_of_a_tensor_that_has_no_factors(shape: tuple[int, ...]) -> None:
    basis = basis_of({"w": np.ones(shape, np.float32)})
    refused(shared(shape=shape, basis=basis.digest), "malformed", "no factors", shared_basis=basis)


def test_known_directions_in_a_tensor_of_integers() -> None:
    refused(shared(dtype="int32"), "malformed", "cannot have", shared_basis=BASIS)
    integers = basis_of({"w": moved(8, 8).astype(np.int32)})
    refused(shared(basis=integers.digest), "malformed", "shared basis has 0", shared_basis=integers)


def test_known_directions_without_a_step() -> None:
    payload = shared(flags=HAS_GAIN | HAS_BASIS)
    refused(payload, "malformed", "without a step", shared_basis=BASIS)


@pytest.mark.parametrize("kind", [18, 19, 20, 21, 22, 23])
def test_known_directions_that_end_early(kind: int) -> None:
    unit = tile_of(UNIT)
    sides = [side(rest=unit) if kind & known else plainly(unit) for known in (RIGHT_KNOWN, LEFT_KNOWN)]
    tail = tile_of([[1] * 8] * 8) if kind & AND_PLAIN else b""
    whole = b"\1" + b"".join(sides) + tail
    parts = take_apart(shared(*sides, kind=kind, rest=tail), {"w": np.zeros((8, 8))})
    for size in range(len(whole) + 1):
        payload = assemble(replace(parts, sections=[(kind, whole[:size])]))
        if size in (len(whole), len(whole) - len(tail)):  # plain coefficients may be left out
            assert np.isfinite(fedfq.decode(payload, shared_basis=BASIS)["w"]).all()
        else:
            with pytest.raises(fedfq.PayloadError):
                fedfq.decode(payload, shared_basis=BASIS)


def test_known_directions_whose_tiles_are_both_empty() -> None:
    refused(shared(right=side(inside=b"")), "truncated", shared_basis=BASIS)
    refused(shared(left=side(inside=b"")), "truncated", shared_basis=BASIS)


def test_bytes_behind_known_directions() -> None:
    refused(shared(rest=b"\0"), "malformed", "follow the factors", shared_basis=BASIS)


def test_known_directions_of_another_size() -> None:
    tall = tile_of([[5], [-6], [7]])
    for lie in (side(1, tall), side(2, tall), side(rest=tile_of(UNIT + UNIT))):
        refused(shared(right=lie), "malformed", shared_basis=BASIS)
        refused(shared(left=lie), "malformed", shared_basis=BASIS)
    wide = side(1, tile_of([[5, -6, 7]]))
    for rank in (1, 2, 4):
        refused(shared(wide, wide, rank=rank), "malformed", shared_basis=BASIS)


@pytest.mark.parametrize("step, gain, level", [(FLOAT32_MAX, 1.0, 8), (1e30, 1e30, 1), (1e34, 1.0, 1 << 17)])
def test_known_directions_whose_product_exceeds_float32(step: float, gain: float, level: int) -> None:
    payload = shared(left=side(inside=tile_of([[level]])), step=step, gain=gain)
    refused(payload, "malformed", "exceeds", shared_basis=BASIS)


@pytest.mark.parametrize("gain", [0.5, 1.0, 1.1, 1.5, 1.9, 3.0])
def test_known_directions_and_a_step_about_the_largest_float(gain: float) -> None:
    """All entries of a direction are below 1, and some are 0: the product may be small where the step is infinite."""
    for left in (side(), side(2, tile_of([[0], [1]])), side(2, tile_of([[1], [1]]))):
        finite_or_refused(shared(left=left, step=FLOAT32_MAX, gain=gain), BASIS)


@pytest.mark.parametrize("gain", [1.0, 1e5, 1e30, FLOAT32_MAX])
def test_known_directions_that_the_rest_undoes(gain: float) -> None:
    """A direction of one entry: what is left of it is nothing, or a rounding error."""
    drift = np.zeros((8, 8), np.float32)
    drift[0, 0] = 1
    basis = basis_of({"w": drift})
    for sign in (1, -1):
        nothing, all_of_it = side(rest=tile_of(sign * np.array(UNIT))), side()
        for right, left in product((nothing, all_of_it), repeat=2):
            payload = shared(right, left, basis=basis.digest, step=FLOAT32_MAX, gain=gain)
            finite_or_refused(payload, basis)


# The gain


@pytest.mark.parametrize("gain", [0.0, -0.0, -1.0, float("nan"), float("inf"), float("-inf")])
def test_a_gain_that_is_not_positive_and_finite(gain: float) -> None:
    refused(with_gain(gain), "malformed", "a gain of")


@pytest.mark.parametrize("gain", [1e-45, 1e30, FLOAT32_MAX])
@pytest.mark.parametrize("kind", [PLAIN, WIDTHS])
def test_the_smallest_and_largest_gain_give_finite_values(gain: float, kind: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isfinite(fedfq.decode(with_gain(gain, kind))["w"]).all()


def with_gain(gain: float, kind: int = PLAIN) -> bytes:
    body = [tile_of([[1, -2, 0, 3]])]
    if kind == WIDTHS:
        body = [struct.pack("<3f", 0, 1, FLOAT32_MAX), *body]
    parts = Parts(HAS_STEP | HAS_GAIN, entry("w", "float32", 4), step_bytes(FLOAT32_MAX), [(kind, body)])
    return assemble(replace(parts, gain=struct.pack("<f", gain)))


def test_a_gain_that_ends_early() -> None:
    refused(seal(HEAD.pack(MAGIC, VERSION, HAS_GAIN, 0) + b"\0\0\0"), "truncated")


# A server


def test_a_refused_payload_leaves_no_trace() -> None:
    """Also where everything but the end of the last section is valid."""
    update = UPDATE | {"z": UPDATE["weight"]}
    valid = take_apart(encode_one_by_one(update), update)
    kind, body = valid.sections[-1]
    damaged = [body[0][:-3] + b"\0\0\0"]
    payload = assemble(Parts(valid.flags, valid.table, valid.step, [*valid.sections[:-1], (kind, damaged)]))
    for threads in (1, 2):
        server = fedfq.Accumulator(update, threads=threads)
        server.add(assemble(valid), 3.0)
        before = {name: array.tobytes() for name, array in server.mean().items()}
        with pytest.raises(fedfq.PayloadError):
            server.add(payload, 3.0)
        assert server.weight == 3.0
        assert {name: array.tobytes() for name, array in server.mean().items()} == before


def test_the_mean_of_the_largest_floats_is_finite() -> None:
    """Neither their sum nor rounding up in the division makes an infinity, nor a warning halfway through a payload."""
    largest = [struct.pack("<fb", FLOAT32_MAX, 0), tile_of(np.full((1, 3), 2))]
    tile = fedfq.encode({"b": np.ones(3, np.float32)}, step=1.0, basis="identity")
    body = take_apart(tile, {"b": np.zeros(3)}).sections[0][1]
    table = entry("a", "float32", 3) + entry("b", "float32", 3)
    step = step_bytes(FLOAT32_MAX, 0, 15, b"\x7f" * 16)
    payload = assemble(Parts(HAS_STEP, table, step, [(OWN_STEP, largest), (PLAIN, body)]))
    rng = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scale in (1e-3, 1.0, 1000.0) * 100:
            server = fedfq.Accumulator({"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)})
            for weight in scale * rng.random(rng.integers(1, 6)):
                server.add(payload, float(weight))
            assert all(np.isfinite(array).all() for array in server.mean().values())


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8", "uint64"])
def test_the_mean_of_the_largest_integers_keeps_their_sign(dtype: str) -> None:
    info = np.iinfo(dtype)
    update = {"n": np.array([info.min, info.max], dtype)}
    server = fedfq.Accumulator(update)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            server.add(fedfq.encode(update, step=1.0))
        low, high = (int(n) for n in server.mean()["n"])
    assert low == info.min
    assert info.max - info.max // 2**52 <= high <= info.max


# All of it at once


def test_the_payloads_that_are_mutated_have_sections_of_every_kind() -> None:
    with small_tiles():
        entries = corpus(wild=0)
        assert all(assemble(item.parts) == item.payload for item in entries)
    assert {kind for item in entries for kind, _ in item.parts.sections} == set(SECTIONS)
    made = {kind for item in entries if item.name.startswith("shared") for kind, _ in item.parts.sections}
    assert made >= set(range(18, 24))


def test_three_thousand_mutants() -> None:
    tally = fuzz(3000, seed=1)
    assert sum(number for key, number in tally.outcomes.items() if not key.startswith("bare")) == 5 * 3000
    assert tally.outcomes["bare basis"] > 100
    reasons = {key.split()[1] for key in tally.outcomes}
    assert reasons == {"accepted", "truncated", "magic", "version", "checksum", "layout", "basis", "limit", "malformed"}
