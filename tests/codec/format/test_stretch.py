"""Stretching along known directions: undone exactly, the same wherever directions are nearly the same."""

import numpy as np
import pytest

from fedfq.codec.format.directions import MAX_STRETCHED, KnownDirections, find_directions
from fedfq.codec.format.stretch import WIDEST, Stretch


def drift(height: int = 60, width: int = 90, rank: int = 4, noise: float = 0.1) -> np.ndarray:
    rng = np.random.default_rng(1)
    strong = rng.standard_normal((height, rank)) @ rng.standard_normal((rank, width))
    return (strong + noise * rng.standard_normal((height, width))).astype(np.float32)


def known(of: np.ndarray) -> KnownDirections:
    found = find_directions(of)
    assert found is not None
    return found[0]


def dense(columns: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """I + Q (T - I) Q^T."""
    wide = columns.astype(np.float64)
    return np.eye(len(wide)) + wide * (factors - 1.0) @ wide.T


@pytest.mark.parametrize("count", [1, 7, MAX_STRETCHED])
def test_it_is_the_product_with_one_matrix_per_side(count: int) -> None:
    stretch = Stretch.along(known(drift()), count)
    matrix = np.random.default_rng(2).standard_normal((60, 90)).astype(np.float32)
    expected = dense(stretch.left, stretch.left_factors) @ matrix @ dense(stretch.right, stretch.right_factors)
    stretch.apply(matrix)
    assert matrix == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_undone() -> None:
    stretch = Stretch.along(known(drift()), MAX_STRETCHED)
    matrix = np.random.default_rng(2).standard_normal((60, 90)).astype(np.float32)
    before = matrix.copy()
    stretch.apply(matrix)
    assert np.abs(matrix - before).max() > 1
    stretch.undo(matrix)
    assert matrix == pytest.approx(before, abs=1e-5)


def test_factors_are_eighth_roots_of_energies_beside_the_ordinary() -> None:
    diagonal = np.diag(np.array([64.0, 16.0, *[1.0] * 40], np.float32))
    stretch = Stretch.along(known(diagonal), 2)
    assert stretch.left_factors == pytest.approx([64.0**0.25, 16.0**0.25], rel=1e-3)
    assert stretch.right_factors == pytest.approx([64.0**0.25, 16.0**0.25], rel=1e-3)
    assert stretch.longest == pytest.approx(8.0, rel=1e-3)


def test_noise_is_what_white_noise_becomes() -> None:
    stretch = Stretch.along(known(drift()), 10)
    sides = dense(stretch.left, stretch.left_factors), dense(stretch.right, stretch.right_factors)
    assert stretch.noise == pytest.approx(np.square(sides[0]).sum() * np.square(sides[1]).sum(), rel=1e-4)


@pytest.mark.parametrize("of", [drift(rank=4, noise=0.0), np.eye(20, 30, dtype=np.float32), drift(9, 200, 9)])
def test_directions_that_hold_everything(of: np.ndarray) -> None:
    """Nothing is left for others: factors stay within bounds."""
    found = known(of)
    for count in range(1, min(found.left.shape[1], MAX_STRETCHED) + 1):
        stretch = Stretch.along(found, count)
        for factors in (stretch.left_factors, stretch.right_factors):
            assert (factors >= 1).all() and (factors <= WIDEST**0.125).all()


def test_small_differences_of_the_drift_make_small_ones() -> None:
    """As they come about between two machines, also where singular values are equal."""
    rng = np.random.default_rng(3)
    left, right = (np.linalg.qr(rng.standard_normal((side, 40)))[0] for side in (120, 300))
    of = (left * np.repeat([8.0, 4.0, 2.0, 1.0], 10)) @ right.T
    matrix = rng.standard_normal((120, 300)).astype(np.float32)
    made = []
    for change in (0.0, 1e-7):
        nearly = of * (1 + change * rng.standard_normal(of.shape))
        made.append(matrix.copy())
        Stretch.along(known(nearly.astype(np.float32)), MAX_STRETCHED).apply(made[-1])
    assert np.abs(made[0] - made[1]).max() < 1e-3
