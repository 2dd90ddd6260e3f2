"""A server that does not mean well: whatever it sends, a client writes and reads no file of its choice, and says in one
line what it does not follow."""

import json
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from fedfq.flower import Compressed, fedfq_mod
from fedfq.flower import memory as client_memory
from fedfq.flower.arrays import ALIGNMENT_BYTES, MAX_TABLE_BYTES, blob, digest, pack, packed_views
from fedfq.flower.protocol import MODEL, ORDER
from tests.flower.local import LocalGrid, app, record
from tests.updates import network

MODEL_SIZE = sum(value.nbytes for value in network(5).values())


def sent(mod: Any = None, down_ratio: float | None = 1) -> tuple[LocalGrid, Message]:
    """A grid of one node, and an honest message to it, by default with all bits of the model."""
    grid = LocalGrid(app([mod or fedfq_mod(32)]), 1)
    strategy = Compressed(FedAvg(min_train_nodes=1, min_available_nodes=1), down_ratio=down_ratio)
    (message,) = strategy.configure_train(1, record(network(5)), ConfigRecord(), grid)
    return grid, message


def with_order(message: Message, **fields: Any) -> None:
    message.content[ORDER] = ConfigRecord({**message.content[ORDER], **fields})


def with_arrays(message: Message, **arrays: Array) -> None:
    """Other Arrays, under a digest that fits what there is to be kept, if that has one."""
    message.content["arrays"] = ArrayRecord(arrays)
    with suppress(ValueError):
        with_order(message, initial=digest(packed_views(arrays.get("initial", arrays["model"]))))


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def refusal(grid: LocalGrid, message: Message, folder: Path) -> str:
    """What the server is told; nothing may have been written or remembered."""
    before = files(folder)
    (reply,) = grid.send_and_receive([message])
    assert reply.has_error(), "it was followed"
    assert files(folder) == before
    assert not grid.contexts[1].state
    assert reply.error.reason.startswith("fedfq_mod on node 1: ")
    assert len(reply.error.reason) <= 500 and reply.error.reason.isprintable()
    return reply.error.reason


@pytest.fixture(params=["in memory", "on disk"])
def kept(request, monkeypatch):
    if request.param == "on disk":
        monkeypatch.setattr(client_memory, "MAX_STATE_BYTES", 0)


# Orders


def test_no_file_is_overwritten(tmp_path, monkeypatch, flower_home):
    """The attack as it was found: a folder's name in the digest, and bytes of the server's choice."""
    monkeypatch.setattr(client_memory, "MAX_STATE_BYTES", 0)
    victim = tmp_path / "victim" / "authorized_keys"
    victim.parent.mkdir()
    victim.write_bytes(b"mine")
    (flower_home / "fedfq" / "7" / "initial-x").mkdir(parents=True)
    grid, message = sent()
    name = "x/../../../../victim/authorized_keys"
    with_order(message, initial=name)
    assert "'initial'" in refusal(grid, message, tmp_path)
    assert victim.read_bytes() == b"mine"


ORDERS = {
    "a path for the initial model": {"initial": "../../x"},
    "a path for the round": {"round": "../../../x"},
    "a path for the accepted round": {"accepted": "../1"},
    "a round that is not whole": {"round": 1.5},
    "a round before the first": {"round": 0},
    "a round beyond all": {"round": 2**62},
    "a list of rounds": {"round": [1, 2]},
    "more accepted than there were": {"accepted": 7},
    "no initial model": {"initial": ""},
    "a number for an answer": {"basis": 1},
    "no token": {"token": b""},
    "a token in text": {"token": "0" * 16},
    "more than there is to say": {"path": "/tmp/x"},
}


@pytest.mark.parametrize("case", ORDERS)
def test_an_order_that_makes_no_sense_is_refused(case, kept, tmp_path):
    grid, message = sent()
    with_order(message, **ORDERS[case])
    refusal(grid, message, tmp_path)


@pytest.mark.parametrize("field", ["round", "accepted", "basis", "initial", "token"])
def test_an_order_with_a_field_less_is_refused(field, kept, tmp_path):
    grid, message = sent()
    message.content[ORDER] = ConfigRecord({k: v for k, v in message.content[ORDER].items() if k != field})
    assert "version" in refusal(grid, message, tmp_path)


def test_an_order_that_is_no_record_of_settings_is_refused(kept, tmp_path):
    grid, message = sent()
    message.content[ORDER] = MetricRecord({"round": 1})
    assert "not from fedfq.flower.Compressed" in refusal(grid, message, tmp_path)


# Records of models


def test_an_initial_model_that_is_not_what_its_digest_says_is_not_kept(kept, tmp_path):
    grid, message = sent()
    honest = message.content["arrays"]["model"]
    message.content["arrays"] = ArrayRecord({"model": honest, "initial": pack(record(network(6)))})
    with_order(message, initial=digest(network(7)))
    assert "initial" in refusal(grid, message, tmp_path)


@pytest.mark.parametrize(
    "names", [(), ("initial",), ("modell",), ("model", "other"), ("model", "../x"), ("model", "initial", "x")]
)
def test_other_models_than_were_ordered_are_refused(names, kept, tmp_path):
    grid, message = sent()
    honest = message.content["arrays"]["model"]
    message.content["arrays"] = ArrayRecord(dict.fromkeys(names, honest))
    refusal(grid, message, tmp_path)


def test_an_unpacked_model_is_refused(kept, tmp_path):
    grid, message = sent()
    with_arrays(message, model=blob(message.content["arrays"]["model"].data, "fedfq.model.v9"))
    assert "fedfq.model.v9" in refusal(grid, message, tmp_path)


# Packed models


def packed(table: Any, *parts: bytes, length: int | None = None) -> Array:
    header = table if isinstance(table, bytes) else json.dumps(table).encode()
    data = (len(header) if length is None else length).to_bytes(8, "little") + header
    for part in parts:
        data += bytes(-len(data) % ALIGNMENT_BYTES) + part
    return blob(data + bytes(-len(data) % ALIGNMENT_BYTES), MODEL)


def npy_file(header: bytes, values: bytes = b"") -> bytes:
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + values


W = Array(np.ones(5, np.float32)).data
ROW = ["w", "float32", [5], "numpy.ndarray", len(W)]
HUGE = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1152921504606846976,), }"
OBJECT = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
NEGATIVE = b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }"
DEEP_LITERAL = b"{'descr': '<f4', 'fortran_order': False, 'shape': " + b"(" * 4000 + b")" * 4000 + b"}"


def row(**changes: Any) -> list[Any]:
    names = ("name", "dtype", "shape", "stype", "size")
    return [changes.get(name, value) for name, value in zip(names, ROW)]


def of_file(data: bytes, **changes: Any) -> Array:
    return packed([row(size=len(data), **changes)], data)


PACKED = {
    "nothing": blob(b"", MODEL),
    "less than a length": blob(b"1234", MODEL),
    "an absurd length of the table": packed([ROW], W, length=2**63),
    "a length one beyond the end": packed([], length=ALIGNMENT_BYTES - 8 + 1),
    "a table beyond the limit": packed(b" " * (MAX_TABLE_BYTES + 1)),
    "a table that is no JSON": packed(b"[[", W),
    "a table that is no text": packed(b"\xff\xfe\xfd", W),
    "a table of nested lists": packed(b"[" * 200_000 + b"]" * 200_000),
    "a number of a million digits": packed(b"[" + b"9" * 1_000_000 + b"]"),
    "no list": packed({"w": 1}, W),
    "a text for a row": packed(["abcde"], W),
    "a row that is too short": packed([ROW[:4]], W),
    "a row that is too long": packed([[*ROW, 1]], W),
    "a name that is a number": packed([row(name=1)], W),
    "a name of half a character": packed(b'[["\\ud800", "float32", [5], "numpy.ndarray", %d]]' % len(W), W),
    "two tensors of one name": packed([ROW, ROW], W, W),
    "a size below 0": packed([row(size=-len(W))], W),
    "a size beyond the end": packed([row(size=2**62)], W),
    "a size of more digits than fit": packed([row(size=10**400)], W),
    "a size that is no whole number": packed([row(size=148.0)], W),
    "a size of true": packed([row(size=True)], W),
    "bytes behind the last": packed([ROW], W, W),
    "a shape that is a number": packed([row(shape=5)], W),
    "a shape of texts": packed([row(shape=["5"])], W),
    "a shape below 0": packed([row(shape=[-5])], W),
    "another shape than the bytes have": packed([row(shape=[6])], W),
    "a shape of another product": packed([row(shape=[2**31, 2**31])], W),
    "too many dimensions": packed([row(shape=[1] * 100_000)], W),
    "another dtype than the bytes have": packed([row(dtype="float64")], W),
    "a serialisation that runs code": packed([row(stype="pickle")], W),
    "no file in it": of_file(b""),
    "a file that is no array": of_file(b"x" * 200),
    "a file that ends in its header": of_file(W[:50]),
    "a file that is a byte short": of_file(W[:-1]),
    "a file that is a byte long": of_file(W + b"0"),
    "objects": of_file(npy_file(OBJECT, b"cos\nsystem\n(S'true'\ntR."), dtype="object", shape=[1]),
    "2^60 entries": of_file(npy_file(HUGE), shape=[2**60]),
    "entries below none": of_file(npy_file(NEGATIVE, bytes(20)), shape=[-1]),
    "none of 2^60 by 0": of_file(
        npy_file(HUGE.replace(b"6976,)", b"6976, 0)")), shape=[2**60, 0], name="empty", dtype="float64"
    ),
    "a header of nested parentheses": of_file(npy_file(DEEP_LITERAL)),
    "a header with code": of_file(npy_file(b"__import__('os').system('true')")),
    "a dtype of 2^31 characters": of_file(npy_file(HUGE.replace(b"<f4", b"<U2147483647"))),
    "a dtype of fields": of_file(npy_file(HUGE.replace(b"'<f4'", b"[('a', '<f4'), ('a', 3)]"))),
}


@pytest.mark.parametrize("name", ["model", "initial"])
@pytest.mark.parametrize("case", PACKED)
def test_a_packed_model_that_was_never_packed_is_refused(case, name, kept, tmp_path):
    grid, message = sent()
    with_arrays(message, **{"model": pack(record(network(5)))} | {name: PACKED[case]})
    tracemalloc.start()
    try:
        refusal(grid, message, tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000 + 20 * len(PACKED[case].data)


def test_random_damage_is_refused_or_still_a_model(tmp_path):
    rng = np.random.default_rng(0)
    honest = pack(record({"w": np.ones((3, 4), np.float32), "n": np.array(3)}))
    for _ in range(300):
        data = bytearray(honest.data)
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(min(400, len(data))))] = int(rng.integers(256))
        cut = len(data) if rng.integers(2) else int(rng.integers(len(data)))
        damaged = blob(bytes(data[:cut]), MODEL)
        grid, message = sent(fedfq_mod(1.0, unbiased=False, error_feedback=False))
        grid.app = app([fedfq_mod(1.0, unbiased=False, error_feedback=False)], lambda model, *_: model)
        with_arrays(message, model=damaged)
        (reply,) = grid.send_and_receive([message])
        if reply.has_error():
            assert reply.error.reason.startswith("fedfq_mod on node 1: ")


# What a server may fill


def test_a_server_that_renames_the_tensors_does_not_fill_the_memory(kept, flower_home):
    """Nor one that has a new initial model in every round."""
    grid, _ = sent()
    for round_ in range(1, 6):
        model = pack(record({f"{name}-{round_}": value for name, value in network(round_).items()}))
        message = sent()[1]
        with_arrays(message, model=model)
        with_order(message, round=round_, accepted=round_ - 1)
        message.content["config"] = ConfigRecord({"server-round": round_})
        grid.app = app([fedfq_mod(32)], lambda model, *_: {name: 2 * value for name, value in model.items()})
        (reply,) = grid.send_and_receive([message])
        assert not reply.has_error(), reply.error.reason
    state = sum(len(a.data) for r in grid.contexts[1].state.array_records.values() for a in r.values())
    disk = sum(path.stat().st_size for path in files(flower_home)) if flower_home.exists() else 0
    assert MODEL_SIZE < state + disk < 4 * MODEL_SIZE


@pytest.mark.parametrize("field", ["run_id", "node_id"])
def test_a_run_or_node_that_is_no_number_has_no_memory(field, monkeypatch, tmp_path):
    monkeypatch.setattr(client_memory, "MAX_STATE_BYTES", 0)
    grid, message = sent()
    setattr(grid.contexts[1], field, "../../x")
    before = files(tmp_path)
    (reply,) = grid.send_and_receive([message])
    assert reply.has_error() and files(tmp_path) == before


def test_the_honest_message_of_these_tests_is_followed(kept):
    """What refuses everything would pass all of the above."""
    grid, message = sent()
    (reply,) = grid.send_and_receive([message])
    assert not reply.has_error()
    with_arrays(message, model=pack(record(network(5))), initial=pack(record(network(6))))
    assert not grid.send_and_receive([message])[0].has_error()
