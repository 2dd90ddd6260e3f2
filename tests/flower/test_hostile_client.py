"""A client that does not mean well: it counts for no more than ten ordinary ones, and cannot say what others said."""

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    Krum,
    MultiKrum,
    Strategy,
)

import fedfq
from fedfq.flower import Compressed, fedfq_mod
from fedfq.flower.arrays import blob
from fedfq.flower.protocol import UPDATE
from tests.flower.local import LocalGrid, app, arrays, change_payloads, record, travelled
from tests.updates import Array as NDArray
from tests.updates import assert_identical, network

HONEST = 0.01  # what honest clients add to every weight
SHAPE = (40, 50)
LENGTH = HONEST * math.sqrt(2000)


def model() -> dict[str, NDArray]:
    return {"weight": np.zeros(SHAPE, np.float32), "steps": np.array([100, 200])}


def train(model: dict[str, NDArray], *_: Any) -> dict[str, NDArray]:
    return {"weight": model["weight"] + np.float32(HONEST), "steps": model["steps"] + 3}


def payload(weight: float, steps: int) -> bytes:
    update = {"weight": np.full(SHAPE, weight, np.float32), "steps": np.array([steps, steps])}
    return fedfq.encode(update, ratio=4, layout="digest")


def saying(node: int, data: bytes | None = None, **metrics: Any) -> Callable[[int, Message], Message]:
    """One node's replies with another payload, or with other metrics."""

    def tamper(who: int, reply: Message) -> Message:
        if who == node:
            change_payloads(reply, lambda honest: honest if data is None else data)
            for name, value in metrics.items():
                reply.content["metrics"][name.replace("_", "-")] = value
        return reply

    return tamper


class Server:
    """A strategy, round after round; replies arrive in any order."""

    def __init__(self, strategy: Strategy, nodes: int = 4, initial: Any = None, **options: Any) -> None:
        mod = fedfq_mod(4, unbiased=False, error_feedback=False, gain=False, initial=initial)
        self.grid = LocalGrid(app([mod], train), nodes)
        self.strategy = Compressed(strategy, **options)
        self.model = record(model())
        self.number = 0

    def round(self, backwards: bool = False, only: tuple[int, ...] | None = None) -> dict[str, NDArray]:
        """By how much the model moved."""
        self.number += 1
        before = arrays(self.model)
        messages = self.strategy.configure_train(self.number, self.model, ConfigRecord(), self.grid)
        asked = [message for message in messages if only is None or message.metadata.dst_node_id in only]
        replies = list(self.grid.send_and_receive(asked))
        after, self.metrics = self.strategy.aggregate_train(self.number, replies[::-1] if backwards else replies)
        self.model = self.model if after is None else after
        return {name: value - before[name] for name, value in arrays(self.model).items()}


# Updates that are too long


@pytest.mark.parametrize("strategy", [FedAvg, FedAvgM])
@pytest.mark.parametrize("weight", [3.4e38, -3.4e38, 1e20, 1.0])
def test_an_update_beyond_all_others_is_cut_to_ten_times_the_median(strategy, weight, caplog):
    logging.getLogger("flwr").propagate = True
    server = Server(strategy())
    server.grid.tamper = saying(1, payload(weight, 3))
    moved = server.round()
    assert np.linalg.norm(moved["weight"]) <= 10 * LENGTH
    assert "the reply of node 1 counts for less: its norm is" in caplog.text
    metrics = server.metrics
    assert (metrics["fedfq-scaled"], metrics["fedfq-scaled-nodes"], metrics["fedfq-dropped"]) == (1, [1], 0)
    assert metrics["fedfq-norm-median"] == pytest.approx(LENGTH, rel=0.01)
    assert metrics["fedfq-norm-largest"] == pytest.approx(abs(weight) * math.sqrt(2000), rel=0.01)


def test_the_cut_update_counts_by_its_whole_weight():
    """Node 1 has 10 of 100 examples: ten times too long is 10/100 * 10 + 90/100 * 1 = 1.9 in the mean."""
    server = Server(FedAvg())
    server.grid.tamper = saying(1, payload(5.0, 3))
    np.testing.assert_allclose(server.round()["weight"], 1.9 * HONEST, rtol=0.01)


def test_averaging_and_reading_one_by_one_make_the_same_of_it():
    class Reading(FedAvg):
        def aggregate_train(self, server_round, replies):
            return super().aggregate_train(server_round, replies)

    moved = []
    for strategy in (FedAvg(), Reading()):
        server = Server(strategy)
        server.grid.tamper = saying(1, payload(1e30, 10**15))
        moved.append(server.round())
    np.testing.assert_allclose(moved[0]["weight"], moved[1]["weight"], rtol=1e-4)
    np.testing.assert_allclose(moved[0]["steps"], moved[1]["steps"], atol=1)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("steps", [10**12, -(2**62)])
def test_integers_do_not_escape(steps, max_norm):
    """Whatever the floats' limit is: they have one of their own."""
    server = Server(FedAvg(), max_norm=max_norm)
    server.grid.tamper = saying(1, payload(HONEST, steps))
    moved = server.round()
    np.testing.assert_allclose(moved["weight"], HONEST, rtol=0.01)
    assert np.abs(moved["steps"]).max() <= 6  # 10 of 100 examples with 30 steps at most
    assert server.metrics["fedfq-scaled-nodes"] == [1]


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats_are_measured_as_they_are_added(dtype):
    server = Server(FedAvg())
    server.model = record(model() | {"weight": np.zeros(SHAPE, dtype)})
    server.grid.tamper = saying(1, payload(3e38, 3))
    np.testing.assert_allclose(server.round()["weight"], 1.9 * HONEST, rtol=0.02)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint64])
def test_integers_that_wrap_round_do_not_escape_either(dtype):
    start = {"weight": np.zeros(SHAPE, np.float32), "steps": np.array([100, 50], dtype)}
    server = Server(FedAvg())
    server.model = record(start)
    update = {"weight": np.full(SHAPE, HONEST, np.float32), "steps": np.array([100, 100], dtype)}
    server.grid.tamper = saying(1, fedfq.encode(update, ratio=4, layout="digest"))
    server.round()
    assert server.metrics["fedfq-scaled-nodes"] == [1]
    assert arrays(server.model)["steps"].tolist() == [106, 56]  # 0.9 * 3 + 0.1 * 30


def test_what_happens_does_not_depend_on_who_answers_first():
    models = []
    for backwards in (False, True):
        server = Server(FedAvg(), nodes=5)
        server.grid.tamper = saying(2, payload(3e38, 10**9), num_examples=10**12)
        for _ in range(2):
            server.round(backwards)
        models.append(arrays(server.model))
    assert_identical(models[0], models[1])


def test_with_two_replies_earlier_rounds_say_what_is_usual():
    server = Server(FedAvg())
    server.round()
    server.grid.tamper = saying(1, payload(1e10, 3))
    moved = server.round(only=(1, 2))
    assert np.linalg.norm(moved["weight"]) <= 10 * LENGTH
    assert server.metrics["fedfq-scaled-nodes"] == [1]


def test_two_clients_are_compared_with_what_they_sent_before():
    server = Server(FedAvg(), nodes=2)
    for _ in range(2):  # four replies are known then
        server.round()
    server.grid.tamper = saying(1, payload(1e10, 3), num_examples=10**12)
    assert np.linalg.norm(server.round()["weight"]) <= 10 * LENGTH
    assert (server.metrics["fedfq-scaled-nodes"], server.metrics["fedfq-reweighted-nodes"]) == ([1], [1])


def test_the_first_round_of_two_has_nothing_to_compare_with():
    """So it is documented; `max_norm` is for that."""
    server = Server(FedAvg(), nodes=2)
    server.grid.tamper = saying(1, payload(1e10, 3))
    assert np.linalg.norm(server.round()["weight"]) > 1e10
    assert server.metrics["fedfq-scaled"] == 0
    limited = Server(FedAvg(), nodes=2, max_norm=100.0)
    limited.grid.tamper = saying(1, payload(1e10, 3))
    assert np.linalg.norm(limited.round()["weight"]) <= 1.01 * LENGTH
    assert limited.metrics["fedfq-dropped-norm"] == 1


def test_limits_can_be_turned_off():
    server = Server(FedAvg(), norm_multiple=None, weight_multiple=None)
    server.grid.tamper = saying(1, payload(1e10, 3), num_examples=10**12)
    np.testing.assert_allclose(server.round()["weight"], 1e10, rtol=0.01)
    assert (server.metrics["fedfq-scaled"], server.metrics["fedfq-reweighted"]) == (0, 0)
    assert server.metrics["fedfq-share-largest"] > 0.99


@pytest.mark.parametrize("options", [{"norm_multiple": 0.5}, {"weight_multiple": 0}, {"norm_multiple": float("nan")}])
def test_a_multiple_below_one_is_refused(options):
    with pytest.raises(ValueError, match="must be at least 1"):
        Compressed(FedAvg(), **options)


def test_another_training_does_not_remember_what_was_usual():
    server = Server(FedAvg(), nodes=2)
    for _ in range(3):
        server.round()
    server.number = 0
    server.grid.tamper = lambda node, reply: saying(node, payload(1.0, 300))(node, reply)  # another model, say
    np.testing.assert_allclose(server.round()["weight"], 1.0, rtol=0.01)


class Watching:
    """What a strategy is given by node 1."""

    seen: NDArray

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.seen = replies[0].content["arrays"]["weight"].numpy()
        return super().aggregate_train(server_round, replies)


@pytest.mark.parametrize("base", [FedMedian, Krum, MultiKrum])
def test_strategies_that_judge_see_updates_as_they_were_sent(base):
    class Judging(Watching, base):
        pass

    strategy = Judging()
    server = Server(strategy, nodes=5)
    server.grid.tamper = saying(1, payload(7.0, 3))
    server.round()
    np.testing.assert_allclose(strategy.seen, 7.0, rtol=0.01)
    assert server.metrics["fedfq-scaled"] == 0


@pytest.mark.parametrize(
    "wrapper", [DifferentialPrivacyServerSideFixedClipping, DifferentialPrivacyClientSideFixedClipping]
)
def test_privacy_wrappers_clip_for_themselves(wrapper):
    """A scale that depends on the other clients would break what they promise."""

    class Private(Watching, wrapper):
        pass

    norm = 1000.0
    strategy = Private(FedAvg(), 0.0, norm, 4)
    server = Server(strategy)
    server.model = record({"weight": np.zeros(SHAPE, np.float32)})
    mods = [fixedclipping_mod] if wrapper is DifferentialPrivacyClientSideFixedClipping else []
    mods.insert(0, fedfq_mod(4, unbiased=False, error_feedback=False, gain=False))
    server.grid.app = app(mods, lambda model, *_: {"weight": model["weight"] + np.float32(HONEST)})
    update = fedfq.encode({"weight": np.full(SHAPE, 7.0, np.float32)}, ratio=4, layout="digest")
    server.grid.tamper = saying(1, update)
    server.round()
    np.testing.assert_allclose(strategy.seen, 7.0, rtol=0.01)
    assert server.metrics["fedfq-scaled"] == 0


# Weights that are too large


@pytest.mark.parametrize("max_norm", [None, 100.0])
@pytest.mark.parametrize("claimed", [10**12, 2**63 - 1, 1e29])
@pytest.mark.parametrize("strategy", [FedAvg, FedAdam, FedMedian, lambda: MultiKrum(num_nodes_to_select=4)])
def test_a_client_that_claims_all_examples_counts_for_ten(strategy, claimed, max_norm, caplog):
    logging.getLogger("flwr").propagate = True
    server = Server(strategy(), max_norm=max_norm)
    server.grid.tamper = saying(1, None, num_examples=claimed, loss=1.0)
    server.round()
    assert "the reply of node 1 counts for less: its weight is" in caplog.text
    assert (server.metrics["fedfq-reweighted-nodes"], server.metrics["fedfq-dropped"]) == ([1], 0)
    share = 300 / (20 + 300 + 30 + 40)  # the lower median of 20, 30, 40 and 10^12 is 30
    assert server.metrics["fedfq-share-largest"] == pytest.approx(share)
    assert server.metrics["loss"] == pytest.approx(share * 1.0 + (1 - share) * 0.5)


def test_the_model_is_averaged_by_the_weights_that_count():
    server = Server(FedAvg())
    server.grid.tamper = saying(1, payload(3 * HONEST, 3), num_examples=10**12)
    np.testing.assert_allclose(server.round()["weight"], HONEST * (3 * 300 + 90) / 390, rtol=0.01)


# Metrics


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("liar", [1, 2])
def test_a_tie_is_not_won_by_who_answers_first(liar, backwards):
    server = Server(FedAvg(), nodes=2)
    server.grid.tamper = saying(liar, None, zeal=1.0)
    server.round(backwards)
    assert server.metrics["fedfq-dropped-nodes"] == [liar]


def test_who_has_no_payload_has_no_vote():
    """Two replies of garbage with an extra metric would outvote the one that can be used."""
    server = Server(FedAvg(), nodes=3)

    def tamper(node: int, reply: Message) -> Message:
        return reply if node == 2 else saying(node, b"garbage" * 9, accuracy=1.0)(node, reply)

    server.grid.tamper = tamper
    np.testing.assert_allclose(server.round()["weight"], HONEST, rtol=0.01)
    assert server.metrics["fedfq-dropped-nodes"] == [1, 3]
    assert server.metrics["fedfq-dropped-magic"] == 2


@pytest.mark.parametrize("nmse", [1e300, -1e300, float("nan"), float("inf")])
def test_an_absurd_error_is_left_out_of_the_rounds(nmse):
    server = Server(FedAvg())
    server.grid.tamper = saying(1, None, fedfq_nmse=nmse)
    server.round()
    assert 0 <= server.metrics["fedfq-nmse"] <= 1


# Replays


def replayed(server: Server, old: Message, node: int) -> Callable[..., Any]:
    """The grid of a network that gives the server an old reply for a node's."""
    ask = server.grid.send_and_receive

    def send_and_receive(messages: Any, **_: Any) -> list[Message]:
        replies = list(ask(messages))
        for reply in replies:
            if reply.metadata.src_node_id == node:
                reply.content = travelled(old).content
        return replies

    return send_and_receive


def test_a_reply_of_an_earlier_round_is_refused():
    server = Server(FedAvg())
    server.round()
    old = server.grid.replies[0]
    server.grid.send_and_receive = replayed(server, old, 1)
    server.round()
    assert (server.metrics["fedfq-dropped-replay"], server.metrics["fedfq-dropped-nodes"]) == (1, [1])
    np.testing.assert_allclose(arrays(server.model)["weight"], 2 * HONEST, rtol=0.01)


def test_a_reply_of_another_node_is_refused():
    server = Server(FedAvg(), initial=model())
    messages = server.strategy.configure_train(1, server.model, ConfigRecord(), server.grid)
    replies = list(server.grid.send_and_receive(messages))
    replies[0].content = travelled(replies[1]).content
    _, metrics = server.strategy.aggregate_train(1, replies)
    assert (metrics["fedfq-dropped-replay"], metrics["fedfq-dropped-nodes"]) == (1, [1])


def test_a_reply_counts_once():
    server = Server(FedAvg(), initial=model())
    messages = server.strategy.configure_train(1, server.model, ConfigRecord(), server.grid)
    replies = list(server.grid.send_and_receive(messages))
    _, metrics = server.strategy.aggregate_train(1, [*replies, travelled(replies[1])])
    assert (metrics["fedfq-dropped-replay"], metrics["fedfq-dropped-nodes"]) == (1, [2])


def test_a_payload_without_its_tag_is_refused():
    server = Server(FedAvg(), initial=model())
    messages = server.strategy.configure_train(1, server.model, ConfigRecord(), server.grid)
    replies = list(server.grid.send_and_receive(messages))
    for reply, tag in zip(replies, (b"", bytes(7), bytes(8))):
        data = reply.content["arrays"]["update"].data
        reply.content["arrays"]["update"] = blob(data[:-8] + tag, UPDATE)
    _, metrics = server.strategy.aggregate_train(1, replies)
    assert metrics["fedfq-dropped-nodes"] == [1, 2, 3]
    assert metrics["fedfq-dropped-replay"] == 1  # the others' payloads lack their last bytes


def test_tokens_are_new_for_every_node_and_round():
    server = Server(FedAvg())
    tokens = []
    for _ in range(3):
        server.round()
        tokens += [message.content["fedfq.order"]["token"] for message in server.grid.sent]
    assert len(set(tokens)) == 12


def test_tokens_change_no_bit_of_the_model():
    def run() -> dict[str, NDArray]:
        grid = LocalGrid(app([fedfq_mod(64)]), 3)
        return arrays(Compressed(FedAvg()).start(grid, record(network(5)), num_rounds=3).arrays)

    assert_identical(run(), run())


@pytest.mark.parametrize("metrics", [{"extra": 1.0}, {"loss": [1.0, 2.0]}, {"num-examples": float("nan")}])
def test_an_evaluation_that_would_end_the_run_is_dropped(metrics):
    grid = LocalGrid(app([fedfq_mod(4)], train), 5)

    def tamper(who: int, reply: Message) -> Message:
        if who == 2 and "arrays" not in reply.content:
            for name, value in metrics.items():
                reply.content["metrics"][name] = value
        return reply

    grid.tamper = tamper
    model = {"weight": np.zeros(SHAPE, np.float32), "steps": np.zeros(2, np.int64)}
    result = Compressed(FedAvg(fraction_evaluate=1.0)).start(grid, record(model), num_rounds=1)
    assert np.isfinite(result.evaluate_metrics_clientapp[1]["loss"])
