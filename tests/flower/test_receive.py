"""The client's half of the way down: whatever a node holds, it trains from the server's bits, or says what it lacks."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedfq.broadcast.server import Broadcast
from fedfq.flower import Compressed, fedfq_mod
from fedfq.flower import memory as client_memory
from fedfq.flower.arrays import blob, digest, pack
from fedfq.flower.protocol import LACKS, MODEL, ORDER
from tests.flower.local import LocalGrid, app, drift, record
from tests.updates import Array as NDArray
from tests.updates import assert_identical, network

INITIAL = network(5)
RAW = sum(value.nbytes for value in INITIAL.values())


class Federation:
    """A server and its nodes, which write down from what they train."""

    def __init__(self, nodes: int = 3, initial: Any = INITIAL, model: Any = INITIAL, **options: Any) -> None:
        self.seen: dict[int, dict[str, NDArray]] = {}
        self.grid = LocalGrid(app([fedfq_mod(32, initial=initial)], self.train), nodes)
        self.strategy = Compressed(FedAvg(min_train_nodes=1, min_available_nodes=1), **options)
        self.model = record(model)
        self.number = 0

    def train(self, model: dict[str, NDArray], context: Any, round_: int) -> dict[str, NDArray]:
        self.seen[context.node_id] = {name: value.copy() for name, value in model.items()}
        return drift(model, context, round_) if "fc.weight" in model else model

    def round(self, *nodes: int) -> dict[int, int]:
        """One round, of these nodes if any are named: how many bytes each was sent. All trained from the same bits."""
        self.number += 1
        self.seen.clear()
        before = len(self.grid.log)
        messages = list(self.strategy.configure_train(self.number, self.model, ConfigRecord(), self.grid))
        asked = [message for message in messages if not nodes or message.metadata.dst_node_id in nodes]
        replies = self.grid.send_and_receive(asked)
        model, self.metrics = self.strategy.aggregate_train(self.number, replies)
        self.model = self.model if model is None else model
        held = self.strategy._downlink.model
        for node in nodes or self.grid.contexts:
            assert_identical(self.seen[node], held)
        sent: dict[int, int] = {}
        for message in self.grid.log[before:]:
            size = sum(len(a.data) for r in message.content.array_records.values() for a in r.values())
            sent[message.metadata.dst_node_id] = sent.get(message.metadata.dst_node_id, 0) + size
        return sent


@pytest.fixture(params=["in memory", "on disk"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "on disk":
        monkeypatch.setattr(client_memory, "MAX_STATE_BYTES", 0)
    return str(request.param)


def test_who_makes_the_initial_model_is_never_sent_it(kept: str) -> None:
    federation = Federation()
    assert set(federation.round().values()) == {28}  # "version 0, with this digest"
    for _ in range(6):
        assert max(federation.round().values()) < RAW / 4


OTHERS = {
    "none": None,
    "another one": network(6),
    "made as another one": lambda: network(6),
    "with other names": {f"module.{name}": value for name, value in INITIAL.items()},
    "of other shapes": INITIAL | {"fc.weight": INITIAL["fc.weight"].reshape(144, 40)},
    "of other floats": {name: v.astype(np.float64) if v.dtype == np.float32 else v for name, v in INITIAL.items()},
}


@pytest.mark.parametrize("initial", OTHERS.values(), ids=list(OTHERS))
def test_who_cannot_make_it_is_sent_it_once(kept: str, initial: Any) -> None:
    federation = Federation(initial=initial)
    assert min(federation.round().values()) > RAW
    for _ in range(3):
        assert max(federation.round().values()) < RAW / 4


def test_the_initial_model_may_be_a_function_or_a_module(kept: str) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    module = torch.nn.Linear(30, 20)
    model = {name: tensor.numpy() for name, tensor in module.state_dict().items()}

    class Net(torch.nn.Linear):
        def __init__(self) -> None:
            torch.manual_seed(1)
            super().__init__(30, 20)

    for initial in (module, lambda: module, lambda: model, Net):
        federation = Federation(initial=initial, model=model)
        assert set(federation.round(1).values()) == {28}


def test_a_module_of_bfloat16_is_not_the_servers_model_of_float32(kept: str) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(30, 20).bfloat16()
    model = {name: tensor.float().numpy() for name, tensor in module.state_dict().items()}
    federation = Federation(initial=module, model=model)
    federation.round()
    federation.round()
    assert federation.seen[1]["weight"].dtype == np.float32


@pytest.mark.parametrize("initial", [42, [1, 2], "model.pt"])
def test_what_is_no_model_is_refused_when_the_mod_is_made(initial: Any) -> None:
    with pytest.raises(TypeError, match="initial must be a module"):
        fedfq_mod(initial=initial)


def test_an_initial_model_that_is_not_the_servers_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").propagate = True
    federation = Federation(initial=network(6))
    federation.round()
    federation.round()
    assert caplog.text.count("gives another model than the server's") == 1


@pytest.mark.parametrize("initial", [lambda: None, lambda: 1 / 0, {"fc.weight": np.full(3, np.nan)}])
def test_what_gives_no_initial_model_is_said_in_one_line(initial: Any) -> None:
    grid = LocalGrid(app([fedfq_mod(32, initial=initial)]), 1)
    strategy = Compressed(FedAvg(min_train_nodes=1, min_available_nodes=1))
    (reply,) = grid.send_and_receive(strategy.configure_train(1, record(INITIAL), ConfigRecord(), grid))
    assert "initial= gives no model" in reply.error.reason


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nodes_and_server_have_the_same_bits_from_the_first_round_on(kept: str, dtype: Any) -> None:
    model = {name: (value / 3).astype(dtype) if value.dtype == np.float32 else value for name, value in INITIAL.items()}
    federation = Federation(initial=None, model=model)
    for _ in range(3):
        federation.round()


def test_a_model_with_an_infinite_mask_may_go_down_with_all_its_bits(kept: str) -> None:
    federation = Federation(initial=None, model=INITIAL | {"mask": np.full(5, -np.inf, np.float32)}, down_ratio=1)
    messages = list(federation.strategy.configure_train(1, federation.model, ConfigRecord(), federation.grid))
    federation.grid.app = app([fedfq_mod(32)], lambda model, *_: model | {"mask": np.zeros(5, np.float32)})
    for reply in federation.grid.send_and_receive(messages):
        assert not reply.has_error() or "not finite" in reply.error.reason


def test_an_initial_model_that_is_sent_smaller_is_the_servers_too(kept: str) -> None:
    federation = Federation(initial=None, initial_ratio=5)
    assert max(federation.round().values()) < RAW / 4
    assert (federation.seen[1]["fc.weight"] != INITIAL["fc.weight"]).any()
    federation.round()


def test_models_of_half_precision_are_approximated_in_their_own_dtype(kept: str) -> None:
    half = {name: value.astype(np.float16) if value.dtype == np.float32 else value for name, value in INITIAL.items()}
    federation = Federation(initial=None, model=half)
    for _ in range(3):
        federation.round()
    assert federation.seen[1]["fc.weight"].dtype == np.float16


def test_a_node_that_was_away_for_five_rounds_gets_what_it_missed(kept: str) -> None:
    federation = Federation()
    federation.round()
    for _ in range(5):
        federation.round(2, 3)
    assert federation.round()[1] < RAW / 4


def test_a_node_that_joins_at_round_ten_gets_the_model(kept: str) -> None:
    for initial in (INITIAL, None):
        federation = Federation(initial=initial)
        for _ in range(10):
            federation.round(2, 3)
        federation.round()


def test_a_node_that_lost_all_it_held_is_served_in_the_same_round(
    kept: str, flower_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for initial in (INITIAL, None):
        federation = Federation(initial=initial)
        for _ in range(3):
            federation.round()
        federation.grid.restart(2)
        for path in flower_home.rglob("*"):
            if path.is_file():
                path.unlink()
        federation.round()
        federation.round()
        assert federation.metrics["fedfq-dropped"] == 0


DAMAGE = {
    "cut off": lambda data, path: path.write_bytes(data[: len(data) // 2]),
    "another bit": lambda data, path: path.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]),
    "emptied": lambda data, path: path.write_bytes(b""),
}


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("pattern", ["*replica*", "initial-*"])
def test_a_damaged_file_costs_bytes_and_no_more(
    case: str, pattern: str, flower_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_memory, "MAX_STATE_BYTES", 0)
    federation = Federation(nodes=1, initial=None)
    for _ in range(3):
        federation.round()
    (path,) = flower_home.rglob(pattern)
    DAMAGE[case](path.read_bytes(), path)
    federation.round()
    federation.round()


def test_another_models_replica_is_not_taken_for_this_ones(flower_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another run has the same number, or somebody copied the file."""
    monkeypatch.setattr(client_memory, "MAX_STATE_BYTES", 0)
    other = Federation(nodes=1, initial=network(6), model=network(6))
    other.round()
    other.round()
    federation = Federation(nodes=1)
    for _ in range(3):
        federation.round()


def test_a_round_that_broke_off_after_the_model_had_arrived_is_made_up_for(kept: str) -> None:
    """The node holds more than the server knows of."""
    federation = Federation()
    federation.round()
    messages = federation.strategy.configure_train(2, federation.model, ConfigRecord(), federation.grid)
    federation.grid.send_and_receive(messages)
    federation.strategy.aggregate_train(2, [])  # no reply came through
    federation.number = 2
    federation.round()
    assert federation.metrics["fedfq-dropped"] == 0


# A hostile server


def difference(held: int = 0, versions: int = 1, seed: int = 5) -> bytes:
    """A message of a server whose models move from version to version."""
    server, rng = Broadcast(network(seed)), np.random.default_rng(1)
    for _ in range(versions):
        step = {name: rng.standard_normal(v.shape).astype(v.dtype) for name, v in INITIAL.items()}
        server.advance({name: value + step[name] for name, value in server.model.items()})
    return server.message(held)


MESSAGES = {
    "cut": lambda honest: honest[:-3],
    "longer": lambda honest: honest + b"?",
    "garbage": lambda honest: b"FD" + bytes(100),
    "empty": lambda honest: b"",
    "changed": lambda honest: honest[:40] + bytes([honest[40] ^ 1]) + honest[41:],
}


@pytest.mark.parametrize("case", MESSAGES)
def test_a_message_that_no_server_sends_is_refused_and_nothing_is_kept(case: str, kept: str) -> None:
    grid, message = first_message()
    message.content["arrays"] = ArrayRecord({"message": blob(MESSAGES[case](difference()), MODEL)})
    (reply,) = grid.send_and_receive([message])
    assert reply.error.reason.startswith("fedfq_mod on node 1: ")
    assert not grid.contexts[1].state and not grid.contexts[1].state.array_records


@pytest.mark.parametrize("what", ["of another run", "for who holds more"])
def test_a_message_for_another_node_is_answered_with_what_is_held(what: str, kept: str) -> None:
    grid, message = first_message()
    data = difference(seed=6) if what == "of another run" else difference(held=1, versions=2)
    message.content["arrays"] = ArrayRecord({"message": blob(data, MODEL)})
    (reply,) = grid.send_and_receive([message])
    assert LACKS in reply.content and not grid.contexts[1].state


def test_an_initial_model_that_is_not_finite_is_not_kept(kept: str, flower_home: Path) -> None:
    broken = INITIAL | {"fc.bias": np.full(40, np.nan, np.float32)}
    grid, message = first_message()
    message.content["arrays"] = ArrayRecord({"model": pack(record(INITIAL)), "initial": pack(record(broken))})
    message.content[ORDER] = ConfigRecord({**message.content[ORDER], "initial": digest(broken)})
    grid.send_and_receive([message])
    assert not grid.contexts[1].state and not any(path.is_file() for path in flower_home.rglob("*"))


def test_an_initial_model_of_another_layout_is_refused(kept: str) -> None:
    grid, message = first_message()
    large = {"w": np.zeros((300, 300), np.float32)}
    message.content["arrays"] = ArrayRecord({"model": pack(record(INITIAL)), "initial": pack(record(large))})
    message.content[ORDER] = ConfigRecord({**message.content[ORDER], "initial": digest(large)})
    (reply,) = grid.send_and_receive([message])
    assert "other tensors" in reply.error.reason and not grid.contexts[1].state


def test_an_error_instead_of_a_model_is_refused(kept: str) -> None:
    grid, _ = first_message()
    message = Message(Error(0, "nothing"), reply_to=Message(RecordDict(), dst_node_id=1, message_type="train"))
    assert "without a model" in grid.app(message, grid.contexts[1]).error.reason


def test_an_older_message_is_not_followed(kept: str) -> None:
    federation = Federation(nodes=1)
    federation.round()
    federation.round()
    old = federation.grid.log[-1]
    federation.round()
    old.content["config"] = ConfigRecord({"server-round": 4})
    (reply,) = federation.grid.send_and_receive([old])
    assert LACKS in reply.content
    federation.round()
    assert federation.metrics["fedfq-dropped"] == 0


def test_two_records_or_other_names_are_refused(kept: str) -> None:
    for names in (("message", "other"), ("model", "message"), ("initial",), ()):
        grid, message = first_message()
        message.content["arrays"] = ArrayRecord({name: pack(record(INITIAL)) for name in names})
        (reply,) = grid.send_and_receive([message])
        assert "where a model, or two, are due" in reply.error.reason


def first_message() -> tuple[LocalGrid, Message]:
    """A grid of one node, and the first honest message to it."""
    grid = LocalGrid(app([fedfq_mod(32, initial=INITIAL)]), 1)
    strategy = Compressed(FedAvg(min_train_nodes=1, min_available_nodes=1))
    (message,) = strategy.configure_train(1, record(INITIAL), ConfigRecord(), grid)
    assert ORDER in message.content
    return grid, message
