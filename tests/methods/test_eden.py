"""EDEN against the tables of Max (1960) and the errors that the papers give."""

import math

import numpy as np
import pytest

from fedfq.methods import make
from fedfq.methods.eden import _hadamard, boundaries, centroids
from tests.methods.cases import encode, flat, payload_of, plain
from tests.updates import draw, nmse

# Distortion of Lloyd-Max quantizers of N(0, 1)
DISTORTION = {1: 1 - 2 / math.pi, 2: 0.11748, 3: 0.034548, 4: 0.009497}
OVERHEAD = 12  # seed and one scale


def sent(h, bits: float, seed: int = 0):
    """One block, and a ratio that leaves so many bits per entry."""
    made = make("eden", ratio=4 * h.size / (OVERHEAD + bits * h.size / 8 + 0.5))
    return made.decode(payload_of(encode(made, {"h": h}, seed)), {"h": h})["h"]


def test_centroids_are_those_of_the_tables():
    np.testing.assert_allclose(centroids(1), [-math.sqrt(2 / math.pi), math.sqrt(2 / math.pi)], atol=1e-12)
    np.testing.assert_allclose(centroids(2)[2:], [0.4528, 1.5104], atol=5e-5)
    np.testing.assert_allclose(centroids(3)[4:], [0.2451, 0.7560, 1.3439, 2.1519], atol=5e-5)
    np.testing.assert_allclose(centroids(4)[[8, 15]], [0.1284, 2.7326], atol=5e-5)


@pytest.mark.parametrize("bits", range(1, 9))
def test_centroids_are_the_means_of_their_cells(bits: int):
    edges = [-math.inf, *boundaries(bits), math.inf]
    for low, high, centroid in zip(edges, edges[1:], centroids(bits)):
        mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        moment = (math.exp(-low * low / 2) - math.exp(-high * high / 2)) / math.sqrt(2 * math.pi)
        assert centroid == pytest.approx(moment / mass, abs=1e-7)


@pytest.mark.parametrize("bits, distortion", DISTORTION.items())
@pytest.mark.parametrize("kind", ["normal", "laplace", "constant", "sparse", "heavy tails"])
def test_the_error_is_that_of_the_paper_whatever_the_vector(bits: int, distortion: float, kind: str):
    """D / (1 - D): 0.571, 0.133, 0.036, 0.0096 at one to four bits."""
    h = draw(kind, (1 << 16,))
    tolerance = 0.08 if kind == "heavy tails" else 0.03  # few entries hold the norm: not quite normal when rotated
    assert nmse({"h": h}, {"h": sent(h, bits)}) == pytest.approx(distortion / (1 - distortion), rel=tolerance)


def test_between_whole_numbers_of_bits_the_error_is_between_theirs():
    """Half of the entries with one bit, half with two: D is in the middle."""
    h, middle = draw("normal", (1 << 16,)), (DISTORTION[1] + DISTORTION[2]) / 2
    assert nmse({"h": h}, {"h": sent(h, 1.5)}) == pytest.approx(middle / (1 - middle), rel=0.03)


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_below_one_bit_the_error_is_that_of_one_bit_and_of_sampling(share: float):
    h = draw("normal", (1 << 16,))
    assert nmse({"h": h}, {"h": sent(h, share)}) == pytest.approx(math.pi / 2 / share - 1, rel=0.03)


def test_the_scale_keeps_the_projection():
    """<h, q> = ||h||^2, block by block."""
    update = plain()
    made = make("eden", ratio=30)
    h, q = flat(update), flat(made.decode(payload_of(encode(made, update)), update))
    assert np.dot(h, q) == pytest.approx(np.dot(h, h), rel=1e-5)


def test_dense_vectors_are_right_in_the_mean():
    h, seeds = draw("laplace", (256,)), 400
    decoded = np.array([sent(h, 1, seed) for seed in range(seeds)], np.float64)
    expected = decoded.var(axis=0, ddof=1).sum() / seeds
    assert np.square(decoded.mean(axis=0) - h).sum() / expected < 1.5


def test_sparse_vectors_are_not():
    """Why `unbiased` is not promised: Hadamard's matrix is no uniform rotation."""
    h = np.zeros(256, np.float32)
    h[:2] = 2, 1
    for seed in range(20):
        np.testing.assert_allclose(sent(h, 1, seed), [2.5, *[0] * 255], atol=1e-5)


def test_the_transform_is_hadamards():
    matrix = np.array([[1.0]])
    for _ in range(5):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = np.random.default_rng(0).normal(size=32).astype(np.float32)
    y = x.copy()
    _hadamard(y)
    np.testing.assert_allclose(y, matrix @ x, atol=1e-5)
    _hadamard(y)
    np.testing.assert_allclose(y, 32 * x, atol=1e-4)


def test_no_bits_are_lost_to_padding():
    """The authors' padding would send 2^17 codes for 66,000 entries."""
    h = draw("normal", (66_000,))
    made = make("eden", ratio=31.8)
    upload = encode(made, {"h": h})
    assert nmse({"h": h}, made.decode(payload_of(upload), {"h": h})) == pytest.approx(0.571, rel=0.02)
