"""Weights are told from updates, by what becomes of them at any ratio."""

import numpy as np
import pytest
import torch

import fedfq
from fedfq.cli.checkpoints import looks_like_checkpoint
from fedfq.cli.codec import measure_nmse
from fedfq.tasks import models

NETWORKS = {
    "digits": models.digits_cnn,
    "SimpleCNN": models.SimpleCNN,
    "ResNet": models.resnet20,
    "LSTM": models.NextCharLSTM,
    "transformer": lambda: torch.nn.TransformerEncoderLayer(64, 4, 256),
}


def suspected(tensors, **options):
    codec = fedfq.Codec(**options)
    payload = codec.encode(tensors)
    report = fedfq.inspect(payload)
    return looks_like_checkpoint(tensors, report.bits_per_parameter, measure_nmse(codec, payload, tensors))


def weights(name):
    torch.manual_seed(0)
    return {key: value.numpy().copy() for key, value in NETWORKS[name]().state_dict().items()}


def digits_trained(steps, rate=0.1):
    """The model before and after some steps of SGD on noise with labels."""
    torch.manual_seed(0)
    model = models.digits_cnn()
    before = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), rate)
    images, labels = torch.randn(200, 1, 8, 8), torch.arange(200) % 10
    for step in range(steps):
        batch = torch.arange(32) * (step + 1) % 200
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return before, {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("ratio", [8, 64, 256])
def test_initial_weights_are_seen(name, ratio):
    assert suspected(weights(name), ratio=ratio)


@pytest.mark.parametrize("ratio", [8, 64, 256, 1024])
@pytest.mark.parametrize("steps", [1, 10, 60])
def test_updates_are_not(steps, ratio):
    before, after = digits_trained(steps)
    assert not suspected({name: after[name] - before[name] for name in after}, ratio=ratio)
    assert suspected(after, ratio=ratio)


@pytest.mark.parametrize("ratio", [8, 64, 256])
def test_noise_of_the_size_of_an_update_is_not(ratio):
    """As differential privacy adds it: it compresses no better than weights, but it is small."""
    rng = np.random.default_rng(0)
    noise = {name: (0.001 * rng.standard_normal(w.shape)).astype("f4") for name, w in weights("digits").items()}
    assert not suspected(noise, ratio=ratio)


@pytest.mark.parametrize("allocator", ["exact", "cgsa"])
def test_the_errors_of_stochastic_rounding_mean_nothing(allocator):
    before, after = digits_trained(10)
    update = {name: after[name] - before[name] for name in after}
    assert not suspected(update, ratio=32, allocator=allocator)


@pytest.mark.parametrize("tensors", [{}, {"b": np.ones(2000, "f4")}, {"n": np.arange(600).reshape(20, 30)}])
def test_where_there_are_no_matrices_there_is_nothing_to_see(tensors):
    assert not suspected(tensors, step=0.01)
