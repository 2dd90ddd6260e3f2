"""This project's tasks as a Flower app: the same clients, batches and payloads as in the inline engine."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedfq.federation.client import state
from fedfq.federation.clients import Clients, Job
from fedfq.federation.config import Config
from fedfq.federation.folder import Folder
from fedfq.federation.loop import run, sample
from fedfq.files import read_tensors
from fedfq.flower import Compressed, app
from fedfq.flower.protocol import TAG_BYTES
from fedfq.flower.replies import Arrivals
from tests.cli.runner import refused
from tests.flower.local import RUN, LocalGrid, payload_of, record
from tests.network.test_links import heed_signals

SETTINGS = {"task": "digits", "clients": 4, "per_round": 3, "local_steps": 2, "rounds": 3, "eval_every": 1}


def make_grid(config: Config, nodes: int = 4) -> LocalGrid:
    """Nodes 1, 2, ... play clients 3, 2, ...: which is which has to be asked."""
    grid = LocalGrid(app.client, nodes, {node: {"partition-id": nodes - node} for node in range(1, nodes + 1)})
    for context in grid.contexts.values():
        context.run_config = app.run_config(config)
    return grid


def test_the_configuration_survives_the_way_through_flower() -> None:
    for method in ("fedfq@32", "fedfq@64:basis=adaptive:gain=false", "fedavg"):
        for more in ({}, {"local_steps": None, "local_epochs": 2}, {"down_ratio": 1}):
            config = Config.make(method=method, weighting="mean", **{**SETTINGS, **more})
            assert app.configuration(app.run_config(config) | {"out": "run", "data-dir": ""}) == config


@pytest.mark.parametrize(
    "given, words",
    [
        ({"method": "stc"}, "does not run on Flower"),
        ({"method": "fedavg", "down-ratio": "auto"}, "down_ratio must be 1 for fedavg on Flower"),
        ({"ruonds": 3}, "ruonds"),
        ({"clients": 2}, "per_round"),
    ],
)
def test_what_cannot_be_run_is_refused(given: dict, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        app.configuration({"task": "digits", "per-round": 3} | given)


def test_every_client_is_found_by_its_partition() -> None:
    config = Config.make(**SETTINGS)
    assert app.find_clients(make_grid(config), 4) == [4, 3, 2, 1]


def test_a_client_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "CLIENTS_TIMEOUT_S", 0.0)
    with pytest.raises(TimeoutError, match="no node plays client 4"):
        app.find_clients(make_grid(Config.make(**SETTINGS)), 5)


def test_nodes_that_answer_nonsense_are_not_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor can one take the place of another."""
    answers = {2: "two", 3: float("nan"), 4: [1], 5: 99, 6: -1, 7: 3, 8: None}

    def tamper(node: int, reply: Message) -> Message:
        if answers.get(node, 0) is None:
            reply.content = RecordDict()
        elif node in answers:
            value = answers[node]
            kind = ConfigRecord if isinstance(value, str) else MetricRecord
            reply.content = RecordDict({"client": kind({"partition-id": value})})
        return reply

    grid = make_grid(Config.make(**SETTINGS), 9)
    grid.tamper = tamper
    monkeypatch.setattr(app, "CLIENTS_TIMEOUT_S", 0.0)
    with pytest.raises(TimeoutError, match="no node plays client 1"):
        app.find_clients(grid, 4)  # nodes 9 and 7 play 0 and 3
    grid.tamper = lambda node, reply: tamper(node, reply) if node == 7 else reply
    with pytest.raises(TimeoutError, match="no node plays client 2"):  # it said 3, but 6 had said so before
        app.find_clients(grid, 4)
    grid.tamper = lambda node, reply: tamper(node, reply) if node < 6 else reply
    assert app.find_clients(grid, 4) == [9, 8, 7, 6]


def test_a_node_that_is_gone_has_not_replied(tmp_path: Path) -> None:
    """The SuperLink answers for it, under the SuperLink's own number."""
    config = Config.make(method="fedfq@32", **SETTINGS)
    task, data, _, model, _ = app.world(config, {})
    strategy, folder = Compressed(app.Sampled(config, [4, 3, 2, 1])), Folder(tmp_path)
    first, second, third = sample(config, 1)
    strategy.last = Arrivals(3, 100, [14 - first], [(14 - second, "it failed"), (1, "Node Unavailable")])
    ledger = app.RunLedger(config, folder, task, data, model, strategy, [14, 13, 12, 11])
    ledger.after_round(1, record(state(model)))
    assert folder.rounds()[0]["rejected"] == [
        {"client": number, "reason": reason}
        for number, reason in sorted({second: "it failed", third: "no reply"}.items())
    ]


def test_a_client_that_came_back_under_another_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 4 answers, goes, and returns as node 9, while the server still waits for another client."""
    grid = make_grid(Config.make(**SETTINGS))
    late, gone = grid.contexts.pop(1), []
    monkeypatch.setattr(app, "RETRY_PAUSE_S", 0.0)

    def node_ids() -> list[int]:
        if grid.replies and not gone:
            gone.append(grid.contexts.pop(4))
            grid.contexts |= {1: late, 9: gone[0]}
        return list(grid.contexts)

    monkeypatch.setattr(grid, "get_node_ids", node_ids)
    assert app.find_clients(grid, 4) == [9, 3, 2, 1]


def test_the_first_rounds_payloads_are_those_of_the_inline_engine(tmp_path: Path) -> None:
    config = Config.make(method="fedfq@32", **SETTINGS)
    grid = make_grid(config)
    strategy = Compressed(app.Sampled(config, app.find_clients(grid, 4)))
    with Clients(config, None, tmp_path, workers=1) as clients:
        clients.publish(clients.initial)
        jobs = [Job(1, number, b"", None) for number in sample(config, 1)]
        inline = {answer.client: answer.payload for answer in clients.train(jobs)}
        model = record(clients.initial)
        grid.send_and_receive(strategy.configure_train(1, model, ConfigRecord(), grid))
    here = {4 - reply.metadata.src_node_id: payload_of(reply) for reply in grid.replies}
    assert here == inline


@pytest.mark.parametrize(
    "given",
    [
        {"method": "fedfq@32"},
        {"method": "fedfq@32", "initial_ratio": 6},
        {"method": "fedfq@32", "down_ratio": 1},
        {"method": "fedfq@32:basis=adaptive", "down_ratio": 1},
        {"method": "fedavg"},
    ],
)
def test_the_ledger_counts_the_same_way_down_as_the_inline_engine(tmp_path: Path, given: dict) -> None:
    """All that is sent, to a client that comes late too. (Later payloads differ by some bytes, and names count.)"""
    config = Config.make(**SETTINGS | {"per_round": 2, "rounds": 5, "seed": 1} | given)
    run_on(make_grid(config), config, tmp_path / "here")
    run(config, tmp_path / "inline")
    here, there = (Folder(tmp_path / name).rounds() for name in ("here", "inline"))
    assert [line["clients"] for line in here] == [line["clients"] for line in there]
    sizes = [(line["downlink_bytes"], reference["downlink_bytes"]) for line, reference in zip(here, there)]
    assert sizes == [(pytest.approx(reference, rel=0.01), reference) for _, reference in sizes]
    assert Folder(tmp_path / "here").raw_bytes == Folder(tmp_path / "inline").raw_bytes


@pytest.mark.parametrize("method", ["fedfq@32", "fedavg"])
def test_a_run_in_which_nothing_can_be_used_ends_with_the_initial_model(tmp_path: Path, method: str) -> None:
    config = Config.make(method=method, lr=1e30, **SETTINGS)
    run_on(make_grid(config), config, tmp_path / "run")
    for line in Folder(tmp_path / "run").rounds():
        assert [each["client"] for each in line["rejected"]] == line["clients"]
        assert all("not finite" in each["reason"] for each in line["rejected"])
    initial = app.world(config, {}).task.model(config.seed).state_dict()
    final = read_tensors(tmp_path / "run" / "model.safetensors")
    assert all((final[name] == value.numpy()).all() for name, value in initial.items())


@pytest.mark.parametrize("weight", [float("nan"), -1.0, 0, 1e300])
def test_uncompressed_replies_are_looked_at_too(tmp_path: Path, weight: float) -> None:
    def tamper(node: int, reply: Message) -> Message:
        if node == 2 and "metrics" in reply.content:
            reply.content["metrics"]["num-examples"] = weight
        if node == 3 and "arrays" in reply.content:
            del reply.content["arrays"]["0.weight"]
        return reply

    config = Config.make(method="fedavg", **SETTINGS | {"per_round": 4})
    grid = make_grid(config)
    grid.tamper = tamper
    run_on(grid, config, tmp_path / "run")
    for line in Folder(tmp_path / "run").rounds():
        assert [each["client"] for each in line["rejected"]] == [1, 2]
        assert "tensors" in line["rejected"][0]["reason"] and "weight" in line["rejected"][1]["reason"]
        assert line["accuracy"] is not None and line["loss"] is not None


def run_on(grid: LocalGrid, config: Config, out: Path) -> None:
    settings = app.run_config(config) | {"out": str(out)}
    app.main(grid, Context(run_id=RUN, node_id=0, node_config={}, state=RecordDict(), run_config=settings))


def fedfq(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from fedfq.cli import main; main()", "run", "--engine", "flower", *arguments]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--method", "stc"), "does not run on Flower"),
        (("--method", "fedavg", "--down-ratio", "auto"), "down_ratio must be 1 for fedavg on Flower"),
        (("--resume", "--out", "nowhere"), "nowhere"),
        (("--engine", "ray"), "there are inline and flower"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused("run", "--engine", "flower", *arguments)


DIGITS = (*("--task", "digits", "--clients", "4", "--per-round", "3", "--local-steps", "2"), "--method", "fedfq@32")


def flower_processes() -> set[str]:
    """Processes of Flower and Ray on this machine, by their command lines."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:  # it is gone
            continue
        if "fedfq-flower-" in command or "ray::" in command:
            found.add(f"{path.parent.name} {command}")
    return found


@pytest.mark.slow
def test_a_run_in_flowers_simulation_is_nearly_the_inline_run(tmp_path: Path) -> None:
    before = flower_processes()
    command = fedfq(*DIGITS, "--rounds", "3", "--out", "run")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    inline = [sys.executable, "-c", "from fedfq.cli import main; main()", "run", *DIGITS, "--rounds", "3"]
    subprocess.run([*inline, "--out", "inline"], cwd=tmp_path, check=True, capture_output=True)
    here, there = (
        [json.loads(line) for line in (tmp_path / name / "rounds.jsonl").read_text().splitlines()]
        for name in ("run", "inline")
    )
    same = ("clients", "accuracy", "rejected", "downlink_bytes")
    assert {key: here[0][key] for key in same} == {key: there[0][key] for key in same}
    assert here[0]["uplink_bytes"] == there[0]["uplink_bytes"] + 3 * TAG_BYTES
    assert here[0]["claimed_bits"] == 8 * here[0]["uplink_bytes"]
    assert [line["loss"] for line in here] == pytest.approx([line["loss"] for line in there], abs=1e-3)
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["engine"] == "flower"
    assert flower_processes() <= before


@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_is_interrupted(tmp_path: Path) -> None:
    before = flower_processes()
    command = fedfq(*DIGITS, "--rounds", "1000", "--out", "run")
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, preexec_fn=heed_signals)
    end = time.monotonic() + 120
    while not (tmp_path / "run" / "rounds.jsonl").exists():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(60) == 130
    finally:
        process.kill()
    while flower_processes() - before:
        assert time.monotonic() < end + 60, flower_processes() - before
        time.sleep(0.2)
