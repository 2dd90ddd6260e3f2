"""Known directions: those in which a weight matrix has moved, which server and client derive for themselves.

Both must find the same directions on different machines, from products that are rounded differently. Singular vectors
of nearly equal singular values may then differ at will. So the directions are what a fixed number of steps of subspace
iteration makes of fixed random numbers, with a QR decomposition in a fixed order after each: a continuous function of
the drift (as long as columns that are made of rounding errors are cut off), and nearly the singular vectors where these
differ.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedfq.types import Array

from ..kernels import kernel
from .fold import column_energies, energy, fold
from .random_numbers import stream_key, uniform

MAX_DIRECTIONS = 128  # that both sides know of a matrix
ITERATIONS = 2
RIDGE = 1e-14  # of the trace
WEAKEST_ENERGY = 1e-5  # of the largest squared singular value: directions below are made of rounding errors
MARGIN = 0.5  # what one machine finds just above the limit, another one may find just below
MAX_STRETCHED = 32  # directions along which a sketch is stretched: more of them gain little


class KnownDirections(NamedTuple):
    """Directions of a matrix's columns and rows that both sides hold: orthonormal, the strongest first."""

    left: Array  # height x k
    right: Array  # width x k
    left_energies: Array  # float64: the drift's energy along each of the first MAX_STRETCHED of them
    right_energies: Array
    energy: float  # of the drift

    @property
    def sides(self) -> tuple[Array, Array]:
        return self.left, self.right

    def leading(self, count: int) -> KnownDirections:
        """The first so many."""
        return KnownDirections(
            np.ascontiguousarray(self.left[:, :count]),
            np.ascontiguousarray(self.right[:, :count]),
            self.left_energies[:count],
            self.right_energies[:count],
            self.energy,
        )


def find_directions(drift: Array) -> tuple[KnownDirections, int] | None:
    """The leading directions of a tensor's drift, and how many of them an encoder uses; None if there are none."""
    view = fold(drift.shape)
    if view is None:
        return None
    scale = float(np.abs(drift).max())
    if not 1e-30 < scale < 1e30:
        return None
    d = view.matrix(drift) / np.float32(scale)
    total = energy(d)
    scale = np.sqrt(total / d.size)
    right = np.empty((d.shape[1], min(MAX_DIRECTIONS, *d.shape)), np.float32)
    _fill_with_random_numbers(stream_key(0, 0), right)
    sizes = np.empty(0)
    for _ in range(ITERATIONS):
        right, sizes = _orthonormalize(d.T @ (d @ (right / np.float32(scale))))
    moved = d @ right
    left = _orthonormalize(moved)[0]
    held, used = (_count_leading(sizes, limit) for limit in (MARGIN * WEAKEST_ENERGY, WEAKEST_ENERGY))
    energies = column_energies(d.T @ left[:, :MAX_STRETCHED]), column_energies(moved[:, :MAX_STRETCHED])
    return KnownDirections(left, right, *energies, total).leading(held), used


def _orthonormalize(y: Array) -> tuple[Array, Array]:
    """Q and the diagonal of R of Y = Q R, in the order of the columns: R_kk is what column k adds to those before.

    By Cholesky's decomposition of Y^T Y; the ridge keeps that positive definite where columns are made of rounding
    errors, which `_count_leading` cuts off.
    """
    wide = y.astype(np.float64)
    gram = wide.T @ wide
    r = np.linalg.cholesky(gram + RIDGE * np.trace(gram) * np.eye(len(gram))).T
    return y @ np.linalg.inv(r).astype(np.float32), np.diag(r)


def _count_leading(sizes: Array, limit: float) -> int:
    """How many columns come before the first weak one."""
    weak = sizes <= limit * sizes.max()
    return int(np.argmax(weak)) if weak.any() else sizes.size


@kernel
def _fill_with_random_numbers(key: np.uint64, columns: Array) -> None:
    """Numbers between -1 and 1. (Random signs may cancel in a matrix of equal entries.)"""
    for i in range(columns.shape[0]):
        for j in range(columns.shape[1]):
            columns[i, j] = 2.0 * uniform(key, i * columns.shape[1] + j) - 1.0
