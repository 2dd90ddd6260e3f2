"""How many times smaller than float32 an update becomes: the default, and which ratios there are.

On its own because the command line shows the default in its help, and should not wait for numba to do so.
"""

from __future__ import annotations

import math
from numbers import Real

DEFAULT_RATIO = 256  # raw bytes / payload bytes, wherever no size is given
DOWN_RATIO = 128  # raw bytes / bytes of a message with the model on its way down, where no ratio is given
LEAST_BYTES = 4096  # of a budget that nobody gave: less saves nothing beside what a transport takes for itself


def check_ratio(ratio: float, name: str = "ratio") -> None:
    """Refuse what would make an update larger, and what is no number."""
    if not isinstance(ratio, Real):
        raise TypeError(f"{name} must be a number, got {ratio!r}")
    if not 1 <= ratio < math.inf:
        raise ValueError(f"{name} must be at least 1 and finite, got {ratio!r}")


def down_bytes(raw: int, ratio: float | None) -> int:
    """How large a message with the model may be: so many times smaller than float32, or what it is without a ratio."""
    return max(raw // DOWN_RATIO, LEAST_BYTES) if ratio is None else int(raw / ratio)
