"""What is in a reply, which of it can be used, and the account of a round's replies."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from logging import WARNING
from typing import Any, NamedTuple

from flwr.app import Message, MetricRecord, RecordDict
from flwr.common.logger import log

from fedfq.codec.errors import FedFQError

from .arrays import size
from .limits import UNSCALED, Pair
from .protocol import BYTES, LACKS, MODEL, NMSE, RATIO, UPDATE, printable, unseal

DROPPED, SCALED, REWEIGHTED = "fedfq-dropped", "fedfq-scaled", "fedfq-reweighted"
FAILED = "fedfq-failed"  # nodes that answered with an error, or not at all
MEDIAN_NORM, LARGEST_NORM, LARGEST_SHARE = "fedfq-norm-median", "fedfq-norm-largest", "fedfq-share-largest"
SMALLEST_WEIGHT, LARGEST_WEIGHT = 1e-30, 1e30  # beyond, no numbers of examples; nor could float32 sums hold them
WORST_NMSE = 1e6  # a payload of zeros has 1; a sketch of few bytes has many times that


class Arrivals(NamedTuple):
    """What went out and came in in the last round."""

    downlink_bytes: int  # of all Arrays that went out
    uplink_bytes: int  # of all Arrays that came in, those of dropped replies too
    accepted: list[int]  # nodes
    dropped: list[tuple[int, str]]  # nodes, and why; those that failed themselves too


class Unusable(FedFQError):
    """A reply that is dropped, though its payload, if there is one, may be sound.

    `reason` is "reply" (not a payload and one record of metrics), "held", "version", "weight", "metrics", "norm",
    "sketch" or "replay".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


Kinds = tuple[tuple[str, int], ...]


@dataclass
class ReplyContent:
    """What is in a reply: the payload and its tag, the app's own metrics, and the mod's."""

    node: int
    key: str
    payload: memoryview
    tag: memoryview
    metrics_key: str
    metrics: MetricRecord
    weight_key: str | None
    weight: Any  # 1 for a strategy without weights; anything until it was checked
    nmse: float | None
    norms: Pair = UNSCALED  # until they are known
    norms_without_sketch: Pair = UNSCALED  # likewise
    scales: Pair = UNSCALED

    @property
    def kinds(self) -> Kinds:
        """The names of its records and metrics; of those that are lists, their length as well, of the others -1."""
        return ((self.key, -1), (self.metrics_key, -1), *_name_kinds(self.metrics))

    def check(self, loss_key: str | None) -> None:
        """Refuse a weight or loss that spoils every mean."""
        if not _is_weight(self.weight):
            raise Unusable("weight", f"the number by which it counts must be positive, got {self.weight!r}")
        if loss_key is not None:
            loss = self.metrics.get(loss_key)
            if not isinstance(loss, (int, float)) or not 0 <= loss < LARGEST_WEIGHT:
                raise Unusable("metrics", f"its {loss_key}, with which the strategy reckons, is {loss!r}")

    def check_kinds(self, usual: Kinds) -> None:
        """Refuse metrics that would end the run: strategies need the same ones in all replies."""
        if self.kinds != usual:
            raise Unusable("metrics", f"it has {_in_words(self.kinds)}; most replies have {_in_words(usual)}")

    def count_by(self, weight: float) -> None:
        """Let the strategy, too, see no other weight."""
        self.weight = weight
        if self.weight_key is not None:
            self.metrics[self.weight_key] = weight


def _is_weight(value: object) -> bool:
    return isinstance(value, (int, float)) and SMALLEST_WEIGHT < value < LARGEST_WEIGHT


def _name_kinds(metrics: MetricRecord) -> Kinds:
    """The names of metrics; of those that are lists, their length as well, of the others -1."""
    return tuple(sorted((name, len(value) if isinstance(value, list) else -1) for name, value in metrics.items()))


def _in_words(kinds: Kinds) -> str:
    return ", ".join(name if length < 0 else f"{name} ({length} numbers)" for name, length in kinds)


def read(node: int, content: RecordDict, weight_key: str | None) -> ReplyContent:
    arrays, metrics = list(content.array_records.items()), list(content.metric_records.items())
    if LACKS in content:
        raise Unusable("held", "it cannot use the model that it was sent, not even with all that it said it lacks")
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
    payload, tag = unseal(next(iter(record.values())).data)
    nmse = own.get(NMSE)
    return ReplyContent(
        node=node,
        key=key,
        payload=payload,
        tag=tag,
        metrics_key=metrics_key,
        metrics=_without_ours(own),
        weight_key=weight_key,
        weight=1.0 if weight_key is None else own.get(weight_key),
        nmse=float(nmse) if isinstance(nmse, (int, float)) and 0 <= nmse <= WORST_NMSE else None,
    )


def usual_kinds(answers: list[ReplyContent], before: Mapping[Kinds, int]) -> Kinds:
    """What most have; where as many have one as another, what most had in earlier rounds, then the first by name.

    Who answered first is of no account.
    """
    counts = Counter(answer.kinds for answer in answers)
    return min(counts, key=lambda kinds: (-counts[kinds], -before.get(kinds, 0), kinds), default=())


def select_evaluations(replies: Iterable[Message], weight_key: str | None) -> list[Message]:
    """Replies of an evaluation whose metrics are those that most have, with a weight that spoils no mean."""
    sound = []
    for reply in replies:
        if reply.has_content():
            for key, record in reply.content.metric_records.items():
                reply.content[key] = _without_ours(record)
            metrics = list(reply.content.metric_records.values())
            weight = metrics[0].get(weight_key) if len(metrics) == 1 and weight_key is not None else 1.0
            if len(metrics) == 1 and _is_weight(weight):
                sound.append((reply, _name_kinds(metrics[0])))
            else:
                _say_dropped(
                    reply, f"{len(metrics)} MetricRecords, and {weight!r:.60} as the number by which it counts"
                )
    counts = Counter(kinds for _, kinds in sound)
    usual = min(counts, key=lambda kinds: (-counts[kinds], kinds), default=())
    for reply, kinds in sound:
        if kinds != usual:
            _say_dropped(reply, f"it has {_in_words(kinds)}; most have {_in_words(usual)}")
    return [reply for reply, kinds in sound if kinds == usual]


def _without_ours(metrics: MetricRecord) -> MetricRecord:
    return MetricRecord({name: value for name, value in metrics.items() if not name.startswith("fedfq-")})


def _say_dropped(reply: Message, why: str) -> None:
    node = reply.metadata.src_node_id
    log(WARNING, "fedfq: the evaluation of node %s is dropped: %s", node, printable(why))


class RoundLedger:
    """A round's bytes, and whose replies were accepted, cut or dropped."""

    def __init__(self, raw: int) -> None:
        self._raw = raw
        self._sizes: list[int] = []
        self._answers: list[ReplyContent] = []
        self._dropped: list[tuple[int, str, str]] = []
        self._failed: list[tuple[int, str]] = []
        self._reweighted: list[int] = []

    def add_upload(self, content: RecordDict) -> None:
        self._sizes.append(size(content))

    def accept(self, answer: ReplyContent, claimed: float) -> None:
        """An answer with its scales and weight, and what weight it had asked for."""
        self._answers.append(answer)
        for what, norm, scale in zip(("norm", "norm of integers"), answer.norms, answer.scales):
            _say_if_less(answer.node, what, norm, norm * scale)
        _say_if_less(answer.node, "weight", claimed, answer.weight)
        if answer.weight != claimed:
            self._reweighted.append(answer.node)

    def add_failure(self, node: int, reason: str | None) -> None:
        """Note a reply that is an error; nothing is logged, as the strategy does so."""
        if reason is not None and MODEL in reason:  # Flower's own words of an Array that no mod has unpacked
            reason = "it cannot read what it was sent: add fedfq.flower.fedfq_mod() to the mods of the ClientApp"
        self._failed.append((node, printable(reason or "it failed")))

    def drop(self, node: int, reason: str, message: str) -> None:
        message = printable(message)  # some of it may be the client's own words
        log(WARNING, "fedfq: the reply of node %s is dropped (%s): %s", node, reason, message)
        self._dropped.append((node, reason, message))

    @property
    def accepted(self) -> list[int]:
        return [answer.node for answer in self._answers]

    def arrivals(self, downlink_bytes: int) -> Arrivals:
        dropped = [(node, f"{reason}: {message}") for node, reason, message in self._dropped]
        return Arrivals(downlink_bytes, sum(self._sizes), self.accepted, dropped + self._failed)

    def metrics(self, own: MetricRecord | None) -> MetricRecord:
        """The strategy's metrics and ours."""
        record = MetricRecord({} if own is None else dict(own))
        record[BYTES] = sum(self._sizes)
        if any(self._sizes):
            record[RATIO] = self._raw * len(self._sizes) / sum(self._sizes)
        if nmse := [answer.nmse for answer in self._answers if answer.nmse is not None]:
            record[NMSE] = statistics.median(nmse)
        if self._answers:
            norms = [answer.norms.floats for answer in self._answers]
            weights = [float(answer.weight) for answer in self._answers]
            record[MEDIAN_NORM], record[LARGEST_NORM] = statistics.median_low(norms), max(norms)
            record[LARGEST_SHARE] = max(weights) / sum(weights)
        scaled = [answer.node for answer in self._answers if answer.scales != UNSCALED]
        for name, nodes in (
            (SCALED, scaled),
            (REWEIGHTED, self._reweighted),
            (DROPPED, [n for n, *_ in self._dropped]),
        ):
            record[name] = len(nodes)
            if nodes:
                record[f"{name}-nodes"] = nodes
        record[FAILED] = len(self._failed)
        for reason, count in sorted(Counter(reason for _, reason, _ in self._dropped).items()):
            record[f"{DROPPED}-{reason}"] = count
        return record


def _say_if_less(node: int, what: str, sent: float, counted: float) -> None:
    if counted < sent:
        text = "fedfq: the reply of node %s counts for less: its %s is %.4g, where %.4g is allowed"
        log(WARNING, text, node, what, sent, counted)
