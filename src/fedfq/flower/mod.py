"""The client's half: the model that the app returns goes out as one payload.

For every train message, the app gets the ordinary model, whatever way it travelled. From its reply the mod takes the
model, subtracts the one that it was given, encodes the difference and sends one Array of a few kilobytes. Messages of
other types pass untouched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

from .arrays import HOW_TO_SEND_BFLOAT16, NDArray, blob, difference, digest, packed_views, unpack, views
from .memory import Memory, memory_of
from .protocol import BYTES, NMSE, ORDER, RATIO, SETTLED, UPDATE, Refusal, TrainOrder, printable, seal

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
) -> Mod:
    """A client mod that sends updates `ratio` times smaller than float32; the server's strategy is `Compressed(...)`.

    Without a ratio, updates are 256 times smaller, but payloads have 4 KB at least: less saves nothing beside what
    Flower's messages take.

    basis           "shared": factors in the directions in which the model has moved so far, which both sides derive
                    from the initial model (sent to a node once); "adaptive" and "identity" as in `Codec`
    unbiased        noise instead of bias: what is left out is sketched (as in `Codec`), with neither memory nor gain.
                    The default, unless one of these is asked for. Where the strategy does more than average (median,
                    Krum, Adam, clipping) or `max_norm` is given, the server says so, and payloads have no sketch
    error_feedback  add what one payload left out to the next one, the default unless unbiased; it is kept in
                    `context.state` or, for models beyond 16 MB, on disk (`memory.py`)
    gain            as in `Codec`; the default is "norm" unless unbiased
    seed            of the random numbers with which factors are sought and sketches are made; it need not differ
                    between clients, as sketches of different updates have numbers of their own

    The reply carries the payload and 8 bytes that bind it to the node and the round.

    A node may have a budget of its own in its node config, of which the server need not know: `fedfq-ratio`, or
    `fedfq-upload-seconds` together with `fedfq-uplink-mbps`.

    The mod is the first of a list, so that others act on the model before it: `mods=[fedfq_mod(), fixedclipping_mod]`.
    With a clipping mod, ask for neither error feedback nor a gain: both make an update larger than the clipping norm,
    and are refused where the server asks for clipping. Nor with `LocalDpMod`, which cannot be seen from here: it
    adds its noise first, and what is done to a private update afterwards leaves it private, but its norm is no longer
    bounded by that of the clipped update, and the memory would carry noise from round to round.

    Its metrics in the reply: `fedfq-bytes`; `fedfq-ratio`; `fedfq-nmse`, the share of the energy of update and memory
    that the payload leaves out, before the gain.
    """
    return FedFQMod(ClientSession(ratio, basis, unbiased, error_feedback, gain), seed)


@dataclass(frozen=True)
class FedFQMod:
    session: ClientSession
    seed: int

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        try:
            return self._train(message, context, call_next)
        except Refusal as error:
            reason = printable(f"fedfq_mod on node {context.node_id}: {error}")
            log(ERROR, reason)
            return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=reason), reply_to=message)

    def _train(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        self._refuse_clipping(message.content)
        order, content, packed = _open(message.content)
        session = self.session
        if session.is_unbiased and not order.sketch:
            session = session.without_sketch()
            _say_once(
                "fedfq_mod: the server's strategy does more than average, or limits norms, so updates go without a "
                "sketch of what they leave out; error_feedback=True would send that later"
            )
        with _refusing():
            codec = _make_codec(session, context.node_config)
        given = dict(_only_record(content)[1])  # the app may take the Arrays out of its record
        with _refusing():
            memory = memory_of(context, given)
            self._keep_initial(order, memory, packed)
        message.content = content
        reply = _call(call_next, message, context)
        if reply.has_error():
            return reply
        update = _update(reply.content, given)
        with _refusing():
            basis = self._shared_basis(order, memory, given)
        del given, packed
        sent = self._encode(session, codec, update, order, memory, basis)
        _warn_of_errors(sent.nmse or 0.0, session.is_unbiased)
        sealed = seal(sent.payload, order.token)
        reply.content = _answer(
            reply.content,
            sealed,
            {
                BYTES: len(sealed),
                RATIO: raw_bytes(specs(update)) / len(sealed),
                NMSE: sent.nmse or 0.0,
                SETTLED: int(not self._uses_basis(order) or memory.has_initial(order.initial)),
            },
        )
        return reply

    def _refuse_clipping(self, content: RecordDict) -> None:
        clipped = any(KEY_CLIPPING_NORM in config for config in content.config_records.values())
        if clipped and (self.session.has_memory or self.session.codec_gain not in (False, "none")):
            raise Refusal(
                "the server asks for clipped updates, and error feedback and gain would push them beyond the clipping "
                "norm, which voids the privacy bound: use fedfq_mod without both"
            )

    def _uses_basis(self, order: TrainOrder) -> bool:
        return self.session.uses_initial and order.initial != ""

    def _keep_initial(self, order: TrainOrder, memory: Memory, packed: Mapping[str, Array]) -> None:
        """Keep the initial model, if that is what was sent or what was sent beside the model."""
        sent = packed["model"] if order.model == order.initial else packed.get("initial")
        if self._uses_basis(order) and sent is not None and not memory.has_initial(order.initial):
            memory.keep_initial(sent)

    def _shared_basis(self, order: TrainOrder, memory: Memory, given: Mapping[str, Array]) -> SharedBasis | None:
        """The basis, or None where there is none (yet): before the model has moved, or if the initial one was lost."""
        if not self._uses_basis(order) or order.model == order.initial or not memory.has_initial(order.initial):
            return None
        return _latest_basis.get(order, memory, given)

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
        with _refusing():  # what is not finite, or a budget that is too small
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
        self._order: tuple[str, str] | None = None
        self._basis: SharedBasis | None = None

    def get(self, order: TrainOrder, memory: Memory, given: Mapping[str, Array]) -> SharedBasis | None:
        if self._order != (order.model, order.initial):
            packed = memory.initial(order.initial)
            if packed is None:
                return None
            self._basis = derive_basis(views(given), packed_views(packed))
            self._order = (order.model, order.initial)
        return self._basis


_latest_basis = _LatestBasis()


def _open(content: RecordDict) -> tuple[TrainOrder, RecordDict, ArrayRecord]:
    """The order, the content as the app expects it, and the record of packed models."""
    config = content.config_records.get(ORDER)
    if config is None:
        raise Refusal(
            "the message is not from fedfq.flower.Compressed: wrap the server's strategy, as in "
            "strategy = Compressed(FedAvg(...)). (Or fedfq_mod is in the list of mods twice.)"
        )
    order = TrainOrder.read(config)
    key, packed = _only_record(content)
    if set(packed) not in ({"model"}, {"model", "initial"}):
        raise Refusal(f"the server sent {printable(', '.join(packed))!r:.60}, where a model, or two, are due")
    for name, array in packed.items():
        expected = getattr(order, name)
        if digest(array) != expected and not (name == "model" and expected == ""):
            raise Refusal(f"the server's {name} is not the one of digest {expected!r} that its order names")
    with _refusing():
        model = unpack(packed["model"])
        if "initial" in packed:
            packed_views(packed["initial"])
    records: dict[str, Any] = {name: record for name, record in content.items() if name != ORDER}
    return order, RecordDict({**records, key: ArrayRecord(model)}), packed


@contextmanager
def _refusing() -> Iterator[None]:
    """Tell the server in one line of bad values, and of a disk that cannot be written."""
    try:
        yield
    except (ValueError, OverflowError, OSError) as error:
        raise Refusal(str(error)) from error


def _call(call_next: ClientAppCallable, message: Message, context: Context) -> Message:
    try:
        return call_next(message, context)
    except TypeError as error:
        if "BFloat16" not in str(error):
            raise
        raise Refusal(f"Flower's Array cannot carry bfloat16: {HOW_TO_SEND_BFLOAT16}") from error


def _only_record(content: RecordDict) -> tuple[str, ArrayRecord]:
    records = list(content.array_records.items())
    if len(records) != 1:
        raise Refusal(f"a message of training has one ArrayRecord, the model; this one has {len(records)}")
    return records[0]


def _update(content: RecordDict, given: Mapping[str, Array]) -> dict[str, NDArray]:
    """What the app returned minus what it was given, tensor by tensor."""
    returned = _only_record(content)[1]
    if other := set(returned) ^ set(given):
        name = min(other)
        raise Refusal(f"the app {'returned' if name in returned else 'did not return'} the tensor {name!r}")
    update = {}
    for name, array in given.items():
        with _refusing():
            new, old = (views({name: each})[name] for each in (returned[name], array))
        if new.shape != old.shape:
            raise Refusal(f"the app returned tensor {name!r} with shape {new.shape}, and was given {old.shape}")
        if new.dtype.kind != old.dtype.kind:
            raise Refusal(f"the app returned tensor {name!r} as {new.dtype}, and was given {old.dtype}")
        update[name] = difference(new, old)
    return update


def _answer(content: RecordDict, sealed: bytes, metrics: dict[str, float]) -> RecordDict:
    """The app's reply with the payload in place of its model, and the metrics among its own."""
    records: dict[str, Any] = dict(content.items())
    if len(content.metric_records) != 1:
        raise Refusal(f"a reply of training has one MetricRecord; this one has {len(content.metric_records)}")
    key, own = next(iter(content.metric_records.items()))
    records[key] = MetricRecord({**own, **metrics})
    records[_only_record(content)[0]] = ArrayRecord({"update": blob(sealed, UPDATE)})
    return RecordDict(records)


def _number(node_config: Mapping[str, Any], key: str) -> float | None:
    value = node_config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise Refusal(f"node config: {key} must be a positive number, got {value!r}")
    return float(value)
