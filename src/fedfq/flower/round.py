"""A round at the server: the model that was sent, and how updates of it are decoded, measured and added up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord

from fedfq.codec.decode import Accumulator, decode, decode_each
from fedfq.codec.errors import PayloadError
from fedfq.codec.format.container import has_sketch
from fedfq.codec.shared_basis import SharedBasis
from fedfq.session import derive_basis

from . import limits
from .arrays import Decoded, NDArray, add_update, as_dtype
from .limits import UNSCALED, Pair
from .protocol import fits
from .replies import ReplyContent, Unusable

T = TypeVar("T")


class ServerRound:
    """What the server knows in a round.

    base      the server's model: what strategies see is this plus updates, whatever clients trained from
    given     the model that clients trained from
    initial   the one that they began with; None where there is no shared basis

    A payload is decoded twice: by `measure`, one tensor at a time, to see whether it is sound and how long it is; and,
    once the lengths of all are known, when it is added up or read.
    """

    def __init__(
        self,
        base: Mapping[str, NDArray],
        given: Mapping[str, NDArray],
        initial: Mapping[str, NDArray] | None,
        max_norm: float | None,
        clipping_norm: float | None,
        takes_sketches: bool,
    ) -> None:
        self.base = base
        self.tokens: dict[int, bytes] = {}  # of every node, for one reply
        self._given = given
        self._initial = initial
        self._max_norm = max_norm
        self._clipping_norm = clipping_norm
        self._takes_sketches = takes_sketches
        self._basis: SharedBasis | None = None
        self._total: Accumulator | None = None
        # What is added up is float32: the norm of a float16 update that was clipped to its range would be too small.
        self._wide = {
            name: np.broadcast_to(np.zeros((), np.float32 if old.dtype.kind == "f" else old.dtype), old.shape)
            for name, old in base.items()
        }

    @property
    def can_be_averaged(self) -> bool:
        """Updates of integers wrap round where they have no sign or few bits: then only the models have a mean."""
        dtypes = [old.dtype for old in self.base.values()]
        return not any(dtype.kind == "u" or (dtype.kind == "i" and dtype.itemsize < 4) for dtype in dtypes)

    def measure(self, answer: ReplyContent) -> None:
        """Decode a payload tensor by tensor for its norms. After this, nothing can fail."""
        answer.norms_without_sketch, answer.norms = self._with_basis(lambda basis: self._norms(answer.payload, basis))
        if has_sketch(answer.payload) and not self._takes_sketches:
            raise Unusable("sketch", "a payload with a sketch, where the order was to send none")
        self._use_token(answer)
        if self._max_norm is not None and answer.norms.floats > self._max_norm:
            raise Unusable(
                "norm", f"an update with norm {answer.norms.floats:.4g}, where {self._max_norm:.4g} is allowed"
            )

    def _norms(self, payload: memoryview, basis: SharedBasis | None) -> tuple[Pair, Pair]:
        """Without its sketch, and with it."""
        found = decode_each(payload, limits.energies, like=self._wide, shared_basis=basis)
        return limits.norms(pair[0] for pair in found), limits.norms(pair[1] for pair in found)

    def _use_token(self, answer: ReplyContent) -> None:
        token = self.tokens.get(answer.node)
        if token is not None and fits(answer.payload, answer.tag, token):
            del self.tokens[answer.node]
            return
        raise Unusable("replay", "its tag is not of this round and node: it was made for another one, or sent twice")

    def add(self, answer: ReplyContent) -> ArrayRecord:
        """Add a payload to the mean. The strategy gets a record without tensors: `average` is what it would make."""
        total = self._total = self._total or Accumulator(like=self.base)
        scales = None if answer.scales == UNSCALED else limits.by_tensor(self.base, answer.scales)
        self._with_basis(lambda basis: total.add(answer.payload, answer.weight, shared_basis=basis, scales=scales))
        return ArrayRecord()

    def average(self) -> ArrayRecord:
        """theta + the mean of the updates (Eq. 4)."""
        assert self._total is not None
        self._basis = None
        record = ArrayRecord()
        for name, mean in self._total.drain():
            record[name] = Array(add_update(self.base[name], mean))
        return record

    def decode_later(self, answer: ReplyContent) -> ArrayRecord:
        """The reply's model, to be decoded when it is read."""
        return Decoded(self.base, lambda: self._decode(answer.payload, answer.scales)).record()

    def restore_dtypes(self, arrays: ArrayRecord) -> ArrayRecord:
        """What a strategy made of the model, in the model's dtypes. (FedAdam, or a mean of integers, is float64.)"""
        for name, old in self.base.items():
            if name in arrays and arrays[name].dtype != str(old.dtype):
                arrays[name] = Array(as_dtype(arrays[name].numpy(), old.dtype))
        return arrays

    def _decode(self, payload: memoryview, scales: Pair) -> dict[str, NDArray]:
        update = self._with_basis(lambda basis: decode(payload, like=self.base, shared_basis=basis))
        limits.scale(update, scales)
        # The client clipped what it encoded; what is decoded may be a little longer.
        if self._clipping_norm is not None:
            norm = limits.norms(map(limits.energies, update.values())).floats
            if norm > self._clipping_norm:
                limits.scale(update, Pair(self._clipping_norm / norm, 1.0))
        return update

    def _with_basis(self, use: Callable[[SharedBasis | None], T]) -> T:
        """`use` the shared basis, which is derived when the first payload needs it."""
        try:
            return use(self._basis)
        except PayloadError as error:
            if error.reason != "basis" or self._basis is not None or self._initial is None:
                raise
        self._basis = derive_basis(self._given, self._initial)
        return use(self._basis)
