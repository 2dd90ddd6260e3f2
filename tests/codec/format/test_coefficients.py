"""Coefficients: any sparse matrix of integers comes back, in about the bytes that theory asks for."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfq.codec.encoder.quantize import MAX_MAGNITUDE, nonzero
from fedfq.codec.encoder.tiles import encode_tile
from fedfq.codec.errors import PayloadError
from fedfq.codec.format.coefficients import decode_tile
from fedfq.codec.format.probability import MAX_CLASS, SHIFTS, SPACINGS
from fedfq.codec.format.tiles import CodedTile, Tile

Levels = npt.NDArray[np.int32]


def encode(levels: Levels, by_size: bool = True) -> CodedTile:
    encoded = encode_tile(nonzero(levels), levels.shape[1], by_size=by_size)
    assert encoded is not None
    return encoded.coded


def decode(encoded: CodedTile, shape: tuple[int, int]) -> Levels:
    """The levels of a tile in the midst of a larger tensor."""
    start, stride = 7, shape[1] + 5
    indices, values = decode_tile(encoded, Tile(start, stride, *shape))
    assert indices.size == np.unique(indices).size == encoded.header.nonzeros
    flat = np.zeros(start + stride * shape[0], np.int32)
    flat[indices] = values
    levels = flat[start:].reshape(shape[0], stride)
    assert not flat[:start].any() and not levels[:, shape[1] :].any()
    return levels[:, : shape[1]]


def assert_round_trip(levels: Levels) -> None:
    for by_size in (True, False):
        encoded = encode(levels, by_size)
        np.testing.assert_array_equal(decode(encoded, levels.shape), levels)
        assert_header_fits_the_format(encoded)


def assert_header_fits_the_format(encoded: CodedTile) -> None:
    header = encoded.header
    assert -128 <= header.base <= 127
    assert header.row_spacing in SPACINGS and header.column_spacing in SPACINGS
    assert 1 <= header.row_first <= header.row_last <= MAX_CLASS
    assert 1 <= header.column_first <= header.column_last <= MAX_CLASS
    assert len(encoded.stream) >= 1


def levels_of(kind: str, shape: tuple[int, int], seed: int = 0) -> Levels:
    rng = np.random.default_rng(seed)
    sides = np.exp(rng.normal(size=(shape[0], 1))) * np.exp(rng.normal(size=(1, shape[1])))
    drawn = {
        "sparse": lambda: np.rint(rng.laplace(scale=0.15, size=shape)),
        "medium": lambda: np.rint(rng.laplace(scale=0.6, size=shape)),
        "dense": lambda: rng.integers(1, 4, shape) * rng.choice([-1, 1], shape),
        "large": lambda: np.rint(rng.normal(scale=300.0, size=shape)),
        "any size": lambda: (
            np.trunc(2.0 ** rng.uniform(0, 17, shape)).clip(1, MAX_MAGNITUDE) * (rng.random(shape) < 0.3)
        ),
        "scales": lambda: np.rint(0.3 * sides * rng.laplace(size=shape)),
        "rows": lambda: np.rint(rng.laplace(size=shape)) * (rng.random((shape[0], 1)) < 0.2),
        "columns": lambda: np.rint(rng.laplace(size=shape)) * (rng.random((1, shape[1])) < 0.2),
    }[kind]()
    levels = drawn.astype(np.int32)
    if not levels.any():
        levels[rng.integers(shape[0]), rng.integers(shape[1])] = -1
    return levels


KINDS = ["sparse", "medium", "dense", "large", "any size", "scales", "rows", "columns"]


@settings(max_examples=250)
@given(st.sampled_from(KINDS), st.integers(1, 40), st.integers(1, 200), st.integers(0, 2**32 - 1))
def test_any_matrix_comes_back(kind: str, height: int, width: int, seed: int) -> None:
    assert_round_trip(levels_of(kind, (height, width), seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 3000), (3000, 1), (8, 8), (64, 64), (65, 65), (7, 9), (300, 513)], ids=str
)
def test_shapes_that_end_within_blocks_and_groups(kind: str, shape: tuple[int, int]) -> None:
    assert_round_trip(levels_of(kind, shape))


@pytest.mark.parametrize(
    "value", [1, -1, 2, 8, 9, -10, 12, 13, 16, 17, 24, 25, 1000, 65536, 65537, MAX_MAGNITUDE, -MAX_MAGNITUDE]
)
def test_magnitudes_around_every_half_octave(value: int) -> None:
    for shape in ((1, 1), (5, 11)):
        levels = np.zeros(shape, np.int32)
        levels[-1, -1] = value
        assert_round_trip(levels)
        assert_round_trip(np.full(shape, value, np.int32))


def test_every_magnitude() -> None:
    assert_round_trip(np.arange(1, MAX_MAGNITUDE + 1, dtype=np.int32)[: 2**17 - 2].reshape(2, -1))


def test_a_tile_of_the_largest_sums() -> None:
    """A row, and a column, of as much as a tile can hold: classes still fit."""
    assert_round_trip(np.full((1, 1 << 18), MAX_MAGNITUDE, np.int32))
    assert_round_trip(np.vstack([np.full((1, 4096), -MAX_MAGNITUDE), np.eye(40, 4096)]).astype(np.int32))


def order_0_bytes(levels: Levels) -> float:
    """The empirical entropy: what an ideal coder without contexts takes, its table for free."""
    counts = np.unique(levels, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum() / 8)


@pytest.mark.parametrize("scale", [0.1, 0.2, 0.5, 2.0, 10.0])
def test_independent_entries_take_their_entropy(scale: float) -> None:
    levels = np.rint(np.random.default_rng(4).laplace(scale=scale, size=(256, 512))).astype(np.int32)
    assert 0.99 < len(encode(levels).stream) / order_0_bytes(levels) < 1.02


@pytest.mark.parametrize(("spread", "share"), [(0.5, 0.95), (1.0, 0.80), (1.5, 0.74)])
def test_rows_and_columns_with_scales_take_less(spread: float, share: float) -> None:
    """The more the scales differ, the more is saved against the entropy of the same levels without contexts."""
    rng = np.random.default_rng(5)
    sides = np.exp(spread * rng.normal(size=(256, 1))) * np.exp(spread * rng.normal(size=(1, 512)))
    levels = np.rint(0.2 * sides * rng.laplace(size=(256, 512))).astype(np.int32)
    levels = levels.clip(-MAX_MAGNITUDE, MAX_MAGNITUDE)
    assert len(encode(levels).stream) < share * order_0_bytes(levels)


def test_clustered_entries_take_less() -> None:
    """Neighbours have no contexts of their own, but a context learns that its blocks are empty or full."""
    rng = np.random.default_rng(6)
    busy = np.repeat(rng.random((128, 64)) < 0.1, 8, axis=1)
    levels = (busy * rng.choice([-1, 1], busy.shape)).astype(np.int32)
    assert len(encode(levels).stream) < 0.6 * order_0_bytes(levels)


def test_zeros_cost_next_to_nothing() -> None:
    one = np.zeros((2048, 2048), np.int32)
    one[1000, 700] = -5
    assert len(encode(one).stream) <= 8
    quiet = levels_of("medium", (64, 64))
    framed = np.zeros((1024, 1024), np.int32)
    framed[300:364, 500:564] = quiet
    assert len(encode(framed).stream) < len(encode(quiet).stream) + 60  # a million cells more


def test_operations_follow_the_non_zeros() -> None:
    """100 times the cells with as many non-zeros: hardly more bytes than the positions' additional bits."""
    rng = np.random.default_rng(7)
    sizes = []
    for side in (200, 2000):
        levels = np.zeros((side, side), np.int32)
        levels.reshape(-1)[rng.choice(side * side, 400, replace=False)] = rng.choice([-1, 1], 400)
        sizes.append(8 * len(encode(levels).stream) / 400)
    assert sizes[1] - sizes[0] < np.log2(100) + 1


def test_decoding_with_a_step_and_shifts() -> None:
    """The shift of a 1 depends on its context, larger levels share one: as the encoder summed the excess."""
    levels = np.array([[1, -1, 0, 2, 1, 0, 0, -3]] * 8, np.int32)
    encoded = encode(levels)
    shifts = np.full(SHIFTS, 0.25, np.float32)
    shifts[-1] = -0.125
    _, values = decode_tile(encoded, Tile(0, 8, 8, 8), 0.5, shifts)
    np.testing.assert_array_equal(values[:5], [0.625, -0.625, 0.9375, 0.625, -1.4375])
    largest = decode_tile(encoded, Tile(0, 8, 8, 8), 3e38, shifts)[1]
    assert np.isfinite(largest).all()


@pytest.mark.parametrize("kind", ["sparse", "medium", "scales"])
def test_damaged_streams_are_refused_or_decode_to_something(kind: str) -> None:
    """Never another error, never more non-zeros than the header says. (tests/attacks has the thorough version.)"""
    levels = levels_of(kind, (20, 50))
    encoded = encode(levels)
    rng = np.random.default_rng(8)
    refused = 0
    for _ in range(200):
        stream = bytearray(encoded.stream)
        stream[rng.integers(len(stream))] ^= 1 << rng.integers(8)
        try:
            decode(encoded._replace(stream=bytes(stream)), levels.shape)
        except PayloadError as error:
            assert error.reason == "malformed"
            refused += 1
    assert refused > 190


def test_a_shortened_stream_is_refused() -> None:
    levels = levels_of("medium", (20, 50))
    encoded = encode(levels)
    for cut in (1, 2, 3, 4, 5, 8, len(encoded.stream) - 1):
        with pytest.raises(PayloadError, match="damaged"):
            decode(encoded._replace(stream=encoded.stream[:-cut]), levels.shape)
    with pytest.raises(PayloadError, match="damaged"):
        decode(encoded._replace(stream=encoded.stream + bytes(4)), levels.shape)
    with pytest.raises(PayloadError, match="damaged"):
        decode(encoded._replace(header=encoded.header._replace(nonzeros=encoded.header.nonzeros + 1)), levels.shape)
