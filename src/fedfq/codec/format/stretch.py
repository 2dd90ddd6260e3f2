"""Stretching a matrix along directions that both sides know.

What is left out of an update is larger where the model has moved most. A sketch has least noise if it is made of
numbers of like size: so a matrix is made shorter along the known directions before it is sketched, and longer again
afterwards. X becomes S_left X S_right, with S = I + Q (T - I) Q^T for the first k directions Q of a side and one factor
t for each of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedfq.types import Array

from .directions import KnownDirections
from .fold import BLOCK_CELLS

WIDEST = 2.0**20  # ratio of a direction's energy to what counts as the ordinary one


class Stretch(NamedTuple):
    """Directions of both sides, a column each, and how many times longer what lies along them becomes."""

    left: Array
    right: Array
    left_factors: Array
    right_factors: Array

    @classmethod
    def along(cls, known: KnownDirections, count: int) -> Stretch:
        """Along the first `count` of them, by the drift's energy there: factors are its eighth root."""
        some = known.leading(count)
        left, right = len(known.left), len(known.right)
        return cls(
            some.left,
            some.right,
            _find_factors(some.left_energies, known.energy, left),
            _find_factors(some.right_energies, known.energy, right),
        )

    @property
    def noise(self) -> float:
        """By how many times more than its variance white noise in one entry counts in all of them afterwards."""
        sides = (self.left, self.left_factors), (self.right, self.right_factors)
        left, right = (len(columns) + float((factors**2 - 1.0).sum()) for columns, factors in sides)
        return left * right

    @property
    def longest(self) -> float:
        """At most so many times longer a matrix becomes."""
        return float(self.left_factors.max() * self.right_factors.max())

    def apply(self, matrix: Array) -> None:
        """In place."""
        self._multiply(matrix, self.left_factors - 1.0, self.right_factors - 1.0)

    def undo(self, matrix: Array) -> None:
        """In place."""
        self._multiply(matrix, 1.0 / self.left_factors - 1.0, 1.0 / self.right_factors - 1.0)

    def _multiply(self, matrix: Array, left: Array, right: Array) -> None:
        """By I + Q diag Q^T from both sides, some rows at a time: this takes little memory beside the matrix."""
        across = left.astype(np.float32)[:, None] * (self.left.T @ matrix)
        along = right.astype(np.float32)
        count = max(1, BLOCK_CELLS // matrix.shape[1])
        for at in range(0, len(matrix), count):
            rows = matrix[at : at + count]
            rows += self.left[at : at + count] @ across
            rows += ((rows @ self.right) * along) @ self.right.T


def _find_factors(energies: Array, total: float, side: int) -> Array:
    """1 for the mean energy of all other directions; where that is next to nothing, for a part of the largest."""
    others = side - len(energies)
    ordinary = (total - float(energies.sum())) / others if others else 0.0
    ratios = energies / max(ordinary, float(energies.max()) / WIDEST)
    return np.sqrt(np.sqrt(np.sqrt(np.maximum(ratios, 1.0))))
