"""Tiles as they are sent: classes where they save bits, and what is learnt of the entries behind the levels."""

import numpy as np
import pytest

from fedfq.codec.encoder.quantize import Sparse, nonzero
from fedfq.codec.encoder.tiles import choose_classes, encode_tile
from fedfq.codec.format.probability import MAX_CLASS


def test_a_tile_of_zeros_is_none() -> None:
    assert encode_tile(nonzero(np.zeros((30, 40), np.int32)), 40) is None


def test_rows_that_are_alike_have_no_classes() -> None:
    """Their sums differ by chance, which is not worth sending."""
    sums = np.random.default_rng(0).poisson(50, 300)
    spacing, classes = choose_classes(sums, sums.sum())
    assert spacing == 0 and (classes == 1).all()


def test_a_side_of_one_has_no_classes() -> None:
    assert choose_classes(np.array([10**6]), 10**6)[0] == 0


@pytest.mark.parametrize(("level", "spacing"), [(0.1, 0), (2, 4), (10, 2), (100, 1)])
def test_rows_of_different_scales_have_the_classes_that_save_most(level: float, spacing: int) -> None:
    """Finer ones, in half octaves of a row's sum, the more there is to save; none where there is next to nothing."""
    rng = np.random.default_rng(0)
    sums = rng.poisson(level * np.exp(rng.normal(size=300)))
    chosen, classes = choose_classes(sums, sums.sum())
    assert chosen == spacing
    if spacing:
        expected = 1 + np.floor(2 * np.log2(np.maximum(sums, 1)) / spacing + 0.5)
        np.testing.assert_array_equal(classes, np.where(sums > 0, expected, 0))


def test_the_largest_sums_that_a_tile_can_have_still_fit() -> None:
    """2^22 entries of 2^17: half octaves up to 2 * 39."""
    sums = np.array([1 << 39, 1, 0] * 50)
    _, classes = choose_classes(sums, sums.sum())
    assert classes.max() <= MAX_CLASS


def test_excess_is_summed_by_group_of_contexts() -> None:
    levels = np.array([[1, -1, 0, 2, 1, 0, 0, -3]] * 8, np.int32)
    row_starts, columns, values, _ = nonzero(levels)
    excess = np.where(np.abs(values) == 1, 0.25, -0.125).astype(np.float32)
    encoded = encode_tile(Sparse(row_starts, columns, values, excess), 8)
    assert encoded is not None
    assert encoded.excess_counts[:-1].sum() == 24 and encoded.excess_counts[-1] == 16
    assert encoded.excess_sums[:-1].sum() == 24 * 0.25 and encoded.excess_sums[-1] == 16 * -0.125


def test_numbers_of_widths_are_counted_not_summed() -> None:
    """A level's number says nothing of its size there: a row of large numbers is no louder than one of small ones."""
    levels = np.random.default_rng(1).integers(1, 3, (60, 64))
    levels[:30] += 100
    by_size, by_count = (encode_tile(nonzero(levels), 64, by_size=by_size) for by_size in (True, False))
    assert by_size is not None and by_count is not None
    assert by_size.coded.header.row_spacing > 0 and by_count.coded.header.row_spacing == 0
