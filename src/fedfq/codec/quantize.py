"""Scalar quantizers: the paper's stochastic one (Eq. 5) and the two roundings of a uniform step.

All randomness is a hash of (seed, stream, element index), so that a result does not depend on threads, on
chunks or on the version of a library's generator. All arithmetic is float64: the squares, ratios and products
of any two finite float32 numbers, subnormal ones included, neither overflow nor vanish there.
"""

import math

import numpy as np
import numpy.typing as npt
from numba import njit

LEVELS = tuple(0 if width == 0 else 2 ** (width - 1) for width in range(9))
"""s = 2^(b-1), the paper's number of levels above zero, indexed by the width b. With the sign and zero, these
are 2^b + 1 symbols: one more than b bits can hold."""

_LEVELS = np.array(LEVELS, dtype=np.float64)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_INT32_MAX = float(2**31 - 1)


@njit(cache=True, nogil=True)
def _mix(x: np.uint64) -> np.uint64:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): a bijection that scatters 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def _derive_key(seed: np.uint64, stream: np.uint64) -> np.uint64:
    return _mix(_mix(seed + _GOLDEN) ^ (stream * _GOLDEN))


@njit(cache=True, nogil=True)
def uniform(key: np.uint64, index: int) -> float:
    """Number `index` of the sequence of `key` (see `stream_key`), in [0, 1), a multiple of 2^-53.

    This is splitmix64 started at `key`, read at any position. 24 bits would not do: an entry of which 1e-9 of
    a level must be sent would be rounded up with probability 2^-24, sixty times too often.
    """
    return float(_mix(key + np.uint64(index) * _GOLDEN) >> np.uint64(11)) * 2.0**-53


def stream_key(seed: int, stream: int) -> np.uint64:
    """The key of one random sequence. Both numbers are taken modulo 2^64."""
    mask = 2**64 - 1
    return np.uint64(_derive_key(np.uint64(seed & mask), np.uint64(stream & mask)))


def class_scales(h: npt.NDArray[np.float32], widths: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The largest |h_j| of each width class, indexed by width: nine entries, 0 where there is none.

    The authors' code scales by this. Eq. 5 as printed scales by ||h||_2: an array with nine times the norm.
    """
    check_widths(h, widths)
    scales = np.zeros(9, dtype=np.float32)
    _class_scales(h, widths, scales)
    return scales


def stochastic_levels(
    h: npt.NDArray[np.float32],
    widths: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    seed: int,
    stream: int = 0,
    *,
    offset: int = 0,
) -> npt.NDArray[np.int16]:
    """The signed level of every entry: Eq. 5's sign(h_j) * s * xi_j, with s = 2^(b_j - 1).

    With x = s |h_j| / scales[b_j], the level is floor(x), plus 1 with probability x - floor(x): unbiased
    (Lemma 1) for b_j > 0 and |h_j| <= scales[b_j]. Width 0 drops the entry (level 0), which is *not*
    unbiased: Theorem 2 needs b_j > 0. An entry above its scale is clipped to s. A level of s = 128 is why the
    result is not int8.

    `offset` is the index of h[0] in the whole vector: quantizing in chunks gives the levels of the whole.
    """
    check_widths(h, widths)
    _check_scales(scales)
    levels = np.empty(h.size, dtype=np.int16)
    _stochastic_levels(h, widths, scales, stream_key(seed, stream), offset, levels)
    return levels


def dequantize_levels(
    levels: npt.NDArray[np.int16], widths: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Q(h)_j = scales[b_j] * level_j / s of Eq. 5; 0 for width 0."""
    check_widths(levels, widths)
    _check_scales(scales)
    values = np.empty(levels.size, dtype=np.float32)
    _dequantize_levels(levels, widths, scales, values)
    return values


def stochastic_round(
    h: npt.NDArray[np.float32], step: float, seed: int, stream: int = 0, *, offset: int = 0
) -> npt.NDArray[np.int32]:
    """h / step rounded to one of its two neighbours at random, unbiased; clipped to +-(2^31 - 1).

    `offset` is the index of h[0] in the whole vector, as in `stochastic_levels`.
    """
    _check_step(step)
    levels = np.empty(h.size, dtype=np.int32)
    _stochastic_round(h, step, stream_key(seed, stream), offset, levels)
    return levels


def deadzone_round(h: npt.NDArray[np.float32], step: float, theta: float = 0.62) -> npt.NDArray[np.int32]:
    """sign(h) * floor(|h| / step + 1 - theta), clipped to +-(2^31 - 1).

    Below theta * step an entry becomes 0. theta = 0.5 rounds to nearest; more sends fewer and smaller levels,
    which cost fewer bits.
    """
    _check_step(step)
    if not 0.0 < theta <= 1.0:
        raise ValueError(f"theta must be in (0, 1], got {theta}")
    levels = np.empty(h.size, dtype=np.int32)
    _deadzone_round(h, step, 1.0 - theta, levels)
    return levels


@njit(cache=True, nogil=True)
def _class_scales(
    h: npt.NDArray[np.float32], widths: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]
) -> None:
    for j in range(h.size):
        if widths[j] > 0:
            scales[widths[j]] = max(scales[widths[j]], abs(h[j]))


@njit(cache=True, nogil=True)
def _round_up_or_down(x: float, key: np.uint64, index: int) -> float:
    """floor(x) or floor(x) + 1, with expectation x."""
    low = np.floor(x)
    return low + 1.0 if uniform(key, index) < x - low else low


@njit(cache=True, nogil=True)
def _stochastic_levels(
    h: npt.NDArray[np.float32],
    widths: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    key: np.uint64,
    offset: int,
    levels: npt.NDArray[np.int16],
) -> None:
    for j in range(h.size):
        s = _LEVELS[widths[j]]
        scale = np.float64(scales[widths[j]])
        magnitude = abs(np.float64(h[j]))
        level = 0.0
        if s > 0.0 and scale > 0.0:
            # For |h_j| <= scale the rounded quotient is at most s, and exactly s, not random, at equality.
            level = _round_up_or_down(min(s * magnitude / scale, s), key, offset + j)
        levels[j] = np.int16(math.copysign(level, h[j]))


@njit(cache=True, nogil=True)
def _dequantize_levels(
    levels: npt.NDArray[np.int16],
    widths: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    values: npt.NDArray[np.float32],
) -> None:
    for j in range(levels.size):
        if widths[j] > 0 and levels[j] != 0:
            values[j] = np.float64(scales[widths[j]]) * levels[j] / _LEVELS[widths[j]]
        else:
            values[j] = 0.0


@njit(cache=True, nogil=True)
def _stochastic_round(
    h: npt.NDArray[np.float32], step: float, key: np.uint64, offset: int, levels: npt.NDArray[np.int32]
) -> None:
    for j in range(h.size):
        x = min(abs(np.float64(h[j])) / step, _INT32_MAX)
        levels[j] = np.int32(math.copysign(_round_up_or_down(x, key, offset + j), h[j]))


@njit(cache=True, nogil=True)
def _deadzone_round(
    h: npt.NDArray[np.float32], step: float, shift: float, levels: npt.NDArray[np.int32]
) -> None:
    for j in range(h.size):
        x = min(abs(np.float64(h[j])) / step + shift, _INT32_MAX)
        levels[j] = np.int32(math.copysign(np.floor(x), h[j]))


def check_widths(
    values: npt.NDArray[np.float32] | npt.NDArray[np.int16], widths: npt.NDArray[np.uint8]
) -> None:
    """The kernels index tables of nine entries by width, unchecked: refuse what would read past them."""
    if values.ndim != 1 or values.shape != widths.shape or widths.dtype != np.uint8:
        raise ValueError(
            f"expected flat vectors of one length, widths in uint8: {values.shape}, {widths.shape}"
        )
    if widths.size and widths.max() > 8:
        raise ValueError(f"width {widths.max()} exceeds 8 bits")


def _check_scales(scales: npt.NDArray[np.float32]) -> None:
    if scales.shape != (9,):
        raise ValueError(f"scales must have nine entries, one a width 0..8, got shape {scales.shape}")


def _check_step(step: float) -> None:
    if not (math.isfinite(step) and step > 0.0):
        raise ValueError(f"step must be positive and finite, got {step}")
