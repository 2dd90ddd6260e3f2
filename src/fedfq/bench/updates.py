"""What is compressed in the benchmark: real updates, from files or trained on the spot, and made-up ones."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedfq import tasks
from fedfq.federation.client import LocalTraining, local_sgd, state
from fedfq.files import read_tensors
from fedfq.tasks.store import DataMissing

Update = dict[str, np.ndarray]

WARM_UP = 100  # steps of common training before a client trains: the first updates are easier than later ones


class Fresh(NamedTuple):
    """Updates of clients trained by the benchmark, the models before, and what ten local steps took, in one thread."""

    updates: dict[str, Update]
    initial: Update
    model: Update
    task: str
    ten_steps_s: float


def from_folder(folder: Path) -> dict[str, Update]:
    """Every .npz and .safetensors file of a folder."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".npz", ".safetensors"))
    if not paths:
        raise ValueError(f"{folder}: no .npz or .safetensors files there")
    return {path.stem: dict(read_tensors(path)) for path in paths}


def fresh(data_dir: Path | None) -> Fresh:
    """An IID client's update and a two-class client's: SimpleCNN on CIFAR-10 where its data is there, else digits."""
    try:
        task = tasks.get("cifar10-simplecnn")
        data = task.load(data_dir)
    except DataMissing:
        task = tasks.get("digits")
        data = task.load(data_dir)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    how = LocalTraining(WARM_UP, None, task.defaults.batch_size, 0.1)
    rng = np.random.default_rng(0)
    model = task.model(0)
    everything = np.arange(len(data.train))
    initial = _copy(state(model))
    local_sgd(model, initial, task, data.train, everything, how, rng)
    theta = _copy(state(model))
    updates, seconds = {}, np.inf
    for split in ("iid", "shards:2"):
        own = tasks.split(split, data, task.defaults.clients, seed=0)[0]
        start = time.perf_counter()
        update, _ = local_sgd(model, theta, task, data.train, own, how._replace(steps=10), rng)
        seconds = min(seconds, time.perf_counter() - start)
        updates[f"fresh {task.name} {split}"] = dict(update)
    torch.set_num_threads(threads)
    return Fresh(updates, initial, theta, task.name, float(seconds))


def _copy(tensors: Update) -> Update:
    return {name: array.copy() for name, array in tensors.items()}


def gaussian(tensors: int, height: int = 512, width: int = 4608) -> Update:
    """The hardest case: no row, column or tail tells where the large entries are, and there is no basis."""
    rng = np.random.default_rng(0)
    return {f"layer{k}": rng.standard_normal((height, width), np.float32) for k in range(tensors)}


def make_up_updates() -> dict[str, Update]:
    """What a basis could be fooled by: nothing to find, heavy tails, a few spikes on a matrix of low rank."""
    rng = np.random.default_rng(1)
    shape = (400, 900)
    low = rng.standard_normal((shape[0], 4)) @ rng.standard_normal((4, shape[1]))
    spikes = np.where(rng.random(shape) < 1e-3, 100.0, 0.0) * rng.standard_normal(shape)
    kinds = {
        "normal": rng.standard_normal(shape),
        "laplace": rng.laplace(size=shape),
        "student-t (2)": rng.standard_t(2, shape),
        "sparse": np.where(rng.random(shape) < 0.01, rng.standard_normal(shape), 0.0),
        "low rank": low,
        "low rank and spikes": low + spikes,
    }
    return {f"made up: {kind}": {"w": array.astype(np.float32)} for kind, array in kinds.items()}
