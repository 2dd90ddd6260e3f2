"""Quantisers of the paper's widths: the stochastic one of Eq. 5, and one with a dead zone.

Randomness is a hash of (seed, stream, element index). All arithmetic is float64, as in `quantize.py`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..format.random_numbers import stream_key
from ..format.sections import LEVELS
from ..kernels import kernel
from .quantize import THETA, round_up_or_down

# s = 2^(b-1), the paper's number of levels above zero, indexed by the width b. With the sign and zero, these are
# 2^b + 1 symbols: one more than b bits can hold.
_LEVELS = np.array(LEVELS, dtype=np.float64)


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


def deadzone_levels(
    h: npt.NDArray[np.float32], widths: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]
) -> npt.NDArray[np.int16]:
    """As `stochastic_levels`, but rounded down below THETA of a level and up from there on: no longer unbiased."""
    check_widths(h, widths)
    _check_scales(scales)
    finest = np.where(scales > 0, _LEVELS / np.maximum(scales.astype(np.float64), 1e-300), 0.0)
    sizes = np.abs(h).astype(np.float64) * finest[widths]
    levels = np.minimum(np.floor(sizes + (1.0 - THETA)), _LEVELS[widths])
    return np.copysign(levels, h).astype(np.int16)


def dequantize_levels(
    levels: npt.NDArray[np.int16], widths: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Q(h)_j = scales[b_j] * level_j / s of Eq. 5; 0 for width 0."""
    check_widths(levels, widths)
    _check_scales(scales)
    values = np.empty(levels.size, dtype=np.float32)
    _dequantize_levels(levels, widths, scales, values)
    return values


@kernel
def _class_scales(h: npt.NDArray[np.float32], widths: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> None:
    for j in range(h.size):
        if widths[j] > 0:
            scales[widths[j]] = max(scales[widths[j]], abs(h[j]))


@kernel
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
            level = round_up_or_down(min(s * magnitude / scale, s), key, offset + j)
        levels[j] = np.int16(math.copysign(level, h[j]))


@kernel
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


def check_widths(values: npt.NDArray[np.float32] | npt.NDArray[np.int16], widths: npt.NDArray[np.uint8]) -> None:
    """The kernels index tables of nine entries by width, unchecked: refuse what would read past them."""
    if values.ndim != 1 or values.shape != widths.shape or widths.dtype != np.uint8:
        raise ValueError(f"expected flat vectors of one length, widths in uint8: {values.shape}, {widths.shape}")
    if widths.size and widths.max() > 8:
        raise ValueError(f"width {widths.max()} exceeds 8 bits")


def _check_scales(scales: npt.NDArray[np.float32]) -> None:
    if scales.shape != (9,):
        raise ValueError(f"scales must have nine entries, one per width 0..8, got shape {scales.shape}")
