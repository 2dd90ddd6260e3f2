"""The sketch in a payload: its bytes, what is decoded, and what a decoder refuses."""

import struct

import numpy as np
import pytest

from fedfq import PayloadError
from fedfq.codec.format.directions import KnownDirections, find_directions
from fedfq.codec.format.layout import Spec
from fedfq.codec.format.reader import ByteReader, deflate, varint
from fedfq.codec.format.sketch import (
    DIRECTIONS,
    LARGEST_NORMAL,
    MOST_NUMBERS,
    NEGATIVE,
    SCALES,
    Sketch,
    make_directions,
)
from fedfq.codec.format.stretch import Stretch

SINGLE = np.dtype(np.float32)
LAYOUT = [Spec("w", (6, 10), SINGLE), Spec("n", (3,), np.dtype(np.int64)), Spec("b", (4,), SINGLE)]
KERNEL = [Spec("k", (5, 6, 3, 2), SINGLE)]

Directions = dict[str, KnownDirections]


def sketch(
    blocks: int = 5, unit: float = 0.5, scales: tuple[int, ...] = (255, 247), stretched: tuple[int, ...] = ()
) -> Sketch:
    words = np.arange(blocks, dtype=np.uint8) + np.uint8(NEGATIVE) * (np.arange(blocks) % 2).astype(np.uint8)
    return Sketch(7, unit, np.array(scales, np.uint8), np.array(stretched, np.uint8), words, [None])


def known() -> Directions:
    """Of the kernel, which is folded to (5 x 3) x (6 x 2)."""
    found = find_directions(np.random.default_rng(0).standard_normal(KERNEL[0].shape).astype(np.float32))
    assert found is not None
    return {"k": found[0]}


def decode(of: Sketch, layout: list[Spec] = LAYOUT, known: Directions | None = None) -> dict[str, np.ndarray]:
    result = {spec.name: np.zeros(spec.size, np.float32) for spec in layout}
    shapes = {spec.name: spec.shape for spec in layout}
    for name, part in of.decode(layout, known or {}):
        part.add_to(result[name], shapes[name], 1.0)
    return result


def test_scales_are_eighths_of_octaves() -> None:
    assert np.log2(SCALES.astype(np.float64)) == pytest.approx((np.arange(256) - 255) / 8, abs=1e-6)
    assert SCALES[-1] == 1.0


def test_bytes_there_and_back() -> None:
    made = sketch()
    read = Sketch.read(ByteReader(made.to_bytes()), LAYOUT, False)
    assert read.to_bytes() == made.to_bytes()
    assert (read.seed, read.unit, read.scales.tolist()) == (7, 0.5, [255, 247])
    with_basis = sketch(stretched=(32, 0))
    assert Sketch.read(ByteReader(with_basis.to_bytes()), LAYOUT, True).stretched.tolist() == [32, 0]


def test_entries_are_dealt_to_blocks_and_have_their_scale() -> None:
    """Entry f is number f // 5 of block f % 5; a scale 8 below is half as large."""
    of = sketch()
    entries = np.concatenate(list(value for value in decode(of).values() if value.size != 3))
    directions = make_directions(7, -(-64 // 5))
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
    next(part for name, part in sketch().decode(LAYOUT, {}) if name == "w").add_to(total, (6, 10), 2.0)
    assert total == pytest.approx(3.0 + 2.0 * once["w"], rel=1e-6)


def test_random_numbers_depend_on_the_seed() -> None:
    assert not np.allclose(decode(sketch())["w"], decode(sketch()._replace(seed=8))["w"])


def test_stretched_along_known_directions() -> None:
    """Entries are then those of the folded matrix: (out, a) x (in, b)."""
    plain = decode(sketch(scales=(255,)), KERNEL)["k"].astype(np.float64)
    made = decode(sketch(scales=(255,), stretched=(3,)), KERNEL, known())["k"].reshape(KERNEL[0].shape)
    stretch, matrix = Stretch.along(known()["k"], 3), plain.reshape(15, 12).astype(np.float32)
    stretch.apply(matrix)
    folded = made.transpose(0, 2, 1, 3).reshape(15, 12)
    assert folded == pytest.approx(matrix, rel=1e-4, abs=1e-5)
    assert np.abs(folded - plain.reshape(15, 12)).max() > 0.1


@pytest.mark.parametrize("stretched", [(13,), (1, 1)])
def test_directions_that_nobody_knows_are_refused(stretched: tuple[int, ...]) -> None:
    """The kernel has twelve, a vector has none."""
    layout = [*KERNEL, Spec("v", (9,), SINGLE)][: len(stretched)]
    with pytest.raises(PayloadError, match="of which the shared basis has"):
        list(sketch(scales=(255,) * len(stretched), stretched=stretched).decode(layout, known()))


def test_stretched_beyond_float32_is_refused() -> None:
    with pytest.raises(PayloadError, match="exceeds float32"):
        list(sketch(unit=1e35, scales=(255,), stretched=(3,)).decode(KERNEL, known()))
    assert np.isfinite(decode(sketch(unit=1e33, scales=(255,), stretched=(3,)), KERNEL, known())["k"]).all()


def test_the_largest_normal_number() -> None:
    """The least square that is not 0 is of two numbers beside 1/2: 2 (2^-52)^2."""
    assert np.sqrt(-2 * np.log(2.0**-105)) < LARGEST_NORMAL


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
        Sketch.read(ByteReader(data), LAYOUT, False)


def test_more_directions_than_are_ever_used_are_refused() -> None:
    with pytest.raises(PayloadError, match="33 directions"):
        Sketch.read(ByteReader(raw(scales=b"\xff\xff\0\x21")), LAYOUT, True)


def test_blocks_of_too_many_numbers_are_refused() -> None:
    """Directions take memory: at most 16 MB of them."""
    large = [Spec("w", (MOST_NUMBERS * 4 + 1,), SINGLE)]
    with pytest.raises(PayloadError, match="in 4 blocks"):
        Sketch.read(ByteReader(raw(scales=b"\xff")), large, False)
    assert MOST_NUMBERS * DIRECTIONS * 4 == 1 << 24


@pytest.mark.parametrize("weight", [1.0, 1e-40, 0.0])
def test_the_largest_numbers_stay_finite(weight: float) -> None:
    """An estimate is kept within float32 before it is weighted: an infinite one could not be made short, or be NaN."""
    total = np.zeros(60, np.float32)
    next(part for name, part in sketch(unit=3e38).decode(LAYOUT, {}) if name == "w").add_to(total, (6, 10), weight)
    assert np.isfinite(total).all() and float(np.abs(total).max()) <= 3.5e38 * weight
