"""Tensors seen as matrices: where a rank costs least, and back again."""

import numpy as np
import pytest

from fedfq.codec.format.fold import Product, fold, unit_columns
from tests.updates import draw


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [((64, 64, 5, 5), (320, 320)), ((64, 3, 5, 5), (64, 75)), ((384, 2304), (384, 2304)), ((64, 32, 3), (64, 96))],
)
def test_a_kernel_is_folded_to_the_shortest_sides(shape: tuple[int, ...], matrix: tuple[int, int]) -> None:
    view = fold(shape)
    assert view is not None
    assert sum(view.shape(shape)) <= sum(matrix)
    array = draw("normal", shape)
    np.testing.assert_array_equal(view.matrix(array), array.transpose(view.order).reshape(view.shape(shape)))
    total = np.zeros(array.size, np.float32)
    Product(view.matrix(array), np.eye(view.shape(shape)[1], dtype=np.float32)).add_to(total, shape)
    np.testing.assert_array_equal(total.reshape(shape), array)


@pytest.mark.parametrize("shape", [(), (100,), (7, 1000), (1000, 7), (0, 50), (1,) * 7])
def test_vectors_and_narrow_matrices_have_no_factors(shape: tuple[int, ...]) -> None:
    assert fold(shape) is None


def test_a_column_of_zeros_stays_one() -> None:
    assert not unit_columns(np.zeros((5, 2), np.float32)).any()
