"""The Flower app of `fedfq bench flower`: rounds without and with fedfq, in turns, in the same processes."""

from __future__ import annotations

import json
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedfq.flower.arrays import record, tensors
from fedfq.flower.mod import fedfq_mod
from fedfq.flower.protocol import ORDER
from fedfq.flower.strategy import Compressed

HEIGHT, WIDTH = 512, 4096  # of a tensor of the made-up model
RANK = 32


def compress(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """fedfq where the server speaks it."""
    if ORDER not in message.content:
        return call_next(message, context)
    mod = fedfq_mod(int(context.run_config["ratio"]), initial=initial_model(*_choice(context)))
    return mod(message, context, call_next)


client = ClientApp(mods=[compress])
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    model = tensors(message.content.array_records["arrays"])
    trained = _trained_network(model) if context.run_config["training"] else _move(model)
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": record(trained), "metrics": metrics}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Seconds per round, the first of each kind left out: it loads and compiles."""
    config = context.run_config
    model = record(initial_model(*_choice(context)))
    seconds: dict[str, list[float]] = {"fedavg": [], "fedfq": []}
    for _ in range(int(config["repeats"])):
        for name, strategy in (("fedavg", _fedavg()), ("fedfq", Compressed(_fedavg()))):
            times: list[float] = []
            strategy.start(
                grid, model, int(config["rounds"]) + 1, evaluate_fn=lambda *_, times=times: times.append(time.time())
            )
            seconds[name] += np.diff(times)[1:].tolist()
    Path(str(config["out"])).write_text(json.dumps(seconds))


def _choice(context: Context) -> tuple[bool, int]:
    return bool(context.run_config["training"]), int(context.run_config["parameters"])


@lru_cache(maxsize=1)
def initial_model(training: bool, parameters: int) -> dict[str, Any]:
    """The same in every process, so that nobody has to be sent it."""
    if not training:
        return make_up_model(parameters)
    from fedfq.federation.client import state

    return state(_make_network())


def _fedavg() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0)


def make_up_model(parameters: int) -> dict[str, Any]:
    """Matrices of one shape."""
    rng = np.random.default_rng(0)
    height = max(1, round(parameters / (-(-parameters // (HEIGHT * WIDTH))) / WIDTH))
    count = max(1, round(parameters / (height * WIDTH)))
    return {f"layer{k}": rng.standard_normal((height, WIDTH), np.float32) for k in range(count)}


def _move(model: dict[str, Any]) -> dict[str, Any]:
    return {name: value + step(value.shape) for name, value in model.items()}


@lru_cache(maxsize=4)
def step(shape: tuple[int, int]) -> Any:
    """An update as real ones are: directions that fade, rows that differ, and a rest with heavy tails."""
    rng = np.random.default_rng(1)
    left, right = (rng.standard_normal((side, RANK), np.float32) for side in shape)
    rows = rng.lognormal(0.0, 1.0, (shape[0], 1)).astype(np.float32)
    rest = rng.standard_t(3, shape).astype(np.float32)
    return 1e-3 * rows * (left @ (right / np.arange(1, RANK + 1, dtype=np.float32)).T + 0.2 * rest)


# Ten real steps of SimpleCNN, on noise


def _make_network() -> Any:
    import torch

    from fedfq.tasks.models import SimpleCNN

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return SimpleCNN()


_network = lru_cache(maxsize=1)(_make_network)  # that a process trains


def _trained_network(model: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch.nn import functional

    from fedfq.federation.client import load, state

    network = _network()
    load(network, model)
    x, y = torch.randn(50, 3, 24, 24).contiguous(memory_format=torch.channels_last), torch.randint(0, 10, (50,))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    for _ in range(10):
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    return state(network)
