"""How far what arrives is from what was sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedfq.types import Array


def energy(array: Array) -> float:
    """The sum of squares, in the array's own precision."""
    flat = array.reshape(-1)
    return float(np.vdot(flat, flat))


def nmse(sent: Mapping[str, Any], received: Mapping[str, Any]) -> float:
    """||sent - received||^2 / ||sent||^2 over all floating-point tensors of `sent`; 0 where both are zero."""
    error = whole = 0.0
    for name, array in sent.items():
        if array.dtype.kind == "f":
            difference = np.subtract(array, received[name], dtype=np.float64)
            error += float(np.vdot(difference, difference))
            whole += float(np.sum(np.square(array, dtype=np.float64)))
    return error / whole if whole else (np.inf if error else 0.0)
