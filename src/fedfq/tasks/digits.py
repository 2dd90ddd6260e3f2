"""Handwritten digits of 8 x 8 pixels, which come with scikit-learn: nothing to fetch, a federation in seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from fedfq.tasks import register
from fedfq.tasks.models import digits_cnn
from fedfq.tasks.task import Array, Arrays, Data, Defaults, Task

TEST_IMAGES = 450  # of 1,797


def load(data_dir: Path | None) -> Data:
    """1,347 images for training and 450 for testing, always the same, with all digits equally frequent in both."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8).astype(np.uint8)  # from 0 to 16
    split = train_test_split(images, labels, test_size=TEST_IMAGES, stratify=labels, random_state=0)
    x_train, x_test, y_train, y_test = split
    return Data(Arrays(x_train, y_train), Arrays(x_test, y_test))


def prepare(x: Array, y: Array, rng: np.random.Generator | None) -> tuple[Tensor, Tensor]:
    """Gray values from 0 to 1. So small a digit is not augmented: a pixel more or less is another digit."""
    return torch.from_numpy(x[:, None] / np.float32(16)), torch.from_numpy(y)


register(
    Task(
        name="digits",
        build=digits_cnn,
        load=load,
        prepare=prepare,
        defaults=Defaults(clients=20, per_round=5, rounds=30, local_steps=5, batch_size=20, lr=0.2),
    )
)
