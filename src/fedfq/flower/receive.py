"""The client's half of the way down: the model that a message stands for, and what the node keeps of it.

A message has all bits of the model (`down_ratio=1`), or what leads to it from what the node holds: then the node has a
`Replica`, and the initial model, which it was sent once or makes by itself. A node that holds something else than the
message starts from says what, and is sent what it lacks in the same round. Nothing is kept before its digest was found
to be right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, Context, RecordDict
from flwr.common.logger import log

from fedfq.broadcast.held import Held, makes_models
from fedfq.broadcast.replica import Replica
from fedfq.codec.decode import decode
from fedfq.codec.errors import PayloadError
from fedfq.codec.tensors import specs

from .arrays import NDArray, digest, pack, packed_views, record, unpack
from .memory import InState, Memory, OnDisk, memory_of
from .protocol import MODEL, NOTHING_HELD, ORDER, UPDATE, HeldVersion, ModelOrder, Refusal, TrainOrder, printable

PARCELS: tuple[set[str], ...] = ({"model"}, {"model", "initial"}, {"message"}, {"message", "initial"})


class Lacking(Exception):
    """The node does not hold what the message starts from."""

    def __init__(self, held: HeldVersion) -> None:
        super().__init__(f"version {held.version} is held")
        self.held = held


class Received(NamedTuple):
    """A message's model, for the app and for what is to be known and kept of it."""

    model: ArrayRecord  # as the app expects it
    memory: Memory
    held: HeldVersion  # what the server is told
    digest: str  # of the model
    initial: Mapping[str, NDArray] | None  # the initial model, where it is there and the model has moved since


@dataclass
class Receiver:
    """`make` gives the initial model: a module, a mapping from names to arrays, or a function that makes it.

    Without `keeps_initial`, the node has no other use for it than to begin with.
    """

    make: Any
    keeps_initial: bool
    _has_warned: bool = False  # that `make` gives another model than the server's
    _made: list[tuple[Held, str]] = field(default_factory=list)  # what `make` gave, once it was asked, and its digest

    def receive(self, order: ModelOrder | TrainOrder, parcel: ArrayRecord, context: Context) -> Received:
        """Raises `Lacking`, or `Refusal` for what no server of this version sends."""
        if set(parcel) not in PARCELS:
            raise Refusal(f"the server sent {printable(', '.join(parcel))!r:.60}, where a model, or two, are due")
        sent = _read_initial(parcel["initial"], order) if "initial" in parcel else None
        if "model" in parcel:
            return self._receive_all(order, parcel["model"], sent, context)
        return self._receive_message(order, parcel["message"], sent, context)

    def _receive_all(
        self, order: ModelOrder | TrainOrder, packed: Array, sent: Array | None, context: Context
    ) -> Received:
        """All bits of the model. The initial one is kept if it comes beside it, or is the same."""
        with refusing():
            given, views = ArrayRecord(unpack(packed)), packed_views(packed)
            memory, held = memory_of(context, views), HeldVersion(0, order.initial)
            if not (self.keeps_initial and isinstance(order, TrainOrder) and order.basis):
                return Received(given, memory, held, "", None)
            found = digest(views)
            if found == order.initial:
                sent = packed
            if sent is None:
                start = self._initial(order.initial, memory)
                return Received(given, memory, NOTHING_HELD if start is None else held, found, _arrays(start))
            if specs(packed_views(sent)) != specs(views):
                raise Refusal("the server's initial model has other tensors than its model")
            try:
                start = Held.of(packed_views(sent))
            except ValueError:  # it is not finite: there will be no basis, and it is not worth keeping
                return Received(given, memory, held, found, None)
            memory.keep_initial(order.initial, sent)
            return Received(given, memory, held, found, None if sent is packed else start.arrays)

    def _receive_message(
        self, order: ModelOrder | TrainOrder, message: Array, sent: Array | None, context: Context
    ) -> Received:
        """What leads to the model from what is held."""
        if message.stype != MODEL:
            raise Refusal(f"a message of type {message.stype!r:.60}: install one version of fedfq on all machines")
        with refusing():
            memory = self._find_memory(order.initial, sent, context)
            start = Held.of(packed_views(sent)) if sent is not None else self._initial(order.initial, memory)
        if start is None:
            raise Lacking(NOTHING_HELD)
        with refusing():
            replica = _restore(start, None if sent is not None else memory.replica(order.initial))
            before = _version(replica)
            try:
                model = replica.receive(message.data)
            except PayloadError as error:
                if error.reason == "held":
                    raise Lacking(before) from error
                raise
            held, found = _version(replica), record(model)
            if sent is not None:
                memory.keep_initial(order.initial, sent)
            if sent is not None or held != before:
                memory.keep_replica(order.initial, replica.state_dict())
        return Received(found, memory, held, held.digest, start.arrays if held.version else None)

    def _find_memory(self, initial: str, sent: Array | None, context: Context) -> Memory:
        if sent is not None:
            return memory_of(context, packed_views(sent))
        if (made := self._make_initial(initial)) is not None:
            return memory_of(context, made.arrays)
        state: Memory = InState(context)
        return state if state.initial(initial) is not None else OnDisk(context)

    def _make_initial(self, wanted: str) -> Held | None:
        """The initial model as the node makes it, if it is the one that is wanted."""
        if self.make is None:
            return None
        if not self._made:
            try:
                made = Held.of(self.make() if makes_models(self.make) else self.make)
            except Exception as error:  # the app's own
                raise Refusal(f"initial= gives no model: {type(error).__name__}: {error}") from error
            self._made.append((made, digest(made.arrays, made.layout)))
        made, found = self._made[0]
        if found == wanted:
            return made
        if not self._has_warned:
            self._has_warned = True
            log(WARNING, "fedfq_mod: initial= gives another model than the server's, which is sent instead")
        return None

    def _initial(self, wanted: str, memory: Memory) -> Held | None:
        """The initial model, made here or kept."""
        if (made := self._make_initial(wanted)) is not None:
            return made
        kept = memory.initial(wanted)
        return None if kept is None else Held.of(kept)


def _restore(initial: Held, state: Mapping[str, NDArray] | None) -> Replica:
    """The replica of that state; one that holds the initial model if there is none, or a damaged one."""
    replica = Replica(lambda: initial)  # so that its state has no copy of it
    if state is not None:
        with suppress(ValueError):  # nothing has changed then
            replica.load_state_dict(state)
    return replica


def _arrays(model: Held | None) -> Mapping[str, NDArray] | None:
    return None if model is None else model.arrays


def _version(replica: Replica) -> HeldVersion:
    return HeldVersion(replica.version, replica.digest.hex())


def _read_initial(sent: Array, order: ModelOrder | TrainOrder) -> Array:
    """The initial model in a message, packed: it came so, or as a payload."""
    with refusing():
        if sent.stype == UPDATE:
            sent = pack(record(decode(sent.data)))
        found = digest(packed_views(sent))
    if found != order.initial:
        raise Refusal(f"the server's initial model has the digest {found}, and its order names {order.initial!r}")
    return sent


def find_order(content: RecordDict) -> Mapping[str, Any] | None:
    """What `Compressed` says about the model, if it comes from there."""
    return content.config_records.get(ORDER)


def only_record(content: RecordDict) -> tuple[str, ArrayRecord]:
    """The one ArrayRecord in a message, and its name."""
    records = list(content.array_records.items())
    if len(records) != 1:
        raise Refusal(f"a message has one ArrayRecord, the model; this one has {len(records)}")
    return records[0]


@contextmanager
def refusing() -> Iterator[None]:
    """Tell the server in one line of bad values, and of a disk that cannot be written."""
    try:
        yield
    except (ValueError, OverflowError, OSError) as error:
        raise Refusal(str(error)) from error
