"""The sketch in a payload: scales that both sides know, its bytes, and what a decoder refuses."""

import struct

import numpy as np
import pytest

from fedfq import PayloadError
from fedfq.codec.format.layout import Spec
from fedfq.codec.format.reader import ByteReader, deflate, varint
from fedfq.codec.format.sketch import (
    DIRECTIONS,
    LOWEST_CLASS,
    MOST_NUMBERS,
    NEGATIVE,
    SCALES,
    Classes,
    Sketch,
    make_directions,
)

SINGLE = np.dtype(np.float32)
LAYOUT = [Spec("w", (6, 10), SINGLE), Spec("n", (3,), np.dtype(np.int64)), Spec("b", (4,), SINGLE)]


def sketch(blocks: int = 5, unit: float = 0.5, scales: tuple[int, ...] = (255, 247)) -> Sketch:
    words = np.arange(blocks, dtype=np.uint8) + np.uint8(NEGATIVE) * (np.arange(blocks) % 2).astype(np.uint8)
    return Sketch(7, unit, np.array(scales, np.uint8), words, [None])


def decode(of: Sketch, layout: list[Spec] = LAYOUT, known: dict[str, Classes] | None = None) -> dict[str, np.ndarray]:
    result = {spec.name: np.zeros(spec.size, np.float32) for spec in layout}
    for name, part in of.decode(99, layout, known or {}):
        part.add_to(result[name], (), 1.0)
    return result


def test_scales_are_eighths_of_octaves() -> None:
    assert np.log2(SCALES[::-1].astype(np.float64)) == pytest.approx(-np.arange(SCALES.size) / 8, abs=1e-6)
    assert SCALES[-1] == 1.0


def test_bytes_there_and_back() -> None:
    made = sketch()
    read = Sketch.read(ByteReader(made.to_bytes()), LAYOUT)
    assert read.to_bytes() == made.to_bytes()
    assert (read.seed, read.unit, read.scales.tolist()) == (7, 0.5, [255, 247])


def test_entries_are_dealt_to_blocks_and_have_their_scale() -> None:
    """Entry f is number f // 5 of block f % 5; a scale 8 below is half as large."""
    of = sketch()
    entries = np.concatenate(list(value for value in decode(of).values() if value.size != 3))
    directions = make_directions(7 << 32 | 99, -(-64 // 5))
    f = np.arange(64)
    scales = np.where(f < 60, 1.0, 0.5)
    lengths = entries / (directions[f // 5, (of.words & 127)[f % 5]] * scales)
    for block in range(5):  # a length each, with the sign of its direction, of about 2.5 units
        assert np.ptp(lengths[f % 5 == block]) < 1e-6
        assert 0.75 <= lengths[block] * (-1) ** block <= 1.75


def test_no_scale_no_sketch() -> None:
    only = decode(sketch(scales=(255, 0)))
    assert only["w"].all() and not only["b"].any() and not only["n"].any()


def test_a_weight_and_what_is_there_already() -> None:
    once, total = decode(sketch()), np.full(60, 3.0, np.float32)
    next(part for name, part in sketch().decode(99, LAYOUT, {}) if name == "w").add_to(total, (6, 10), 2.0)
    assert total == pytest.approx(3.0 + 2.0 * once["w"], rel=1e-6)


def test_random_numbers_depend_on_the_seed_and_on_the_bytes_before() -> None:
    one, other_seed = decode(sketch())["w"], decode(sketch()._replace(seed=8))["w"]
    elsewhere = np.zeros(60, np.float32)
    next(part for name, part in sketch().decode(98, LAYOUT, {}) if name == "w").add_to(elsewhere, (), 1.0)
    assert not np.allclose(one, other_seed) and not np.allclose(one, elsewhere)


def test_classes_follow_the_energies_of_rows_and_columns() -> None:
    """An octave of scale in the drift is two of energy: a quarter of an octave of the sketch's scale."""
    drift = np.outer([1.0, 0.5, 0.0], [1.0, 1.0, 2.0**-9]).astype(np.float32)
    classes = Classes.of(drift)
    assert classes is not None
    assert classes.rows.tolist() == [0, -2, LOWEST_CLASS]
    assert classes.columns.tolist() == [0, 0, LOWEST_CLASS]
    known = decode(sketch(), known={"w": Classes(np.array([0, -8, 0, 0, 0, 0]), np.zeros(10, np.int64))})
    assert known["w"][10:20] == pytest.approx(decode(sketch())["w"][10:20] / 2)


@pytest.mark.parametrize("drift", [np.zeros((3, 4)), np.ones(7), np.ones((0, 4)), np.float32(1.0)])
def test_no_classes_where_nothing_is_known(drift: np.ndarray) -> None:
    assert Classes.of(np.asarray(drift, np.float32)) is None


def raw(unit: float = 1.0, scales: bytes = b"\xff\xff", blocks: int = 4, tail: bytes = b"") -> bytes:
    packed = deflate(scales)
    return struct.pack("<If", 1, unit) + varint(len(packed)) + packed + varint(blocks) + bytes(blocks) + tail


@pytest.mark.parametrize(
    "data",
    [
        raw(unit=0.0),
        raw(unit=-1.0),
        raw(unit=float("nan")),
        raw(unit=float("inf")),
        raw(scales=b"\xff"),
        raw(scales=b"\xff\xff\xff"),
        raw(scales=b"\0\0"),
        raw(blocks=0),
        raw(blocks=65),
        raw(tail=b"\1"),
        raw()[:-1],
        raw()[:3],
    ],
)
def test_malformed_sketches_are_refused(data: bytes) -> None:
    with pytest.raises(PayloadError):
        Sketch.read(ByteReader(data), LAYOUT)


def test_blocks_of_too_many_numbers_are_refused() -> None:
    """Directions take memory: at most 16 MB of them."""
    large = [Spec("w", (MOST_NUMBERS * 4 + 1,), SINGLE)]
    with pytest.raises(PayloadError, match="in 4 blocks"):
        Sketch.read(ByteReader(raw(scales=b"\xff")), large)
    assert MOST_NUMBERS * DIRECTIONS * 4 == 1 << 24


def test_the_largest_numbers_stay_finite() -> None:
    huge = decode(sketch(unit=3e38))
    assert np.isfinite(huge["w"]).all()
