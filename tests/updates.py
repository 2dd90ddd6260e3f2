"""Updates to try the codec on, and how far what comes back is from them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_DRAWS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "laplace": lambda rng, shape: rng.laplace(size=shape),
    "heavy tails": lambda rng, shape: rng.standard_t(1.1, size=shape),
    "constant": lambda rng, shape: np.full(shape, -0.3),
    "sparse": lambda rng, shape: rng.laplace(size=shape) * (rng.random(shape) < 0.02),
    "zero": lambda rng, shape: np.zeros(shape),
}
DISTRIBUTIONS = tuple(_DRAWS)


def draw(kind: str, shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[np.float32]:
    return np.asarray(_DRAWS[kind](np.random.default_rng(seed), shape), dtype=np.float32)


def scaled(rows: int, columns: int, seed: int = 0, spread: float = 1.0) -> npt.NDArray[np.float32]:
    """A Laplace matrix whose rows and columns have scales of their own, as those of real updates do."""
    rng = np.random.default_rng(seed)
    sides = np.exp(spread * rng.normal(size=(rows, 1))) * np.exp(spread * rng.normal(size=(1, columns)))
    return (0.01 * sides * rng.laplace(size=(rows, columns))).astype(np.float32)


def low_rank(height: int, width: int, rank: int, noise: float = 0.0, seed: int = 0) -> npt.NDArray[np.float32]:
    """A few outer products with falling weights, and some noise: what a client's update looks like."""
    rng = np.random.default_rng(seed)
    left = rng.standard_normal((height, rank)) * 0.7 ** np.arange(rank)
    matrix = left @ rng.standard_normal((rank, width)) + noise * rng.standard_normal((height, width))
    return matrix.astype(np.float32)


def network(seed: int = 0) -> dict[str, Array]:
    """A small network's update: convolution, batch normalisation with its counter, dense layer."""
    rng = np.random.default_rng(seed)
    return {
        "conv.weight": (0.01 * rng.laplace(size=(16, 3, 3, 3))).astype(np.float32),
        "bn.weight": (0.01 * rng.normal(size=16)).astype(np.float32),
        "bn.running_mean": rng.normal(size=16).astype(np.float32),
        "bn.running_var": rng.random(16).astype(np.float32),
        "bn.num_batches_tracked": np.array(10, dtype=np.int64),
        "fc.weight": scaled(40, 144, seed + 1),
        "fc.bias": (0.01 * rng.normal(size=40)).astype(np.float32),
    }


def raw_size(update: Mapping[str, Array]) -> int:
    """4 bytes a floating-point entry, native bytes otherwise: what ratios refer to."""
    return sum(value.size * (4 if value.dtype.kind == "f" else value.dtype.itemsize) for value in update.values())


def nmse(sent: Mapping[str, Array], received: Mapping[str, Array]) -> float:
    """||sent - received||^2 / ||sent||^2 over the floating-point tensors."""
    names = [name for name, value in sent.items() if value.dtype.kind == "f"]
    error = sum(np.sum((sent[name].astype(np.float64) - received[name]) ** 2) for name in names)
    return float(error / sum(np.sum(sent[name].astype(np.float64) ** 2) for name in names))


def assert_identical(left: Mapping[str, Array], right: Mapping[str, Array]) -> None:
    """Same names in the same order, same dtypes and shapes, same bits."""
    assert list(left) == list(right)
    for name, value in left.items():
        other = right[name]
        assert (value.dtype, value.shape) == (other.dtype, other.shape), name
        assert value.tobytes() == other.tobytes(), name
