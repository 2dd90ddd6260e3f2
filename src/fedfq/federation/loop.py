"""The FedAvg loop (Eqs. 1-4), with any method between the clients and the server.

for every round t:
    W <- |W| of n clients, at random
    every client i in W:   theta_i <- theta_t, then tau times theta_i - eta_t * gradient    (Eq. 2)
                           h_i = theta_i - theta_t, sent as method.encode(h_i)
    theta_{t+1} = theta_t + mean of what the server decodes             (Eq. 3 for FedAvg, Eq. 4 for all others)

The paper's mean is a plain one (`weighting="mean"`); that of its code, and our default, is weighted by samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedfq.codec.errors import PayloadError
from fedfq.federation.checkpoint import Checkpoint, naming
from fedfq.federation.clients import SAMPLING, Answer, Clients, Job, random
from fedfq.federation.config import Config
from fedfq.federation.downlink import OWN, BroadcastDownlink, Downlink, OwnDownlink
from fedfq.federation.folder import Folder
from fedfq.federation.memory import Written
from fedfq.methods import Method, Order, RoundContext
from fedfq.signals import ending_by_signal, postponed
from fedfq.types import Array

Watch = Callable[[dict[str, Any], dict[str, float]], None]


class Result(NamedTuple):
    """A finished run: the model, and its ledger."""

    theta: Mapping[str, Array]
    rounds: list[dict[str, Any]]


def run(
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    workers: int = 1,
    data_dir: Path | None = None,
    device: str = "cpu",
    watch: Watch = lambda line, times: None,
) -> Result:
    """Train a federation, in a new folder or on from its last checkpoint. `watch` is told of every round.

    With `overwrite` the folder may hold another run, which is deleted once this one is ready to begin.

    Results of another `device` than the processor differ by its rounding, and it is named in `run.json`.
    Ctrl-C, SIGTERM and SIGHUP are heeded at once: what was finished is in a checkpoint when KeyboardInterrupt or
    SystemExit is raised.
    """
    folder = Folder(out)
    with ending_by_signal(), folder.held():
        if not resume:
            folder.refuse_if_taken(overwrite)
        elif folder.config() != config:
            raise ValueError(f"{out}: holds a run with another configuration")
        return _run(config, folder, resume, min(workers, config.per_round), data_dir, device, watch)


def _run(
    config: Config, folder: Folder, resume: bool, workers: int, data_dir: Path | None, device: str, watch: Watch
) -> Result:
    with Clients(config, data_dir, folder.checkpoints.memories.folder, workers, device) as clients:
        federation = Federation(config, clients)
        if not resume:
            folder.clear()
            folder.begin(config, federation.theta, **({"device": device} if device != "cpu" else {}))
        if (checkpoint := folder.restore()) is not None:
            with naming(folder.checkpoints.folder, "a checkpoint of this run"):
                federation.load(checkpoint)
        _train(config, folder, federation, watch)
        if not (folder.path / "model.safetensors").exists():
            folder.finish(federation.theta)
        return Result(federation.theta, folder.rounds())


def _train(config: Config, folder: Folder, federation: Federation, watch: Watch) -> None:
    """All rounds that are left. One that is interrupted leaves no trace."""
    saved = federation.round
    recorded = federation.checkpoint()
    try:
        while federation.round < config.rounds:
            line, times = federation.step()
            with postponed():
                folder.append(line, times)
                recorded = federation.checkpoint()
                if recorded.round % config.checkpoint_every == 0 or recorded.round == config.rounds:
                    folder.save(recorded, config)
                    saved = recorded.round
                watch(line, times)
    except (KeyboardInterrupt, SystemExit):
        if recorded.round > saved:
            with postponed():
                folder.save(recorded, config)
        raise


class Federation:
    """The server: the global model, and which clients train in a round."""

    def __init__(self, config: Config, clients: Clients) -> None:
        self.config = config
        self.clients = clients
        method = config.make_method()
        self.downlink = make_downlink(config, method, {name: value.copy() for name, value in clients.initial.items()})
        for name, value in self.downlink.initial.items():
            clients.initial[name][...] = value
        self.theta: Mapping[str, Array] = self.downlink.initial  # w
        nothing = {name: np.zeros_like(value) for name, value in self.theta.items()}
        # A budget too small for any update is refused before one is trained.
        method.encode(nothing, {}, Order(RoundContext(), client=0, seed=0))
        self.method = method
        self.server = method.server(self.theta)
        self.memories: dict[int, Written] = {}
        self.round = 0
        self.sample: bytes | None = None  # the last payload that was accepted

    def step(self) -> tuple[dict[str, Any], dict[str, float]]:
        """One round: its line of the ledger, and its seconds."""
        config, began, number = self.config, time.perf_counter(), self.round + 1
        chosen = sample(config, number)
        downlink = self.downlink
        self.server.open_round(self.method.open_round(number, downlink.model, downlink.initial))
        announced = self.server.announce({client: self._weight(client) for client in chosen})
        sent = sum(downlink.send(chosen).values()) + sum(map(len, announced.values()))
        jobs = [Job(number, client, announced.get(client, b""), self._find_memory_round(client)) for client in chosen]
        self.clients.publish(downlink.model)
        answers, rejected, decode_s = [], [], 0.0
        for answer in self.clients.train(jobs):
            start = time.perf_counter()
            answers.append(answer)
            if (reason := self._receive(answer)) is not None:
                rejected.append({"client": answer.client, "reason": reason})
            decode_s += time.perf_counter() - start
        start = time.perf_counter()
        loss = float(np.mean([answer.loss for answer in answers]))
        theta = {name: value.copy() for name, value in self.theta.items()}  # a checkpoint may hold the old one
        for name, change in self.server.finish(loss).items():
            theta[name] += change
        downlink.advance(theta)
        aggregated = time.perf_counter()
        line = {
            "round": number,
            **self._evaluate(number, theta),
            **downlink.describe(),
            "train_loss": loss if np.isfinite(loss) else None,
            "clients": chosen,
            "uplink_bytes": sum(len(answer.payload or b"") for answer in answers),
            "downlink_bytes": sent,
            "claimed_bits": sum(answer.claimed_bits for answer in answers),
            "rejected": rejected,
        }
        end = time.perf_counter()
        times = {
            "round": number,
            "train_s": sum(answer.train_s for answer in answers),
            "encode_s": sum(answer.encode_s for answer in answers),
            "memory_s": sum(answer.memory_s for answer in answers),
            "decode_s": decode_s,
            "aggregate_s": aggregated - start,
            "evaluate_s": end - aggregated,
            "round_s": end - began,
        }
        self.round, self.theta = number, theta
        return line, times

    def _find_memory_round(self, client: int) -> int | None:
        return self.memories[client].round if client in self.memories else None

    def _weight(self, client: int) -> float:
        return float(len(self.clients.worker.shards[client])) if self.config.weighting == "samples" else 1.0

    def _receive(self, answer: Answer) -> str | None:
        """Take an answer in; a reason if it is refused, and then the client's memory stays what it was."""
        if answer.refused is not None:
            return answer.refused
        try:
            self.server.receive(answer.client, answer.payload, self._weight(answer.client))
        except PayloadError as error:
            if error.reason == "basis":  # perhaps it has another initial model
                self.downlink.forget(answer.client)
            return f"{error.reason}: {error}"
        if answer.memory is not None:
            self.memories[answer.client] = answer.memory
        self.downlink.settle(answer.client)
        self.sample = answer.payload if answer.payload is not None else self.sample
        return None

    def _evaluate(self, number: int, theta: Mapping[str, Array]) -> dict[str, float | None]:
        if number % self.config.eval_every and number != self.config.rounds:
            return {"accuracy": None, "loss": None}
        self.clients.publish(theta)
        accuracy, loss = self.clients.evaluate()
        line = {"accuracy": accuracy, "loss": loss if np.isfinite(loss) else None}
        if self.downlink.model is not theta:
            self.clients.publish(self.downlink.model)
            line["held_accuracy"], _ = self.clients.evaluate()
        return line

    def checkpoint(self) -> Checkpoint:
        """The state after the last round; later rounds do not change it."""
        memories, held = dict(self.memories), dict(self.downlink.held)
        states = self.server.state_dict(), self.downlink.state_dict()
        return Checkpoint(self.round, self.theta, *states, memories, held, self.sample)

    def load(self, checkpoint: Checkpoint) -> None:
        if _layout(checkpoint.theta) != _layout(self.theta):
            raise ValueError("its model has other tensors")
        self.round = checkpoint.round
        self.theta = {name: checkpoint.theta[name] for name in self.theta}
        self.memories = dict(checkpoint.memories)
        self.server.load_state_dict(checkpoint.server)
        self.downlink.load_state_dict(checkpoint.downlink, self.theta)
        if max(checkpoint.held.values(), default=0) > self.downlink.newest:
            raise ValueError("a client holds a version of the model that there is not")
        self.downlink.held = dict(checkpoint.held)


def make_downlink(config: Config, method: Method, initial: Mapping[str, Array]) -> Downlink:
    """The way down of a run whose initial model is this."""
    if config.down_ratio == 1:
        return Downlink(initial, method.uses_initial)
    if config.down_ratio == OWN:
        return OwnDownlink(initial, method)
    return BroadcastDownlink(initial, config.down_ratio, config.initial_ratio)


def sample(config: Config, round_: int) -> list[int]:
    """W: clients of a round, all equally likely."""
    rng = random(config, SAMPLING, round_)
    return sorted(rng.choice(config.clients, config.per_round, replace=False).tolist())


def _layout(model: Mapping[str, Array]) -> dict[str, Any]:
    return {name: (value.shape, value.dtype) for name, value in model.items()}
