"""Shakespeare's plays, a client for every character: which letter comes next?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedfq.tasks import register, store
from fedfq.tasks.models import NextCharLSTM
from fedfq.tasks.shakespeare_text import WINDOW_CHARACTERS
from fedfq.tasks.task import Array, Data, Defaults, Task

TEST_WINDOWS = 10_000  # of 771 thousand: accuracy to within half a percent, in a 77th of the time


@dataclass(frozen=True)
class Windows:
    """80 characters from each start on, and the one after them, out of a text that is stored once."""

    codes: Array
    starts: Array

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def labels(self) -> Array:
        return self.codes[self.starts + WINDOW_CHARACTERS].astype(np.int64)

    def take(self, indices: Array) -> tuple[Array, Array]:
        window = self.codes[self.starts[indices, None] + np.arange(WINDOW_CHARACTERS + 1)]
        return window[:, :-1], window[:, -1]


def load(data_dir: Path | None) -> Data:
    """The test set is `TEST_WINDOWS` of all clients' test windows, drawn at random, but always the same ones."""
    codes, train_starts, test_starts, train_sizes = store.load("shakespeare", data_dir)
    count = min(TEST_WINDOWS, len(test_starts))
    drawn = np.sort(np.random.default_rng(0).choice(len(test_starts), count, replace=False))
    groups = np.split(np.arange(len(train_starts)), np.cumsum(train_sizes)[:-1])
    whole = Windows(codes, test_starts)
    return Data(Windows(codes, train_starts), Windows(codes, test_starts[drawn]), groups, whole)


def prepare(x: Array, y: Array, rng: np.random.Generator | None) -> tuple[Tensor, Tensor]:
    """Characters by number. Text is not augmented."""
    return torch.from_numpy(x.astype(np.int64)), torch.from_numpy(y.astype(np.int64))


# The paper's setting: 5 local updates (its code: epochs), batches of 10, a learning rate of 1.47.
register(
    Task(
        name="shakespeare-lstm",
        build=NextCharLSTM,
        load=load,
        prepare=prepare,
        defaults=Defaults(
            clients=100,
            per_round=10,
            rounds=100,
            local_steps=5,
            batch_size=10,
            lr=1.47,
            split="natural",
            eval_every=5,
        ),
    )
)
