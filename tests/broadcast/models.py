"""Federations in miniature: a model that moves every round, and clients that come and go."""

from collections.abc import Iterator

import numpy as np

from fedfq import Broadcast, Replica
from tests.updates import Array, low_rank, network

Model = dict[str, Array]


def initial_model(seed: int = 0) -> Model:
    """With batch normalisation: variances that begin at 1, and a counter."""
    model = network(seed)
    return model | {
        "fc.weight": low_rank(64, 144, 8, 0.1, seed),
        "bn.running_mean": np.zeros(16, np.float32),
        "bn.running_var": np.ones(16, np.float32),
        "bn.num_batches_tracked": np.array(0, np.int64),
        "mask": np.arange(10) % 2 == 0,
    }


def train(model: Model, rounds: int, seed: int = 1) -> Iterator[Model]:
    """A model per round. Weights move in few directions, variances fall to a thousandth."""
    rng = np.random.default_rng(seed)
    model = dict(model)
    for round_ in range(rounds):
        move = 0.01 * low_rank(64, 144, 3, 0.02, seed=100 + round_ % 3)
        model["fc.weight"] = model["fc.weight"] + move
        for name in ("conv.weight", "bn.weight", "fc.bias"):
            model[name] = model[name] + (0.002 * rng.standard_normal(model[name].shape)).astype(np.float32)
        model["bn.running_mean"] = 0.9 * model["bn.running_mean"] + np.float32(0.1)
        model["bn.running_var"] = 0.8 * model["bn.running_var"] + np.float32(0.2e-3)
        model["bn.num_batches_tracked"] = model["bn.num_batches_tracked"] + 10
        model["mask"] = ~model["mask"]
        yield dict(model)


def hand_out(server: Broadcast, replica: Replica) -> Model:
    return replica.receive(server.message(replica.version))
