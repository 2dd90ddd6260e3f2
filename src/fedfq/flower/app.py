"""This project's tasks as a Flower app: what `fedfq run --engine flower` and examples/flower-cifar10 run.

The run's configuration is that of `fedfq run`, one key an option. A node plays the client that its `partition-id` says,
trains on the same examples in the same order as in the inline engine, and the server asks the same clients in every
round. So the first round's payloads are the same as inline; later ones differ by the order in which replies are added.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fedfq import tasks
from fedfq.federation.client import load, local_sgd, refuse_unusable, state
from fedfq.federation.clients import ENCODING, TRAINING, random
from fedfq.federation.config import Config
from fedfq.federation.downlink import AUTO
from fedfq.federation.folder import Folder
from fedfq.federation.loop import sample
from fedfq.flower.arrays import record, size, tensors, views
from fedfq.flower.mod import fedfq_mod
from fedfq.flower.protocol import LONGEST_REASON
from fedfq.flower.replies import LARGEST_WEIGHT, Arrivals
from fedfq.flower.strategy import Compressed, NothingAccepted
from fedfq.tasks.task import Data, Task, evaluate
from fedfq.types import Array as NDArray

PATHS = ("data-dir", "out")  # in the run's configuration: what its result does not depend on
METHODS = ("fedavg", "fedfq")
CLIENTS_TIMEOUT_S = 600.0  # for all clients to be there
RETRY_PAUSE_S = 1.0  # before nodes are asked again


def configuration(run_config: Mapping[str, Any]) -> Config:
    """The keys of `fedfq run` in a Flower app's configuration; an empty text means not given."""
    given = {key.replace("-", "_"): value for key, value in run_config.items() if key not in PATHS and value != ""}
    config = Config.make(**given)
    if config.method not in METHODS:
        raise ValueError(f"method {config.method!r} does not run on Flower; {' and '.join(METHODS)} do")
    if config.method == "fedavg" and config.down_ratio != 1:
        raise ValueError("down_ratio must be 1 for fedavg on Flower, which sends all bits both ways")
    return config


def run_config(config: Config) -> dict[str, Any]:
    """The inverse of `configuration`."""
    keys = [
        *("task", "split", "rounds", "clients", "per_round", "local_steps", "local_epochs", "batch_size"),
        *("lr", "lr_decay", "down_ratio", "initial_ratio", "weighting", "precision", "seed", "eval_every"),
    ]
    found = {key.replace("_", "-"): getattr(config, key) for key in keys if getattr(config, key) is not None}
    return found | {"method": config.label}


class World(NamedTuple):
    """What a process holds of a run, whichever client it plays."""

    task: Task
    data: Data
    shards: list[Any]
    model: nn.Module
    initial: dict[str, NDArray]


@lru_cache(maxsize=1)
def _world(task: str, split: str, clients: int, seed: int, data_dir: str) -> World:
    torch.set_num_threads(1)
    known = tasks.get(task)
    data = known.load(Path(data_dir) if data_dir else None)
    model = known.model(seed)
    initial = {name: value.copy() for name, value in state(model).items()}
    return World(known, data, tasks.split(split, data, clients, seed), model, initial)


def world(config: Config, run_config: Mapping[str, Any]) -> World:
    return _world(config.task, config.split, config.clients, config.seed, str(run_config.get("data-dir", "")))


# The client


def compress(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """`fedfq_mod` with the options of the run."""
    config = configuration(context.run_config)
    if config.method == "fedavg":
        return call_next(message, context)
    if message.metadata.message_type != MessageType.TRAIN:
        return call_next(message, context)
    numbers = ENCODING, int(_config(message)["server-round"]), _number(context)
    seed = int(random(config, *numbers).integers(2**62))
    initial = world(config, context.run_config).initial if config.initial_ratio is None else None
    return fedfq_mod(**config.options, seed=seed, initial=initial)(message, context, call_next)


client = ClientApp(mods=[compress])


@client.train()
def train(message: Message, context: Context) -> Message:
    config = configuration(context.run_config)
    task, data, shards, model, _ = world(config, context.run_config)
    number, round_ = _number(context), int(_config(message)["server-round"])
    theta = tensors(message.content.array_records["arrays"])
    refuse_unusable("cpu", config.precision)
    rng = random(config, TRAINING, round_, number)
    _, loss = local_sgd(model, theta, task, data.train, shards[number], config.local_training(round_), rng)
    weight = len(shards[number]) if config.weighting == "samples" else 1
    metrics = MetricRecord({"num-examples": weight, "train-loss": loss})
    return Message(RecordDict({"arrays": record(state(model)), "metrics": metrics}), reply_to=message)


@client.query()
def which(message: Message, context: Context) -> Message:
    """Which client this node plays."""
    found = MetricRecord({"partition-id": _number(context)})
    return Message(RecordDict({"client": found}), reply_to=message)


# The server

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = configuration(context.run_config)
    task, data, _, model, start = world(config, context.run_config)
    folder = Folder(Path(str(context.run_config["out"])))
    folder.refuse_if_taken()
    nodes = find_clients(grid, config.clients)
    folder.begin(config, start, engine="flower", flwr=version("flwr"))
    ledger = RunLedger(config, folder, task, data, model, make_strategy(config, nodes), nodes)
    initial = record(start)
    arrays = initial
    with suppress(NothingAccepted):  # the ledger says so
        arrays = ledger.strategy.start(grid, initial, config.rounds, evaluate_fn=ledger.after_round).arrays or initial
    folder.finish(tensors(arrays))


def make_strategy(config: Config, nodes: list[int]) -> Counted | Compressed:
    if config.method != "fedfq":
        return Counted(config, nodes)
    return Compressed(
        Sampled(config, nodes),
        down_ratio=None if config.down_ratio == AUTO else float(config.down_ratio),
        initial_ratio=config.initial_ratio,
        shared_basis=config.make_method().uses_initial,
    )


def find_clients(grid: Grid, count: int) -> list[int]:
    """The node of each client, once every one of them is there."""
    nodes: dict[int, int] = {}
    end = time.monotonic() + CLIENTS_TIMEOUT_S
    while True:
        present = set(grid.get_node_ids())
        nodes = {number: node for number, node in nodes.items() if node in present}
        unknown = present - set(nodes.values())
        messages = [Message(RecordDict(), node, MessageType.QUERY) for node in unknown]
        for reply in grid.send_and_receive(messages, timeout=CLIENTS_TIMEOUT_S) if messages else []:
            found = reply.content.get("client") if reply.has_content() else None
            claimed = found.get("partition-id") if isinstance(found, MetricRecord) else None
            if isinstance(claimed, int) and 0 <= claimed < count:
                nodes.setdefault(claimed, reply.metadata.src_node_id)  # the first who says so is it
        missing = sorted(set(range(count)) - set(nodes))
        if not missing:
            return [nodes[number] for number in range(count)]
        if time.monotonic() > end:
            raise TimeoutError(
                f"no node plays client {missing[0]} (partition-id) of {count} after {CLIENTS_TIMEOUT_S:.0f} s"
            )
        time.sleep(RETRY_PAUSE_S)


class Sampled(FedAvg):
    """FedAvg that asks in every round the clients that the inline engine asks."""

    def __init__(self, config: Config, nodes: list[int]) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.config = config
        self.nodes = nodes

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config["server-round"] = server_round
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        chosen = [self.nodes[number] for number in sample(self.config, server_round)]
        return self._construct_messages(content, chosen, MessageType.TRAIN)


class Counted(Sampled):
    """Without compression: counts what came in, and leaves out what would spoil the mean, as `Compressed` does."""

    last = Arrivals(0, 0, [], [])
    layout: Mapping[str, Any] = {}
    downlink = 0  # bytes of the models of this round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.layout = _layout(arrays)
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self.downlink = sum(size(message.content) for message in messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        accepted, dropped, uplink = [], [], 0
        for reply in replies:
            uplink += size(reply.content) if reply.has_content() else 0
            if (reason := self._refusal(reply)) is None:
                accepted.append(reply)
            else:
                dropped.append((reply.metadata.src_node_id, reason[:LONGEST_REASON]))
        nodes = [reply.metadata.src_node_id for reply in accepted]
        self.last = Arrivals(self.downlink, uplink, nodes, dropped)
        return super().aggregate_train(server_round, accepted)

    def _refusal(self, reply: Message) -> str | None:
        """Why a reply cannot be averaged, if it cannot."""
        if reply.has_error():
            return reply.error.reason or "it failed"
        arrays = reply.content.array_records.get(self.arrayrecord_key)
        metrics = reply.content.metric_records.get("metrics")
        weight = None if metrics is None else metrics.get(self.weighted_by_key)
        try:
            if arrays is None or _layout(arrays) != self.layout:
                return "reply: it has not the model's tensors"
            finite = all(np.isfinite(value).all() for value in views(arrays).values())
        except ValueError as error:
            return f"reply: {error}"
        if not finite:
            return "reply: it has numbers that are not finite"
        if not isinstance(weight, (int, float)) or not 0 < weight < LARGEST_WEIGHT:
            return f"weight: the number by which it counts must be positive, got {weight!r}"
        return None


def _layout(arrays: ArrayRecord) -> dict[str, Any]:
    return {name: (value.shape, value.dtype) for name, value in views(arrays).items()}


class RunLedger:
    """Evaluates the model and writes the lines of the run's folder, round by round."""

    def __init__(
        self,
        config: Config,
        folder: Folder,
        task: Task,
        data: Data,
        model: nn.Module,
        strategy: Counted | Compressed,
        nodes: list[int],
    ) -> None:
        self.config = config
        self.folder = folder
        self.task = task
        self.data = data
        self.model = model
        self.strategy = strategy
        self.numbers = {node: number for number, node in enumerate(nodes)}
        self.began = time.perf_counter()

    def after_round(self, round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        began, self.began = self.began, time.perf_counter()
        if round_ == 0:
            return None
        accuracy, loss = self._evaluate(round_, arrays)
        chosen = sample(self.config, round_)
        downlink, uplink, accepted, dropped = self.strategy.last
        reasons = dict.fromkeys(set(chosen) - {self.numbers[node] for node in accepted}, "no reply")
        # Of a node that is gone, the SuperLink answers in its own name.
        reasons |= {self.numbers[node]: reason for node, reason in dropped if node in self.numbers}
        line = {
            "round": round_,
            "accuracy": accuracy,
            "loss": loss,
            "train_loss": None,
            "clients": chosen,
            "uplink_bytes": uplink,
            "downlink_bytes": downlink,
            "claimed_bits": 8 * uplink,
            "rejected": [{"client": number, "reason": reason} for number, reason in sorted(reasons.items())],
        }
        self.folder.append(line, {"round": round_, "round_s": time.perf_counter() - began})
        return None if accuracy is None else MetricRecord({"accuracy": accuracy})

    def _evaluate(self, round_: int, arrays: ArrayRecord) -> tuple[float | None, float | None]:
        if round_ % self.config.eval_every and round_ != self.config.rounds:
            return None, None
        load(self.model, tensors(arrays))
        accuracy, loss = evaluate(self.model, self.task, self.data.test)
        return accuracy, loss if np.isfinite(loss) else None


def _config(message: Message) -> Any:
    return message.content.config_records["config"]


def _number(context: Context) -> int:
    """Which client a node plays."""
    number = context.node_config.get("partition-id")
    if not isinstance(number, int):
        raise ValueError("the node's config has no partition-id, a number: it says which client the node plays")
    return number
