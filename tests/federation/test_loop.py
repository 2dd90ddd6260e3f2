"""The loop: the paper's equations, the byte ledger, and that nothing depends on how or when a run is computed."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from torch import nn

from fedfq import SharedBasis, inspect, methods, tasks
from fedfq.broadcast.server import OVERHEAD
from fedfq.federation.clients import Answer, Clients, Job, Worker
from fedfq.federation.config import Config
from fedfq.federation.folder import Folder
from fedfq.federation.loop import Federation, run
from fedfq.methods import RoundContext
from fedfq.methods.method import Method, Order, State, Update, Upload

SMALL = {"task": "digits", "rounds": 4, "clients": 8, "per_round": 3, "local_steps": 2, "checkpoint_every": 2}


def config(method: str = "fedavg", **changes: Any) -> Config:
    return Config.make(method=method, **(SMALL | changes))


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("rounds.jsonl", "model.safetensors")}


# --- The equations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["samples", "mean"])
def test_the_model_moves_by_the_weighted_mean_of_the_updates(tmp_path: Path, weighting: str) -> None:
    """Eq. 4, by hand, for the first round of FedAvg."""
    settings = config(weighting=weighting, split="dirichlet:0.3")
    with Clients(settings, None, tmp_path, 1) as clients:
        federation = Federation(settings, clients)
        line, _ = federation.step()
        assert line["clients"] == sorted(set(line["clients"])) and len(line["clients"]) == 3
        clients.publish(clients.initial)
        total = {name: np.zeros(value.shape) for name, value in clients.initial.items()}
        weights = [len(clients.worker.shards[c]) if weighting == "samples" else 1 for c in line["clients"]]
        assert len(set(weights)) == (3 if weighting == "samples" else 1)
        jobs = [Job(1, client, b"", None) for client in line["clients"]]
        for weight, answer in zip(weights, clients.train(jobs)):
            assert answer.payload is not None
            for name, value in methods.make("fedavg").decode(answer.payload, clients.initial).items():
                total[name] += weight / sum(weights) * value
        for name, value in federation.theta.items():
            np.testing.assert_allclose(value, clients.initial[name] + total[name], atol=1e-6)


def test_the_learning_rate_decays_every_round(tmp_path: Path) -> None:
    """At a decay to next to nothing, later rounds change nothing."""
    short = run(config(rounds=1, lr_decay=1e-9), tmp_path / "a").theta
    long = run(config(rounds=4, lr_decay=1e-9), tmp_path / "b").theta
    for name, value in short.items():
        np.testing.assert_allclose(long[name], value, atol=1e-6)


# --- The ledger --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedavg-4bit", "fedfq@32", "fedfq-cgsa"])
def test_the_ledger_counts_true_bytes(tmp_path: Path, method: str) -> None:
    result = run(config(method, down_ratio=1), tmp_path / "run")
    model = sum(value.nbytes for value in result.theta.values())
    for line in result.rounds:
        assert set(line) == {
            *("round", "accuracy", "loss", "train_loss", "clients", "uplink_bytes", "downlink_bytes", "claimed_bits"),
            "rejected",
        }  # and nothing of what clients hold: it is the server's model
        if method != "fedfq@32":
            assert line["downlink_bytes"] == 3 * model
        ratio = 3 * model / line["uplink_bytes"]
        assert {"fedavg": 1, "fedavg-4bit": 7.9, "fedfq@32": 32, "fedfq-cgsa": 10}[method] <= ratio + 1e-9
    if method == "fedavg":
        assert line["claimed_bits"] == 8 * line["uplink_bytes"]
    timings = (tmp_path / "run" / "timings.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in timings] == [1, 2, 3, 4]


@pytest.mark.parametrize(("method", "asks"), [("fedfq@32", True), ("fedfq@32:basis=adaptive", False), ("aqg", False)])
def test_the_shared_basis_takes_the_initial_model_down_to_each_client_once(
    tmp_path: Path, method: str, asks: bool
) -> None:
    """At a client's first round; if that is the first of all, the model is the initial one. AQG announces 8 bytes."""
    result = run(config(method, rounds=6, down_ratio=1), tmp_path / "run")
    model = sum(value.nbytes for value in result.theta.values())
    met: set[int] = set()
    for line in result.rounds:
        new = [client for client in line["clients"] if client not in met and line["round"] > 1]
        announced = 3 * 8 if method == "aqg" else 0
        assert line["downlink_bytes"] == (3 + len(new) * asks) * model + announced
        met |= set(line["clients"])
    assert len(met) > 5


def test_a_client_whose_update_was_refused_is_sent_the_initial_model_again(tmp_path: Path) -> None:
    settings = config("fedfq@32", per_round=8, clients=8, down_ratio=1)
    with Clients(settings, None, tmp_path, 1) as clients:
        federation = Federation(settings, clients)
        model = sum(value.nbytes for value in federation.theta.values())
        train = clients.train
        clients.train = lambda jobs: (  # type: ignore[method-assign]
            answer._replace(payload=b"garbage") if answer.client in (2, 5) else answer for answer in train(jobs)
        )
        downlinks = [federation.step()[0]["downlink_bytes"] for _ in range(3)]
        assert [size // model for size in downlinks] == [8, 10, 10]


def test_a_model_that_goes_down_compressed_is_learned_and_costs_a_fraction(tmp_path: Path) -> None:
    """Clients begin with the initial model, and then train from what they hold of the server's."""
    settings = config("fedfq@32", rounds=12, local_steps=20, eval_every=4, down_ratio="auto")
    result = run(settings, tmp_path / "run")
    everything = 3 * sum(value.nbytes for value in result.theta.values())
    for line in result.rounds:
        evaluated = line["round"] % 4 == 0
        assert ("held_accuracy" in line) == (line["accuracy"] is not None) == evaluated
        assert line["left_out"] > 0
        assert line["downlink_bytes"] < everything / 20
    assert result.rounds[0]["downlink_bytes"] < 3 * 100  # to say that nothing is new
    assert result.rounds[-1]["accuracy"] > 0.6 and result.rounds[-1]["held_accuracy"] > 0.6


def test_the_initial_model_goes_down_to_each_client_once_where_it_is_compressed(tmp_path: Path) -> None:
    """And it is what the server begins with, too: the basis that both sides derive is the same."""
    result = run(config("fedfq@32", rounds=6, down_ratio="auto", initial_ratio=4), tmp_path / "run")
    model = sum(value.nbytes for value in result.theta.values())
    initial = result.rounds[0]["downlink_bytes"] / 3
    assert model / 5 < initial < model / 4 + OVERHEAD
    met: set[int] = set()
    for line in result.rounds:
        new = set(line["clients"]) - met
        assert 0 <= line["downlink_bytes"] - len(new) * initial < initial and line["rejected"] == []
        met |= new
    assert len(met) > 5


def test_a_run_whose_clients_all_diverge_goes_on_with_the_initial_model(tmp_path: Path) -> None:
    result = run(config("fedfq@32", lr=1e30, rounds=2, down_ratio="auto"), tmp_path / "run")
    first, second = result.rounds
    assert first["accuracy"] == second["accuracy"] == second["held_accuracy"]
    assert second["left_out"] == 0 and second["downlink_bytes"] < 3 * 100


def test_evaluation_every_k_rounds_and_at_the_end(tmp_path: Path) -> None:
    rounds = run(config(rounds=5, eval_every=3), tmp_path / "run").rounds
    assert [line["accuracy"] is not None for line in rounds] == [False, False, True, False, True]


# --- Same configuration, same result -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedfq@32:error_feedback=true:gain=true", {}),
        ("aqg", {}),
        ("dadaquant", {}),
        ("fedfq@32", {"down_ratio": "auto"}),
        ("fedavg", {"down_ratio": 16, "initial_ratio": 8}),
    ],
)
def test_a_run_goes_on_from_its_checkpoint_as_if_nothing_had_happened(
    tmp_path: Path, method: str, changes: dict[str, Any]
) -> None:
    run(config(method, rounds=6, **changes), tmp_path / "whole")

    class Killed(Exception):
        pass

    def kill(line: dict[str, Any], times: dict[str, float]) -> None:
        if line["round"] == 5:  # after the checkpoint of round 4
            raise Killed

    with pytest.raises(Killed):
        run(config(method, rounds=6, **changes), tmp_path / "killed", watch=kill)
    assert len((tmp_path / "killed" / "rounds.jsonl").read_text().splitlines()) == 5
    run(Folder(tmp_path / "killed").config(), tmp_path / "killed", resume=True)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("method", "down_ratio"), [("fedfq@32", 1), ("fedfq@32", "auto"), ("aqg", 1), ("dadaquant", 1)]
)
def test_an_interrupted_run_has_a_checkpoint_of_the_last_whole_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, down_ratio: float | str, kind: int
) -> None:
    """Long before one is due, and in the middle of the fourth round, after two of its updates were received.

    By then all of that round's clients were sent the model; whoever holds what is of the third round again.
    """
    settings = config(method, rounds=5, checkpoint_every=100, down_ratio=down_ratio)
    run(settings, tmp_path / "whole")
    train, left = Worker.train, iter(range(3 * 3 + 2))

    def interrupted(worker: Worker, job: Job) -> Answer:
        if next(left, None) is None:
            signal.raise_signal(kind)
        return train(worker, job)

    with monkeypatch.context() as patched, heeding(kind):
        patched.setattr(Worker, "train", interrupted)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run(settings, tmp_path / "cut")
    assert [line["round"] for line in Folder(tmp_path / "cut").rounds()] == [1, 2, 3]
    assert json.loads((tmp_path / "cut" / "checkpoint" / "state.json").read_text())["round"] == 3
    run(settings, tmp_path / "cut", resume=True)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


@contextmanager
def heeding(kind: int) -> Iterator[None]:
    """Even if the tests run in the background, where Ctrl-C is ignored."""
    before = signal.signal(kind, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(kind, before)


@pytest.mark.parametrize("cut", [0, 5])
def test_a_run_killed_before_its_first_checkpoint_begins_anew(tmp_path: Path, cut: int) -> None:
    """Even if a full disk took the end of the ledger's last line."""

    def kill(line: dict[str, Any], times: dict[str, float]) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        run(config("fedfq@32:error_feedback=true"), tmp_path / "killed", watch=kill)
    ledger = tmp_path / "killed" / "rounds.jsonl"
    os.truncate(ledger, ledger.stat().st_size - cut)
    run(config("fedfq@32:error_feedback=true"), tmp_path / "killed", resume=True)
    run(config("fedfq@32:error_feedback=true"), tmp_path / "whole")
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_a_finished_run_that_is_resumed_changes_nothing(tmp_path: Path) -> None:
    run(config(), tmp_path / "run")
    before = files(tmp_path / "run")
    result = run(config(), tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == before and len(result.rounds) == 4


def test_a_run_that_lost_its_checkpoint_keeps_its_ledger(tmp_path: Path) -> None:
    """Such as those in results/ of the repository."""
    run(config(), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    for name in ("model.safetensors", "nothing more"):
        before = (tmp_path / "run" / "rounds.jsonl").read_bytes()
        with pytest.raises(ValueError, match="cannot be continued"):
            run(config(), tmp_path / "run", resume=True)
        assert (tmp_path / "run" / "rounds.jsonl").read_bytes() == before
        (tmp_path / "run" / name).unlink(missing_ok=True)


def test_a_run_on_flower_is_not_continued_inline(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    folder.begin(config(), {"weight": np.zeros(3, np.float32)}, engine="flower")
    folder.append({"round": 1}, {})
    with pytest.raises(ValueError, match="was run on flower"):
        run(config(), tmp_path / "run", resume=True)
    assert folder.rounds() == [{"round": 1}]


def test_a_ledger_that_lost_rounds_is_not_gone_on_with(tmp_path: Path) -> None:
    """As a machine may leave it that went down."""
    run(config(), tmp_path / "run")
    (tmp_path / "run" / "rounds.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match="rounds.jsonl: has lost rounds"):
        run(config(), tmp_path / "run", resume=True)


@pytest.mark.parametrize("method", ["fedavg", "fedfq@4", "fedpaq", "aqg"])
def test_networks_with_batch_norm_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    digits = tasks.get("digits")
    layers = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))  # noqa: E731
    monkeypatch.setitem(tasks._registered, "digits", replace(digits, build=layers))
    result = run(config(method), tmp_path / "run")
    assert not any(line["rejected"] for line in result.rounds)
    assert result.theta["2.num_batches_tracked"] == 4 * 2  # rounds, steps
    assert result.rounds[-1]["accuracy"] > 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "changes"),
    [("fedfq@32:error_feedback=true", {}), ("fedfq@32", {"down_ratio": "auto", "initial_ratio": 8})],
)
def test_the_number_of_processes_does_not_matter(tmp_path: Path, method: str, changes: dict[str, Any]) -> None:
    run(config(method, **changes), tmp_path / "one", workers=1)
    run(config(method, **changes), tmp_path / "two", workers=2)
    assert files(tmp_path / "one") == files(tmp_path / "two")


# --- What goes wrong ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SomeSendGarbage(Method):
    """Clients with an odd number send bytes that nobody can read; all of them count their accepted uploads."""

    paper: ClassVar[str] = "none"
    claims: ClassVar[str] = "nothing"

    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        sent = np.int64(memory["sent"][()] if memory else 0) + 1
        upload = methods.make("fedavg").encode(update, {}, order)
        return upload._replace(
            payload=b"garbage" if order.client % 2 else upload.payload, memory={"sent": np.array(sent)}
        )

    def decode(self, payload: bytes, like: Update, context: RoundContext = RoundContext()) -> Update:  # noqa: B008
        return methods.make("fedavg").decode(payload, like)


def test_a_payload_that_cannot_be_decoded_is_left_out_and_its_memory_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(methods.METHODS, "some-garbage", SomeSendGarbage)
    rounds = run(config("some-garbage", rounds=6), tmp_path / "run").rounds
    accepted: dict[int, int] = {}
    for line in rounds:
        odd = [client for client in line["clients"] if client % 2]
        assert [entry["client"] for entry in line["rejected"]] == odd
        assert all(entry["reason"].startswith("truncated") for entry in line["rejected"])
        assert line["uplink_bytes"] >= 7 * len(odd)  # refused bytes were sent as well
        for client in set(line["clients"]) - set(odd):
            accepted[client] = accepted.get(client, 0) + 1
    memories = sorted((tmp_path / "run" / "checkpoint" / "memory").iterdir())
    assert len(memories) == len(accepted)  # no memory of those that were refused
    folder = Folder(tmp_path / "run")
    checkpoint = folder.restore()
    assert checkpoint is not None
    for client, written in checkpoint.memories.items():
        assert folder.checkpoints.memories.read(client, written.round)["sent"] == accepted[client]


def test_a_client_whose_training_diverges_is_left_out(tmp_path: Path) -> None:
    rounds = run(config("fedfq@32", lr=1e30, rounds=1), tmp_path / "run").rounds
    assert len(rounds[0]["rejected"]) == 3
    assert all("not finite" in entry["reason"] for entry in rounds[0]["rejected"])
    assert rounds[0]["uplink_bytes"] == 0 and rounds[0]["accuracy"] is not None


def test_a_run_is_not_continued_with_another_configuration(tmp_path: Path) -> None:
    run(config(), tmp_path / "run")
    with pytest.raises(ValueError, match="holds a run with another configuration"):
        run(config(seed=1), tmp_path / "run", resume=True)


def test_a_folder_that_holds_something_is_not_touched(tmp_path: Path) -> None:
    run(config(), tmp_path / "run")
    before = files(tmp_path / "run")
    with pytest.raises(ValueError, match="already holds a run"):
        run(config("fedfq"), tmp_path / "run")
    assert files(tmp_path / "run") == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("important")
    with pytest.raises(ValueError, match="is not empty"):
        run(config(), tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]


# --- The shared basis --------------------------------------------------------------------------------------


@pytest.mark.parametrize("down_ratio", [1, 16])
def test_from_the_second_round_on_both_sides_derive_the_same_basis(tmp_path: Path, down_ratio: float) -> None:
    """From what clients hold, which is the server's model or close to it."""
    settings = config("fedfq@32", local_steps=5, down_ratio=down_ratio)
    with Clients(settings, None, tmp_path, 2) as clients:
        federation = Federation(settings, clients)
        for number in (1, 2, 3):
            basis = SharedBasis(federation.downlink.model, clients.initial)
            line, _ = federation.step()
            assert line["rejected"] == [] and federation.sample is not None
            named = inspect(federation.sample, like=federation.theta).shared_basis
            assert named == (None if number == 1 else basis.digest.hex())


def test_a_client_that_lacks_the_initial_model_is_understood(tmp_path: Path) -> None:
    """A late joiner encodes without a basis; the round goes on as with the others."""
    settings = config("fedfq@32", local_steps=5)
    with Clients(settings, None, tmp_path, 1) as clients:
        federation = Federation(settings, clients)
        federation.step()
        clients.worker._context = RoundContext(2)
        line, _ = federation.step()
        assert line["rejected"] == [] and federation.sample is not None
        assert inspect(federation.sample, like=federation.theta).shared_basis is None
