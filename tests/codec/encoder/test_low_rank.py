"""The low-rank basis of a matrix: its leading singular subspace, and factors that know their error."""

import numpy as np
import pytest

from fedfq.codec.encoder.low_rank import LowRank
from fedfq.codec.format.random_numbers import stream_key
from tests.updates import low_rank


def test_the_range_finder_finds_the_leading_singular_values() -> None:
    h = low_rank(120, 300, 40, noise=0.01)
    found = LowRank(h, 16, stream_key(0, 0))
    np.testing.assert_allclose(found.sigma, np.linalg.svd(h, compute_uv=False)[:16], rtol=5e-3)


def test_the_stated_error_is_that_of_the_factors() -> None:
    h = low_rank(120, 300, 40, noise=0.05)
    found = LowRank(h, 32, stream_key(0, 0))
    for step in (0.1, 0.5, 2.0):
        factors = found.quantize(step, found.estimate(step).rank, 0, 0)
        error = np.square(h - factors.left @ factors.right.T, dtype=np.float64).sum()
        assert factors.error == pytest.approx(error, rel=0.02)
        np.testing.assert_allclose(np.linalg.norm(factors.right, axis=0), 1, rtol=1e-5)
