"""The server's half: `Compressed` stands around any strategy and gives it ordinary models for payloads.

Down, the model is packed into one Array for all nodes, with a few numbers for each. Up, a reply's payload is decoded
against the model of the round. Strategies that average as FedAvg does never see single replies: payloads are added up
one at a time, in the memory of one model. All others get Arrays that are decoded when they are read, after each
payload was decoded once to see whether it is sound.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from logging import INFO, WARNING
from typing import Any, NamedTuple, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, FedXgbBagging, FedXgbCyclic, Strategy
from flwr.serverapp.strategy.dp_adaptive_clipping import DifferentialPrivacyAdaptiveBase
from flwr.serverapp.strategy.dp_fixed_clipping import DifferentialPrivacyFixedClippingBase
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM

from fedfq.codec.decode import Accumulator, decode
from fedfq.codec.errors import FedFQError, PayloadError
from fedfq.codec.format.layout import raw_bytes
from fedfq.codec.shared_basis import SharedBasis
from fedfq.codec.tensors import specs

from .arrays import UPDATE, Decoded, NDArray, as_dtype, digest, moved, pack, packed_views, size, views
from .mod import BYTES, NMSE, ORDER, RATIO, SETTLED, Order, derive

DROPPED = "fedfq-dropped"
LONGEST = 300  # characters of a reason
TINY, LARGEST = 1e-30, 1e30  # weights beyond are no numbers of examples, and float32 sums could not hold them
PRIVACY = (DifferentialPrivacyFixedClippingBase, DifferentialPrivacyAdaptiveBase)

T = TypeVar("T")


class Compressed(Strategy):
    """Let `strategy` work with clients that have `fedfq_mod`.

    shared_basis  send a node the initial model once, so that it can use the shared basis of later rounds
    max_norm      drop updates whose Euclidean norm, over all floating-point tensors, is larger. Numbers that are not
                  finite are never decoded; but without a bound, finite ones may be as large as float32 allows

    It is the outermost wrapper: `Compressed(DifferentialPrivacyServerSideFixedClipping(FedAvg(...), ...))`. A reply
    that cannot be used is dropped, with node and reason in the log, and the round goes on with the others. The
    aggregated metrics have, besides the strategy's own, `fedfq-bytes` (of all payloads, dropped ones too),
    `fedfq-ratio` (of them all), `fedfq-nmse` (the clients' mean), `fedfq-dropped`, and where that is not 0
    `fedfq-dropped-nodes` and a count for every reason, such as `fedfq-dropped-checksum`.

    The global model keeps its dtypes, whatever the strategy makes of them; means of integers are rounded.
    Strategies that compare replies (median, trimmed mean, Krum, Bulyan) hold all of them decoded, as they always do;
    those that average as FedAvg does see none, and so does their `train_metrics_aggr_fn`.
    """

    def __init__(self, strategy: Strategy, *, shared_basis: bool = True, max_norm: float | None = None) -> None:
        if isinstance(strategy, Compressed):
            raise ValueError("the strategy is Compressed already")
        if isinstance(strategy, (FedXgbBagging, FedXgbCyclic)):
            raise ValueError(f"{type(strategy).__name__} sends trees, and Compressed updates of a model's tensors")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm!r}")
        self.strategy = strategy
        self.shared_basis = shared_basis
        self.max_norm = max_norm
        self._begin()

    def _begin(self) -> None:
        """A new training: nothing is known of the nodes."""
        self._number = 0  # the round of the last model that was sent
        self._initial: Array | None = None  # the first one, packed
        self._initial_digest = ""
        self._settled: set[int] = set()  # nodes that have it, or do not want it
        self._accepted: dict[int, int] = {}  # the round of each node's last reply that was taken
        self._round: _Round | None = None  # between configure_train and aggregate_train
        self._models = 0  # that were sent in this round
        self._kinds: Kinds = ()  # of records and metrics that most replies of the last round had
        self.last = Arrivals(0, 0, [], [])

    def summary(self) -> None:
        log(INFO, "\t├──> fedfq: payloads from the clients, one packed Array to them")
        log(INFO, "\t│\t├── Shared basis: %s", self.shared_basis)
        log(INFO, "\t│\t└── Largest norm of an update: %s", self.max_norm)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        _refuse_outside(sys._getframe(1).f_locals.get("self"))
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        if not messages:
            return messages
        if server_round <= self._number:
            self._begin()
        self._number = server_round
        key, model = _model(messages)
        packed = pack(model)
        model_digest = digest(packed) if self.shared_basis else ""
        if self.shared_basis and self._initial is None:
            self._initial, self._initial_digest = packed, model_digest
        self._round = _Round(views(model), self._initial, self.max_norm, _clipping_norm(messages[0].content))
        alone = both = ArrayRecord({"model": packed})
        if self._initial is not None and model_digest != self._initial_digest:
            both = ArrayRecord({"model": packed, "initial": self._initial})
        self._models = 0
        for message in messages:  # they share one content; what differs from node to node is small
            node = message.metadata.dst_node_id
            record = alone if node in self._settled else both
            self._models += len(record)
            order = Order(server_round, self._accepted.get(node, 0), model_digest, self._initial_digest)
            message.content = RecordDict({**message.content, key: record, ORDER: ConfigRecord(order._asdict())})
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        round_, self._round = self._round, None
        if round_ is None:
            return self.strategy.aggregate_train(server_round, replies)
        averages = _averages(self.strategy) and round_.can_be_averaged
        take = _Round.add if averages else _Round.checked
        weight_key, loss_key = _keys(self.strategy)
        ledger = _Ledger(raw_bytes(specs(round_.base)))
        passed: list[Message] = []
        answers: list[tuple[Message, _Answer]] = []
        for reply in replies:
            if reply.has_error():
                passed.append(reply)
                ledger.failed(reply.metadata.src_node_id, reply.error.reason)
                continue
            ledger.sent(reply.content)
            try:
                answers.append((reply, _read(reply.content, weight_key)))
            except Unusable as error:
                ledger.drop(reply.metadata.src_node_id, error.reason, str(error))
        usual = self._kinds = _usual([answer.kinds for _, answer in answers], self._kinds)
        for reply, answer in answers:
            node = reply.metadata.src_node_id
            try:
                answer.check(usual, loss_key)
                record = take(round_, answer)
            except (PayloadError, Unusable) as error:
                ledger.drop(node, error.reason, str(error))
                continue
            reply.content = RecordDict({**reply.content, answer.key: record, answer.metrics_key: answer.metrics})
            passed.append(reply)
            ledger.accept(node, answer)
        arrays, metrics = None, None
        if passed:  # not all strategies can do with nothing at all
            arrays, metrics = self.strategy.aggregate_train(server_round, passed)
        if arrays is not None:
            arrays = round_.averaged() if averages else round_.with_dtypes(arrays)
            self._accepted.update(dict.fromkeys(ledger.accepted, server_round))
        self._settled = (self._settled | ledger.settled) - ledger.unsettled
        self.last = ledger.arrivals(self._models)
        return arrays, ledger.metrics(metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy has it: the app's evaluation need not have the mod."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)


class Arrivals(NamedTuple):
    """What went out and came in in the last round."""

    models: int  # that were sent: one a node, and the initial one where it was sent as well
    uplink_bytes: int  # of all Arrays that came in, those of dropped replies too
    accepted: list[int]  # nodes
    dropped: list[tuple[int, str]]  # nodes, and why; those that failed themselves too


class Unusable(FedFQError):
    """A reply that is dropped, though its payload, if there is one, may be sound.

    `reason` is "reply" (not a payload and one record of metrics), "version", "weight", "metrics" or "norm".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


Kinds = tuple[tuple[str, int], ...]


class _Answer(NamedTuple):
    """What is in a reply: the payload, the app's own metrics, and the mod's."""

    key: str
    payload: bytes
    metrics_key: str
    metrics: MetricRecord
    weight: Any  # 1 for a strategy without weights; anything until it was checked
    nmse: float | None
    settled: bool

    @property
    def kinds(self) -> Kinds:
        """The names of its records and metrics; of those that are lists, their length as well, of the others -1."""
        metrics = sorted((name, len(value) if isinstance(value, list) else -1) for name, value in self.metrics.items())
        return ((self.key, -1), (self.metrics_key, -1), *metrics)

    def check(self, usual: Kinds, loss_key: str | None) -> None:
        """Refuse what strategies cannot do with: a weight or loss that spoils every mean, metrics that would end the
        run."""
        if not isinstance(self.weight, (int, float)) or not TINY < self.weight < LARGEST:
            raise Unusable("weight", f"the number by which it counts must be positive, got {self.weight!r}")
        if self.kinds != usual:
            raise Unusable("metrics", f"it has {_in_words(self.kinds)}; most replies have {_in_words(usual)}")
        if loss_key is not None:
            loss = self.metrics.get(loss_key)
            if not isinstance(loss, (int, float)) or not 0 <= loss < LARGEST:
                raise Unusable("metrics", f"its {loss_key}, with which the strategy reckons, is {loss!r}")


def _in_words(kinds: Kinds) -> str:
    return ", ".join(name if length < 0 else f"{name} ({length} numbers)" for name, length in kinds)


class _Total(Accumulator):
    def means(self) -> Iterator[tuple[str, NDArray]]:
        """The mean, tensor by tensor; each sum is forgotten first, so that the two never take two models' memory."""
        for spec in list(self.layout):
            self.layout = [spec]
            mean = self.mean()[spec.name]
            del self._sums[spec.name]
            yield spec.name, mean


class _Round:
    """What the server knows in a round: the model that was sent, and how to decode updates of it."""

    def __init__(
        self,
        base: Mapping[str, NDArray],
        initial: Array | None,
        max_norm: float | None,
        clipping_norm: float | None,
    ) -> None:
        self.base = base
        self._initial = initial
        self._max_norm = max_norm
        self._clipping_norm = clipping_norm
        self._basis: SharedBasis | None = None
        self._total: _Total | None = None

    @property
    def can_be_averaged(self) -> bool:
        """Updates of integers wrap round where they have no sign or few bits: then only the models have a mean."""
        dtypes = [old.dtype for old in self.base.values()]
        return not any(dtype.kind == "u" or (dtype.kind == "i" and dtype.itemsize < 4) for dtype in dtypes)

    def add(self, answer: _Answer) -> ArrayRecord:
        """Add a payload to the mean. The strategy gets a record without tensors: `averaged` is what it would make."""
        if self._max_norm is not None:
            self._decode(answer.payload)
        total = self._total = self._total or _Total(like=self.base)
        self._with_basis(lambda basis: total.add(answer.payload, answer.weight, shared_basis=basis))
        return ArrayRecord()

    def averaged(self) -> ArrayRecord:
        """theta + the mean of the updates (Eq. 4)."""
        assert self._total is not None
        self._basis = None
        record = ArrayRecord()
        for name, mean in self._total.means():
            record[name] = Array(moved(self.base[name], mean))
        return record

    def checked(self, answer: _Answer) -> ArrayRecord:
        """The reply's model, to be decoded when it is read; it was decoded once, so that nothing can fail then."""
        self._decode(answer.payload)
        return Decoded(self.base, lambda: self._decode(answer.payload)).record()

    def with_dtypes(self, arrays: ArrayRecord) -> ArrayRecord:
        """What a strategy made of the model, in the model's dtypes. (FedAdam, or a mean of integers, is float64.)"""
        for name, old in self.base.items():
            if name in arrays and arrays[name].dtype != str(old.dtype):
                arrays[name] = Array(as_dtype(arrays[name].numpy(), old.dtype))
        return arrays

    def _decode(self, payload: bytes) -> dict[str, NDArray]:
        update = self._with_basis(lambda basis: decode(payload, like=self.base, shared_basis=basis))
        if self._max_norm is not None and (norm := _norm(update)) > self._max_norm:
            raise Unusable("norm", f"an update with norm {norm:.4g}, where {self._max_norm:.4g} is allowed")
        # The client clipped what it encoded; what is decoded may be a little longer.
        if self._clipping_norm is not None and (norm := _norm(update)) > self._clipping_norm:
            for array in update.values():
                if array.dtype.kind == "f":
                    array *= self._clipping_norm / norm
        return update

    def _with_basis(self, use: Callable[[SharedBasis | None], T]) -> T:
        """`use` the shared basis, which is derived when the first payload needs it."""
        try:
            return use(self._basis)
        except PayloadError as error:
            if error.reason != "basis" or self._basis is not None or self._initial is None:
                raise
        self._basis = derive(self.base, packed_views(self._initial))
        return use(self._basis)


class _Ledger:
    """A round's bytes, and whose replies were accepted or dropped."""

    def __init__(self, raw: int) -> None:
        self._raw = raw
        self._sizes: list[int] = []
        self._nmse: list[float] = []
        self._dropped: list[tuple[int, str, str]] = []
        self._failed: list[tuple[int, str]] = []
        self.accepted: list[int] = []
        self.settled: set[int] = set()
        self.unsettled: set[int] = set()

    def sent(self, content: RecordDict) -> None:
        self._sizes.append(size(content))

    def accept(self, node: int, answer: _Answer) -> None:
        self.accepted.append(node)
        (self.settled if answer.settled else self.unsettled).add(node)
        if answer.nmse is not None:
            self._nmse.append(answer.nmse)

    def failed(self, node: int, reason: str | None) -> None:
        """It says so itself, and so does the strategy's log."""
        self._failed.append((node, (reason or "it failed")[:LONGEST]))

    def drop(self, node: int, reason: str, message: str) -> None:
        message = message[:LONGEST]  # some of it may be the client's own words
        log(WARNING, "fedfq: the reply of node %s is dropped (%s): %s", node, reason, message)
        self._dropped.append((node, reason, message))
        if reason == "basis":  # perhaps it has another initial model
            self.unsettled.add(node)

    def arrivals(self, models: int) -> Arrivals:
        dropped = [(node, f"{reason}: {message}") for node, reason, message in self._dropped]
        return Arrivals(models, sum(self._sizes), self.accepted, dropped + self._failed)

    def metrics(self, own: MetricRecord | None) -> MetricRecord:
        """The strategy's metrics and ours."""
        record = MetricRecord({} if own is None else dict(own))
        record[BYTES] = sum(self._sizes)
        record[DROPPED] = len(self._dropped)
        if any(self._sizes):
            record[RATIO] = self._raw * len(self._sizes) / sum(self._sizes)
        if self._nmse:
            record[NMSE] = sum(self._nmse) / len(self._nmse)
        if self._dropped:
            record[f"{DROPPED}-nodes"] = [node for node, *_ in self._dropped]
        for reason, count in sorted(Counter(reason for _, reason, _ in self._dropped).items()):
            record[f"{DROPPED}-{reason}"] = count
        return record


def _refuse_outside(caller: object) -> None:
    """A privacy wrapper around `Compressed` would clip payloads, or count replies that are dropped inside."""
    if isinstance(caller, PRIVACY):
        name = type(caller).__name__
        raise ValueError(f"{name} must see decoded models: write Compressed({name}(strategy, ...)), not the reverse")


def _averages(strategy: Strategy) -> bool:
    """Whether the strategy aggregates just as FedAvg does."""
    return isinstance(strategy, FedAvg) and type(strategy).aggregate_train is FedAvg.aggregate_train


def _model(messages: list[Message]) -> tuple[str, ArrayRecord]:
    """The model that all messages of a round carry, and its name in them."""
    records = list(messages[0].content.array_records.items())
    if len(records) != 1:
        raise ValueError(
            f"Compressed needs a strategy that sends one ArrayRecord, the model; this one has {len(records)}"
        )
    key, model = records[0]
    if any(message.content.get(key) is not model for message in messages):
        raise ValueError("Compressed needs a strategy that sends the same model to all nodes of a round")
    return key, model


def _clipping_norm(content: RecordDict) -> float | None:
    """To what the clients are told to clip their updates."""
    for config in content.config_records.values():
        if KEY_CLIPPING_NORM in config:
            return float(config[KEY_CLIPPING_NORM])  # type: ignore[arg-type]
    return None


def _keys(strategy: Strategy) -> tuple[str | None, str | None]:
    """The metrics by which the strategy, or the one that it stands around, weighs replies: their number of examples,
    and in QFedAvg their loss."""
    while isinstance(inner := getattr(strategy, "strategy", None), Strategy):
        strategy = inner
    return getattr(strategy, "weighted_by_key", None), getattr(strategy, "train_loss_key", None)


def _usual(kinds: list[Kinds], before: Kinds) -> Kinds:
    """What most have; where as many have one as another, what was usual before."""
    counts = Counter(kinds)
    return max(counts, key=lambda each: (counts[each], each == before), default=before)


def _read(content: RecordDict, weight_key: str | None) -> _Answer:
    arrays, metrics = list(content.array_records.items()), list(content.metric_records.items())
    if len(arrays) != 1 or len(metrics) != 1:
        raise Unusable(
            "reply", f"{len(arrays)} ArrayRecords and {len(metrics)} MetricRecords, where one of each is due"
        )
    (key, record), (metrics_key, own) = arrays[0], metrics[0]
    types = {array.stype for array in record.values()}
    if len(record) != 1 or not next(iter(types)).startswith("fedfq."):
        raise Unusable("reply", "it has no payload: add fedfq.flower.fedfq_mod() to the mods of the ClientApp")
    if types != {UPDATE}:
        raise Unusable(
            "version", f"a payload of type {types.pop()!r}, where {UPDATE!r} is read: update fedfq here or there"
        )
    nmse = own.get(NMSE)
    return _Answer(
        key=key,
        payload=next(iter(record.values())).data,
        metrics_key=metrics_key,
        metrics=MetricRecord({name: value for name, value in own.items() if not name.startswith("fedfq-")}),
        weight=1.0 if weight_key is None else own.get(weight_key),
        nmse=float(nmse) if isinstance(nmse, (int, float)) and math.isfinite(nmse) else None,
        settled=own.get(SETTLED) == 1,
    )


def _norm(update: Mapping[str, NDArray]) -> float:
    return math.sqrt(sum(float(np.sum(np.square(a, dtype=np.float64))) for a in update.values() if a.dtype.kind == "f"))
