"""The client mod: what it makes of an app's reply, what it refuses and how, and what it remembers."""

import logging

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg

import fedfq
from fedfq.flower import Compressed, fedfq_mod, mod
from fedfq.flower import memory as client_memory
from tests.flower.local import LocalGrid, app, arrays, drift, payload_of, record
from tests.updates import assert_identical, network

RAW = sum(value.nbytes for value in network(5).values())


class Server:
    """`Compressed(FedAvg())`, round after round."""

    def __init__(self, grid, model=None, strategy=None):
        self.grid = grid
        self.strategy = Compressed(FedAvg() if strategy is None else strategy)
        self.model = record(network(5) if model is None else model)
        self.number = 0

    def round(self, only=None):
        """One round; the replies as they arrived."""
        self.number += 1
        messages = self.strategy.configure_train(self.number, self.model, ConfigRecord(), self.grid)
        chosen = [message for message in messages if only is None or message.metadata.dst_node_id in only]
        replies = self.grid.send_and_receive(chosen)
        after, self.metrics = self.strategy.aggregate_train(self.number, replies)
        self.model = self.model if after is None else after
        return {reply.metadata.src_node_id: reply for reply in self.grid.replies}


def refusal(mods, train=None, **options):
    """What the server is told by node 1."""
    reply = Server(LocalGrid(app(mods, train), 2), **options).round()[1]
    assert reply.has_error()
    assert "node 1" in reply.error.reason
    return reply.error.reason


# What is sent


@pytest.mark.parametrize("basis", ["shared", "adaptive", "identity"])
@pytest.mark.parametrize("error_feedback", [True, False])
def test_the_payload_is_that_of_the_codec(basis, error_feedback):
    model = network(5)
    grid = LocalGrid(app([fedfq_mod(32, basis=basis, unbiased=False, error_feedback=error_feedback)]), 2)
    reply = Server(grid, model).round()[2]
    trained = drift(model, grid.contexts[2], 1)
    update = {name: trained[name] - model[name] for name in model}
    codec_basis = "identity" if basis == "identity" else "adaptive"
    assert payload_of(reply) == fedfq.encode(update, ratio=32, basis=codec_basis, gain="norm", layout="digest")


def test_nmse_is_what_the_payload_leaves_out():
    model = network(5)
    grid = LocalGrid(app([fedfq_mod(32, unbiased=False, error_feedback=False, gain=False)]), 2)
    reply = Server(grid, model).round()[2]
    decoded = fedfq.decode(payload_of(reply), like=model)
    trained = drift(model, grid.contexts[2], 1)
    names = [name for name in model if model[name].dtype == np.float32]
    error = sum(np.sum((trained[name] - model[name] - decoded[name]) ** 2) for name in names)
    assert reply.content["metrics"]["fedfq-nmse"] == pytest.approx(
        error / sum(np.sum((trained[name] - model[name]) ** 2) for name in names), rel=1e-3
    )


def test_the_apps_own_metrics_and_other_records_are_kept():
    client = ClientApp(mods=[fedfq_mod()])

    @client.train()
    def _(message, context):
        records = {"m": MetricRecord({"num-examples": 3, "loss": 0.25}), "a": message.content["arrays"]}
        return Message(RecordDict({**records, "c": ConfigRecord({"note": "hello"})}), reply_to=message)

    content = Server(LocalGrid(client, 2)).round()[1].content
    assert content["c"]["note"] == "hello"
    assert (content["m"]["num-examples"], content["m"]["loss"]) == (3, 0.25)
    assert [array.stype for array in content["a"].values()] == ["fedfq.v1"]


def test_a_torch_app_as_in_flowers_quickstart():
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 10))
    client = ClientApp()

    @client.train(mods=[fedfq_mod(16)])
    def _(message, context):
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(8, 64) * torch.arange(8)[:, None]).square().mean().backward()
        optimizer.step()
        metrics = MetricRecord({"train_loss": 0.5, "num-examples": 8})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    server = Server(LocalGrid(client, 2))
    server.model = ArrayRecord(net.state_dict())
    for round_ in (1, 2):
        server.round()
        assert server.metrics["fedfq-dropped"] == 0
        assert server.model["1.num_batches_tracked"].numpy() == round_
    net.load_state_dict(server.model.to_torch_state_dict())


def test_an_app_may_take_its_model_out_of_the_message():
    def with_pop(message, context):
        model = {name: message.content["arrays"].pop(name).numpy() for name in list(message.content["arrays"])}
        records = {"arrays": record(drift(model, context, 1)), "metrics": MetricRecord({"num-examples": 10})}
        return Message(RecordDict(records), reply_to=message)

    client = ClientApp(mods=[fedfq_mod(32)])
    client.train()(with_pop)
    popped, kept = Server(LocalGrid(client, 2)).round(), Server(LocalGrid(app([fedfq_mod(32)]), 2)).round()
    assert payload_of(popped[1]) == payload_of(kept[1])


def test_booleans_and_other_integers_travel_exactly():
    model = {"mask": np.array([True, False, True]), "count": np.array([7, 8], np.uint8), "w": np.zeros(400, np.float32)}

    def train(model, context, round_):
        return {"mask": ~model["mask"], "count": model["count"] - np.uint8(2), "w": model["w"] + np.float32(1)}

    server = Server(LocalGrid(app([fedfq_mod(8)], train), 2), model)
    server.strategy = Compressed(FedAvg())
    update = fedfq.decode(payload_of(server.round()[1]), like=model)
    np.testing.assert_array_equal(model["mask"] ^ update["mask"], [False, True, False])
    np.testing.assert_array_equal(model["count"] + update["count"], [5, 6])
    np.testing.assert_array_equal(arrays(server.model)["mask"], [False, True, False])


def test_only_train_messages_are_touched():
    grid, model = LocalGrid(app([fedfq_mod()]), 1), record(network(5))
    for kind in ("evaluate", "query"):
        content = RecordDict({"arrays": model, "config": ConfigRecord({"server-round": 1})})
        (reply,) = grid.send_and_receive([Message(content, dst_node_id=1, message_type=kind)])
        assert not reply.has_error()
        assert not any(key.startswith("fedfq") for record in reply.content.metric_records.values() for key in record)
    assert_identical(arrays(reply.content["arrays"]), arrays(model))  # the query's echo


def test_other_train_actions_are_train_messages_too():
    client = ClientApp(mods=[fedfq_mod(32, initial=network(5))])

    @client.train("gently")
    def _(message, context):
        return Message(
            RecordDict({"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}),
            reply_to=message,
        )

    grid = LocalGrid(client, 2)
    (first, _) = Compressed(FedAvg()).configure_train(1, record(network(5)), ConfigRecord(), grid)
    (reply,) = grid.send_and_receive([Message(first.content, dst_node_id=1, message_type="train.gently")])
    update = fedfq.decode(payload_of(reply), like=network(5))
    assert not any(value.any() for value in update.values())


def test_an_error_of_the_app_passes_as_it_is():
    client = ClientApp(mods=[fedfq_mod()])
    client.train()(lambda message, context: Message(Error(code=0, reason="no data today"), reply_to=message))
    assert Server(LocalGrid(client, 2)).round()[1].error.reason == "no data today"


# What is refused


def test_a_server_without_compressed_is_told_what_to_add():
    grid = LocalGrid(app([fedfq_mod()]), 2)
    grid.send_and_receive(FedAvg().configure_train(1, record(network(5)), ConfigRecord(), grid))
    assert "strategy = Compressed(FedAvg(...))" in grid.replies[0].error.reason


def test_a_mod_that_is_there_twice_says_so():
    assert "in the list of mods twice" in refusal([fedfq_mod(), fedfq_mod()])


def returned(change):
    def train(model, context, round_):
        change(model)
        return model

    return train


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.pop("fc.bias"), "did not return the tensor 'fc.bias'"),
        (lambda model: model.update(extra=np.zeros(3)), "returned the tensor 'extra'"),
        (lambda model: model.clear(), "did not return the tensor 'bn.num_batches_tracked'"),
        (
            lambda model: model.update({"fc.bias": np.zeros((20, 2), np.float32)}),
            r"'fc.bias' with shape (20, 2), and was given (40,)",
        ),
        (
            lambda model: model.update({"bn.num_batches_tracked": np.array(1.5)}),
            "'bn.num_batches_tracked' as float64, and was given int64",
        ),
        (
            lambda model: model.update({"fc.bias": np.full(40, np.inf, np.float32)}),
            "'fc.bias' has entries that are not finite",
        ),
        (lambda model: model.update({"bn.running_var": np.full(16, np.nan, np.float32)}), "'bn.running_var'"),
    ],
)
@pytest.mark.parametrize("error_feedback", [True, False])
def test_a_model_that_does_not_fit_is_refused_by_the_tensors_name(change, reason, error_feedback):
    assert reason in refusal([fedfq_mod(16, error_feedback=error_feedback)], returned(change))


def test_replies_without_a_model_or_metrics_are_refused():
    for records, reason in (
        ({}, "one ArrayRecord, the model; this one has 0"),
        ({"arrays": record(network(5))}, "one MetricRecord; this one has 0"),
    ):
        client = ClientApp(mods=[fedfq_mod(16)])
        client.train()(lambda message, context, records=records: Message(RecordDict(records), reply_to=message))
        assert reason in Server(LocalGrid(client, 2)).round()[1].error.reason


def test_bfloat16_comes_with_advice():
    torch = pytest.importorskip("torch")

    def train(model, context, round_):
        return ArrayRecord({name: torch.tensor(value).bfloat16() for name, value in model.items()})

    reason = refusal([fedfq_mod()], train)
    assert "bfloat16" in reason and "tensor.float()" in reason


@pytest.mark.parametrize("options", [{"error_feedback": True}, {"gain": "norm"}, {"unbiased": False}])
def test_error_feedback_and_gain_are_refused_where_updates_are_clipped(options):
    strategy = DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.1, 1.0, 2)
    reason = refusal([fedfq_mod(**options), fixedclipping_mod], strategy=strategy)
    assert "use fedfq_mod without both" in reason


def test_local_privacy_is_applied_before_the_mod():
    model = {"weight": np.zeros((60, 80), np.float32)}
    mods = [
        fedfq_mod(4, unbiased=False, error_feedback=False, gain=False),
        LocalDpMod(1.0, 1e-9, 1.0, 1e-5),
    ]  # clips; hardly any noise
    grid = LocalGrid(app(mods, lambda model, *_: {"weight": model["weight"] + np.float32(5)}), 2)
    update = fedfq.decode(payload_of(Server(grid, model).round()[1]), like=model)
    assert np.linalg.norm(update["weight"]) == pytest.approx(1.0, rel=0.01)


def test_options_are_checked_when_the_mod_is_made():
    for options in ({"basis": "none"}, {"gain": "double"}, {"ratio": -1}, {"ratio": 0.5}):
        with pytest.raises(ValueError):
            fedfq_mod(**options)


# Budgets of single nodes


def test_every_node_may_have_a_budget_of_its_own():
    budgets = {
        2: {"fedfq-ratio": 8},
        3: {"fedfq-upload-seconds": 2.0, "fedfq-uplink-mbps": 0.004},  # 1,000 bytes
    }
    server = Server(LocalGrid(app([fedfq_mod(64)]), 3, budgets))
    for _ in range(2):
        sizes = {node: len(payload_of(reply)) for node, reply in server.round().items()}
        assert server.metrics["fedfq-dropped"] == 0
        for node, budget in ((1, RAW / 64), (2, RAW / 8), (3, 1000)):
            assert 0.8 * budget < sizes[node] <= budget


@pytest.mark.parametrize(
    ("node_config", "reason"),
    [
        ({"fedfq-ratio": "much"}, "fedfq-ratio must be a positive number, got 'much'"),
        ({"fedfq-ratio": -2}, "fedfq-ratio must be a positive number"),
        ({"fedfq-ratio": 0.5}, "fedfq-ratio must be at least 1, got 0.5"),
        ({"fedfq-upload-seconds": 1}, "fedfq-upload-seconds goes with fedfq-uplink-mbps"),
        ({"fedfq-upload-seconds": 1, "fedfq-uplink-mbps": 1, "fedfq-ratio": 8}, "and without fedfq-ratio"),
        ({"fedfq-upload-seconds": 1, "fedfq-uplink-mbps": 1e-5}, "needs at least"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(node_config, reason):
    reply = Server(LocalGrid(app([fedfq_mod()]), 2, {1: node_config})).round()[1]
    assert reason in reply.error.reason and "node 1" in reply.error.reason


# Memory


def residual_of(grid, node, round_):
    return arrays(grid.contexts[node].state[f"fedfq-residual-{round_}"])


def test_what_a_payload_leaves_out_is_added_to_the_next():
    model = network(5)
    grid = LocalGrid(app([fedfq_mod(32, basis="adaptive", error_feedback=True)]), 2)
    server = Server(grid, model)
    memory = fedfq.ErrorFeedback(fedfq.Codec(ratio=32, gain="norm", layout="digest"))
    for round_ in (1, 2, 3):
        payload = payload_of(server.round()[1])
        before = server.strategy._downlink.model  # what the node was given
        trained = drift(before, grid.contexts[1], round_)
        assert payload == memory.encode({name: trained[name] - before[name] for name in before})
        assert_identical(residual_of(grid, 1, round_), memory.residual)


def test_a_reply_that_was_not_accepted_is_rolled_back():
    def lost(node, reply):
        return Message(Error(code=0, reason="lost"), reply_to=reply) if node == 1 and server.number in (2, 3) else reply

    model = network(5)
    grid = LocalGrid(app([fedfq_mod(32, basis="adaptive", error_feedback=True)]), 2)
    grid.tamper = lost
    server = Server(grid, model)
    memory = fedfq.ErrorFeedback(fedfq.Codec(ratio=32, gain="norm", layout="digest"))
    for round_ in (1, 2, 3, 4):
        reply = server.round()[1]
        before = server.strategy._downlink.model  # what the node was given
        trained = drift(before, grid.contexts[1], round_)
        payload = memory.encode({name: trained[name] - before[name] for name in before})
        if round_ in (2, 3):
            memory.rollback()
        else:
            assert payload_of(reply) == payload


def test_a_memory_of_which_the_server_knows_nothing_is_not_used():
    """As when a server starts again, and with it the count of rounds."""
    grid = LocalGrid(app([fedfq_mod(32, error_feedback=True)]), 2)
    first = Server(grid)
    fresh = payload_of(first.round()[1])
    first.round()
    assert payload_of(Server(grid).round()[1]) == fresh


def test_a_restarted_node_goes_on_with_what_is_on_its_disk(monkeypatch, flower_home):
    def run(restart):
        grid = LocalGrid(app([fedfq_mod(32, error_feedback=True)]), 2)
        server = Server(grid)
        payloads = []
        for _ in range(3):
            if restart:
                grid.restart(1)
            payloads.append(payload_of(server.round()[1]))
        return payloads

    in_memory = run(restart=False)
    assert run(restart=True)[1:] != in_memory[1:]
    assert not (flower_home / "fedfq").exists()
    monkeypatch.setattr(client_memory, "MAX_STATE_BYTES", 0)
    assert run(restart=True) == in_memory


def test_models_of_any_size_learn_the_same(monkeypatch):
    """Where the memory is, in the context or on disk, changes no byte."""
    runs = []
    for largest in (client_memory.MAX_STATE_BYTES, 0):
        monkeypatch.setattr(client_memory, "MAX_STATE_BYTES", largest)
        server = Server(LocalGrid(app([fedfq_mod(64, error_feedback=True)]), 2))
        runs.append([payload_of(reply) for _ in range(3) for reply in server.round().values()])
    assert runs[0] == runs[1]


# Unbiased payloads


def test_unbiased_payloads_are_sketched_and_leave_no_memory():
    model = network(5)
    grid = LocalGrid(app([fedfq_mod(16, unbiased=True)]), 2)
    server = Server(grid, model)
    for _ in range(2):
        reply = server.round()[2]
        assert fedfq.inspect(payload_of(reply), like=model).sketch_bytes > 0
        assert server.metrics["fedfq-dropped"] == 0
    assert not any(name.startswith("residual") for name in grid.contexts[2].state)


def test_clients_with_the_same_seed_have_noise_of_their_own():
    model = network(5)
    server = Server(LocalGrid(app([fedfq_mod(16, unbiased=True)]), 2), model)
    one, other = (fedfq.decode(payload_of(reply), like=model)["fc.weight"] for reply in server.round().values())
    assert abs(np.corrcoef(one.reshape(-1), other.reshape(-1))[0, 1]) < 0.5


def test_payloads_that_are_too_small_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").propagate = True
    mod._say_once.cache_clear()
    model = {"w": np.zeros((200, 300), np.float32)}
    update = np.random.default_rng(0).standard_normal((200, 300)).astype(np.float32)
    for unbiased, said in ((True, "over 100 times the energy"), (False, "leave out over 95%")):
        grid = LocalGrid(app([fedfq_mod(4000, unbiased=unbiased)], lambda given, *_: {"w": given["w"] + update}), 2)
        server = Server(grid, model)
        server.round()
        server.round()
        assert caplog.text.count(said) == 1
