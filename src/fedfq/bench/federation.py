"""What a round costs beside the training itself, whether processes pay, and what the shared basis saves in a real run:
for `fedfq bench federation`."""

from __future__ import annotations

import math
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfq import SharedBasis, decode, encode, tasks
from fedfq.bench.codec import Say, machine
from fedfq.federation.clients import Clients, Job
from fedfq.federation.config import Config
from fedfq.federation.loop import Federation
from fedfq.methods.method import Update
from fedfq.metrics import nmse
from fedfq.tasks.store import DataMissing

Row = dict[str, Any]
METHODS = ("fedavg", "fedfq@256", "fedfq@256:basis=adaptive", "fedfq@64", "fedfq-cgsa")
ROUNDS = 3
RATIOS = (32, 64, 128, 256, 512, 1024, 2048)


def run(data_dir: Path | None, quick: bool, say: Say) -> Row:
    """`quick` leaves out the large model."""
    name = "cifar10-simplecnn"
    try:
        tasks.get(name).load(data_dir)
    except DataMissing:
        name = "digits"
    result: Row = {**machine(), "task": name}
    say("what a round costs beside training")
    result["overhead"] = [overhead(name, method, data_dir) for method in METHODS]
    say("processes beside threads")
    result["workers"] = workers(name, data_dir)
    say("bytes with the shared basis at the error of the adaptive one")
    places = (("iid", 0.1), ("shards:2", 0.05))
    rounds = (3,) if quick else (12, 25)
    result["shared_basis"] = [row for split, lr in places for row in shared_basis(name, split, lr, rounds, data_dir)]
    if not quick and name != "digits":
        say("memory of 100 clients with 9.2 M parameters and error feedback")
        result["memory"] = memory(data_dir)
    return result


def overhead(task: str, method: str, data_dir: Path | None) -> Row:
    """Copying, encoding, decoding, aggregating and the ledger, over the whole round without evaluation. One process."""
    config = Config.make(task=task, method=method, local_steps=10, rounds=ROUNDS + 1, eval_every=ROUNDS + 1)
    with tempfile.TemporaryDirectory() as folder, Clients(config, data_dir, Path(folder), 1) as clients:
        federation = Federation(config, clients)
        federation.step()  # compiles, and opens the data
        times = [federation.step()[1] for _ in range(ROUNDS)]
    best = min(times, key=lambda t: t["round_s"] - t["evaluate_s"])
    whole = best["round_s"] - best["evaluate_s"]
    shares = {key: best[key] / whole for key in ("train_s", "encode_s", "memory_s", "decode_s", "aggregate_s")}
    return {"method": method, "round_s": whole, **shares, "outside_training": 1 - shares["train_s"]}


def workers(task: str, data_dir: Path | None) -> list[Row]:
    """A round's training by two processes of one thread each, and by one process of two threads."""
    config = Config.make(task=task, method="fedavg", local_steps=10)
    jobs = [Job(1, client, b"", None) for client in range(config.per_round)]
    rows = []
    for label, processes, threads in (("one process, two threads", 1, 2), ("two processes, one thread each", 2, 1)):
        with tempfile.TemporaryDirectory() as folder, Clients(config, data_dir, Path(folder), processes) as clients:
            clients.publish(clients.initial)
            if processes == 1:
                torch.set_num_threads(threads)
            list(clients.train(jobs[:processes]))
            seconds = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                list(clients.train(jobs))
                seconds.append(time.perf_counter() - start)
        rows.append({"how": label, "round_s": min(seconds)})
    return rows


def shared_basis(task: str, split: str, lr: float, rounds: tuple[int, ...], data_dir: Path | None) -> list[Row]:
    """Bytes with the shared basis over those without, at the same error, of clients in a run of FedAvg.

    The error is the mean NMSE of three clients; bytes between two ratios are read off the line through both, in logs.
    """
    config = Config.make(task=task, split=split, lr=lr, method="fedavg", local_steps=10)
    rows = []
    with tempfile.TemporaryDirectory() as folder, Clients(config, data_dir, Path(folder), 2) as clients:
        federation = Federation(config, clients)
        for number in range(1, max(rounds) + 1):
            if number in rounds:
                clients.publish(federation.theta)
                jobs = [Job(number, client, b"", None) for client in range(3)]
                updates = [
                    federation.method.decode(answer.payload, clients.initial)
                    for answer in clients.train(jobs)
                    if answer.payload is not None
                ]
                basis = SharedBasis(federation.theta, clients.initial)
                alone = [_errors(updates, ratio, None) for ratio in RATIOS]
                for ratio in RATIOS[2:]:
                    error = _errors(updates, ratio, basis)
                    other = math.exp(np.interp(math.log(error), np.log(alone), np.log(RATIOS)))
                    rows.append(
                        {
                            "split": split,
                            "round": number,
                            "ratio": ratio,
                            "nmse": error,
                            "adaptive_nmse": alone[RATIOS.index(ratio)],
                            "bytes_over_adaptive": other / ratio,
                        }
                    )
            federation.step()
    return rows


def _errors(updates: Sequence[Update], ratio: float, basis: SharedBasis | None) -> float:
    decoded = [
        decode(encode(update, ratio=ratio, layout="digest", shared_basis=basis), like=update, shared_basis=basis)
        for update in updates
    ]
    return float(np.mean([nmse(update, back) for update, back in zip(updates, decoded)]))


def memory(data_dir: Path | None) -> list[Row]:
    """Peak memory of all processes once every one of 100 clients has a memory of 9.2 M parameters."""
    config = Config.make(
        task="cifar10-vgg11",
        method="fedfq@256:error_feedback=true",
        clients=100,
        per_round=100,
        local_steps=1,
        rounds=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        with Clients(config, data_dir, Path(folder), 2) as clients:
            federation = Federation(config, clients)
            federation.step()
            on_disk = sum(path.stat().st_size for path in Path(folder).iterdir())
        # the largest of the ended processes, for each of the two, and this one
        ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [{"memories_on_disk_GB": on_disk / 1e9, "peak_GB": (own + 2 * ended) / 1e9, "bar_GB": 6.0}]


TITLES = {
    "overhead": "Shares of a round without evaluation, one process",
    "workers": "Training of a round",
    "shared_basis": "Bytes with the shared basis over those of the adaptive one at the same NMSE, clients of FedAvg",
    "memory": "100 clients, 9.2 M parameters, error feedback",
}
