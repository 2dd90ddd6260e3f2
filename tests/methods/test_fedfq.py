"""Our method on updates of a real federation: handwritten digits, after four rounds, in the shared basis."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedfq import Codec, SharedBasis, decode
from fedfq.codec.decode import decode_parsed, parse
from fedfq.codec.encoder.sketch import Sketcher
from fedfq.codec.tensors import read, specs
from fedfq.federation.clients import Clients, Job
from fedfq.federation.config import Config
from fedfq.federation.loop import Federation
from tests.updates import Array

SEEDS = 120
RATIO = 256


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Array], SharedBasis]:
    """A client's update, and the basis that it shares with the server."""
    config = Config.make(task="digits", method="fedavg", rounds=10, local_steps=10)
    folder: Path = tmp_path_factory.mktemp("memories")
    with Clients(config, None, folder, 1) as clients:
        federation = Federation(config, clients)
        for _ in range(4):
            federation.step()
        clients.publish(federation.theta)
        (answer,) = clients.train([Job(5, 0, b"", None)])
        assert answer.payload is not None
        update = federation.method.decode(answer.payload, clients.initial)
        return dict(update), SharedBasis(federation.theta, clients.initial)


@pytest.fixture(scope="module")
def drawn(trained: tuple[dict[str, Array], SharedBasis]) -> dict[str, Array]:
    """What unbiased payloads of that update decode to, one for every seed, by tensor."""
    update, basis = trained
    codec = Codec(ratio=RATIO, unbiased=True, layout="digest")
    payloads = [codec.encode(update, seed, shared_basis=basis) for seed in range(SEEDS)]
    every = [decode(payload, like=update, shared_basis=basis) for payload in payloads]
    return {name: np.stack([one[name].reshape(-1) for one in every]).astype(float) for name in update}


def test_every_tensor_of_a_real_update_is_right_in_the_mean(
    trained: tuple[dict[str, Array], SharedBasis], drawn: dict[str, Array]
) -> None:
    """Entry by entry within standard errors, and as a whole: <mean, h> is <h, h>."""
    update, basis = trained
    biased = decode(
        Codec(ratio=RATIO, layout="digest").encode(update, shared_basis=basis), like=update, shared_basis=basis
    )
    for name, array in update.items():
        h, found = array.reshape(-1).astype(float), drawn[name]
        deviations = found.std(0, ddof=1) / np.sqrt(SEEDS)
        sketched = deviations > 0
        assert sketched.all(), name
        errors = (found.mean(0) - h) / deviations
        assert np.square(errors).mean() == pytest.approx(1.0, abs=0.25 if h.size > 100 else 1.5), name
        along = found @ h / (h @ h)
        assert abs(along.mean() - 1) < 4 * along.std(ddof=1) / np.sqrt(SEEDS), name
    h = np.concatenate([array.reshape(-1) for array in update.values()])
    q = np.concatenate([biased[name].reshape(-1) for name in update])
    assert h @ q < 0.97 * (h @ h)  # which is what the sketch makes up for


def test_the_variance_on_a_real_update_is_as_expected(
    trained: tuple[dict[str, Array], SharedBasis], drawn: dict[str, Array]
) -> None:
    """Within 5% of the formula by which the encoder divides a budget."""
    update, basis = trained
    codec = Codec(ratio=RATIO, unbiased=True, layout="digest")
    tensors = sorted(read(update), key=lambda tensor: tensor.spec.name)
    expected = []
    for seed in range(8):
        payload = codec.encode(update, seed, shared_basis=basis)
        sections, blocks = _without_sketch(payload, update, basis)
        expected.append(Sketcher(tensors, sections, basis.used, seed).variance(blocks))
    measured = sum(found.var(0, ddof=1).sum() for found in drawn.values())
    assert np.mean(expected) == pytest.approx(measured, rel=0.05)


def _without_sketch(payload: bytes, update: dict[str, Array], basis: SharedBasis) -> tuple[dict[str, Array], int]:
    """What the sections of a payload say, and in how many blocks the rest is sketched."""
    parsed = parse(payload, specs(update))
    assert parsed.sketch is not None
    return decode_parsed(replace(parsed, sketch=None), basis), parsed.sketch.words.size
