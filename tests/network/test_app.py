"""The Flower app of the experiment: its model is ResNet-20, and its updates have structure for a codec to find."""

import numpy as np
import pytest

from fedfq import tasks
from fedfq.codec.codec import Codec
from fedfq.codec.decode import decode
from fedfq.federation.client import state
from fedfq.metrics import nmse
from fedfq.network.app import UPDATE_SIZE, emulate_training, flat, resnet20, unflat
from fedfq.network.measure import PARAMETERS


def test_the_model_has_the_tensors_of_resnet20() -> None:
    real = state(tasks.get("cifar10-resnet20").model(0))
    ours = resnet20(0)
    assert [(name, a.shape, a.dtype) for name, a in ours.items()] == [
        (name, a.shape, a.dtype) for name, a in real.items()
    ]
    assert sum(tensor.size for tensor in ours.values()) == PARAMETERS


def test_one_tensor_holds_the_whole_model() -> None:
    model = resnet20(1)
    vector = flat(model)["model"]
    assert vector.dtype == np.float32 and vector.size == PARAMETERS
    back = unflat(vector, model)
    assert list(back) == list(model)
    assert all(np.array_equal(back[name], model[name]) and back[name].shape == model[name].shape for name in model)


def test_updates_differ_by_client_and_round_and_come_again() -> None:
    model = resnet20(0)
    name = "11.conv2.weight"
    updates = {(r, c): emulate_training(model, r, c, 5)[name] - model[name] for r in (1, 2) for c in (0, 1)}
    assert np.array_equal(updates[1, 0], emulate_training(model, 1, 0, 5)[name] - model[name])
    assert len({update.tobytes() for update in updates.values()}) == 4
    norm = np.linalg.norm
    assert norm(updates[1, 0]) == pytest.approx(UPDATE_SIZE * norm(model[name]), rel=0.2)

    def cosine(a, b):
        return float(np.vdot(a, b) / (norm(a) * norm(b)))

    assert cosine(updates[1, 0], updates[1, 1]) > 0.3  # clients of a round want similar things
    assert abs(cosine(updates[1, 0], updates[2, 0])) < 0.1


def test_the_codec_finds_structure_in_them() -> None:
    model = resnet20(0)
    new = emulate_training(model, 1, 0, 5)
    update = {name: new[name] - model[name] for name in model}
    payload = Codec(ratio=64).encode(update)
    kept = {name: a for name, a in update.items() if a.ndim > 1}
    assert 0.05 < nmse(kept, decode(payload)) < 0.5
