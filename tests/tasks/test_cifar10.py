"""Batches of CIFAR-10 against naive slicing."""

import numpy as np
import pytest
import torch

from fedfq import tasks
from fedfq.tasks.cifar10 import MEAN, STD
from tests.tasks import miniatures

CROPPED = "cifar10-simplecnn"
PADDED = "cifar10-resnet20"


def numbered(count):
    """Images whose pixels say where they are: row, column and image number, from 1."""
    images = np.empty((count, 32, 32, 3), np.uint8)
    images[..., 0] = np.arange(1, 33)[:, None]
    images[..., 1] = np.arange(1, 33)
    images[..., 2] = (np.arange(count) % 255 + 1)[:, None, None]
    return images


def pixels(batch):
    """A batch back as bytes of shape (n, rows, columns, 3)."""
    return np.rint((batch.numpy().transpose(0, 2, 3, 1) * STD + MEAN) * 255).astype(np.uint8)


def prepare(name, images, seed=None):
    rng = None if seed is None else np.random.default_rng(seed)
    return tasks.get(name).prepare(images, np.zeros(len(images), np.int64), rng)[0]


def crops(image, size, padding):
    """All that may come out of an image: (top, left, mirrored) -> image."""
    padded = np.zeros((32 + 2 * padding, 32 + 2 * padding, 3), np.uint8)
    padded[padding : padding + 32, padding : padding + 32] = image
    result = {}
    for top, left in np.ndindex(len(padded) - size + 1, len(padded) - size + 1):
        crop = padded[top : top + size, left : left + size]
        result[top, left, False], result[top, left, True] = crop, crop[:, ::-1]
    return result


@pytest.mark.parametrize(("name", "size", "padding"), [(CROPPED, 24, 0), (PADDED, 32, 4)])
def test_training_crops_and_mirrors_at_random(name, size, padding):
    images = numbered(1500)
    found = pixels(prepare(name, images, seed=0))
    assert found.shape == (1500, size, size, 3)
    places = []
    possible = {place: crop[..., :2] for place, crop in crops(images[0], size, padding).items()}
    by_content = {crop.tobytes(): place for place, crop in possible.items()}
    for number, image in enumerate(found):
        places.append(by_content[image[..., :2].tobytes()])
        inside = image[..., 0] > 0
        assert (image[inside, 2] == number % 255 + 1).all() and not image[~inside].any()
    assert set(places) == set(possible)  # every crop occurs, so far apart are they drawn
    top, left, mirrored = np.array(places).T
    assert abs(mirrored.mean() - 0.5) < 0.05 and abs(np.corrcoef(top, left)[0, 1]) < 0.1


@pytest.mark.parametrize("name", [CROPPED, PADDED])
def test_the_generator_decides(name):
    images = numbered(20)
    assert torch.equal(prepare(name, images, seed=1), prepare(name, images, seed=1))
    assert not torch.equal(prepare(name, images, seed=1), prepare(name, images, seed=2))


def test_evaluation_takes_the_middle():
    images = numbered(3)
    assert np.array_equal(pixels(prepare(CROPPED, images)), images[:, 4:28, 4:28])
    assert np.array_equal(pixels(prepare(PADDED, images)), images)


def test_normalisation():
    grey = np.full((1, 32, 32, 3), 51, np.uint8)
    batch = prepare(PADDED, grey)
    assert batch.dtype == torch.float32
    torch.testing.assert_close(batch[0, :, 0, 0], torch.from_numpy((np.float32(0.2) - MEAN) / STD))


@pytest.mark.parametrize("name", [name for name in tasks.TASKS if name.startswith("cifar10")])
def test_order_in_memory(name):
    batch = prepare(name, numbered(2), seed=0)
    assert batch.is_contiguous(memory_format=torch.channels_last)


def test_data_is_mapped_and_read_only(filled):
    data = tasks.get(CROPPED).load(None)
    arrays = miniatures.cifar10()
    assert len(data.train) == 50 and len(data.test) == 10 and data.groups is None
    x, y = data.train.take(np.array([7, 7, 2]))
    assert np.array_equal(x, arrays["x_train"][[7, 7, 2]]) and np.array_equal(y, arrays["y_train"][[7, 7, 2]])
    assert np.array_equal(data.test.labels, arrays["y_test"])
    x[:] = 0  # a copy
    assert data.train.inputs[7].any() and not data.train.inputs.flags.writeable


def test_a_training_step(filled):
    task = tasks.get(CROPPED)
    data, model, rng = task.load(filled), task.model(0), np.random.default_rng(0)
    x, y = task.prepare(*data.train.take(np.arange(50)), rng)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    accuracy, loss = tasks.evaluate(model, task, data.test)
    assert 0 <= accuracy <= 1 and loss == pytest.approx(np.log(10), rel=0.1)
