"""DAdaQuant: who gets how many levels, and when there are more."""

import numpy as np
import pytest

from fedfq.methods import make
from fedfq.methods.dadaquant import AdaptingServer, client_levels
from tests.methods.cases import encode, order, payload_of
from tests.updates import draw

LIKE = {"h": np.zeros(3, np.float32)}


def server(**options: int) -> AdaptingServer:
    made = make("dadaquant", **options).server(LIKE)
    assert isinstance(made, AdaptingServer)
    return made


def test_equal_weights_have_equal_levels():
    assert client_levels(8, {3: 5.0, 4: 5.0, 9: 5.0}) == {3: 8, 4: 8, 9: 8}


def test_levels_by_hand():
    """Weights 1 and 8: w^(2/3) is 1 and 4, sqrt((1 + 4) / (1 + 64)) = 0.2774."""
    assert client_levels(100, {0: 1.0, 1: 8.0}) == {0: 28, 1: 111}
    assert client_levels(100, {0: 10.0, 1: 80.0}) == {0: 28, 1: 111}
    assert client_levels(1, {0: 1.0, 1: 1000.0}) == {0: 1, 1: 1}
    assert client_levels(5, {0: 0.0}) == {0: 5}


def test_the_variance_is_that_of_equal_levels_with_fewer_of_them():
    w = np.random.default_rng(0).lognormal(size=30)
    levels = np.array(list(client_levels(1000, dict(enumerate(w))).values()))
    assert np.sum(w**2 / levels**2) == pytest.approx(np.sum(w**2 / 1000**2), rel=0.01)
    assert levels.sum() < 1000 * w.size


def test_q_doubles_when_the_loss_stalls():
    made = server(levels=2, patience=3)
    for loss in (5.0, 4.0, 3.0, 2.0, 1.0):
        made.finish(loss)
        assert made.q == 2
    # Smoothed: 5, 4.9, 4.71, 4.439, 4.095; then 4.586 < 4.71 and 5.027 > 4.439, and again every third round
    for expected in (2, 4, 4, 4, 8, 8, 8, 16):
        made.finish(9.0)
        assert made.q == expected


def test_a_loss_that_is_not_finite_does_not_count():
    made = server(patience=1)
    for _ in range(5):
        made.finish(float("nan"))
    assert made.q == 1


def test_a_client_does_as_announced():
    h = {"h": draw("laplace", (1000,))}
    made = make("dadaquant")
    announced = server(levels=300).announce({7: 1.0})[7]
    upload = made.encode(h, {}, order(announcement=announced))
    np.testing.assert_allclose(made.decode(payload_of(upload), h)["h"], h["h"], atol=np.abs(h["h"]).max() / 300)
    assert len(payload_of(upload)) > 3 * len(payload_of(encode(made, h)))
    with pytest.raises(ValueError, match="announced"):
        made.encode(h, {}, order(announcement=b"\0\0"))
