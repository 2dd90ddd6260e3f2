"""The task that needs no data from outside: it can be trained here."""

import numpy as np
import torch
from torch.nn import functional

from fedfq import tasks
from fedfq.tasks import evaluate


def test_data():
    data = tasks.get("digits").load(None)
    assert len(data.train) == 1347 and len(data.test) == 450 and data.groups is None
    for part in (data.train, data.test):
        frequencies = np.bincount(part.labels)
        assert len(frequencies) == 10 and frequencies.min() > 0.9 * frequencies.max()
    again = tasks.get("digits").load(None)
    assert np.array_equal(data.train.take(np.arange(5))[0], again.train.take(np.arange(5))[0])


def test_batches():
    task = tasks.get("digits")
    x, y = task.load(None).train.take(np.array([3, 1, 4]))
    batch, labels = task.prepare(x, y, None)
    assert batch.shape == (3, 1, 8, 8) and batch.dtype == torch.float32 and labels.dtype == torch.int64
    assert batch.min() >= 0 and batch.max() == 1
    assert torch.equal(batch, task.prepare(x, y, np.random.default_rng(0))[0])


def test_it_learns():
    task = tasks.get("digits")
    data, model, rng = task.load(None), task.model(0), np.random.default_rng(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.defaults.lr)
    for _ in range(200):
        x, y = task.prepare(*data.train.take(rng.integers(len(data.train), size=20)), rng)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    accuracy, loss = evaluate(model, task, data.test)
    assert accuracy > 0.85 and loss < 0.5
