"""The client's half: the model comes in as a few kilobytes, and the app's goes out as a few kilobytes.

For every message of training or evaluation, the app gets the ordinary model, whatever way it travelled (`receive.py`).
From its reply to a training, the mod takes the model, subtracts the one that it was given, encodes the difference and
sends one Array. Messages of other types, and those that are not from `Compressed`, pass untouched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from logging import ERROR, WARNING
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM

from fedfq.codec.codec import Codec, Gain
from fedfq.codec.format.layout import raw_bytes
from fedfq.codec.shared_basis import SharedBasis
from fedfq.codec.tensors import specs
from fedfq.session import Basis, ClientSession, Sent, derive_basis

from .arrays import HOW_TO_SEND_BFLOAT16, NDArray, blob, difference, views
from .memory import Memory
from .protocol import (
    BYTES,
    HELD,
    LACKS,
    NMSE,
    ORDER,
    RATIO,
    UPDATE,
    ModelOrder,
    Refusal,
    TrainOrder,
    printable,
    seal,
)
from .receive import Lacking, Received, Receiver, find_order, only_record, refusing

NOISIEST = 100.0  # times an update's energy; EDEN trains with 50 in places (docs/benchmarks.md)
EMPTIEST = 0.95  # of an update's energy: with a payload that leaves out more, next to nothing is trained


def fedfq_mod(
    ratio: float | None = None,
    *,
    basis: Basis = "shared",
    unbiased: bool | None = None,
    error_feedback: bool | None = None,
    gain: Gain | bool | None = None,
    seed: int = 0,
    initial: Any = None,
) -> Mod:
    """A client mod that sends updates `ratio` times smaller than float32; the server's strategy is `Compressed(...)`.

    Without a ratio, updates are 256 times smaller, but payloads have 4 KB at least: less saves nothing beside what
    Flower's messages take.

    basis           "shared": factors in the directions in which the model has moved so far, which both sides derive
                    from the initial model; "adaptive" and "identity" as in `Codec`
    unbiased        noise instead of bias: what is left out is sketched (as in `Codec`), with neither memory nor gain.
                    The default, unless one of these is asked for. Where the strategy does more than average (median,
                    Krum, Adam, clipping) or `max_norm` is given, the server says so, and payloads have no sketch
    error_feedback  add what one payload left out to the next one, the default unless unbiased; it is kept in
                    `context.state` or, for models beyond 12 MB, on disk (`memory.py`)
    gain            as in `Codec`; the default is "norm" unless unbiased
    seed            of the random numbers with which factors are sought and sketches are made; it need not differ
                    between clients, as sketches of different updates have numbers of their own
    initial         the initial model, or a function that makes it, the same bits as at the server (for instance from a
                    seed of the app's): then nobody has to be sent it. A module, or a mapping from names to arrays.
                    Where its digest is not the server's, it is not used

    The reply carries the payload and 8 bytes that bind it to the node and the round.

    A node may have a budget of its own in its node config, of which the server need not know: `fedfq-ratio`, or
    `fedfq-upload-seconds` together with `fedfq-uplink-mbps`.

    In `ClientApp(mods=[fedfq_mod()])` it serves training and evaluation; in `@app.train(mods=[fedfq_mod()])`, where
    evaluations are sent the model as it is, only the former. It is the first of a list, so that others act on the model
    before it: `mods=[fedfq_mod(), fixedclipping_mod]`.
    With a clipping mod, ask for neither error feedback nor a gain: both make an update larger than the clipping norm,
    and are refused where the server asks for clipping. Nor with `LocalDpMod`, which cannot be seen from here: it
    adds its noise first, and what is done to a private update afterwards leaves it private, but its norm is no longer
    bounded by that of the clipped update, and the memory would carry noise from round to round.

    Its metrics in the reply: `fedfq-bytes`; `fedfq-ratio`; `fedfq-nmse`, the share of the energy of update and memory
    that the payload leaves out, before the gain.
    """
    if not (initial is None or callable(initial) or isinstance(initial, Mapping) or hasattr(initial, "state_dict")):
        raise TypeError(f"initial must be a module, a mapping from names to arrays, or a function; got {initial!r:.60}")
    session = ClientSession(ratio, basis, unbiased, error_feedback, gain)
    return FedFQMod(session, seed, Receiver(initial, session.uses_initial))


@dataclass(frozen=True)
class FedFQMod:
    session: ClientSession
    seed: int
    receiver: Receiver

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        category = message.metadata.message_type.partition(".")[0]
        is_ours = message.has_content() and find_order(message.content) is not None
        try:
            if category == MessageType.TRAIN:
                if not message.has_content():
                    raise Refusal("a message of training without a model")
                return self._train(message, context, call_next)
            if category == MessageType.EVALUATE and is_ours:
                return self._evaluate(message, context, call_next)
        except Lacking as lacking:
            lacks = MetricRecord({HELD: lacking.held.write()})
            return Message(RecordDict({LACKS: lacks}), reply_to=message)
        except Refusal as error:
            reason = printable(f"fedfq_mod on node {context.node_id}: {error}")
            log(ERROR, reason)
            return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=reason), reply_to=message)
        return call_next(message, context)

    def _evaluate(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        order = ModelOrder.read(find_order(message.content) or {})
        received = self._receive(order, message, context)
        reply = _call(call_next, message, context)
        if reply.has_content() and len(reply.content.metric_records) == 1:  # else the server can do nothing with it
            key, own = next(iter(reply.content.metric_records.items()))
            reply.content[key] = MetricRecord({**own, HELD: received.held.write()})
        return reply

    def _train(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        self._refuse_clipping(message.content)
        if (found := find_order(message.content)) is None:
            raise Refusal(
                "the message is not from fedfq.flower.Compressed: wrap the server's strategy, as in "
                "strategy = Compressed(FedAvg(...)). (Or fedfq_mod is in the list of mods twice.)"
            )
        order = TrainOrder.read(found)
        session = self.session
        if session.is_unbiased and not order.sketch:
            session = session.without_sketch()
            _say_once(
                "fedfq_mod: the server's strategy does more than average, or limits norms, so updates go without a "
                "sketch of what they leave out; error_feedback=True would send that later"
            )
        with refusing():
            codec = _make_codec(session, context.node_config)
        received = self._receive(order, message, context)
        given = dict(received.model)  # the app may take the Arrays out of its record
        reply = _call(call_next, message, context)
        if reply.has_error():
            return reply
        update = _update(reply.content, given)
        with refusing():
            basis = self._shared_basis(order, received, given)
        del given
        sent = self._encode(session, codec, update, order, received.memory, basis)
        _warn_of_errors(sent.nmse or 0.0, session.is_unbiased)
        sealed = seal(sent.payload, order.token)
        reply.content = _answer(
            reply.content,
            sealed,
            {
                BYTES: len(sealed),
                RATIO: raw_bytes(specs(update)) / len(sealed),
                NMSE: sent.nmse or 0.0,
                HELD: received.held.write(),
            },
        )
        return reply

    def _receive(self, order: ModelOrder | TrainOrder, message: Message, context: Context) -> Received:
        """The model; in the message, it is as the app expects it then."""
        content = message.content
        key, parcel = only_record(content)
        received = self.receiver.receive(order, parcel, context)
        message.content = RecordDict({**{n: r for n, r in content.items() if n != ORDER}, key: received.model})
        return received

    def _refuse_clipping(self, content: RecordDict) -> None:
        clipped = any(KEY_CLIPPING_NORM in config for config in content.config_records.values())
        if clipped and (self.session.has_memory or self.session.codec_gain not in (False, "none")):
            raise Refusal(
                "the server asks for clipped updates, and error feedback and gain would push them beyond the clipping "
                "norm, which voids the privacy bound: use fedfq_mod without both"
            )

    def _shared_basis(self, order: TrainOrder, received: Received, given: Mapping[str, Array]) -> SharedBasis | None:
        """The basis, or None where there is none (yet): before the model has moved, or if the initial one was lost."""
        if not self.session.uses_initial or not order.basis or received.initial is None:
            return None
        return _latest_basis.get((order.initial, received.digest), received.initial, given)

    def _encode(
        self,
        session: ClientSession,
        codec: Codec,
        update: dict[str, NDArray],
        order: TrainOrder,
        memory: Memory,
        basis: SharedBasis | None,
    ) -> Sent:
        """The payload; what it leaves out is in the memory then."""
        with refusing():  # what is not finite, or a budget that is too small
            # Of another model's tensors nothing is carried on: a server could send new names in every round.
            residual = memory.residual(order.accepted) if session.has_memory else {}
            before = {name: left for name, left in residual.items() if name in update}
            sent = session.encode(update, before, self.seed, basis, codec=codec, measure=True)
            if session.has_memory:
                memory.keep_residual(order.round, sent.residual, order.accepted)
        return sent


def _warn_of_errors(nmse: float, unbiased: bool) -> None:
    """Say once that payloads are too small for these updates."""
    if unbiased and nmse > NOISIEST:
        _say_once(
            f"fedfq_mod: the noise of payloads has over {NOISIEST:g} times the energy of the updates, which training "
            "may not bear: a smaller ratio has less"
        )
    elif not unbiased and nmse > EMPTIEST:
        _say_once(f"fedfq_mod: payloads leave out over {EMPTIEST:.0%} of the updates: a smaller ratio leaves out less")


@lru_cache
def _say_once(text: str) -> None:
    log(WARNING, text)


def _make_codec(session: ClientSession, node_config: Mapping[str, Any]) -> Codec:
    """The codec with this node's own budget, if it has one."""
    ratio, seconds, mbps = (
        _number(node_config, key) for key in ("fedfq-ratio", "fedfq-upload-seconds", "fedfq-uplink-mbps")
    )
    if ratio is not None and ratio < 1:
        raise Refusal(f"node config: fedfq-ratio must be at least 1, got {ratio:g}")
    if seconds is None:
        return session.make_codec() if ratio is None else session.make_codec(ratio=ratio)
    if ratio is not None or mbps is None:
        raise Refusal("node config: fedfq-upload-seconds goes with fedfq-uplink-mbps and without fedfq-ratio")
    return session.make_codec(max_bytes=max(1, int(seconds * mbps * 1e6 / 8)))


class _LatestBasis:
    """The basis of one round: in a simulation, many clients of it are trained in one process."""

    def __init__(self) -> None:
        self._models: tuple[str, str] | None = None
        self._basis: SharedBasis | None = None

    def get(
        self, digests: tuple[str, str], initial: Mapping[str, NDArray], given: Mapping[str, Array]
    ) -> SharedBasis | None:
        if self._models != digests:
            self._basis = derive_basis(views(given), initial)
            self._models = digests
        return self._basis


_latest_basis = _LatestBasis()


def _call(call_next: ClientAppCallable, message: Message, context: Context) -> Message:
    try:
        return call_next(message, context)
    except TypeError as error:
        if "BFloat16" not in str(error):
            raise
        raise Refusal(f"Flower's Array cannot carry bfloat16: {HOW_TO_SEND_BFLOAT16}") from error


def _update(content: RecordDict, given: Mapping[str, Array]) -> dict[str, NDArray]:
    """What the app returned minus what it was given, tensor by tensor."""
    returned = only_record(content)[1]
    if other := set(returned) ^ set(given):
        name = min(other)
        raise Refusal(f"the app {'returned' if name in returned else 'did not return'} the tensor {name!r}")
    update = {}
    for name, array in given.items():
        with refusing():
            new, old = (views({name: each})[name] for each in (returned[name], array))
        if new.shape != old.shape:
            raise Refusal(f"the app returned tensor {name!r} with shape {new.shape}, and was given {old.shape}")
        if new.dtype.kind != old.dtype.kind:
            raise Refusal(f"the app returned tensor {name!r} as {new.dtype}, and was given {old.dtype}")
        update[name] = difference(new, old)
    return update


def _answer(content: RecordDict, sealed: bytes, metrics: dict[str, Any]) -> RecordDict:
    """The app's reply with the payload in place of its model, and the metrics among its own."""
    records: dict[str, Any] = dict(content.items())
    if len(content.metric_records) != 1:
        raise Refusal(f"a reply of training has one MetricRecord; this one has {len(content.metric_records)}")
    key, own = next(iter(content.metric_records.items()))
    records[key] = MetricRecord({**own, **metrics})
    records[only_record(content)[0]] = ArrayRecord({"update": blob(sealed, UPDATE)})
    return RecordDict(records)


def _number(node_config: Mapping[str, Any], key: str) -> float | None:
    value = node_config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise Refusal(f"node config: {key} must be a positive number, got {value!r}")
    return float(value)
