"""`Compressed` around every strategy: what comes out is what the strategy makes of models decoded by hand."""

import gc
import logging
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedXgbBagging,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)

import fedfq
from fedfq.flower import Compressed, fedfq_mod
from fedfq.flower.protocol import TAG_BYTES
from fedfq.flower.strategy import NothingAccepted
from tests.flower.local import LocalGrid, app, arrays, change_payloads, number, payload_of, record, travelled
from tests.updates import Array as NDArray
from tests.updates import assert_identical, network

NODES = 7
INITIAL = network(5)  # which nodes make themselves, where it is the initial model
COUNTER = "bn.num_batches_tracked"

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "FedAvg": FedAvg,
    "FedProx": lambda: FedProx(proximal_mu=0.1),
    "FedAvgM": lambda: FedAvgM(server_learning_rate=0.9, server_momentum=0.5),
    "FedAdam": FedAdam,
    "FedYogi": FedYogi,
    "FedAdagrad": FedAdagrad,
    "QFedAvg": lambda: QFedAvg(0.1, train_loss_key="loss"),
    "FedMedian": FedMedian,
    "FedTrimmedAvg": FedTrimmedAvg,
    "Krum": lambda: Krum(num_malicious_nodes=1),
    "MultiKrum": lambda: MultiKrum(num_malicious_nodes=1, num_nodes_to_select=3),
    "Bulyan": lambda: Bulyan(num_malicious_nodes=1),
    "server-side fixed clipping": lambda: DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 1.0, NODES),
    "server-side adaptive clipping": lambda: DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 0.1, NODES),
    "client-side fixed clipping": lambda: DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.1, 1.0, NODES),
    "client-side adaptive clipping": lambda: DifferentialPrivacyClientSideAdaptiveClipping(FedAvg(), 0.1, NODES),
}
MODS = {"client-side fixed clipping": [fixedclipping_mod], "client-side adaptive clipping": [adaptiveclipping_mod]}
WITHOUT = {"unbiased": False, "error_feedback": False, "gain": False}
OPTIONS = {name: WITHOUT for name in MODS}


def by_hand(reply: Message, model: dict[str, NDArray], basis: fedfq.SharedBasis) -> Message:
    """The reply as a client without the mod would have sent it, had it trained to just what the payload says."""
    reply = travelled(reply)
    update = fedfq.decode(payload_of(reply), like=model, shared_basis=basis)
    own = {key: value for key, value in reply.content["metrics"].items() if not key.startswith("fedfq-")}
    new = record({name: value + update[name] for name, value in model.items()})
    reply.content = RecordDict({"arrays": new, "metrics": MetricRecord(own)})
    return reply


@pytest.fixture
def little_garbage():
    """Flower collects garbage whenever Bulyan reads a reply; what this session already holds need not be looked at."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("down_ratio", [None, 1])
@pytest.mark.parametrize("name", STRATEGIES)
def test_three_rounds_are_those_of_decoding_by_hand(name, down_ratio, little_garbage):
    """What strategies see is their own model plus the updates, whatever clients trained from."""
    initial = network(5)
    if "clipping" in name or name == "QFedAvg":
        del initial[COUNTER]  # Flower's do not work with integers
    grid = LocalGrid(app([fedfq_mod(32, **OPTIONS.get(name, {}), initial=initial), *MODS.get(name, [])]), NODES)
    compressed, reference = Compressed(STRATEGIES[name](), down_ratio=down_ratio), STRATEGIES[name]()
    model = record(initial)
    for round_ in (1, 2, 3):
        before = arrays(model)
        replies = grid.send_and_receive(compressed.configure_train(round_, model, ConfigRecord(), grid))
        held = compressed._downlink.model
        assert (down_ratio == 1) == all((held[name] == before[name]).all() for name in held) or round_ == 1
        basis = fedfq.SharedBasis(held, initial)
        expected_replies = [by_hand(reply, before, basis) for reply in grid.replies]
        reference.configure_train(round_, record(before), ConfigRecord(), grid)
        np.random.seed(round_)  # noqa: NPY002 (what Flower's noise is drawn from)
        expected, expected_metrics = reference.aggregate_train(round_, expected_replies)
        np.random.seed(round_)  # noqa: NPY002
        model, metrics = compressed.aggregate_train(round_, replies)

        assert metrics["loss"] == pytest.approx(expected_metrics["loss"])
        assert metrics["fedfq-dropped"] == 0
        for key, value in arrays(expected).items():
            new = arrays(model)[key]
            assert (new.dtype, new.shape) == (before[key].dtype, before[key].shape), key
            tolerance = 1 if key == COUNTER else 1e-5 * np.abs(value).max()
            np.testing.assert_allclose(new, value, rtol=0, atol=tolerance, err_msg=f"{key} in round {round_}")
        assert any((arrays(model)[key] != before[key]).any() for key in before)


def test_lazily_decoded_models_are_exactly_those_decoded_by_hand():
    seen = {}

    class Watching(FedAvg):
        def aggregate_train(self, server_round, replies):
            seen.update({reply.metadata.src_node_id: arrays(reply.content["arrays"]) for reply in replies})
            return super().aggregate_train(server_round, replies)

    grid, compressed, model = LocalGrid(app([fedfq_mod(32, initial=INITIAL)]), 3), Compressed(Watching()), network(5)
    replies = grid.send_and_receive(compressed.configure_train(1, record(model), ConfigRecord(), grid))
    compressed.aggregate_train(1, replies)
    for reply in grid.replies:
        update = fedfq.decode(payload_of(reply), like=model)
        assert_identical(seen[reply.metadata.src_node_id], {name: model[name] + update[name] for name in model})


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("strategy", [FedAvg, FedAdam])
def test_models_of_other_floats_keep_their_dtype(strategy, dtype):
    model = {name: value.astype(dtype) if value.dtype == np.float32 else value for name, value in network(5).items()}
    grid = LocalGrid(app([fedfq_mod(16, initial=INITIAL)]), 3)
    result = Compressed(strategy()).start(grid, record(model), num_rounds=2)
    assert {name: value.dtype for name, value in arrays(result.arrays).items()} == {
        name: value.dtype for name, value in model.items()
    }
    assert all(np.isfinite(value).all() for value in arrays(result.arrays).values())


def test_means_of_integers_are_rounded():
    def train(model, context, round_):
        return {"steps": model["steps"] + context.node_id, "weight": model["weight"] + np.float32(1)}

    for strategy in (FedAvg(), FedMedian()):
        model = {"steps": np.array([100, 200]), "weight": np.zeros(300, np.float32)}
        result = Compressed(strategy).start(LocalGrid(app([fedfq_mod(4)], train), 3), record(model), num_rounds=1)
        after = arrays(result.arrays)["steps"]
        assert after.dtype == np.int64  # FedAvg weighs by 10, 20, 30 examples: (1 + 4 + 9) / 6 = 2.33; the median is 2
        np.testing.assert_array_equal(after, [102, 202])


def test_the_same_run_gives_the_same_bytes():
    def run() -> tuple[list[bytes], dict[str, NDArray]]:
        grid, compressed, model = (
            LocalGrid(app([fedfq_mod(64, initial=INITIAL)]), 3),
            Compressed(FedAvg()),
            record(network(5)),
        )
        payloads = []
        for round_ in (1, 2, 3):
            replies = grid.send_and_receive(compressed.configure_train(round_, model, ConfigRecord(), grid))
            payloads += [payload_of(reply) for reply in grid.replies]
            model, _ = compressed.aggregate_train(round_, replies)
        return payloads, arrays(model)

    (payloads, model), (again, model_again) = run(), run()
    assert payloads == again
    assert_identical(model, model_again)


def test_metrics_are_sums_of_bytes_and_medians_of_errors():
    grid, compressed = LocalGrid(app([fedfq_mod(64, initial=INITIAL)]), 4), Compressed(FedAvg())
    model = network(5)
    replies = grid.send_and_receive(compressed.configure_train(1, record(model), ConfigRecord(), grid))
    sizes = [len(payload_of(reply)) + TAG_BYTES for reply in grid.replies]
    raw = sum(value.nbytes for value in model.values())
    for reply, size in zip(grid.replies, sizes):
        assert reply.content["metrics"]["fedfq-bytes"] == size <= raw / 64 + TAG_BYTES
        assert reply.content["metrics"]["fedfq-ratio"] == raw / size
    _, metrics = compressed.aggregate_train(1, replies)
    assert metrics["fedfq-bytes"] == sum(sizes)
    assert metrics["fedfq-ratio"] == 4 * raw / sum(sizes)
    assert metrics["fedfq-nmse"] == pytest.approx(
        np.median([reply.content["metrics"]["fedfq-nmse"] for reply in grid.replies])
    )


def test_another_training_with_the_same_strategy_starts_afresh():
    def train(model, context, round_):
        rng = np.random.default_rng((number(context), round_))
        return {name: value + rng.laplace(size=value.shape).astype(value.dtype) for name, value in model.items()}

    grid, compressed = LocalGrid(app([fedfq_mod(64, initial=INITIAL)], train), 3), Compressed(FedAvg())
    first = compressed.start(grid, record(network(5)), num_rounds=2)
    compressed.start(grid, record({"fc.weight": np.ones((30, 40), np.float32)}), num_rounds=2)  # another model
    again = compressed.start(grid, record(network(5)), num_rounds=2)
    assert_identical(arrays(again.arrays), arrays(first.arrays))


# The downlink


def test_the_model_travels_as_one_array_and_the_app_sees_an_ordinary_one():
    seen = []

    def train(model, context, round_):
        seen.append(model)
        return model

    grid, model = LocalGrid(app([fedfq_mod(initial=INITIAL)], train), 2), network(5)
    messages = Compressed(FedAvg()).configure_train(1, record(model), ConfigRecord(), grid)
    assert [len(message.content["arrays"]) for message in messages] == [1, 1]
    grid.send_and_receive(messages)
    for given in seen:
        assert_identical(given, model)


def test_evaluation_needs_no_mod():
    grid, model = LocalGrid(app([]), 2), network(5)
    compressed = Compressed(FedAvg())
    replies = grid.send_and_receive(compressed.configure_evaluate(1, record(model), ConfigRecord(), grid))
    assert compressed.aggregate_evaluate(1, replies)["loss"] == pytest.approx(
        sum(value.sum() for value in model.values())
    )


def test_a_client_without_the_mod_is_told_what_to_add():
    grid = LocalGrid(app([]), 2)
    messages = Compressed(FedAvg()).configure_train(1, record(network(5)), ConfigRecord(), grid)
    for reply in grid.send_and_receive(messages):
        assert "add fedfq.flower.fedfq_mod() to the mods of the ClientApp" in reply.error.reason
    with pytest.raises(NothingAccepted, match=r"add fedfq.flower.fedfq_mod\(\) to the mods of the ClientApp"):
        Compressed(FedAvg()).start(grid, record(network(5)), num_rounds=1)


def test_a_model_that_cannot_travel_is_refused_by_name():
    grid = LocalGrid(app([fedfq_mod()]), 2)
    model = record(network(5))
    model["fc.bias"] = Array(dtype="bfloat16", shape=(2,), stype="numpy.ndarray", data=Array(np.zeros(2, "V2")).data)
    with pytest.raises(ValueError, match=r"'fc.bias'.*bfloat16.*tensor.float\(\)"):
        Compressed(FedAvg()).configure_train(1, model, ConfigRecord(), grid)


# Replies that are of no use


def tampered(change: Callable[[bytes], bytes]) -> Callable[[Message], None]:
    return lambda reply: change_payloads(reply, change)


def as_plain_arrays(reply: Message) -> None:
    reply.content["arrays"] = record(network(1))


def as_next_version(reply: Message) -> None:
    array = Array(dtype="uint8", shape=(1,), stype="fedfq.v2", data=b"?")
    reply.content["arrays"] = ArrayRecord({"update": array})


def with_metric(name: str, value: Any) -> Callable[[Message], None]:
    def change(reply: Message) -> None:
        reply.content["metrics"][name] = value

    return change


def with_other_names(reply: Message) -> None:
    reply.content = RecordDict({"model": reply.content["arrays"], "numbers": reply.content["metrics"]})


def without_records(reply: Message) -> None:
    reply.content = RecordDict()


OTHER = fedfq.encode({"another": np.ones(500, np.float32)}, ratio=2, layout="digest")
FOREIGN_BASIS = fedfq.encode(
    network(1),
    ratio=8,
    layout="digest",
    shared_basis=fedfq.SharedBasis(network(2), network(3)),
)

BAD = {
    "garbage": ("magic", tampered(lambda payload: b"garbage" * 20)),
    "cut off": ("checksum", tampered(lambda payload: payload[:-3])),
    "nothing": ("truncated", tampered(lambda payload: b"")),
    "damaged": ("checksum", tampered(lambda payload: payload[:30] + bytes([payload[30] ^ 1]) + payload[31:])),
    "of a later format": ("version", tampered(lambda payload: payload[:2] + b"\x09" + payload[3:])),
    "of a later mod": ("version", as_next_version),
    "of another model": ("layout", tampered(lambda payload: OTHER)),
    "with a basis that nobody has": ("basis", tampered(lambda payload: FOREIGN_BASIS)),
    "not compressed": ("reply", as_plain_arrays),
    "empty": ("reply", without_records),
    "of no examples": ("weight", with_metric("num-examples", 0)),
    "of fewer than no examples": ("weight", with_metric("num-examples", -5)),
    "of NaN examples": ("weight", with_metric("num-examples", float("nan"))),
    "of a list of examples": ("weight", with_metric("num-examples", [1, 2])),
    "of more examples than there can be": ("weight", with_metric("num-examples", 1e38)),
    "with a metric that others do not have": ("metrics", with_metric("extra", 1.0)),
    "with a list for a number": ("metrics", with_metric("loss", [1.0, 2.0])),
    "with other names of its records": ("metrics", with_other_names),
}


@pytest.mark.parametrize("strategy", [FedAvg, FedAdam, FedMedian])
@pytest.mark.parametrize("case", BAD)
def test_a_bad_reply_is_dropped_and_the_round_goes_on(strategy, case, caplog):
    reason, tamper = BAD[case]

    def third_node(node: int, reply: Message) -> Message:
        if node == 3:
            tamper(reply)
        return reply

    model = record(network(5))
    grid, compressed = LocalGrid(app([fedfq_mod(32, initial=INITIAL)]), 4), Compressed(strategy())
    grid.tamper = third_node
    logging.getLogger("flwr").propagate = True
    replies = grid.send_and_receive(compressed.configure_train(1, model, ConfigRecord(), grid))
    after, metrics = compressed.aggregate_train(1, replies)

    assert f"the reply of node 3 is dropped ({reason})" in caplog.text
    assert (metrics["fedfq-dropped"], metrics["fedfq-dropped-nodes"]) == (1, [3])
    assert metrics[f"fedfq-dropped-{reason}"] == 1

    grid, reference = LocalGrid(app([fedfq_mod(32, initial=INITIAL)]), 4), Compressed(strategy())
    replies = grid.send_and_receive(reference.configure_train(1, model, ConfigRecord(), grid))
    others = [reply for reply in replies if reply.metadata.src_node_id != 3]
    assert_identical(arrays(after), arrays(reference.aggregate_train(1, others)[0]))


def test_the_name_of_a_number_cannot_stand_for_a_list():
    """What most clients send as three numbers, one sends as one, under a name that looks like it."""

    def tamper(node: int, reply: Message) -> Message:
        name, value = ("per-class[3]", 1.0) if node == 3 else ("per-class", [1.0, 2.0, 3.0])
        with_metric(name, value)(reply)
        return reply

    grid, compressed = LocalGrid(app([fedfq_mod(32, initial=INITIAL)]), 4), Compressed(FedAvg(fraction_evaluate=0.0))
    grid.tamper = tamper
    result = compressed.start(grid, record(network(5)), num_rounds=1)
    assert result.train_metrics_clientapp[1]["fedfq-dropped-nodes"] == [3]


def test_of_two_that_differ_the_one_who_was_as_usual_before_is_kept():
    grid, compressed, model = (
        LocalGrid(app([fedfq_mod(32, initial=INITIAL)]), 2),
        Compressed(FedAvg()),
        record(network(5)),
    )
    for round_, dropped in ((1, 0), (2, 1)):
        grid.tamper = lambda node, reply, odd=dropped: (
            with_metric("extra", 1.0)(reply) if node == odd else None,
            reply,
        )[1]
        replies = grid.send_and_receive(compressed.configure_train(round_, model, ConfigRecord(), grid))
        _, metrics = compressed.aggregate_train(round_, replies)
        assert metrics["fedfq-dropped"] == dropped
    assert metrics["fedfq-dropped-nodes"] == [1]


@pytest.mark.parametrize("loss", [float("nan"), -1.0, float("inf")])
def test_a_loss_that_would_spoil_the_model_is_dropped(loss):
    """QFedAvg weighs replies by a power of their loss."""
    grid, compressed = (
        LocalGrid(app([fedfq_mod(32, initial=INITIAL)]), 3),
        Compressed(QFedAvg(0.1, train_loss_key="loss")),
    )
    grid.tamper = lambda node, reply: (with_metric("loss", loss)(reply) if node == 2 else None, reply)[1]
    result = compressed.start(grid, record({"fc.weight": network(5)["fc.weight"]}), num_rounds=1)
    assert result.train_metrics_clientapp[1]["fedfq-dropped-nodes"] == [2]
    assert all(np.isfinite(value).all() for value in arrays(result.arrays).values())


@pytest.mark.parametrize("strategy", [FedAvg, FedMedian])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint64, np.int64])
def test_integers_that_go_up_here_and_down_there(strategy, dtype):
    """From 7, one client with 10 examples goes to 5, two with 20 and 30 to 9: the mean is 8.3, the median 9."""

    def train(model, context, round_):
        return model | {"count": np.array([5 if context.node_id == 1 else 9, 120], dtype)}

    model = {"weight": np.zeros((40, 50), np.float32), "count": np.array([7, 8], dtype)}
    grid = LocalGrid(app([fedfq_mod(16, initial=INITIAL)], train), 3)
    result = Compressed(strategy()).start(grid, record(model), num_rounds=1)
    count = arrays(result.arrays)["count"]
    assert count.tolist() == [8 if strategy is FedAvg else 9, 120] and count.dtype == dtype


@pytest.mark.parametrize("wrong", [FedAvg, None, "FedAvg"])
def test_what_is_no_strategy_is_refused(wrong):
    with pytest.raises(TypeError, match="goes around a strategy"):
        Compressed(wrong)


@pytest.mark.parametrize("ratio", ["auto", 0.5, float("inf"), float("nan")])
def test_what_is_no_ratio_is_refused(ratio):
    with pytest.raises((TypeError, ValueError), match="down_ratio must be"):
        Compressed(FedAvg(), down_ratio=ratio)


def test_trees_are_refused():
    with pytest.raises(ValueError, match="FedXgbBagging sends trees"):
        Compressed(FedXgbBagging())


@pytest.mark.parametrize("strategy", [FedAvg, FedAdam, Krum, lambda: STRATEGIES["server-side adaptive clipping"]()])
def test_a_round_without_a_usable_reply_leaves_the_model_as_it_is(strategy):
    grid, compressed = LocalGrid(app([fedfq_mod(32, initial=INITIAL)]), NODES), Compressed(strategy())
    grid.tamper = lambda node, reply: (tampered(lambda payload: b"")(reply), reply)[1]
    replies = grid.send_and_receive(compressed.configure_train(1, record(network(5)), ConfigRecord(), grid))
    after, metrics = compressed.aggregate_train(1, replies)
    assert after is None
    assert metrics["fedfq-dropped"] == NODES


@pytest.mark.parametrize("strategy", [FedAvg, FedMedian])
def test_updates_beyond_max_norm_are_dropped(strategy):
    def train(model, context, round_):
        return {name: value + np.float32(100 if context.node_id == 2 else 0.01) for name, value in model.items()}

    model = {"weight": np.zeros((40, 50), np.float32)}  # norms 0.45 and 4,472
    grid = LocalGrid(app([fedfq_mod(16, initial=INITIAL)], train), 3)
    result = Compressed(strategy(), max_norm=10).start(grid, record(model), num_rounds=1)
    assert result.train_metrics_clientapp[1]["fedfq-dropped-nodes"] == [2]
    np.testing.assert_allclose(arrays(result.arrays)["weight"], 0.01, rtol=0.05)


def test_clients_that_fail_are_reported_by_the_strategy_itself():
    def train(model, context, round_):
        return {**model, "fc.bias": model["fc.bias"] + np.nan} if context.node_id == 1 else model

    grid, compressed = LocalGrid(app([fedfq_mod(32, initial=INITIAL)], train), 3), Compressed(FedAvg())
    replies = grid.send_and_receive(compressed.configure_train(1, record(network(5)), ConfigRecord(), grid))
    assert "node 1" in grid.replies[0].error.reason and "'fc.bias'" in grid.replies[0].error.reason
    after, metrics = compressed.aggregate_train(1, replies)
    assert after is not None
    assert metrics["fedfq-dropped"] == 0
    ((node, reason),) = compressed.last.dropped
    assert node == 1 and "'fc.bias'" in reason


# The shared basis


def test_nodes_get_the_initial_model_once_and_again_if_they_lost_it():
    """Where the model goes down with all its bits, and clients do not make the initial one."""
    grid, compressed = LocalGrid(app([fedfq_mod(32)]), 3), Compressed(FedAvg(), down_ratio=1)
    model = record(network(5))

    def round_(number: int, only: tuple[int, ...] = (1, 2, 3)) -> tuple[set[int], set[int]]:
        """Who was sent the initial model, and who used the basis."""
        nonlocal model
        messages = [
            message
            for message in compressed.configure_train(number, model, ConfigRecord(), grid)
            if message.metadata.dst_node_id in only
        ]
        sent = {m.metadata.dst_node_id for m in messages if "initial" in m.content["arrays"]}
        like = arrays(model)
        replies = grid.send_and_receive(messages)
        used = {
            reply.metadata.src_node_id
            for reply in grid.replies
            if fedfq.inspect(payload_of(reply), like=like).shared_basis is not None
        }
        model, metrics = compressed.aggregate_train(number, replies)
        assert metrics["fedfq-dropped"] == 0
        return sent, used

    assert round_(1, only=(1, 2)) == (set(), set())  # the model is the initial one, and has not moved
    assert round_(2) == ({3}, {1, 2, 3})
    assert round_(3) == (set(), {1, 2, 3})
    grid.restart(2)
    assert round_(4) == (set(), {1, 3})
    assert round_(5) == ({2}, {1, 2, 3})
    assert round_(6) == (set(), {1, 2, 3})


@pytest.mark.parametrize(
    ("mod", "shared_basis"),
    [(fedfq_mod(32, basis="adaptive", initial=INITIAL), True), (fedfq_mod(32, initial=INITIAL), False)],
)
def test_nodes_that_do_without_the_basis_are_not_sent_the_initial_model(mod, shared_basis):
    grid, compressed, model = (
        LocalGrid(app([mod]), 2),
        Compressed(FedAvg(), shared_basis=shared_basis),
        record(network(5)),
    )
    for round_ in (1, 2, 3):
        messages = list(compressed.configure_train(round_, model, ConfigRecord(), grid))
        assert not any("initial" in message.content["arrays"] for message in messages)
        replies = grid.send_and_receive(messages)
        for reply in grid.replies:
            assert fedfq.inspect(payload_of(reply), like=arrays(model)).shared_basis is None
        model, _ = compressed.aggregate_train(round_, replies)


# Privacy


@pytest.mark.parametrize("name", [name for name in STRATEGIES if "clipping" in name])
def test_privacy_wrappers_stand_inside(name):
    wrapper = STRATEGIES[name]()
    wrapper.strategy = Compressed(FedAvg())
    with pytest.raises(ValueError, match=r"write Compressed\(Other\(strategy\)\), not Other\(Compressed\(strategy\)\)"):
        wrapper.start(LocalGrid(app([fedfq_mod()]), NODES), record(network(5)), num_rounds=1)


def test_a_summary_that_is_asked_for_by_hand_changes_nothing():
    strategy = Compressed(FedAvg(fraction_evaluate=0.0))
    strategy.summary()
    result = strategy.start(LocalGrid(app([fedfq_mod()]), NODES), record(network(5)), num_rounds=1)
    assert set(result.arrays) == set(network(5))


def test_a_quantised_update_is_never_longer_than_the_clipping_norm():
    """Error feedback would do that; here a client sends it in spite of what it was told."""
    seen = []

    class Watching(FedAvg):
        def aggregate_train(self, server_round, replies):
            seen.extend(arrays(reply.content["arrays"])["weight"] for reply in replies)
            return super().aggregate_train(server_round, replies)

    model = {"weight": np.zeros((40, 50), np.float32)}
    mods = [fedfq_mod(16, unbiased=False, error_feedback=False, gain=False), fixedclipping_mod]
    grid = LocalGrid(app(mods, lambda model, *_: {"weight": model["weight"] + np.float32(1)}), 2)
    long = fedfq.encode({"weight": np.ones((40, 50), np.float32)}, ratio=16, layout="digest")
    grid.tamper = lambda node, reply: (tampered(lambda payload: long)(reply), reply)[1]
    compressed = Compressed(DifferentialPrivacyClientSideFixedClipping(Watching(), 0.0, 0.5, 2))
    compressed.aggregate_train(
        1, grid.send_and_receive(compressed.configure_train(1, record(model), ConfigRecord(), grid))
    )
    assert len(seen) == 2
    for weight in seen:
        assert np.linalg.norm(weight) == pytest.approx(0.5, rel=1e-5)


# Memory


@pytest.mark.slow
def test_averaging_takes_less_than_two_models_for_any_number_of_replies():
    rng = np.random.default_rng(0)
    initial = {f"layer{k}": rng.normal(size=(512, 1024)).astype(np.float32) for k in range(6)}  # 12.6 MB
    low_rank = (rng.normal(size=(512, 2)) @ rng.normal(size=(2, 1024))).astype(np.float32)
    mods = [fedfq_mod(256, initial=initial)]
    grid = LocalGrid(app(mods, lambda model, *_: {k: v + low_rank for k, v in model.items()}), 2)
    compressed, model = Compressed(FedAvg()), record(initial)
    for round_ in (1, 2):  # with a shared basis in the second
        reply, _ = grid.send_and_receive(compressed.configure_train(round_, model, ConfigRecord(), grid))
        replies = [travelled(reply) for _ in range(50)]
        for node, copy in enumerate(replies, 1):  # as if so many nodes had been asked
            compressed._round.tokens[node] = compressed._round.tokens[reply.metadata.src_node_id]
            copy.metadata.__dict__["_src_node_id"] = node
        tracemalloc.start()
        try:
            model, metrics = compressed.aggregate_train(round_, replies)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert metrics["fedfq-dropped"] == 0
        assert peak < 2 * sum(value.nbytes for value in initial.values())


def test_a_training_in_which_nothing_was_accepted_fails_and_says_why(caplog):
    """A budget that is too small for the model: every client refuses, and an empty model would be saved."""
    model = {"bn.running_var": np.ones(256, np.float32), "w": np.zeros((20, 20), np.float32)}
    strategy = Compressed(FedAvg(fraction_evaluate=0.0))
    grid = LocalGrid(app([fedfq_mod(256)], lambda given, *_: {name: value + 1 for name, value in given.items()}), NODES)
    with caplog.at_level("ERROR", "flwr"), pytest.raises(NothingAccepted, match="in 2 rounds.*a ratio of .* at most"):
        strategy.start(grid, record(model), num_rounds=2)
    said = [each.getMessage() for each in caplog.records if "no reply of round" in each.getMessage()]
    assert len(said) == 2 and "so the model stays as it was" in said[0]


# Unbiased payloads

LINEAR = ("FedAvg", "FedProx", "FedAvgM")


@pytest.mark.parametrize("name", STRATEGIES)
def test_sketches_are_for_strategies_that_only_average(name: str) -> None:
    """Clients that would send noise are told not to where it is squared, compared or clipped."""
    before = {key: array for key, array in network(5).items() if key != COUNTER}  # QFedAvg cannot do with integers
    mods = [fedfq_mod(16, unbiased=True, initial=before), *MODS.get(name, [])]
    grid = LocalGrid(app(mods), NODES)
    strategy = Compressed(STRATEGIES[name]())
    replies = list(grid.send_and_receive(strategy.configure_train(1, record(before), ConfigRecord(), grid)))
    found = {fedfq.inspect(payload_of(reply), like=before).sketch_bytes > 0 for reply in replies}
    assert found == {name in LINEAR}
    model, metrics = strategy.aggregate_train(1, replies)
    assert model is not None and metrics is not None and metrics["fedfq-dropped"] == 0


def test_nor_are_they_where_norms_are_limited() -> None:
    grid = LocalGrid(app([fedfq_mod(16, unbiased=True, initial=INITIAL)]), 2)
    messages = Compressed(FedAvg(), max_norm=1e3).configure_train(1, record(network(5)), ConfigRecord(), grid)
    (one, *_) = grid.send_and_receive(messages)
    assert fedfq.inspect(payload_of(one), like=network(5)).sketch_bytes == 0


@pytest.mark.parametrize("unit", [1e6, 1e38, 3e38])
@pytest.mark.parametrize("weight", [10, 1e-6])
def test_nobody_owns_the_mean_with_a_sketch(unit: float, weight: float) -> None:
    """A sketch in huge units, beside sections like everybody's, is cut to ten times what is usual."""
    grid = LocalGrid(app([fedfq_mod(16, unbiased=True, initial=INITIAL)]), NODES)

    def tamper(node: int, reply: Message) -> Message:
        if node == 1:
            change_payloads(reply, lambda payload: with_unit(payload, unit))
            reply.content["metrics"]["num-examples"] = weight
        return reply

    grid.tamper = tamper
    model = record(network(5))
    strategy = Compressed(FedAvg())
    replies = grid.send_and_receive(strategy.configure_train(1, model, ConfigRecord(), grid))
    after, metrics = strategy.aggregate_train(1, replies)
    assert after is not None and metrics is not None
    assert metrics["fedfq-scaled-nodes"] == [1]
    moved = max(np.abs(after[name].numpy() - model[name].numpy()).max() for name in ("fc.weight", "conv.weight"))
    assert moved < 10


def test_sketches_are_limited_by_rounds_that_had_none() -> None:
    """Two nodes do not say what is usual, but the rounds before do, also if nobody sent a sketch in them."""

    def tamper(node: int, reply: Message) -> Message:
        if node == 1:
            change_payloads(reply, lambda payload: with_unit(payload, 1e6))
        return reply

    grid = LocalGrid(app([fedfq_mod(16, unbiased=False, error_feedback=False, gain=False)]), 2)
    strategy = Compressed(FedAvg())
    model = record(network(5))
    for round_ in range(1, 5):
        if round_ == 4:
            grid.app = app([fedfq_mod(16, unbiased=True, initial=INITIAL)])
            grid.tamper = tamper
        replies = grid.send_and_receive(strategy.configure_train(round_, model, ConfigRecord(), grid))
        after, metrics = strategy.aggregate_train(round_, replies)
    assert after is not None and metrics is not None
    assert metrics["fedfq-scaled-nodes"] == [1]
    assert np.abs(after["fc.weight"].numpy() - model["fc.weight"].numpy()).max() < 30


def test_a_sketch_that_was_not_ordered_is_refused() -> None:
    grid = LocalGrid(app([fedfq_mod(16, unbiased=True, initial=INITIAL)]), NODES)
    model = record(network(5))
    replies = list(grid.send_and_receive(Compressed(FedAvg()).configure_train(1, model, ConfigRecord(), grid)))
    strategy = Compressed(FedMedian())
    strategy.configure_train(1, model, ConfigRecord(), grid)
    _, metrics = strategy.aggregate_train(1, replies)
    assert metrics is not None and metrics["fedfq-dropped-sketch"] == NODES


def with_unit(payload: bytes, unit: float) -> bytes:
    """The payload with a sketch in other units."""
    report = fedfq.inspect(payload, like=network(5))
    at = len(payload) - report.sketch_bytes + 4
    changed = payload[:at] + struct.pack("<f", unit) + payload[at + 4 :]
    checksum = zlib.crc32(changed[8:], zlib.crc32(changed[:4]))
    return changed[:4] + struct.pack("<I", checksum) + changed[8:]
