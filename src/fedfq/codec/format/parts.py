"""Parts: what decoding a piece of a section gives, ready to be added to a tensor."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedfq.types import Array

from ..kernels import FLOAT32_MAX, kernel
from .fold import Product


class Part(NamedTuple):
    """Decoded entries of one tensor: `values` at `indices`; all of them; with `right`, scale values right^T."""

    indices: Array | None
    values: Array
    right: Array | None = None
    scale: float = 1.0

    def add_to(self, total: Array, shape: tuple[int, ...], weight: float) -> None:
        """total += weight * part, kept within float32; `total` is the tensor, flat."""
        if self.indices is not None:
            _scatter_add(total, self.indices, self.values, weight)
            return
        if self.right is not None:
            Product(self.values, self.right, weight * self.scale).add_to(total, shape)
            return
        with np.errstate(over="ignore"):
            total += self.values * total.dtype.type(weight)
        np.clip(total, -FLOAT32_MAX, FLOAT32_MAX, out=total)


@kernel
def _scatter_add(flat: Array, indices: Array, values: Array, weight: float) -> None:
    for k in range(indices.size):
        total = flat[indices[k]] + weight * np.float64(values[k])
        flat[indices[k]] = min(max(total, -FLOAT32_MAX), FLOAT32_MAX)
