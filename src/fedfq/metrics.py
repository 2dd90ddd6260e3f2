"""How far what arrives is from what was sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def nmse(sent: Mapping[str, Any], received: Mapping[str, Any]) -> float:
    """||sent - received||^2 / ||sent||^2 over all floating-point tensors of `sent`; 0 where both are zero."""
    error = energy = 0.0
    for name, array in sent.items():
        if array.dtype.kind == "f":
            difference = np.subtract(array, received[name], dtype=np.float64)
            error += float(np.vdot(difference, difference))
            energy += float(np.sum(np.square(array, dtype=np.float64)))
    return error / energy if energy else (np.inf if error else 0.0)
