"""Known directions: nearly the singular vectors, but the same on every machine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfq.codec.format.directions import find_directions


def equal_singular_values(rng: np.random.Generator) -> np.ndarray:
    """Forty of them in four groups of ten: any rotation within a group gives singular vectors as good."""
    left = np.linalg.qr(rng.standard_normal((120, 40)))[0]
    right = np.linalg.qr(rng.standard_normal((300, 40)))[0]
    return (left * np.repeat([8.0, 4.0, 2.0, 1.0], 10)) @ right.T


@pytest.mark.parametrize("change", [1e-7, 1e-6])
def test_equal_singular_values_do_not_turn_the_basis(change: float) -> None:
    """Rounded differently, singular vectors are arbitrary; these directions move by no more than about the change."""
    rng = np.random.default_rng(3)
    drift = equal_singular_values(rng)
    nearly = drift * (1 + change * rng.standard_normal(drift.shape))
    (one, used), (two, _) = (find_directions(d.astype(np.float32)) for d in (drift, nearly))
    assert used == 40
    for a, b in zip(one.sides, two.sides):
        assert np.linalg.norm(a[:, :used] - b[:, :used], axis=0).max() < 2e4 * change
    turned = np.abs(np.linalg.svd(drift)[2][:40] - np.linalg.svd(nearly)[2][:40]).max()
    assert turned > 0.1  # what plain singular vectors would do


def test_columns_of_rounding_errors_are_cut_off() -> None:
    rng = np.random.default_rng(5)
    drift = (rng.standard_normal((100, 3)) @ rng.standard_normal((3, 200))).astype(np.float32)
    known, used = find_directions(drift)
    assert used == 3 and known.left.shape[1] == 3


@given(st.sampled_from(["constant", "one row", "one entry", "identity"]), st.integers(8, 40), st.integers(8, 40))
def test_degenerate_drifts(kind: str, height: int, width: int) -> None:
    drift = {
        "constant": np.ones((height, width)),
        "one row": np.eye(height, 1) @ np.ones((1, width)),
        "one entry": np.eye(height, 1) @ np.eye(1, width),
        "identity": np.eye(height, width),
    }[kind].astype(np.float32)
    with np.errstate(all="raise", under="ignore"):
        known, used = find_directions(drift)
    assert used == (min(height, width) if kind == "identity" else 1)
    assert np.isfinite(known.left).all() and np.isfinite(known.right).all()
