"""Normal numbers that every machine draws alike."""

import math

import numpy as np
import pytest

from fedfq.codec.format.normal import fill_with_normals, log
from fedfq.codec.format.random_numbers import stream_key


def draw(rows: int, seed: int = 0, columns: tuple[int, ...] = tuple(range(100))) -> np.ndarray:
    """Columns of a matrix 100 wide."""
    numbers = np.empty((rows, len(columns)), np.float32)
    fill_with_normals(stream_key(seed, 0), 100, np.array(columns), numbers)
    return numbers


def test_moments_are_those_of_a_normal_distribution() -> None:
    numbers = draw(10_000).astype(np.float64).reshape(-1)
    assert [float((numbers**k).mean()) for k in (1, 2, 3, 4, 6)] == pytest.approx([0, 1, 0, 3, 15], abs=0.15)
    assert float(np.mean(np.abs(numbers) > 3.0)) == pytest.approx(math.erfc(3 / math.sqrt(2)), rel=0.05)


def test_numbers_are_independent_of_their_neighbours() -> None:
    numbers = draw(10_000).astype(np.float64).reshape(-1)
    assert all(abs(float((numbers[k:] * numbers[:-k]).mean())) < 0.005 for k in (1, 2, 3))


def test_columns_are_the_same_whichever_are_wanted() -> None:
    assert draw(30, columns=(7, 99))[:20].tolist() == draw(20)[:, [7, 99]].tolist()
    assert draw(1).tolist() != draw(1, seed=1).tolist()


def test_the_first_numbers_stay_what_they_are() -> None:
    """They are part of the format."""
    assert draw(1)[0, :4].tobytes().hex() == "30878cbf8a4e19bf8c106fbfb48a6cbf"


@pytest.mark.parametrize("x", [1e-300, 1e-17, 0.1, 0.5, 0.7071067811865475, 0.7071067811865477, 0.999, 1 - 2**-53])
def test_the_logarithm_is_right_to_the_last_bits(x: float) -> None:
    assert log(x) == pytest.approx(math.log(x), rel=4e-16)
