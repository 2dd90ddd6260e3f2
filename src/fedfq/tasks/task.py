"""What a federation trains: a network, its data, and how a batch is made. Every task is trained with cross entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfq.types import Array

Prepare = Callable[[Array, Array, np.random.Generator | None], tuple[Tensor, Tensor]]


class Examples(Protocol):
    """Inputs and labels that are read when they are asked for."""

    def __len__(self) -> int: ...

    @property
    def labels(self) -> Array:
        """The class of every example: integers."""
        ...

    def take(self, indices: Array) -> tuple[Array, Array]:
        """Copies of some inputs and their labels, as they are stored."""
        ...


@dataclass(frozen=True)
class Arrays:
    """Examples that lie in two arrays."""

    inputs: Array
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Array) -> tuple[Array, Array]:
        return self.inputs[indices], self.labels[indices]


@dataclass(frozen=True)
class Data:
    """`groups` are the clients that the data itself knows, as indices into `train`; None where it knows none.

    `whole_test` is the whole test set where `test` is only a part of it, as evaluating the whole takes minutes.
    """

    train: Examples
    test: Examples
    groups: list[Array] | None = None
    whole_test: Examples | None = None


@dataclass(frozen=True)
class Defaults:
    """How a task is trained unless the user says otherwise. `lr_decay` multiplies the learning rate every round."""

    clients: int
    per_round: int
    rounds: int
    local_steps: int
    batch_size: int
    lr: float
    lr_decay: float = 1.0
    split: str = "iid"
    eval_every: int = 1


@dataclass(frozen=True)
class Task:
    """All that a federation must know to train something.

    `build` makes the network. `load` reads the data from a folder, or from the default cache if it is given None.
    `prepare` turns examples as they are stored into a batch for the network; in training it is given a random
    generator to augment them with, in evaluation None.
    """

    name: str
    build: Callable[[], nn.Module]
    load: Callable[[Path | None], Data]
    prepare: Prepare
    defaults: Defaults

    def model(self, seed: int) -> nn.Module:
        """A new network. Same seed, same weights; the random state of the caller does not change."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()


def device_of(model: nn.Module) -> torch.device:
    """Where the model is, and its batches have to be."""
    return next((tensor.device for tensor in model.state_dict().values()), torch.device("cpu"))


@torch.inference_mode()
def evaluate(model: nn.Module, task: Task, examples: Examples, batch_size: int = 200) -> tuple[float, float]:
    """Accuracy and mean loss."""
    was_training = model.training
    model.eval()
    right = loss = 0.0
    for start in range(0, len(examples), batch_size):
        indices = np.arange(start, min(start + batch_size, len(examples)))
        x, y = (part.to(device_of(model)) for part in task.prepare(*examples.take(indices), None))
        output = model(x)
        right += float((output.argmax(1) == y).sum())
        loss += float(functional.cross_entropy(output, y, reduction="sum"))
    model.train(was_training)
    return right / len(examples), loss / len(examples)
