"""A basis that both sides know: the directions in which the model has moved.

All clients' updates of one weight matrix lie in nearly the same few directions, those of its inputs and of the errors
behind it; and so does the sum of all updates so far, the drift D = theta_t - theta_0, which server and clients hold
anyway. The leading directions of D, of its rows and of its columns, are therefore where factors of an update take
fewest bytes: the basis costs nothing to send.

Server and client must find the same directions on different machines, from products that are rounded differently.
Singular vectors of nearly equal singular values may then differ at will. So the basis is what a fixed number of steps
of subspace iteration makes of fixed random numbers, with a QR decomposition in a fixed order after each: a continuous
function of the drift (as long as columns that are made of rounding errors are cut off), and nearly the singular vectors
where these differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import layout as lay
from .basis import MAX_DIRECTIONS, Known, energy, fold
from .kernels import Array, kernel
from .layout import Spec, Tensor, read
from .parallel import with_workers
from .quantize import stream_key, uniform

ITERATIONS = 2
RIDGE = 1e-14  # of the trace
WEAKEST = 1e-5  # of the largest squared singular value: directions below are made of rounding errors
MARGIN = 0.5  # what one machine finds just above the limit, another one may find just below


class SharedBasis:
    """The directions of `model` - `initial`, for every tensor that may have factors; 128 of a matrix at most.

    Both are mappings or modules as for `encode`; server and clients must hold the same numbers. `digest` names them in
    every payload that is made with the basis. Before the model has moved, the basis is empty and payloads do without.
    It never changes: threads may share it.
    """

    def __init__(self, model: Any, initial: Any, *, threads: int = 1) -> None:
        before = {tensor.spec.name: tensor for tensor in read(initial, ())}
        tensors = read(model, ())
        self.layout = [tensor.spec for tensor in tensors]
        if (other := _difference(self.layout, [tensor.spec for tensor in before.values()])) is not None:
            raise ValueError(f"the initial model is another one: {other}")
        floats = sorted((tensor for tensor in tensors if tensor.spec.is_float), key=lambda tensor: tensor.spec.name)
        moves = with_workers(
            threads, lambda spread: spread(lambda tensor: _moved(tensor, before[tensor.spec.name]), floats)
        )
        digests = b"".join(digest for digest, _ in moves)
        self.digest = hashlib.sha256(lay.digest(self.layout) + digests).digest()[:8]
        named = [(tensor.spec.name, known) for tensor, (_, known) in zip(floats, moves) if known is not None]
        self.held = {name: known for name, (known, _) in named}  # what payloads may name
        self.used = {  # what they are made with
            name: Known(known.left[:, :count], known.right[:, :count]) for name, (known, count) in named if count
        }

    def other_than(self, layout: Sequence[Spec]) -> str | None:
        """What an update of this layout has that the model has not, or the other way round; None if it is the same."""
        return _difference(layout, self.layout)


def _difference(one: Sequence[Spec], other: Sequence[Spec]) -> str | None:
    shapes = {spec.name: spec.shape for spec in other}
    for spec in one:
        if spec.name not in shapes:
            return f"it lacks the tensor {spec.name!r}"
        if spec.shape != shapes[spec.name]:
            return f"its tensor {spec.name!r} has shape {shapes[spec.name]}, not {spec.shape}"
    missing = set(shapes) - {spec.name for spec in one}
    return f"it has a tensor {min(missing)!r}" if missing else None


def _moved(now: Tensor, before: Tensor) -> tuple[bytes, tuple[Known, int] | None]:
    """The digest of a tensor's drift and its directions. The drift in float32 is the same on every machine."""
    with np.errstate(over="ignore", invalid="ignore"):
        drift = np.asarray(now.array, np.float32) - np.asarray(before.array, np.float32)
    if not np.isfinite(drift).all():
        raise ValueError(f"tensor {now.spec.name!r} of the model or the initial model has entries that are not finite")
    digest = hashlib.sha256(np.ascontiguousarray(drift, "<f4").data).digest()  # processors have instructions for it
    return digest, directions(drift)


def directions(drift: Array) -> tuple[Known, int] | None:
    """The leading directions of a tensor's drift, and how many of them an encoder uses; None if there are none."""
    view = fold(drift.shape)
    if view is None:
        return None
    scale = float(np.abs(drift).max())
    if not 1e-30 < scale < 1e30:
        return None
    d = view.matrix(drift) / np.float32(scale)
    scale = np.sqrt(energy(d) / d.size)
    right = np.empty((d.shape[1], min(MAX_DIRECTIONS, *d.shape)), np.float32)
    _random(stream_key(0, 0), right)
    sizes = np.empty(0)
    for _ in range(ITERATIONS):
        right, sizes = _orthonormal(d.T @ (d @ (right / np.float32(scale))))
    left = _orthonormal(d @ right)[0]
    held, used = (_leading(sizes, limit) for limit in (MARGIN * WEAKEST, WEAKEST))
    return Known(np.ascontiguousarray(left[:, :held]), np.ascontiguousarray(right[:, :held])), used


def _orthonormal(y: Array) -> tuple[Array, Array]:
    """Q and the diagonal of R of Y = Q R, in the order of the columns: R_kk is what column k adds to those before.

    By Cholesky's decomposition of Y^T Y; the ridge keeps that positive definite where columns are made of rounding
    errors, which `_leading` cuts off.
    """
    wide = y.astype(np.float64)
    gram = wide.T @ wide
    r = np.linalg.cholesky(gram + RIDGE * np.trace(gram) * np.eye(len(gram))).T
    return y @ np.linalg.inv(r).astype(np.float32), np.diag(r)


def _leading(sizes: Array, limit: float) -> int:
    """How many columns come before the first weak one."""
    weak = sizes <= limit * sizes.max()
    return int(np.argmax(weak)) if weak.any() else sizes.size


@kernel
def _random(key: np.uint64, columns: Array) -> None:
    """Numbers between -1 and 1. (Random signs may cancel in a matrix of equal entries.)"""
    for i in range(columns.shape[0]):
        for j in range(columns.shape[1]):
            columns[i, j] = 2.0 * uniform(key, i * columns.shape[1] + j) - 1.0
