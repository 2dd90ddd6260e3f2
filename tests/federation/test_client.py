"""Local SGD (Eq. 2) and the update that comes of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedfq.federation import client
from fedfq.federation.client import LocalTraining, batches, load, local_sgd, refuse_unusable, state
from fedfq.tasks.task import Arrays, Data, Defaults, Task

DEFAULTS = Defaults(clients=2, per_round=1, rounds=1, local_steps=1, batch_size=4, lr=0.1)


def linear_task() -> Task:
    rng = np.random.default_rng(0)
    examples = Arrays(rng.standard_normal((12, 3)).astype(np.float32), rng.integers(0, 2, 12))
    return Task(
        name="linear",
        build=lambda: nn.Linear(3, 2),
        load=lambda data_dir: Data(examples, examples),
        prepare=lambda x, y, rng: (torch.from_numpy(x), torch.from_numpy(y)),
        defaults=DEFAULTS,
    )


def test_one_step_on_all_examples_is_a_gradient_step() -> None:
    task = linear_task()
    examples = task.load(None).train
    model = task.model(0)
    theta = {name: value.copy() for name, value in state(model).items()}
    update, loss = local_sgd(
        *(model, theta, task, examples, np.arange(12), LocalTraining(1, None, 12, 0.5), np.random.default_rng(0))
    )
    load(model, theta)
    model.zero_grad()
    expected = functional.cross_entropy(model(torch.from_numpy(examples.inputs)), torch.from_numpy(examples.labels))
    expected.backward()
    assert loss == pytest.approx(expected.item())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(update[name], -0.5 * parameter.grad.numpy(), atol=1e-6)


def test_the_global_model_is_not_changed_by_a_client() -> None:
    task = linear_task()
    theta = {name: value.copy() for name, value in state(task.model(0)).items()}
    before = {name: value.copy() for name, value in theta.items()}
    how = LocalTraining(5, None, 4, 0.5)
    first, _ = local_sgd(task.model(1), theta, task, task.load(None).train, np.arange(6), how, np.random.default_rng(3))
    again, _ = local_sgd(task.model(2), theta, task, task.load(None).train, np.arange(6), how, np.random.default_rng(3))
    for name in theta:
        np.testing.assert_array_equal(theta[name], before[name])
        np.testing.assert_array_equal(first[name], again[name])  # whatever model it works in


def test_bfloat16_changes_what_layers_compute_and_not_the_weights() -> None:
    task = linear_task()
    theta = {name: value.copy() for name, value in state(task.model(0)).items()}
    arguments = (theta, task, task.load(None).train, np.arange(12))
    updates = [
        local_sgd(task.model(1), *arguments, LocalTraining(5, None, 4, 0.5, precision), np.random.default_rng(3))[0]
        for precision in ("float32", "bfloat16")
    ]
    for name, exact in updates[0].items():
        rounded = updates[1][name]
        assert rounded.dtype == np.float32 and not np.array_equal(rounded, exact)
        np.testing.assert_allclose(rounded, exact, atol=0.02)


def test_bfloat16_is_refused_where_it_would_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_computes_bfloat16", lambda: False)
    refuse_unusable("cpu", "float32")
    with pytest.raises(ValueError, match="bfloat16 needs a processor with its instructions"):
        refuse_unusable("cpu", "bfloat16")


def test_statistics_of_batch_norm_are_part_of_the_model() -> None:
    """Among them a count without dimensions."""
    task = replace(linear_task(), build=lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    theta = {name: value.copy() for name, value in state(task.model(0)).items()}
    how = LocalTraining(5, None, 4, 0.5)
    update, _ = local_sgd(
        task.model(1), theta, task, task.load(None).train, np.arange(6), how, np.random.default_rng(3)
    )
    assert update["1.num_batches_tracked"] == 5 and update["1.running_mean"].any()
    load(model := task.model(1), {name: value + update[name] for name, value in theta.items()})
    assert state(model)["1.num_batches_tracked"].shape == () and state(model)["1.num_batches_tracked"] == 5


@pytest.mark.parametrize(("how", "sizes"), [
    (LocalTraining(3, None, 4, 1.0), [4, 4, 2]),
    (LocalTraining(5, None, 4, 1.0), [4, 4, 2, 4, 4]),
    (LocalTraining(2, None, 50, 1.0), [10, 10]),
    (LocalTraining(None, 2, 4, 1.0), [4, 4, 2, 4, 4, 2]),
])  # fmt: skip
def test_batches_go_through_all_examples_again_and_again(how: LocalTraining, sizes: list[int]) -> None:
    own = np.arange(100, 110)
    found = list(batches(own, how, np.random.default_rng(0)))
    assert [len(batch) for batch in found] == sizes
    epoch = np.concatenate(found)[:10]
    assert sorted(epoch.tolist()) == own.tolist()
