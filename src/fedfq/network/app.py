"""The Flower app of Tables 3 and 4: updates of ResNet-20's size, real codec and transport, emulated training.

Two cores cannot be sixteen GPUs, nor sixteen CPUs. So a client makes an update from a seed, in a moment, instead of
training; and the time that its machine would need is waited for afterwards, by all clients at once. An update is a few
outer products that all clients share, a few of its own, and noise, in shares that were chosen by hand.

    one-parameter    a model of one parameter: what Flower takes whatever is sent
    fedavg           ResNet-20 as float32, in one Array
    fedavg-tensors   the same tensor by tensor, as a Flower app does that gives no thought to it
    fedfq            with `fedfq_mod` and `Compressed`; clients make the initial model themselves

No PyTorch in here: it would only take memory.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from fedfq.codec.codec import Codec
from fedfq.codec.decode import Accumulator
from fedfq.codec.shared_basis import SharedBasis
from fedfq.flower import Compressed, fedfq_mod
from fedfq.flower.arrays import record, size, tensors
from fedfq.network.links import counters
from fedfq.types import Array as NDArray

POLL_S = 0.2  # how often the server asks for replies; Flower's own loop does so every 3 s, too coarse to measure with
MEETING_POLL_S = 0.05
TIMEOUT_S = 600.0  # for a round
RANK, COMMON, OWN, NOISE = 4, 0.7, 0.6, 0.4  # of an update: ranks, and shares of its norm
UPDATE_SIZE = 0.01  # an update's norm over the model's
RESNET20 = "resnet20"


# The model


def resnet20(seed: int) -> dict[str, NDArray]:
    """The tensors of `fedfq.tasks.models.resnet20`, names and shapes alike, with He's initialisation."""
    rng = np.random.default_rng(seed)
    model = _convolution(rng, "0", 3, 16) | _norm("1", 16)
    before = 16
    for block in range(9):
        width = (16, 32, 64)[block // 3]
        for half, inputs in (("1", before), ("2", width)):
            model |= _convolution(rng, f"{block + 3}.conv{half}", inputs, width)
            model |= _norm(f"{block + 3}.norm{half}", width)
        before = width
    model["14.weight"] = (0.01 * rng.standard_normal((10, 64))).astype(np.float32)
    model["14.bias"] = np.zeros(10, np.float32)
    return model


def _convolution(rng: np.random.Generator, name: str, inputs: int, outputs: int) -> dict[str, NDArray]:
    values = rng.standard_normal((outputs, inputs, 3, 3)) * np.sqrt(2 / (9 * outputs))
    return {f"{name}.weight": values.astype(np.float32)}


def _norm(name: str, width: int) -> dict[str, NDArray]:
    ones, zeros = np.ones(width, np.float32), np.zeros(width, np.float32)
    return {
        f"{name}.weight": ones,
        f"{name}.bias": zeros,
        f"{name}.running_mean": zeros.copy(),
        f"{name}.running_var": ones.copy(),
        f"{name}.num_batches_tracked": np.zeros((), np.int64),
    }


def emulate_training(theta: Mapping[str, NDArray], round_: int, client: int, steps: int) -> dict[str, NDArray]:
    """The model after emulated training: theta and an update that this client would have in this round."""
    common, own = np.random.default_rng([round_]), np.random.default_rng([round_, client + 1])
    new = {}
    for name, old in theta.items():
        if old.ndim == 0:  # steps so far; FedAvg makes a float of it
            new[name] = np.asarray(old + steps, old.dtype)
        elif old.ndim == 1:
            new[name] = (old + UPDATE_SIZE * _unit(own, old.shape)).astype(np.float32)
        else:
            rows = (old.shape[0], old.size // old.shape[0])
            update = COMMON * _low_rank(common, rows) + OWN * _low_rank(own, rows) + NOISE * _unit(own, rows)
            new[name] = (old + UPDATE_SIZE * float(np.linalg.norm(old)) * update.reshape(old.shape)).astype(np.float32)
    return new


def _low_rank(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray:
    """A sum of outer products, each half as strong as the one before; norm 1."""
    rows, columns = shape
    left = rng.standard_normal((rows, RANK)) * 0.5 ** np.arange(RANK)
    matrix = left @ rng.standard_normal((RANK, columns))
    return matrix / np.linalg.norm(matrix)


def _unit(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray:
    values = rng.standard_normal(shape)
    return values / np.linalg.norm(values)


def flat(model: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """The whole model as one tensor."""
    return {"model": np.concatenate([tensor.ravel() for tensor in model.values()]).astype(np.float32)}


def unflat(vector: NDArray, like: Mapping[str, NDArray]) -> dict[str, NDArray]:
    ends = np.cumsum([tensor.size for tensor in like.values()])
    parts = np.split(vector, ends[:-1])
    return {name: part.reshape(tensor.shape) for (name, tensor), part in zip(like.items(), parts)}


def exercise() -> None:
    """Make whatever is compiled or loaded on first use ready, before processes are forked."""
    initial = resnet20(0)
    theta, new = (emulate_training(initial, round_, 0, 1) for round_ in (1, 2))
    update = {name: new[name] - initial[name] for name in initial}
    basis = SharedBasis(theta, initial)
    payload = Codec(gain="norm", layout="digest").encode(update, shared_basis=basis)
    Accumulator(like=initial).add(payload, shared_basis=basis)


# The client


def keep_pace(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Make a client as fast as one with a machine of its own.

    All clients come here with the model, and do what is real, one after the other: make the update, encode it. The
    clock stands still until all are done. Then they wait together, each for its emulated steps and for the seconds of a
    core that its encoding took; and so they upload together.
    """
    config = context.run_config
    meeting = Path(str(config["meeting"]))
    round_, number = _identify(message, context)
    stopped = _meet(meeting, f"{round_}-begin", number, int(config["clients"]))
    try:
        with _turn(meeting):
            cpu = time.process_time()
            reply = call_next(message, context)
            cpu = time.process_time() - cpu
    finally:  # the others need not wait for one that failed
        released = _meet(meeting, f"{round_}-end", number, int(config["clients"]))
    if reply.has_content():
        metrics: Any = reply.content["metrics"]
        metrics["cpu-s"] = cpu
        metrics["codec-s"] = cpu - metrics["app-cpu-s"]
        metrics["stopped-s"] = released - stopped
        steps_s = int(config["steps"]) * float(config["step-seconds"])
        time.sleep(float(config["slow-motion"]) * (steps_s + metrics["codec-s"]))
        metrics["ready"] = time.time()
    return reply


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Let one client at a time work: with others on the same cores, its encoding would take more seconds of a core."""
    with open(folder / "turn", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _identify(message: Message, context: Context) -> tuple[int, int]:
    """The round, and the number of the client."""
    config: Any = message.content.config_records["config"]
    return int(config["server-round"]), int(context.node_config["partition-id"])


def _meet(folder: Path, what: str, number: int, clients: int) -> float:
    """Wait until all clients are there; says when they were."""
    (folder / f"{what}-{number}").touch()
    deadline = time.time() + TIMEOUT_S
    while sum(name.startswith(f"{what}-") for name in os.listdir(folder)) < clients:
        if time.time() > deadline:
            raise TimeoutError(f"not all clients have come to {what}")
        time.sleep(MEETING_POLL_S)
    return time.time()


def compress(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    if context.run_config["variant"] != "fedfq":
        return call_next(message, context)
    config = context.run_config
    return fedfq_mod(float(config["ratio"]), initial=_model(str(config["model"])))(message, context, call_next)


client = ClientApp(mods=[keep_pace, compress])


@client.train()
def train(message: Message, context: Context) -> Message:
    cpu = time.process_time()
    round_, number = _identify(message, context)
    theta = tensors(message.content.array_records["arrays"])
    steps = int(context.run_config["steps"])
    if list(theta) == ["model"]:
        like = _model(str(context.run_config["model"]))
        new = flat(emulate_training(unflat(theta["model"], like), round_, number, steps))
    else:
        new = emulate_training(theta, round_, number, steps)
    made = record(new)
    metrics = MetricRecord({"num-examples": 1, "app-cpu-s": time.process_time() - cpu})
    return Message(RecordDict({"arrays": made, "metrics": metrics}), reply_to=message)


# The server

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    clients, variant = int(config["clients"]), config["variant"]
    strategy: Strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    if variant == "fedfq":
        strategy = Compressed(strategy)
    model = {"weight": np.zeros(1, np.float32)} if variant == "one-parameter" else _model(str(config["model"]))
    arrays = record(flat(model) if variant == "fedavg" else model)
    with open(str(config["out"]), "a", buffering=1) as file:
        for round_ in range(1, int(config["rounds"]) + 1):
            arrays, line = measure_round(strategy, grid, arrays, round_, float(config["slow-motion"]))
            file.write(json.dumps(line) + "\n")


def _model(name: str) -> dict[str, NDArray]:
    """ResNet-20, or so many square matrices of so many rows, as in "40x500"."""
    if name == RESNET20:
        return resnet20(0)
    count, side = map(int, name.split("x"))
    rng = np.random.default_rng(0)
    return {f"layer{k}": rng.standard_normal((side, side), np.float32) for k in range(count)}


def measure_round(
    strategy: Strategy, grid: Grid, arrays: ArrayRecord, round_: int, slow_motion: float
) -> tuple[ArrayRecord, dict[str, Any]]:
    """A round as `Strategy.start` does it, with a clock, and the bytes that passed the server's link meanwhile.

    In slow motion, whatever is emulated takes so many times longer, and what is done once for the clients or by the
    server is followed by a wait: so only Flower's own work becomes as much faster beside it.
    """
    began, cpu, (received, sent) = time.time(), busy_seconds(), counters()
    messages = list(strategy.configure_train(round_, arrays, ConfigRecord(), grid))
    down_payload = sum(size(message.content) for message in messages)
    replies, arrivals = _exchange(grid, messages)
    if failed := [reply for reply in replies if reply.has_error()]:
        raise RuntimeError(f"round {round_}: {len(failed)} of {len(replies)} clients failed: {failed[0].error.reason}")
    metrics: list[Any] = [reply.content["metrics"] for reply in replies]
    payload = sum(size(reply.content) for reply in replies)
    aggregation = time.time()
    aggregated, _ = strategy.aggregate_train(round_, replies)
    if aggregated is None:
        raise RuntimeError(f"round {round_}: no reply could be used")
    aggregation = time.time() - aggregation
    time.sleep((slow_motion - 1) * aggregation)
    ended, cpu, (received_now, sent_now) = time.time(), busy_seconds() - cpu, counters()
    stopped = float(np.mean([each["stopped-s"] for each in metrics]))
    return aggregated, {
        "round": round_,
        "round_s": ended - began - stopped,
        "stopped_s": stopped,
        "encode_s": float(np.mean([each["codec-s"] for each in metrics])),
        "delivery_s": max(arrivals) - max(each["ready"] for each in metrics),
        "aggregate_s": aggregation,
        "flower_s": (cpu - aggregation - sum(each["cpu-s"] for each in metrics)) / (os.cpu_count() or 1),
        "uplink_bytes": received_now - received,
        "downlink_bytes": sent_now - sent,
        "payload_bytes": payload,
        "down_payload_bytes": down_payload,
    }


def busy_seconds() -> float:
    """What all cores of the machine have worked so far, for whomever."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _waiting, interrupts, soft_interrupts = map(int, file.readline().split()[1:8])
    return (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")


def _exchange(grid: Grid, messages: list[Message]) -> tuple[list[Message], list[float]]:
    """The replies, and when each had arrived."""
    replies: list[Message] = []
    arrivals: list[float] = []
    waiting = set(grid.push_messages(messages))
    deadline = time.time() + TIMEOUT_S
    while waiting:
        if time.time() > deadline:
            raise TimeoutError(f"{len(waiting)} of {len(messages)} clients did not reply in {TIMEOUT_S:.0f} s")
        for reply in grid.pull_messages(waiting):
            waiting.discard(reply.metadata.reply_to_message_id)
            replies.append(reply)
            arrivals.append(time.time())
        if waiting:
            time.sleep(POLL_S)
    return replies, arrivals
