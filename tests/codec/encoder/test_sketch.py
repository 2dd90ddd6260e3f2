"""Sketches are right in the mean, and their variance is what the formula says."""

import numpy as np
import pytest

from fedfq.codec.encoder.sketch import EXPECTED_LARGEST, Sketcher
from fedfq.codec.format.sketch import LENGTH, Classes, Sketch
from fedfq.codec.tensors import Tensor, read
from tests.updates import low_rank, scaled

SQUARE_OF_LARGEST = 8.148251810874743  # expected, of 128 magnitudes
CNN = {"w": low_rank(80, 120, 5, noise=0.5), "v": scaled(40, 60), "b": np.linspace(-1, 1, 30, dtype=np.float32)}


def make(tensors: list[Tensor], seed: int, known: dict[str, Classes] | None = None) -> Sketcher:
    zeros = {tensor.spec.name: np.zeros(tensor.spec.shape, np.float32) for tensor in tensors}
    return Sketcher(tensors, zeros, known or {}, seed, 0)


def decode(made: Sketch, tensors: list[Tensor], known: dict[str, Classes] | None = None) -> np.ndarray:
    layout = [tensor.spec for tensor in tensors]
    result = {spec.name: np.zeros(spec.size, np.float32) for spec in layout}
    for name, part in made.decode(0, layout, known or {}):
        part.add_to(result[name], (), 1.0)
    return np.concatenate(list(result.values())).astype(np.float64)


def estimates(update: dict[str, np.ndarray], room: int, seeds: int) -> np.ndarray:
    tensors = read(update)
    made = (make(tensors, seed).sketch(room) for seed in range(seeds))
    return np.stack([decode(one, tensors) for one in made if one is not None])


def test_the_largest_of_128_normal_numbers() -> None:
    magnitudes = np.abs(np.random.default_rng(0).standard_normal((20_000, 128))).max(1)
    assert magnitudes.mean() == pytest.approx(EXPECTED_LARGEST, rel=0.003)
    assert (magnitudes**2).mean() == pytest.approx(SQUARE_OF_LARGEST, rel=0.005)


def test_the_mean_over_seeds_is_what_is_sketched() -> None:
    """Also of entries that stand out: 4,000 sketches of 90 numbers, one of them 30 times the others."""
    rng = np.random.default_rng(0)
    update = {"w": rng.standard_normal((8, 10)).astype(np.float32), "b": rng.standard_normal(10).astype(np.float32)}
    update["w"][3, 4] = 30.0
    every = estimates(update, 40, 4000)
    truth = np.concatenate([value.reshape(-1) for value in update.values()])
    errors = (every.mean(0) - truth) / (every.std(0) / np.sqrt(len(every)))  # in standard errors
    assert np.abs(errors).max() < 4.5
    assert np.square(errors).mean() == pytest.approx(1.0, abs=0.5)


def test_the_variance_is_what_the_formula_says() -> None:
    room = 800
    tensors = read(CNN)
    truth = np.concatenate([value.reshape(-1) for value in CNN.values()]).astype(np.float64)
    every = estimates(CNN, room, 40)
    measured = np.square(every - truth).sum(1).mean()
    assert measured == pytest.approx(formula(tensors, room), rel=0.05)


def formula(tensors: list[Tensor], room: int) -> float:
    """docs/theory.md: the sum over blocks b with entries y = r / t of

    E[length^2] / largest^2 (sum t^2 + (square of largest - 1) sum r^2 / |y|^2) - sum r^2
    """
    sketcher = make(tensors, 0)
    made = sketcher.sketch(room)
    assert made is not None
    blocks = made.words.size
    scales = np.concatenate(
        [np.full(t.spec.size, 2.0 ** ((int(b) - 255) / 8)) for t, b in zip(tensors, sketcher.scales) if b]
    )
    r = np.concatenate([t.array.reshape(-1) for t, b in zip(tensors, sketcher.scales) if b]).astype(np.float64)
    total, mean = 0.0, np.sqrt([np.square((r / scales)[b::blocks]).sum() for b in range(blocks)]).mean()
    for b in range(blocks):
        own, t = r[b::blocks], scales[b::blocks]
        square = np.square(own / t).sum()
        length = square + (mean / LENGTH) ** 2 / 12
        along = np.square(own).sum() / square
        total += length / EXPECTED_LARGEST**2 * (np.square(t).sum() + (SQUARE_OF_LARGEST - 1) * along)
        total -= np.square(own).sum()
    return total


def test_known_classes_lower_the_variance() -> None:
    rng = np.random.default_rng(0)
    scales = 2.0 ** rng.uniform(-4, 0, (60, 1))
    update = {"w": (scales * rng.standard_normal((60, 100))).astype(np.float32)}
    tensors, classes = read(update), Classes.of(scales * np.ones((60, 100)))
    assert classes is not None

    def error(known: dict[str, Classes]) -> float:
        found = []
        for seed in range(20):
            made = make(tensors, seed, known).sketch(150)
            assert made is not None
            found.append(np.square(decode(made, tensors, known) - update["w"].reshape(-1)).sum())
        return float(np.mean(found))

    assert error({"w": classes}) < 0.85 * error({})


@pytest.mark.parametrize("room", [60, 200, 1000, 5000])
def test_room_is_kept_and_used(room: int) -> None:
    made = make(read(CNN), 1).sketch(room)
    assert made is not None
    assert room - max(4, 0.03 * room) <= len(made.to_bytes()) <= room


def test_less_than_the_smallest_is_none() -> None:
    sketcher = make(read(CNN), 1)
    smallest = sketcher.smallest()
    assert sketcher.sketch(smallest) is not None
    assert sketcher.sketch(smallest - 1) is None


def test_nothing_left_out_nothing_sketched() -> None:
    sketcher = make(read({"w": np.zeros((20, 20), np.float32)}), 1)
    assert sketcher.entries == 0


@pytest.mark.parametrize("size", [1e-37, 1e-30, 1e30, 1e38])
def test_sizes_near_the_ends_of_float32(size: float) -> None:
    update = {"w": (size * np.random.default_rng(0).uniform(-1, 1, (20, 30))).astype(np.float32)}
    every = estimates(update, 300, 50)
    assert np.isfinite(every).all()
    cosine = every.mean(0) @ update["w"].reshape(-1) / np.square(update["w"].astype(np.float64)).sum()
    assert cosine == pytest.approx(1.0, abs=0.1)
