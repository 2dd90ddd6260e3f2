"""The one alias for numpy arrays whose dtype is not part of the type."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
