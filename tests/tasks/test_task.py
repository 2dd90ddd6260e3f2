"""New models and their evaluation."""

import numpy as np
import pytest
import torch
from torch import nn

from fedfq import tasks
from fedfq.tasks import Arrays, Defaults, Task, evaluate


class Known(nn.Module):
    """Its output is its input."""

    def forward(self, x):
        assert not self.training
        return x


def known_task():
    def prepare(x, y, rng):
        assert rng is None
        return torch.from_numpy(x), torch.from_numpy(y)

    return Task("known", build=Known, load=None, prepare=prepare, defaults=Defaults(1, 1, 1, 1, 1, 1.0))


@pytest.mark.parametrize("batch_size", [1, 3, 7, 1000])
def test_evaluate(batch_size):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(7, 4)), np.array([0, 1, 2, 3, 0, 1, 2])
    accuracy, loss = evaluate(Known(), known_task(), Arrays(logits, labels), batch_size)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert accuracy == np.mean(logits.argmax(1) == labels)
    assert loss == pytest.approx(-np.log(probabilities[np.arange(7), labels]).mean())


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_leaves_the_mode_as_it_was(training):
    model = Known().train(training)
    evaluate(model, known_task(), Arrays(np.ones((2, 4)), np.array([0, 1])))
    assert model.training is training


@pytest.mark.parametrize("name", [name for name in tasks.TASKS if name != "cifar10-vgg11-paper"])
def test_same_seed_same_weights(name):
    task = tasks.get(name)
    state = torch.random.get_rng_state()
    first, again, other = (task.model(seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    assert all(tensor.is_contiguous() for tensor in first.values())  # .safetensors files take no others
