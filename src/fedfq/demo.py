"""One federated client's real update, compressed and applied: what `fedfq demo` shows.

A small network is trained for a while on data that all share, then for a few local steps on the data of one client.
The difference is the update that the client would upload. The digits are those that come with scikit-learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedfq import BudgetError, Codec, decode
from fedfq.metrics import nmse
from fedfq.tasks.models import digits_cnn

RATIOS = (32, 64, 128)
SHARED, CLIENT = 200, 800  # images of the common training and of the client; the rest of the 1,797 are for testing
BATCH_SIZE = 64
LEARNING_RATE = 0.05

State = dict[str, np.ndarray]


class Digits(NamedTuple):
    """Images of 8 x 8 pixels and what they show."""

    images: Tensor
    labels: Tensor


class Client(NamedTuple):
    """`before` is the test accuracy of the model without any update."""

    model: nn.Module
    theta: State
    update: State
    before: float
    test: Digits


@dataclass(frozen=True)
class Row:
    """One way of sending the update. `payload` is what goes over the wire; None where no payload is small enough."""

    name: str
    payload: bytes | None
    ratio: float = 0.0
    error: float = 0.0
    accuracy: float = 0.0


@dataclass(frozen=True)
class Result:
    """`before` is the test accuracy of the model without any update."""

    parameters: int
    before: float
    rows: list[Row]


def train(shared_steps: int = 200, local_steps: int = 100, seed: int = 0) -> Client:
    """A client's network after the common training (`theta`) and after its own. Same seed, same result."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shared, own, test = _data()
        model = digits_cnn()
        _train(model, shared, shared_steps)
        theta, before = _state(model), _accuracy(model, test)
        _train(model, own, local_steps)
    update = {name: array - theta[name] for name, array in _state(model).items()}
    return Client(model, theta, update, before, test)


def run(shared_steps: int = 200, local_steps: int = 100, ratios: Sequence[float] = RATIOS, seed: int = 0) -> Result:
    """Train, encode, decode, apply, test."""
    model, theta, update, before, test = train(shared_steps, local_steps, seed)
    raw = b"".join(array.tobytes() for array in update.values())

    def row(name: str, payload: bytes, received: State) -> Row:
        model.load_state_dict({name: torch.from_numpy(theta[name] + received[name]) for name in theta})
        return Row(name, payload, len(raw) / len(payload), nmse(update, received), _accuracy(model, test))

    rows = [row("the update as it is", raw, update)]
    for ratio in ratios:
        try:
            payload = Codec(ratio=ratio).encode(update, seed)
            rows.append(row(f"fedfq, ratio {ratio:g}", payload, decode(payload, like=update)))
            payload = Codec(max_bytes=len(payload), allocator="cgsa").encode(update, seed)
            rows.append(row("the paper's cgsa in as many bytes", payload, decode(payload, like=update)))
        except BudgetError as error:
            rows.append(Row(f"ratio {ratio:g} is too much: {error.minimum:,} bytes are needed", None))
    return Result(len(raw) // 4, before, rows)


def _data() -> tuple[Digits, Digits, Digits]:
    bunch = load_digits()
    order = torch.randperm(len(bunch.target))
    images = torch.tensor(bunch.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(bunch.target)[order]
    cuts = (slice(SHARED), slice(SHARED, SHARED + CLIENT), slice(SHARED + CLIENT, None))
    shared, client, test = (Digits(images[cut], labels[cut]) for cut in cuts)
    return shared, client, test


def _train(model: nn.Module, data: Digits, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(steps):
        batch = torch.randint(len(data.labels), (BATCH_SIZE,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.images[batch]), data.labels[batch]).backward()
        optimizer.step()


@torch.no_grad()
def _accuracy(model: nn.Module, data: Digits) -> float:
    return float((model(data.images).argmax(1) == data.labels).float().mean())


def _state(model: nn.Module) -> State:
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}
