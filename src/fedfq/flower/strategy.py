"""The server's half: `Compressed` stands around any strategy and gives it ordinary models for payloads.

Down, a node is sent what leads to the model from what it holds, in one Array (`downlink.py`), and clients train from an
approximation of the model. Up, a reply's payload is decoded and added to the model itself, which nothing degrades: that
is what strategies see. Strategies that average as FedAvg does never see single replies: payloads are added up
one at a time, in the memory of one model. All others get Arrays that are decoded when they are read. Before, each
payload was decoded once to see whether it is sound and how long it is: no client owns the mean (`limits.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from logging import ERROR, INFO
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    Bulyan,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    Krum,
    MultiKrum,
    Result,
    Strategy,
)
from flwr.serverapp.strategy.dp_adaptive_clipping import DifferentialPrivacyAdaptiveBase
from flwr.serverapp.strategy.dp_fixed_clipping import DifferentialPrivacyFixedClippingBase
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM

from fedfq.codec.errors import FedFQError, PayloadError
from fedfq.codec.format.layout import raw_bytes
from fedfq.codec.ratio import check_ratio
from fedfq.codec.tensors import specs

from .arrays import size, views
from .downlink import AllBits, Differences, Downlink
from .exchange import Exchange
from .limits import DEFAULT_MULTIPLE, UNSCALED, Limits
from .protocol import ORDER, ModelOrder, TrainOrder, new_token
from .replies import Arrivals, Kinds, ReplyContent, RoundLedger, Unusable, read, select_evaluations, usual_kinds
from .round import ServerRound

PRIVACY = (DifferentialPrivacyFixedClippingBase, DifferentialPrivacyAdaptiveBase)
DOWN_BYTES, LEFT_OUT = "fedfq-down-bytes", "fedfq-left-out"
PATIENCE_S = 3600.0  # for a round, where nobody says; Flower's own
Answered = tuple[Message, ReplyContent]  # a reply, and what was read in it
JUDGES = (FedMedian, FedTrimmedAvg, Krum, MultiKrum, Bulyan, *PRIVACY)


class NothingAccepted(FedFQError):
    """A training in which no update was accepted in any round."""


class Compressed(Strategy):
    """Let `strategy` work with clients that have `fedfq_mod`.

    down_ratio       float32 bytes of the model / bytes of a message, at least; None: 128, but 4 KB or more (`Broadcast`
                     says which messages may be longer). 1: all bits of the model, each time
    initial_ratio    how many times smaller than float32 the initial model is sent to nodes that do not make it. What
                     that decodes to is the initial model for the server as well. None: all of its bits
    shared_basis     let payloads be in the directions in which the model has moved since the initial one
    max_norm         drop updates whose Euclidean norm, over all floating-point tensors, is larger
    norm_multiple    an update that is longer than so many times the median of its round is scaled down to that;
                     integers are judged by themselves. None: finite numbers may be as large as float32 allows
    weight_multiple  a weight (`num-examples`) that is larger than so many times the median counts for that; None: for
                     whatever the client says

    It is the outermost wrapper: `Compressed(DifferentialPrivacyServerSideFixedClipping(FedAvg(...), ...))`. A reply
    that cannot be used is dropped, with node and reason in the log, and the round goes on with the others. The
    aggregated metrics have, besides the strategy's own, `fedfq-bytes` (of all payloads, dropped ones too),
    `fedfq-ratio` (of them all), `fedfq-down-bytes` (of all Arrays to the nodes; of evaluations, it is in their own
    metrics), `fedfq-left-out` (what nodes lack of the model, as energy over that of a round's change), `fedfq-nmse`
    (the clients' median; above 1 for payloads whose noise is larger than the update), `fedfq-norm-median` and
    `fedfq-norm-largest` (as they were sent), `fedfq-share-largest` (of the weights, as they count), and how many
    replies were `fedfq-dropped`, `fedfq-scaled` or `fedfq-reweighted`. Where that is not 0, `fedfq-dropped-nodes` and
    so on say whose, and there is a count for every reason, such as `fedfq-dropped-checksum`.

    What is usual is the lower median of the round; with fewer than three replies, that of the replies before. So in a
    first round with one or two replies there is nothing to compare with: there, only `max_norm` limits an update.
    Strategies that judge updates themselves (median, trimmed mean, Krum, Bulyan) or clip them (differential privacy,
    where a scale that depends on other clients would break the accounting) see them as they were sent.

    The global model keeps its dtypes, whatever the strategy makes of them; means of integers are rounded.
    Strategies that compare replies (median, trimmed mean, Krum, Bulyan) hold all of them decoded, as they always do;
    those that average as FedAvg does see none, and so does their `train_metrics_aggr_fn`.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        down_ratio: float | None = None,
        initial_ratio: float | None = None,
        shared_basis: bool = True,
        max_norm: float | None = None,
        norm_multiple: float | None = DEFAULT_MULTIPLE,
        weight_multiple: float | None = DEFAULT_MULTIPLE,
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise TypeError(f"Compressed goes around a strategy, as in Compressed(FedAvg(...)); got {strategy!r}")
        if isinstance(strategy, Compressed):
            raise ValueError("the strategy is Compressed already")
        if isinstance(strategy, (FedXgbBagging, FedXgbCyclic)):
            raise ValueError(f"{type(strategy).__name__} sends trees, and Compressed updates of a model's tensors")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm!r}")
        for name, multiple in (("norm_multiple", norm_multiple), ("weight_multiple", weight_multiple)):
            if multiple is not None and not multiple >= 1:
                raise ValueError(f"{name} must be at least 1, or None for no limit; got {multiple!r}")
        for name, ratio in (("down_ratio", down_ratio), ("initial_ratio", initial_ratio)):
            if ratio is not None:
                check_ratio(ratio, name)
        if down_ratio == 1 and initial_ratio is not None:
            raise ValueError("initial_ratio does not go with a down_ratio of 1")
        self.strategy = strategy
        self.down_ratio = down_ratio
        self.initial_ratio = initial_ratio
        self.shared_basis = shared_basis
        self.max_norm = max_norm
        self.norm_multiple = norm_multiple
        self.weight_multiple = weight_multiple
        self._starts = False  # between begin and end of `start`
        self._useful_rounds = 0  # in which an update was accepted
        self._useless_rounds = 0
        self._is_wrapped = False  # another strategy was started, and stands around this one
        self._timeout_s = PATIENCE_S
        self._begin()

    def _begin(self) -> None:
        """A new training: nothing is known of the nodes."""
        self._number = 0  # the round of the last model that was sent
        self._downlink: Downlink | None = None
        self._exchange: Exchange | None = None  # between configure and aggregate
        self._down_bytes = 0  # of Arrays to nodes that evaluate, as the strategy sends them
        self._accepted: dict[int, int] = {}  # the round of each node's last reply that was taken
        self._round: ServerRound | None = None  # between configure_train and aggregate_train
        self._without_mod: set[int] = set()  # nodes whose evaluation has none
        self._kinds: Counter[Kinds] = Counter()  # of records and metrics, of all replies that were accepted
        self._limits = Limits(self.norm_multiple, self.weight_multiple)
        self.last = Arrivals(0, 0, [], [])

    def start(self, *args: Any, **options: Any) -> Result:
        """Run the federation, as `Strategy.start` does."""
        self._starts = True
        self._timeout_s = _timeout(*args, **options)
        self._useful_rounds = self._useless_rounds = 0
        try:
            result = super().start(*args, **options)
        finally:
            self._starts = False
        if self._useless_rounds and not self._useful_rounds:
            raise NothingAccepted(
                f"no client sent anything that could be used in {self._useless_rounds} rounds, so nothing was "
                f"trained; the last reason: {self.last.dropped[-1][1] if self.last.dropped else 'no reply'}"
            )
        return result

    def summary(self) -> None:
        # Flower asks the strategy that it starts for a summary, and that one asks those inside.
        self._is_wrapped = not self._starts
        log(INFO, "\t├──> fedfq: payloads from the clients, and one Array to them")
        log(INFO, "\t│\t├── Ratio of the way down: %s", self.down_ratio or "128, but 4 KB or more")
        log(INFO, "\t│\t├── Shared basis: %s", self.shared_basis)
        log(INFO, "\t│\t├── Largest norm of an update: %s", self.max_norm)
        log(INFO, "\t│\t├── Largest norm in multiples of the median: %s", self.norm_multiple)
        log(INFO, "\t│\t└── Largest weight in multiples of the median: %s", self.weight_multiple)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if self._is_wrapped:
            raise ValueError(
                "Compressed must be the outermost strategy: write Compressed(Other(strategy)), not "
                "Other(Compressed(strategy)); a privacy wrapper around it would clip payloads instead of models"
            )
        if server_round <= self._number or not (self._downlink is None or self._downlink.fits(arrays)):
            self._begin()
        if self._downlink is None:
            downlink = self._make_downlink(arrays)
            arrays = downlink.start  # what the initial model is for everybody
        else:
            downlink = self._downlink
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        if not messages:
            return messages
        key, model = _find_model(messages)
        if not downlink.fits(model):
            raise ValueError("the strategy sends out another model than the one that it was given to train")
        downlink.advance(model)
        self._downlink, self._number = downlink, server_round
        clipping_norm = _clipping_norm(messages[0].content)
        sketch = _is_linear(self.strategy) and self.max_norm is None and clipping_norm is None
        initial = downlink.initial if self.shared_basis else None
        round_ = ServerRound(views(model), downlink.model, initial, self.max_norm, clipping_norm, sketch)

        def make(node: int, content: RecordDict) -> RecordDict:
            token = new_token()
            round_.tokens[node] = token
            accepted = self._accepted.get(node, 0)
            order = TrainOrder(server_round, downlink.digest, accepted, self.shared_basis, sketch, token)
            return _with_order(content, key, downlink.record(node), order)

        self._round, self._exchange = round_, Exchange(grid, self._timeout_s, downlink, messages, make)
        return messages

    def _make_downlink(self, initial: ArrayRecord) -> Downlink:
        if self.down_ratio == 1:
            return AllBits(initial, self.shared_basis)
        return Differences(initial, self.down_ratio, self.initial_ratio)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        round_, self._round = self._round, None
        exchange, self._exchange = self._exchange, None
        if round_ is None or exchange is None:
            return self.strategy.aggregate_train(server_round, replies)
        averages = _averages(self.strategy) and round_.can_be_averaged
        ledger = RoundLedger(raw_bytes(specs(round_.base)))
        # In the order of nodes: sums depend on it in their last bits, and who answers first has no say.
        arrived = sorted(exchange.complete(replies), key=lambda reply: reply.metadata.src_node_id)
        passed = [reply for reply in arrived if reply.has_error()]
        for reply in passed:
            ledger.add_failure(reply.metadata.src_node_id, reply.error.reason)
        sound = self._select_sound(round_, [reply for reply in arrived if reply.has_content()], ledger)
        answers = self._select_alike(sound, ledger)
        self._limit([answer for _, answer in answers], ledger)
        for reply, answer in answers:
            record = round_.add(answer) if averages else round_.decode_later(answer)
            reply.content = RecordDict({**reply.content, answer.key: record, answer.metrics_key: answer.metrics})
            passed.append(reply)
        arrays, metrics = None, None
        if passed:  # not all strategies can do with nothing at all
            arrays, metrics = self.strategy.aggregate_train(server_round, passed)
        if arrays is not None:
            arrays = round_.average() if averages else round_.restore_dtypes(arrays)
            self._accepted.update(dict.fromkeys(ledger.accepted, server_round))
        self.last = ledger.arrivals(exchange.bytes)
        self._count_round(server_round)
        all_metrics = ledger.metrics(metrics)
        all_metrics[DOWN_BYTES] = exchange.bytes
        if self._downlink is not None and self._downlink.left_out is not None:
            all_metrics[LEFT_OUT] = self._downlink.left_out
        return arrays, all_metrics

    def _count_round(self, number: int) -> None:
        """Say so if nothing came of a round."""
        if self.last.accepted:
            self._useful_rounds += 1
            return
        self._useless_rounds += 1
        reasons = {reason for _, reason in self.last.dropped} or {"no node answered"}
        log(ERROR, "fedfq: no reply of round %s could be used, so the model stays as it was: %s", number, min(reasons))

    def _select_sound(self, round_: ServerRound, replies: list[Message], ledger: RoundLedger) -> list[Answered]:
        """The replies of which each for itself can be used, with their norms."""
        weight_key, loss_key = _find_keys(self.strategy)
        found = []
        for reply in replies:
            node = reply.metadata.src_node_id
            ledger.add_upload(reply.content)
            try:
                answer = read(node, reply.content, weight_key)
                answer.check(loss_key)
                round_.measure(answer)
            except (PayloadError, Unusable) as error:
                ledger.drop(node, error.reason, str(error))
            else:
                found.append((reply, answer))
        return found

    def _select_alike(self, answers: list[Answered], ledger: RoundLedger) -> list[Answered]:
        """The answers with the metrics that most have."""
        usual = usual_kinds([answer for _, answer in answers], self._kinds)
        found = []
        for reply, answer in answers:
            try:
                answer.check_kinds(usual)
            except Unusable as error:
                ledger.drop(answer.node, error.reason, str(error))
            else:
                found.append((reply, answer))
        self._kinds[usual] += len(found)
        return found

    def _limit(self, answers: list[ReplyContent], ledger: RoundLedger) -> None:
        """Accept answers, none for much more than is usual."""
        scales = self._limits.scales(
            [answer.norms_without_sketch for answer in answers], [answer.norms.floats for answer in answers]
        )
        weights = self._limits.weights([answer.weight for answer in answers])
        left_alone = _judges(self.strategy)
        for answer, scale, weight in zip(answers, scales, weights):
            claimed = answer.weight
            answer.scales = UNSCALED if left_alone else scale
            answer.count_by(weight)
            ledger.accept(answer, claimed)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy has it, but nodes with the mod are sent what leads to the model that they will train next."""
        messages = list(self.strategy.configure_evaluate(server_round, arrays, config, grid))
        downlink, packed = self._downlink, []
        self._down_bytes = 0
        for message in messages:
            if isinstance(downlink, Differences) and self._evaluates_with_mod(downlink, message):
                packed.append(message)
            else:
                self._down_bytes += size(message.content)
        if not packed or not isinstance(downlink, Differences):
            return messages
        key, model = _find_model(packed)
        downlink.advance(model)
        order = ModelOrder(server_round, downlink.digest)

        def make(node: int, content: RecordDict) -> RecordDict:
            return _with_order(content, key, downlink.record(node), order)

        self._exchange = Exchange(grid, self._timeout_s, downlink, packed, make, without_mod=True)
        return messages

    def _evaluates_with_mod(self, downlink: Differences, message: Message) -> bool:
        """Unless the node did not before, or what it is to evaluate is not the model that is trained."""
        records = list(message.content.array_records.values())
        is_trained = len(records) == 1 and downlink.fits(records[0])
        return is_trained and message.metadata.dst_node_id not in self._without_mod

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the strategy has it, of replies with the metrics that most have: one with others would end the run."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            replies = exchange.complete(replies)
            self._down_bytes += exchange.bytes
            self._without_mod |= exchange.without_mod
        weight_key, _ = _find_keys(self.strategy)
        arrived = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
        kept = [reply for reply in arrived if reply.has_error()] + select_evaluations(arrived, weight_key)
        metrics = self.strategy.aggregate_evaluate(server_round, kept) if kept else None
        return None if metrics is None else MetricRecord({**metrics, DOWN_BYTES: self._down_bytes})


def _judges(strategy: Strategy) -> bool:
    """Whether the strategy, or the one that it stands around, has rules of its own for updates that are too long."""
    return isinstance(strategy, JUDGES) or (
        isinstance(inner := getattr(strategy, "strategy", None), Strategy) and _judges(inner)
    )


def _averages(strategy: Strategy) -> bool:
    """Whether the strategy aggregates just as FedAvg does."""
    return isinstance(strategy, FedAvg) and type(strategy).aggregate_train is FedAvg.aggregate_train


def _is_linear(strategy: Strategy) -> bool:
    """Whether noise that is right in the mean stays so: not where updates are squared, compared or clipped."""
    return _averages(strategy) or type(strategy) is FedAvgM


def _find_model(messages: list[Message]) -> tuple[str, ArrayRecord]:
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


def _with_order(content: RecordDict, key: str, record: ArrayRecord, order: TrainOrder | ModelOrder) -> RecordDict:
    """What a node is sent: the strategy's content with this record in place of the model, and the order."""
    return RecordDict({**content, key: record, ORDER: ConfigRecord(order._asdict())})


def _timeout(
    grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = PATIENCE_S, **_: Any
) -> float:
    """How many seconds a round may take, of the arguments of `Strategy.start`."""
    return timeout


def _clipping_norm(content: RecordDict) -> float | None:
    """To what the clients are told to clip their updates."""
    for config in content.config_records.values():
        if KEY_CLIPPING_NORM in config:
            return float(config[KEY_CLIPPING_NORM])  # type: ignore[arg-type]
    return None


def _find_keys(strategy: Strategy) -> tuple[str | None, str | None]:
    """The metrics by which the strategy, or the one that it stands around, weighs replies: their number of examples,
    and in QFedAvg their loss."""
    while isinstance(inner := getattr(strategy, "strategy", None), Strategy):
        strategy = inner
    return getattr(strategy, "weighted_by_key", None), getattr(strategy, "train_loss_key", None)
