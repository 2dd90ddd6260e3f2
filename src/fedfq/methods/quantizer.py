"""The stochastic quantizer that QSGD, FedPAQ and those after them share (Eq. 5 of FedFQ with one width)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedfq.codec.kernels import FLOAT32_MAX
from fedfq.types import Array

from .wire import finite

Scale = Array | np.floating[Any] | float


def random_levels(h: Array, scale: Scale, s: int, rng: np.random.Generator) -> Array:
    """s h / scale, rounded up or down at random so that the mean is right: numbers from -s to s.

    Where the scale is 0, so are the levels. Magnitudes above the scale become s.
    """
    scale = np.asarray(scale, np.float64)
    wanted = h * np.divide(s, scale, out=np.zeros_like(scale), where=scale > 0)
    wanted += rng.random(h.shape)
    return np.clip(np.floor(wanted, out=wanted), -s, s).astype(np.int32)


def dequantize(levels: Array, scale: Scale, s: int) -> Array:
    return finite(levels * (np.asarray(scale, np.float64) / s))


def l2(h: Array) -> np.float32:
    """||h||_2 as it is sent."""
    return np.float32(min(math.sqrt(energy(h)), FLOAT32_MAX))


def energy(h: Array) -> float:
    """||h||^2. Not by `np.dot`, whose sum depends on the number of threads."""
    return float(np.square(h, dtype=np.float64).sum())


def peak(h: Array) -> np.float32:
    """max |h|."""
    return np.float32(np.abs(h).max(initial=0.0))
