"""A basis that both sides know: the directions in which the model has moved.

All clients' updates of one weight matrix lie in nearly the same few directions, those of its inputs and of the errors
behind it; and so does the sum of all updates so far, the drift D = theta_t - theta_0, which server and clients hold
anyway. The leading directions of D, of its rows and of its columns, are therefore where factors of an update take
fewest bytes: the basis costs nothing to send.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .format.directions import KnownDirections, find_directions
from .format.layout import Spec, digest
from .parallel import with_workers
from .tensors import Tensor, read


class SharedBasis:
    """The directions of `model` - `initial`, for every tensor that may have factors; 128 of a matrix at most.

    Both are mappings or modules as for `encode`; server and clients must hold the same numbers. `digest` names them in
    every payload that is made with the basis. Before the model has moved, the basis is empty and payloads do without.
    It never changes: threads may share it. Raises `ValueError` if the two models differ in names or shapes, or are not
    finite.

    >>> import fedfq, numpy as np
    >>> rng = np.random.default_rng(0)
    >>> move = np.outer(rng.standard_normal(60), rng.standard_normal(80)).astype(np.float32)
    >>> initial, model = {"w": np.zeros((60, 80), np.float32)}, {"w": move}
    >>> basis = fedfq.SharedBasis(model, initial)
    >>> known = fedfq.encode({"w": 2 * move}, step=0.1, shared_basis=basis)
    >>> len(known) < len(fedfq.encode({"w": 2 * move}, step=0.1))
    True
    """

    def __init__(self, model: Any, initial: Any, *, threads: int = 1) -> None:
        before = {tensor.spec.name: tensor for tensor in read(initial, ())}
        tensors = read(model, ())
        self.layout = [tensor.spec for tensor in tensors]
        if (other := difference(self.layout, [tensor.spec for tensor in before.values()])) is not None:
            raise ValueError(f"the initial model is another one: {other}")
        floats = sorted((tensor for tensor in tensors if tensor.spec.is_float), key=lambda tensor: tensor.spec.name)
        moves = with_workers(
            threads, lambda spread: spread(lambda tensor: _find_movement(tensor, before[tensor.spec.name]), floats)
        )
        digests = b"".join(move.digest for move in moves)
        self.digest = hashlib.sha256(digest(self.layout) + digests).digest()[:8]
        names = [tensor.spec.name for tensor in floats]
        named = [(name, move.directions) for name, move in zip(names, moves) if move.directions is not None]
        self.held = {name: known for name, (known, _) in named}  # what payloads may name
        self.used = {name: known.leading(count) for name, (known, count) in named if count}  # what they are made with

    def other_than(self, layout: Sequence[Spec]) -> str | None:
        """What an update of this layout has that the model has not, or the other way round; None if it is the same."""
        return difference(layout, self.layout)


def difference(one: Sequence[Spec], other: Sequence[Spec]) -> str | None:
    """What is wrong with the other layout, as a sentence about it; None if it is the same."""
    shapes = {spec.name: spec.shape for spec in other}
    for spec in one:
        if spec.name not in shapes:
            return f"it lacks the tensor {spec.name!r}"
        if spec.shape != shapes[spec.name]:
            return f"its tensor {spec.name!r} has shape {shapes[spec.name]}, not {spec.shape}"
    missing = set(shapes) - {spec.name for spec in one}
    return f"it has a tensor {min(missing)!r}" if missing else None


class Movement(NamedTuple):
    """What the drift of a tensor tells: its digest, its directions and how many of them an encoder uses."""

    digest: bytes
    directions: tuple[KnownDirections, int] | None


def _find_movement(now: Tensor, before: Tensor) -> Movement:
    """The drift in float32 is the same on every machine."""
    with np.errstate(over="ignore", invalid="ignore"):
        drift = np.asarray(now.array, np.float32) - np.asarray(before.array, np.float32)
    if not np.isfinite(drift).all():
        raise ValueError(f"tensor {now.spec.name!r} of the model or the initial model has entries that are not finite")
    hashed = hashlib.sha256(np.ascontiguousarray(drift, "<f4").data).digest()  # processors have instructions for it
    return Movement(hashed, find_directions(drift))
