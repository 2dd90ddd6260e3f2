"""The server's half of the way down: what each node is sent, and what it is known to hold.

Only what a node acknowledged, with the digest of its bits, is known. Who never did so is taken to be like most others:
they make the initial model by themselves, or are sent it with their first message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from logging import ERROR
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.common.logger import log

from fedfq.broadcast.server import Broadcast
from fedfq.codec.codec import Codec
from fedfq.codec.decode import decode

from .arrays import NDArray, blob, digest, pack, record, views
from .protocol import MODEL, UPDATE, HeldVersion


class Downlink(ABC):
    """`model` is what nodes train from, `initial` what they began with; `start` is the server's model to begin with."""

    left_out: float | None = None  # what nodes lack of the model, over a round's change; None if they lack nothing

    def __init__(self, start: ArrayRecord, sent: Array) -> None:
        self.start = start
        self.initial: Mapping[str, NDArray] = views(start)
        self.model = self.initial
        self.digest = digest(self.initial)
        self._sent = sent  # the initial model, for who lacks it
        self._held: dict[int, int] = {}  # the version that a node acknowledged
        self._records: dict[tuple[int | None, bool], ArrayRecord] = {}  # that were made for the newest version

    def fits(self, model: ArrayRecord) -> bool:
        """Whether it has the tensors of the initial model."""
        return _layout(model) == _layout(self.start)

    @abstractmethod
    def advance(self, model: ArrayRecord) -> None:
        """The newest version is this model; nothing happens if it was that already."""

    @abstractmethod
    def record(self, node: int) -> ArrayRecord:
        """What a node is sent, the same one for all that hold the same."""

    @abstractmethod
    def _is_right(self, held: HeldVersion) -> bool:
        """Whether there was such a version."""

    def acknowledge(self, node: int, held: HeldVersion | None) -> None:
        """What a node says it holds."""
        if held is not None and self._is_right(held):
            self._held[node] = held.version
        else:
            self._held.pop(node, None)


class AllBits(Downlink):
    """The model as it is, packed into one Array; once it has moved, beside it the initial one for who lacks that."""

    def __init__(self, model: ArrayRecord, uses_initial: bool) -> None:
        super().__init__(model, pack(model))
        self._packed = self._sent
        self._uses_initial = uses_initial

    def advance(self, model: ArrayRecord) -> None:
        self.model, self._packed = views(model), pack(model)
        self._records.clear()

    def record(self, node: int) -> ArrayRecord:
        beside = self._uses_initial and node not in self._held and self._packed.data != self._sent.data
        if (found := self._records.get((None, beside))) is None:
            found = ArrayRecord({"model": self._packed} | ({"initial": self._sent} if beside else {}))
            self._records[None, beside] = found
        return found

    def _is_right(self, held: HeldVersion) -> bool:
        return held == HeldVersion(0, self.digest)


class Differences(Downlink):
    """What leads to the newest model of a `Broadcast` from what a node holds."""

    def __init__(self, model: ArrayRecord, ratio: float | None, initial_ratio: float | None) -> None:
        start, sent = model, pack(model)
        if initial_ratio is not None:
            payload = Codec(ratio=initial_ratio).encode(views(model))
            start, sent = record(decode(payload)), blob(payload, UPDATE)
        super().__init__(start, sent)
        self._broadcast = Broadcast(self.initial, ratio=ratio)
        self._true = self.initial
        self.initial = self.model = self._broadcast.model  # in float32, as nodes hold it
        self._makes_initial: set[int] = set()  # nodes that do
        self._needs_initial: set[int] = set()  # nodes that do not

    def advance(self, model: ArrayRecord) -> None:
        new = views(model)
        if all(np.array_equal(new[name], old) for name, old in self._true.items()):
            return
        try:
            self._broadcast.advance(new)
        except ValueError as error:
            log(ERROR, "fedfq: nodes go on with the model that they hold: %s", error)
            return
        self._true, self.model, self.left_out = new, self._broadcast.model, self._broadcast.left_out
        self._records.clear()

    def record(self, node: int) -> ArrayRecord:
        version = self._held.get(node)
        with_initial = version is None and (
            node in self._needs_initial or len(self._needs_initial) > len(self._makes_initial)
        )
        if with_initial:
            self._needs_initial.add(node)
        if (found := self._records.get((version, with_initial))) is None:
            message = blob(self._broadcast.message(version or 0), MODEL)
            found = ArrayRecord({"message": message} | ({"initial": self._sent} if with_initial else {}))
            self._records[version, with_initial] = found
        return found

    def _is_right(self, held: HeldVersion) -> bool:
        is_version = 0 <= held.version <= self._broadcast.version
        return is_version and self._broadcast.digest(held.version).hex() == held.digest

    def acknowledge(self, node: int, held: HeldVersion | None) -> None:
        super().acknowledge(node, held)
        if node not in self._held:
            self._needs_initial.add(node)
        elif node not in self._needs_initial:
            self._makes_initial.add(node)


def _layout(model: ArrayRecord) -> dict[str, Any]:
    return {name: (tuple(array.shape), array.dtype) for name, array in model.items()}
