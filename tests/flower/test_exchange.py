"""Second messages in a round: for nodes that lack something, for evaluations without the mod; and what nodes claim."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedfq.flower import Compressed, fedfq_mod
from fedfq.flower.protocol import HELD, LACKS, MODEL, NOTHING_HELD
from tests.flower.local import LocalGrid, app, arrays, record
from tests.updates import network

INITIAL = network(5)
RAW = sum(value.nbytes for value in INITIAL.values())


def size(message: Message) -> int:
    return sum(len(a.data) for r in message.content.array_records.values() for a in r.values())


def app_without_evaluation_mod() -> ClientApp:
    """The mod is where the README has it: on train alone."""
    client, inner = ClientApp(), app([])

    @client.train(mods=[fedfq_mod(32, initial=INITIAL)])
    def _(message: Message, context: Context) -> Message:
        return inner(message, context)

    @client.evaluate()
    def _(message: Message, context: Context) -> Message:
        return inner(message, context)

    return client


def evaluations(grid: LocalGrid) -> list[int]:
    return [size(message) for message in grid.log if message.metadata.message_type == "evaluate"]


def test_evaluation_and_the_next_training_are_one_version_and_sent_once() -> None:
    grid, strategy = LocalGrid(app([fedfq_mod(32, initial=INITIAL)]), 3), Compressed(FedAvg())
    result = strategy.start(grid, record(INITIAL), num_rounds=4)
    trainings = [size(message) for message in grid.log if message.metadata.message_type == "train"]
    assert max(trainings) < 50  # "go on with the version that you have"
    assert max(evaluations(grid)) < RAW / 4
    for metrics, sizes in (
        (result.train_metrics_clientapp, trainings),
        (result.evaluate_metrics_clientapp, evaluations(grid)),
    ):
        assert sum(metrics[round_]["fedfq-down-bytes"] for round_ in (1, 2, 3, 4)) == sum(sizes)


def test_metrics_of_an_evaluation_are_the_apps_own() -> None:
    grid, strategy = LocalGrid(app([fedfq_mod(32, initial=INITIAL)]), 3), Compressed(FedAvg())
    result = strategy.start(grid, record(INITIAL), num_rounds=2)
    assert set(result.evaluate_metrics_clientapp[2]) == {"loss", "fedfq-down-bytes"}
    held = strategy._downlink.model
    assert result.evaluate_metrics_clientapp[2]["loss"] == pytest.approx(sum(value.sum() for value in held.values()))


def test_nodes_without_the_mod_on_evaluate_get_the_plain_model() -> None:
    grid = LocalGrid(app_without_evaluation_mod(), 3)
    strategy = Compressed(FedAvg())
    result = strategy.start(grid, record(INITIAL), num_rounds=3)
    expected = sum(value.sum() for value in arrays(result.arrays).values())
    assert result.evaluate_metrics_clientapp[3]["loss"] == pytest.approx(expected)
    sizes = evaluations(grid)
    assert [each > RAW for each in sizes] == [False] * 3 + [True] * 9  # only in the first round they are asked twice


def test_some_nodes_may_have_the_mod_and_others_not() -> None:
    grid = LocalGrid(app([fedfq_mod(32, initial=INITIAL)]), 4)
    plain, whole = app_without_evaluation_mod(), grid.app
    grid.app = lambda message, context: (plain if context.node_id == 2 else whole)(message, context)
    strategy = Compressed(FedAvg())
    strategy.start(grid, record(INITIAL), num_rounds=3)
    later = [message for message in grid.log if message.metadata.message_type == "evaluate"][5:]
    assert {message.metadata.dst_node_id for message in later if size(message) > RAW} == {2}
    assert {message.metadata.dst_node_id for message in later if size(message) < RAW / 4} == {1, 3, 4}


def test_nobody_is_asked_a_third_time() -> None:
    """A node that says of everything that it lacks something is dropped by name, and the others go on."""
    grid, strategy = LocalGrid(app([fedfq_mod(32, initial=INITIAL)]), 4), Compressed(FedAvg(fraction_evaluate=0.0))
    honest = grid.app

    def lacking(message: Message, context: Context) -> Message:
        if context.node_id == 3:
            return Message(RecordDict({LACKS: MetricRecord({HELD: NOTHING_HELD.write()})}), reply_to=message)
        return honest(message, context)

    grid.app = lacking
    result = strategy.start(grid, record(INITIAL), num_rounds=2)
    assert sum(message.metadata.dst_node_id == 3 for message in grid.log) == 4
    for metrics in result.train_metrics_clientapp.values():
        assert (metrics["fedfq-dropped-nodes"], metrics["fedfq-dropped-held"]) == ([3], 1)


def test_second_messages_have_the_time_of_a_whole_round() -> None:
    """One that never answers may have used up that of the first messages."""
    grid, strategy = LocalGrid(app([fedfq_mod(32)]), 3), Compressed(FedAvg(fraction_evaluate=0.0))
    send, given = grid.send_and_receive, []

    def timed(messages: Any, *, timeout: float | None = None) -> Any:
        given.append(timeout)
        return send(messages, timeout=timeout)

    grid.send_and_receive = timed
    strategy.start(grid, record(INITIAL), num_rounds=1, timeout=77.0)
    assert len(given) >= 2 and set(given) == {77.0}


def test_a_node_decides_only_for_itself_whether_it_evaluates_with_the_mod() -> None:
    grid, strategy = LocalGrid(app([fedfq_mod(32, initial=INITIAL)]), 4), Compressed(FedAvg())

    honest = grid.app

    def hostile(message: Message, context: Context) -> Message:
        if context.node_id != 4 and message.metadata.message_type == "evaluate":
            return Message(Error(0, f"hostile {MODEL}"), reply_to=message)
        return honest(message, context)

    grid.app = hostile
    strategy.start(grid, record(INITIAL), num_rounds=3)
    later = [message for message in grid.log if message.metadata.message_type == "evaluate"][7:]
    assert {message.metadata.dst_node_id for message in later if size(message) < RAW / 4} == {4}


class Part(FedAvg):
    """Evaluates a part of the model, with a second record beside it."""

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        part = ArrayRecord({"fc.bias": arrays["fc.bias"]})
        messages = super().configure_evaluate(server_round, part, config, grid)
        for message in messages:
            if message.metadata.dst_node_id == 2:
                message.content["more"] = ArrayRecord({"fc.weight": arrays["fc.weight"]})
        return messages


def test_an_evaluation_of_something_else_is_sent_as_it_is() -> None:
    grid, strategy = LocalGrid(app([fedfq_mod(32, initial=INITIAL)]), 3), Compressed(Part())
    result = strategy.start(grid, record(INITIAL), num_rounds=2)
    assert result.evaluate_metrics_clientapp[2]["loss"] == pytest.approx(arrays(result.arrays)["fc.bias"].sum())


def test_a_model_that_changes_its_tensors_in_a_run_begins_anew() -> None:
    grid, strategy = LocalGrid(app([fedfq_mod(32)], lambda model, *_: model), 3), Compressed(FedAvg())
    for round_, model in ((1, INITIAL), (2, {"w": np.ones((30, 40), np.float32)}), (3, {"w": np.ones((40, 30), "f4")})):
        replies = grid.send_and_receive(strategy.configure_train(round_, record(model), ConfigRecord(), grid))
        _, metrics = strategy.aggregate_train(round_, replies)
        assert metrics["fedfq-dropped"] == metrics["fedfq-failed"] == 0


def test_integers_that_take_more_than_the_ratio_do_not_end_the_run() -> None:
    model = {"w": np.zeros((200, 50), np.float32), "count": np.zeros(500, np.int64)}

    def train(given: dict[str, Any], context: Any, round_: int) -> dict[str, Any]:
        rng = np.random.default_rng((round_, context.node_id))
        return {"w": given["w"] + np.float32(1), "count": given["count"] + rng.integers(0, 2**21, 500)}

    grid = LocalGrid(app([fedfq_mod(4, initial=model)], train), 3)
    strategy = Compressed(FedAvg(fraction_evaluate=0.0), down_ratio=20)
    result = strategy.start(grid, record(model), num_rounds=3)
    assert result.train_metrics_clientapp[3]["fedfq-dropped"] == 0


CLAIMS: dict[str, Any] = {
    "a version that is not there yet": [99, 0],
    "a version below nothing": [-7, 0],
    "another digest": [1, 12345],
    "a number": 3,
    "floats": [1.0, 2.0],
    "too many": [1, 2, 3],
    "none": [],
    "a digest beyond 64 bits": [0, 2**63 - 1],
}


@pytest.mark.parametrize("case", CLAIMS)
def test_what_a_node_claims_to_hold_hurts_nobody(case: str) -> None:
    """It is sent more than it needs, at most; what it really holds is found out in the same round."""
    grid, strategy = LocalGrid(app([fedfq_mod(32, initial=INITIAL)]), 3), Compressed(FedAvg(fraction_evaluate=0.0))

    def tamper(node: int, reply: Message) -> Message:
        if node == 2 and "metrics" in reply.content:
            reply.content["metrics"][HELD] = CLAIMS[case]
        return reply

    grid.tamper = tamper
    result = strategy.start(grid, record(INITIAL), num_rounds=4)
    for metrics in result.train_metrics_clientapp.values():
        assert metrics["fedfq-dropped"] == metrics["fedfq-failed"] == 0
    assert max(size(m) for m in grid.log if m.metadata.dst_node_id != 2) < RAW / 4
    assert np.isfinite(arrays(result.arrays)["fc.weight"]).all()
