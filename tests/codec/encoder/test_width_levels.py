"""The paper's widths: their quantisers, and which of its claims hold (Lemma 1, Theorem 2, Corollary 3)."""

import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfq.codec.encoder import allocate
from fedfq.codec.encoder.quantize import THETA
from fedfq.codec.encoder.width_levels import class_scales, deadzone_levels, dequantize_levels, stochastic_levels
from fedfq.codec.format.sections import LEVELS

Vector = npt.NDArray[np.float32]
Widths = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

REPEATS = 20_000


def l2_scales(h: Vector) -> Vector:
    """Eq. 5 as printed: every class is scaled by ||h||_2."""
    return np.full(9, np.linalg.norm(h.astype(np.float64)), dtype=np.float32)


def variances(h: Vector, widths: Widths, scales: Vector) -> Floats:
    """E|Q(h)_j - h_j|^2, exactly: (scale/s)^2 f(1-f), f the fraction of s|h_j|/scale; h_j^2 if dropped."""
    h64, scale, s = h.astype(np.float64), scales[widths].astype(np.float64), np.array(LEVELS)[widths]
    sent = (s > 0) & (scale > 0)
    unit = np.divide(scale, s, out=np.ones_like(h64), where=sent)
    fraction = np.abs(h64) / unit % 1.0
    return np.where(sent, unit**2 * fraction * (1.0 - fraction), h64**2)


def draws(h: Vector, widths: Widths, scales: Vector) -> Floats:
    """Q(h), `REPEATS` times with independent randomness: other seeds, other streams, other indices."""
    tiled_h, tiled_widths = np.tile(h, REPEATS // 20), np.tile(widths, REPEATS // 20)
    values = [
        dequantize_levels(stochastic_levels(tiled_h, tiled_widths, scales, seed, stream), tiled_widths, scales)
        for seed in range(10)
        for stream in range(2)
    ]
    return np.concatenate(values).reshape(REPEATS, h.size).astype(np.float64)


def vector(kind: str, size: int, seed: int) -> Vector:
    rng = np.random.default_rng(seed)
    return (rng.laplace(size=size) if kind == "laplace" else rng.normal(size=size)).astype(np.float32)


# --- Lemma 1 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("norm", ["l2", "max"])
def test_lemma_1_unbiased_with_bounded_variance(width: int, norm: str) -> None:
    h = vector("laplace", 32, width)
    widths = np.full(h.size, width, dtype=np.uint8)
    scales = l2_scales(h) if norm == "l2" else class_scales(h, widths)
    q = draws(h, widths, scales)
    expected = variances(h, widths, scales)
    assert (np.abs(q.mean(axis=0) - h) <= 5.0 * np.sqrt(expected / REPEATS) + 1e-7).all()
    error = np.sum((q - h) ** 2, axis=1).mean()
    assert error == pytest.approx(expected.sum(), rel=0.05)
    assert error <= h.size / 4**width * np.sum(h.astype(np.float64) ** 2)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200), st.sampled_from([2, 4, 8]), st.integers(0, 2**32 - 1))
def test_lemma_1_bounds_the_exact_variance(size: int, width: int, seed: int) -> None:
    h = vector("normal", size, seed)
    widths = np.full(size, width, dtype=np.uint8)
    assert variances(h, widths, l2_scales(h)).sum() <= size / 4**width * np.sum(h.astype(np.float64) ** 2) * (1 + 1e-6)


def test_width_0_is_biased() -> None:
    h = np.array([1.0, 0.25, -0.25], dtype=np.float32)
    widths = np.array([4, 0, 0], dtype=np.uint8)
    q = draws(h, widths, l2_scales(h))
    assert (q[:, 1:] == 0.0).all()
    assert q[:, 0].mean() == pytest.approx(1.0, abs=0.01)


# --- Theorem 2 ---------------------------------------------------------------------------------------------


def q_f(h: Vector, widths: Widths) -> float:
    """Theorem 2's q_f = sum_j d 4^-b_j h_j^2 / ||h||^2 (Eq. 11)."""
    return h.size * allocate.objective(h, widths) / allocate.objective(h, np.zeros_like(widths))


def test_theorem_2_does_not_hold_with_a_common_norm() -> None:
    """Its proof gives each entry its own norm |h_j| as the scale. With the norm of the whole vector, which is
    what can be sent, small entries of small width break the bound, here by a factor of sixteen."""
    h = np.array([1.0, 0.1, 0.1, 0.1], dtype=np.float32)
    widths = np.array([8, 2, 2, 2], dtype=np.uint8)
    scales = l2_scales(h)
    norm_squared = allocate.objective(h, np.zeros_like(widths))
    error = variances(h, widths, scales).sum()
    assert np.sum((draws(h, widths, scales) - h) ** 2, axis=1).mean() == pytest.approx(error, rel=0.05)
    assert error > 16 * q_f(h, widths) * norm_squared
    assert error <= common_norm_bound(h, widths)


def common_norm_bound(h: Vector, widths: Widths) -> float:
    """What holds with the scale ||h||: f(1-f) <= 1/4, so an entry sent costs at most ||h||^2 / (4 s_j^2)."""
    s = np.array(LEVELS)[widths[widths > 0]]
    return float(np.sum(np.sum(h.astype(np.float64) ** 2) / (4.0 * s**2)))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_the_bound_with_a_common_norm_holds(size: int, seed: int) -> None:
    h = vector("laplace", size, seed)
    widths = np.random.default_rng(seed).choice(np.array([2, 4, 8], dtype=np.uint8), size)
    assert variances(h, widths, l2_scales(h)).sum() <= common_norm_bound(h, widths) * (1 + 1e-6)


def test_q_f_is_below_q_exactly_when_the_papers_inequality_holds() -> None:
    """From width 4, x bits up on d_1 entries, y bits down on the d_2 others, as many: both outcomes occur."""
    rng = np.random.default_rng(0)
    outcomes = []
    for _ in range(500):
        half = int(rng.integers(1, 10))
        h = (rng.laplace(size=2 * half) ** int(rng.integers(1, 4))).astype(np.float32)
        if rng.random() < 0.5:
            h = h[np.argsort(-np.abs(h))]
        change = rng.choice([1, 2, 3], half)
        x, y = change, rng.permutation(change)
        widths = np.concatenate([4 + x, 4 - y]).astype(np.uint8)
        squares = h.astype(np.float64) ** 2
        gained = np.sum((4.0**x - 1) / 4.0**x * squares[:half])
        lost = np.sum((4.0**y - 1) * squares[half:])
        assert (q_f(h, widths) < h.size / 4**4) == (gained > lost)
        outcomes.append(bool(gained > lost))
    assert 50 < sum(outcomes) < 450


# --- Corollary 3 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 4])
def test_corollary_3_more_discrepancy_lowers_the_best_q_f(width: int) -> None:
    """|h|^p spreads the magnitudes with p: from 1 at p = 0 (all equal) on, min q_f / q only falls."""
    h = np.abs(vector("normal", 2000, 1))
    ratios = []
    for power in (0.0, 0.5, 1.0, 2.0, 3.0):
        spread = h ** np.float32(power)
        ratios.append(q_f(spread, allocate.exact(spread, width * h.size)) / (h.size / 4**width))
    assert ratios[0] == pytest.approx(1.0)
    assert all(after < before for before, after in pairwise(ratios))
    assert ratios[-1] < 0.1


def test_corollary_3_only_large_components_get_more_bits() -> None:
    h = vector("laplace", 50_000, 2)
    widths = allocate.exact(h, 4 * h.size)
    magnitudes = [np.abs(h[widths == width]) for width in allocate.WIDTHS]
    for below, above in pairwise(magnitudes):
        assert below.max() <= above.min()
    # The gains per bit of 0->2, 2->4 and 4->8 are equal at magnitudes 1 : 4 : 21.95.
    assert magnitudes[2].min() / magnitudes[1].min() == pytest.approx(4.0, rel=0.02)
    assert magnitudes[3].min() / magnitudes[1].min() == pytest.approx(math.sqrt(8192 / 17), rel=0.02)


@pytest.mark.parametrize("width", [2, 4])
def test_in_the_limit_q_f_is_q_over_4_to_the_k(width: int) -> None:
    """The paper's k is not defined. It is 8 - b for widths up to 8: what the few entries that matter can get more."""
    few = width * 2000 // 8
    ratios = []
    for rest in (1.0, 1e-1, 1e-2, 1e-3, 0.0):
        h = np.full(2000, rest, np.float32)
        h[:few] = 1.0
        ratios.append(q_f(h, allocate.exact(h, width * h.size)) * 4.0**width / h.size)
    assert all(after < before for before, after in pairwise(ratios))
    assert ratios[-1] == pytest.approx(4.0 ** (width - 8))


# --- Randomness --------------------------------------------------------------------------------------------


def test_levels_are_frozen() -> None:
    """A change of these numbers changes what a seed means: a breaking release."""
    h = np.array([0.9, -0.5, 0.3, 0.05, -0.2, 0.7, -0.01, 0.4], dtype=np.float32)
    widths = np.array([8, 4, 2, 0, 4, 8, 2, 2], dtype=np.uint8)
    assert stochastic_levels(h, widths, class_scales(h, widths), seed=7).tolist() == [
        128,
        -8,
        1,
        0,
        -4,
        99,
        0,
        2,
    ]


def test_chunks_and_repeats_give_the_same_levels() -> None:
    h = vector("laplace", 1000, 3)
    widths = np.random.default_rng(3).choice(np.array([0, 2, 4, 8], dtype=np.uint8), h.size)
    scales = class_scales(h, widths)
    levels = stochastic_levels(h, widths, scales, seed=4, stream=5)
    np.testing.assert_array_equal(levels, stochastic_levels(h, widths, scales, seed=4, stream=5))
    for start, stop in ((0, 1), (1, 333), (333, 1000)):
        part = slice(start, stop)
        np.testing.assert_array_equal(
            levels[part], stochastic_levels(h[part], widths[part], scales, seed=4, stream=5, offset=start)
        )
    for seed, stream in ((4, 6), (5, 5)):
        assert (levels != stochastic_levels(h, widths, scales, seed=seed, stream=stream)).any()


# --- Levels ------------------------------------------------------------------------------------------------


def test_class_scales_are_the_largest_magnitude_of_each_class() -> None:
    h = np.array([-9.0, 1.0, -2.0, 0.5, 0.0], dtype=np.float32)
    widths = np.array([0, 2, 2, 4, 4], dtype=np.uint8)
    assert class_scales(h, widths).tolist() == [0, 0, 2.0, 0, 0.5, 0, 0, 0, 0]


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(finite, st.sampled_from([0, 2, 4, 8])), min_size=1, max_size=50),
    st.integers(0, 2**64 - 1),
)
def test_levels_are_the_neighbours_of_the_ratio_for_any_floats(entries: list[tuple[float, int]], seed: int) -> None:
    h = np.array([value for value, _ in entries], dtype=np.float32)
    widths = np.array([width for _, width in entries], dtype=np.uint8)
    scales = class_scales(h, widths)
    levels = stochastic_levels(h, widths, scales, seed)
    s = np.array(LEVELS)[widths]
    assert (np.abs(levels) <= s).all()
    assert (levels * np.sign(h) >= 0).all()
    scale = scales[widths].astype(np.float64)
    ratio = np.divide(s * np.abs(h.astype(np.float64)), scale, out=np.zeros(h.size), where=scale > 0)
    assert (np.abs(np.abs(levels) - ratio) < 1.0).all()
    at_scale = (np.abs(h) == scales[widths]) & (widths > 0) & (h != 0)
    assert (np.abs(levels[at_scale]) == s[at_scale]).all()
    values = dequantize_levels(levels, widths, scales)
    assert np.isfinite(values).all()
    np.testing.assert_array_equal(values[at_scale], h[at_scale])
    assert (values[widths == 0] == 0).all()


def test_an_entry_above_its_scale_is_clipped() -> None:
    h = np.array([3e38, -5.0, 1e-45], dtype=np.float32)
    widths = np.array([8, 4, 2], dtype=np.uint8)
    assert stochastic_levels(h, widths, np.ones(9, dtype=np.float32), seed=0).tolist() == [128, -8, 0]


def test_a_scale_that_overflowed_sends_zeros_not_nan() -> None:
    h = np.full(4, 3e38, dtype=np.float32)
    widths = np.full(4, 8, dtype=np.uint8)
    with np.errstate(over="ignore"):
        scales = l2_scales(h)
    levels = stochastic_levels(h, widths, scales, seed=0)
    assert dequantize_levels(levels, widths, scales).tolist() == [0.0] * 4


def test_deadzone_levels_of_widths() -> None:
    """Eq. 5's levels, rounded up from THETA on instead of at random."""
    h = np.array([1.0, 0.30, 0.32, -0.82, 0.5, 0.5, 3.0, -0.004, -0.006], dtype=np.float32)
    widths = np.array([2, 2, 2, 2, 4, 0, 4, 8, 8], dtype=np.uint8)
    assert deadzone_levels(h, widths, np.ones(9, np.float32)).tolist() == [2, 0, 1, -2, 4, 0, 8, 0, -1]
    assert deadzone_levels(h, widths, np.zeros(9, np.float32)).tolist() == [0] * 9


@settings(max_examples=200)
@given(st.lists(st.tuples(finite, st.sampled_from([0, 2, 4, 8])), min_size=1, max_size=50))
def test_deadzone_levels_are_near_the_ratio_for_any_floats(entries: list[tuple[float, int]]) -> None:
    h = np.array([value for value, _ in entries], dtype=np.float32)
    widths = np.array([width for _, width in entries], dtype=np.uint8)
    scales = class_scales(h, widths)
    levels = deadzone_levels(h, widths, scales)
    s, scale = np.array(LEVELS)[widths], scales[widths].astype(np.float64)
    ratio = np.divide(s * np.abs(h.astype(np.float64)), scale, out=np.zeros(h.size), where=scale > 0)
    assert (np.abs(np.abs(levels) - ratio) <= THETA + 1e-9).all()
    assert (np.abs(levels) <= s).all() and (levels * np.sign(h) >= 0).all()


def test_bad_arguments_are_refused() -> None:
    h = np.ones(3, dtype=np.float32)
    widths = np.full(3, 2, dtype=np.uint8)
    scales = np.ones(9, dtype=np.float32)
    with pytest.raises(ValueError, match="exceeds 8"):
        dequantize_levels(np.zeros(3, dtype=np.int16), np.full(3, 9, dtype=np.uint8), scales)
    with pytest.raises(ValueError, match="one length"):
        class_scales(h, widths[:2])
    with pytest.raises(ValueError, match="nine entries"):
        stochastic_levels(h, widths, scales[:4], seed=0)
    with pytest.raises(ValueError, match="nine entries"):
        deadzone_levels(h, widths, scales[:4])
