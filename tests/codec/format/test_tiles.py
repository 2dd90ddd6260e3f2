"""Tiles: every cell of a tensor is in exactly one, and their frames come back as they were written."""

import math

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedfq.codec.encoder.quantize import nonzero
from fedfq.codec.encoder.tiles import encode_tile
from fedfq.codec.format.tiles import TILE_CELLS, cut_into_tiles, read_tiles, write_tiles


@settings(max_examples=200)
@given(st.lists(st.integers(0, 12), max_size=5).map(tuple))
@example(())
@example((0,))
@example((1024,))
@example((1025,))
@example((3, 2000))
@example((2000, 3))
@example((513, 3))
@example((1, 1, 70_000))
@example((4, 4))
@example((2, 3, 5, 7, 11, 13))
@example((2049, 2048))
@example((4, 1_100_000))
@example((1_100_000, 4))
@example((4_200_000,))
@example((2500, 3100))
def test_tiles_cover_every_cell_once(shape: tuple[int, ...]) -> None:
    covered = np.zeros(math.prod(shape), np.uint8)
    for tile in cut_into_tiles(shape):
        assert 0 < tile.height * tile.width == tile.cells <= TILE_CELLS
        end = tile.start + (tile.height - 1) * tile.stride + tile.width
        assert 0 <= tile.start < end <= covered.size
        for i in range(tile.height):
            first = tile.start + i * tile.stride
            covered[first : first + tile.width] += 1
    assert (covered == 1).all()


def test_tiles_are_the_matrices_one_expects() -> None:
    assert cut_into_tiles((30, 40)) == [(0, 40, 30, 40)]
    assert cut_into_tiles((16, 3, 3, 3)) == [(0, 27, 16, 27)]
    assert cut_into_tiles((1000,)) == [(0, 1000, 1, 1000)]
    assert cut_into_tiles((1100,)) == [(0, 256, 4, 256), (1024, 76, 1, 76)]  # rows of 256, and a rest
    assert cut_into_tiles((3, 400)) == [(0, 256, 4, 256), (1024, 176, 1, 176)]
    assert cut_into_tiles((4096, 2048)) == [(0, 2048, 2048, 2048), (2048 * 2048, 2048, 2048, 2048)]
    assert cut_into_tiles((5, 0, 3)) == []
    assert cut_into_tiles(()) == [(0, 1, 1, 1)]


def test_headers_of_tiles_round_trip() -> None:
    """Through `write_tiles` and `read_tiles`, all-zero tiles left out."""
    rng = np.random.default_rng(0)
    shape = (3000, 3000)
    every = cut_into_tiles(shape)
    encoded = []
    for k in range(len(every)):
        levels = rng.integers(-1, 2, (30, 40)) * (np.arange(30)[:, None] < 8 * k)
        tile = encode_tile(nonzero(levels), 40)
        encoded.append(None if tile is None else tile.coded)
    coded = read_tiles(write_tiles(encoded), shape)
    assert len(coded) == len(every) and coded[0] is None
    for part, expected in zip(coded[1:], encoded[1:], strict=True):
        assert part is not None and expected is not None
        assert (part.header, bytes(part.stream)) == (expected.header, expected.stream)
    assert coded[1].header.row_spacing and coded[1].header.row_first >= 1
