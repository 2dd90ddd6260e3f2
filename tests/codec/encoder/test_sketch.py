"""Sketches are right in the mean, and their variance is what the formula says."""

import numpy as np
import pytest

from fedfq.codec.encoder.sketch import EXPECTED_LARGEST, Sketcher
from fedfq.codec.format.directions import KnownDirections, find_directions
from fedfq.codec.format.sketch import LENGTH, Sketch
from fedfq.codec.tensors import Tensor, read
from tests.updates import low_rank, scaled

SQUARE_OF_LARGEST = 8.148251810874743  # expected, of 128 magnitudes
CNN = {"w": low_rank(80, 120, 5, noise=0.5), "v": scaled(40, 60), "b": np.linspace(-1, 1, 30, dtype=np.float32)}


Directions = dict[str, KnownDirections]


def make(tensors: list[Tensor], seed: int, known: Directions | None = None) -> Sketcher:
    zeros = {tensor.spec.name: np.zeros(tensor.spec.shape, np.float32) for tensor in tensors}
    return Sketcher(tensors, zeros, known, seed)


def decode(made: Sketch, tensors: list[Tensor], known: Directions | None = None) -> np.ndarray:
    layout = [tensor.spec for tensor in tensors]
    result = {spec.name: np.zeros(spec.size, np.float32) for spec in layout}
    shapes = {spec.name: spec.shape for spec in layout}
    for name, part in made.decode(layout, known or {}):
        part.add_to(result[name], shapes[name], 1.0)
    return np.concatenate(list(result.values())).astype(np.float64)


def estimates(update: dict[str, np.ndarray], room: int, seeds: int, known: Directions | None = None) -> np.ndarray:
    tensors = read(update)
    made = (make(tensors, seed, known).sketch(room) for seed in range(seeds))
    return np.stack([decode(one, tensors, known) for one in made if one is not None])


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


def going_on(noise: float) -> tuple[dict[str, np.ndarray], Directions]:
    """An update that is large where the model has moved, and the directions of that."""
    rng = np.random.default_rng(0)
    drift = (rng.standard_normal((60, 3)) @ rng.standard_normal((3, 100))).astype(np.float32)
    found = find_directions(drift + np.float32(0.1) * rng.standard_normal(drift.shape).astype(np.float32))
    assert found is not None
    return {"w": drift + np.float32(noise) * rng.standard_normal(drift.shape).astype(np.float32)}, {"w": found[0]}


def test_stretching_lowers_the_variance() -> None:
    update, known = going_on(noise=0.3)
    truth = update["w"].reshape(-1)
    errors = [np.square(estimates(update, 150, 20, of) - truth).sum(1).mean() for of in (known, None)]
    assert errors[0] < 0.5 * errors[1]


def test_stretched_estimates_are_right_in_the_mean() -> None:
    update, known = going_on(noise=0.3)
    every = estimates(update, 150, 1000, known)
    errors = (every.mean(0) - update["w"].reshape(-1)) / (every.std(0) / np.sqrt(len(every)))
    assert np.abs(errors).max() < 5
    assert np.square(errors).mean() == pytest.approx(1.0, abs=0.1)


def test_what_does_not_follow_the_drift_is_left_as_it_is() -> None:
    _, known = going_on(noise=0.3)
    update = {"w": np.random.default_rng(1).standard_normal((60, 100)).astype(np.float32)}
    assert make(read(update), 0, known).stretched.tolist() == [0]
    assert make(read(going_on(noise=0.3)[0]), 0, known).stretched.tolist() == [32]


@pytest.mark.parametrize("room", [60, 200, 1000, 5000])
def test_room_is_kept_and_used(room: int) -> None:
    made = make(read(CNN), 1).sketch(room)
    assert made is not None
    assert room - max(8, 0.03 * room) <= len(made.to_bytes()) <= room


def test_less_than_the_smallest_is_none() -> None:
    sketcher = make(read(CNN), 1)
    smallest = sketcher.smallest
    assert sketcher.sketch(smallest) is not None
    assert sketcher.sketch(smallest - 1) is None


def test_nothing_left_out_nothing_sketched() -> None:
    sketcher = make(read({"w": np.zeros((20, 20), np.float32)}), 1)
    assert sketcher.entries == 0


def test_next_to_nothing_left_out_nothing_sketched() -> None:
    assert make(read({"w": np.full((20, 20), 1e-31, np.float32)}), 1).entries == 0


@pytest.mark.parametrize("blocks", [8, 12, 20])
def test_few_blocks_are_right_in_the_mean_as_well(blocks: int) -> None:
    """How many there are must not depend on the random numbers of their lengths."""
    update = {"w": np.random.default_rng(3).standard_normal((9, 10)).astype(np.float32)}
    truth = update["w"].reshape(-1).astype(np.float64)
    along = estimates(update, 15 + blocks, 3000) @ truth / (truth @ truth)
    assert abs(along.mean() - 1) < 4 * along.std() / np.sqrt(len(along))


def test_updates_that_differ_have_noise_of_their_own() -> None:
    """Also with the same seed, and where nothing but the sketch is sent: signs, for instance, all of one size."""
    rng = np.random.default_rng(4)
    signs = [{"w": rng.choice(np.float32([-1, 1]), (20, 30))} for _ in range(50)]
    made = [(make(read(one), 0).sketch(100), one["w"].reshape(-1)) for one in signs]
    assert len({one.seed for one, _ in made if one is not None}) == 50
    errors = [decode(one, read(signs[0])) - truth for one, truth in made if one is not None]
    alone, together = np.square(errors).sum(1).mean(), np.square(np.mean(errors, axis=0)).sum()
    assert together < 1.3 * alone / len(errors)


@pytest.mark.parametrize("size", [1e-28, 1e30, 1e38])
def test_sizes_near_the_ends_of_float32(size: float) -> None:
    update = {"w": (size * np.random.default_rng(0).uniform(-1, 1, (20, 30))).astype(np.float32)}
    every = estimates(update, 300, 50)
    assert np.isfinite(every).all()
    cosine = every.mean(0) @ update["w"].reshape(-1) / np.square(update["w"].astype(np.float64)).sum()
    assert cosine == pytest.approx(1.0, abs=0.1)
