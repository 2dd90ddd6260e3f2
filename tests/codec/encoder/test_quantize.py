"""The quantisers of one step: the dead zone keeps what is worth its bits, stochastic rounding is unbiased."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfq.codec.encoder.quantize import (
    MAX_MAGNITUDE,
    MAX_THRESHOLD,
    MIN_THRESHOLD,
    THETA,
    Sparse,
    deadzone,
    nonzero,
    stochastic,
)
from fedfq.codec.format.random_numbers import stream_key, uniform
from fedfq.codec.tensors import Matrix


def row(h: npt.NDArray[np.float32]) -> Matrix:
    return Matrix(h, 0, h.size, 1, h.size)


def matrix(values: npt.NDArray[np.float32]) -> Matrix:
    return Matrix(values.reshape(-1), 0, values.shape[1], *values.shape)


def dense(sparse: Sparse, width: int) -> npt.NDArray[np.int64]:
    """The matrix of levels, having checked that each row's columns ascend."""
    height = sparse.row_starts.size - 1
    levels = np.zeros((height, width), np.int64)
    for i in range(height):
        part = slice(sparse.row_starts[i], sparse.row_starts[i + 1])
        assert (np.diff(sparse.columns[part]) > 0).all()
        levels[i, sparse.columns[part]] = sparse.levels[part]
    assert sparse.row_starts[0] == 0
    assert sparse.row_starts[-1] == sparse.columns.size == sparse.levels.size == sparse.excess.size
    return levels


def test_stochastic_rounding_is_unbiased() -> None:
    h = np.array([0.0, 0.03, -0.07, 0.1, -0.25, 1.234, -100.01], dtype=np.float32)
    ratio = h.astype(np.float64) / 0.1
    levels = dense(stochastic(matrix(np.tile(h, (40_000, 1))), 0.1, stream_key(1, 0)), h.size)
    assert (np.abs(levels - ratio) < 1.0).all()
    fraction = np.abs(ratio) % 1.0
    assert (np.abs(levels.mean(axis=0) - ratio) <= 5 * np.sqrt(fraction * (1 - fraction) / 40_000) + 1e-9).all()


def test_stochastic_rounding_draws_a_number_a_cell() -> None:
    h = np.random.default_rng(1).laplace(size=(5, 12)).astype(np.float32)
    key = stream_key(4, 5)
    levels = dense(stochastic(matrix(h), 0.7, key), 12)
    for i, j in np.ndindex(*h.shape):
        size = abs(float(h[i, j])) / 0.7
        assert abs(levels[i, j]) == math.floor(size) + (uniform(key, i * 12 + j) < size % 1.0)
    inside = Matrix(h.reshape(-1), 2 * 12 + 3, 12, 2, 6)  # a tile counts its own cells
    copy = np.ascontiguousarray(h[2:4, 3:9])
    np.testing.assert_array_equal(dense(stochastic(inside, 0.7, key), 6), dense(stochastic(matrix(copy), 0.7, key), 6))
    assert (levels != dense(stochastic(matrix(h), 0.7, stream_key(4, 6)), 12)).any()


def test_nonzero_is_the_sparse_form_of_a_matrix() -> None:
    levels = np.random.default_rng(0).integers(-1, 2, (7, 9)) * np.array([[1], [0], [1], [1], [0], [0], [1]])
    np.testing.assert_array_equal(dense(nonzero(levels), 9), levels)
    assert nonzero(np.zeros((3, 4), np.int32)).row_starts.tolist() == [0, 0, 0, 0]


def spread_out(kind: str, height: int, width: int, seed: int) -> npt.NDArray[np.float32]:
    """Laplace entries, alike or with a scale for each row and column."""
    rng = np.random.default_rng(seed)
    h = rng.laplace(size=(height, width))
    if kind == "scales":
        h *= np.exp(rng.normal(size=(height, 1))) * np.exp(rng.normal(size=(1, width)))
    return h.astype(np.float32)


@settings(max_examples=150)
@given(
    st.sampled_from(["alike", "scales"]),
    st.integers(1, 60),
    st.integers(1, 90),
    st.floats(0.05, 20.0),
    st.integers(0, 2**32 - 1),
)
def test_deadzone_keeps_what_is_worth_its_bits(kind: str, height: int, width: int, step: float, seed: int) -> None:
    h = spread_out(kind, height, width, seed)
    sparse = deadzone(matrix(h), step)
    levels = dense(sparse, width)
    size = np.abs(h).astype(np.float64) * (1.0 / step)
    kept = levels != 0
    np.testing.assert_array_equal(np.abs(levels[kept]), np.maximum(np.floor(size[kept] + (1.0 - THETA)), 1))
    assert (np.sign(levels[kept]) == np.sign(h[kept])).all()
    assert (size[kept] >= MIN_THRESHOLD).all()
    assert (size[~kept] < MAX_THRESHOLD).all()
    np.testing.assert_array_equal(sparse.excess, (size[kept] - np.abs(levels[kept])).astype(np.float32))


def test_deadzone_has_one_threshold_where_all_entries_are_alike() -> None:
    """The lowest one for dense levels, and the higher, the rarer non-zeros are."""
    h = spread_out("alike", 200, 300, 5)
    cuts = []
    for step in (0.5, 2.0, 8.0):
        levels = dense(deadzone(matrix(h), step), 300)
        cuts.append(float(np.abs(h[levels != 0]).min()) / step)
    assert cuts[0] == pytest.approx(MIN_THRESHOLD, abs=0.01)
    assert cuts[0] < cuts[1] < cuts[2] < 1.2


def test_deadzone_drops_lone_entries_of_quiet_rows() -> None:
    """A 1 costs more bits among zeros, so the same magnitude is kept in a busy row and dropped in a quiet one."""
    h = spread_out("alike", 64, 64, 3)
    h[:32] *= 0.02
    h[np.arange(64), np.arange(64)] = 0.72
    levels = dense(deadzone(matrix(h), 1.0), 64).diagonal()
    assert (levels[:32] == 0).all() and (levels[32:] == 1).all()


@pytest.mark.parametrize("exponent", [-100, -60, 60, 110])
def test_deadzone_is_scale_free(exponent: int) -> None:
    h = spread_out("scales", 30, 40, 0)
    expected = deadzone(matrix(h), 0.25)
    actual = deadzone(matrix(np.ldexp(h, exponent)), math.ldexp(0.25, exponent))
    for a, b in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1.0, 1e30, 3e38])
def test_both_roundings_of_a_step_at_the_ends_of_float32(scale: float) -> None:
    h = np.array([1.0, -1.0, 0.5, -0.1, 0.0], dtype=np.float64).astype(np.float32) * np.float32(scale)
    for step in (scale / 100, scale / 2, scale):
        step = float(np.maximum(np.float32(step), np.finfo(np.float32).smallest_subnormal))
        size = h.astype(np.float64) / step
        for sparse in (deadzone(row(h), step), stochastic(row(h), step, stream_key(0, 0))):
            levels = dense(sparse, h.size)[0]
            assert (np.abs(levels - size) <= 1.0).all()
            assert levels[4] == 0 and levels[0] == -levels[1] != 0


def test_entries_beyond_the_largest_level_are_clipped() -> None:
    h = np.array([3e38, -3e38, 1e-45, -1e-45, 0.0], dtype=np.float32)
    for step in (1e-45, 1e-30, 1.0):
        for sparse in (deadzone(row(h), step), stochastic(row(h), step, stream_key(0, 0))):
            levels = dense(sparse, h.size)[0]
            assert levels[:2].tolist() == [MAX_MAGNITUDE, -MAX_MAGNITUDE] and levels[4] == 0


def test_stochastic_levels_are_frozen() -> None:
    """A change of these numbers changes what a seed means: a breaking release."""
    h = np.array([0.9, -0.5, 0.3, 0.05, -0.2, 0.7, -0.01, 0.4], dtype=np.float32)
    assert dense(stochastic(row(h), 0.25, stream_key(7, 0)), h.size).tolist() == [[4, -2, 1, 0, -1, 3, 0, 2]]
