"""Water-filling: one step for all, low-rank factors where they pay, plain coefficients where they do not."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfq import Codec, decode, encode, inspect
from fedfq.codec.format.fold import Product, fold
from fedfq.metrics import nmse
from tests.updates import draw, low_rank

# --- What it is good for -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(200, 300), (40, 30, 5, 5)])
def test_low_rank_updates_take_a_fraction_of_the_bytes(shape: tuple[int, ...]) -> None:
    view = fold(shape)
    assert view is not None
    total = np.zeros(math.prod(shape), np.float32)
    matrix = low_rank(*view.shape(shape), 6, noise=0.02)
    Product(matrix, np.eye(matrix.shape[1], dtype=np.float32)).add_to(total, shape)
    update = {"w": total.reshape(shape)}
    adaptive = encode(update, ratio=40)
    plain = encode(update, ratio=40, basis="identity")
    assert inspect(adaptive).tensors[0].rank > 0
    assert nmse(update, decode(adaptive)) < 0.2 * nmse(update, decode(plain))


@pytest.mark.parametrize("ratio", [32, 64, 128])
def test_a_budget_that_factors_cannot_fill_does_not_break_them(ratio: int) -> None:
    """An exact product of few columns needs few bytes; at ever finer steps its levels would no longer fit."""
    update = {"w": low_rank(400, 900, 4)}
    assert nmse(update, decode(encode(update, ratio=ratio))) < 1e-5


@pytest.mark.parametrize("kind", ["normal", "laplace", "sparse"])
@pytest.mark.parametrize("ratio", [16, 64, 256])
def test_never_much_worse_than_plain_coefficients(kind: str, ratio: int) -> None:
    """Where there is nothing to gain it is plain: the same error in hardly more bytes."""
    update = {"w": draw(kind, (300, 400))}
    adaptive, plain = encode(update, ratio=ratio), encode(update, ratio=ratio, basis="identity")
    assert nmse(update, decode(adaptive)) <= 1.02 * nmse(update, decode(plain))


def test_spikes_beside_a_low_rank_part_are_sent_as_a_plain_rest() -> None:
    matrix = low_rank(200, 300, 4)
    spikes = np.random.default_rng(1).choice(matrix.size, 100, replace=False)
    matrix.reshape(-1)[spikes] += 8.0
    update = {"w": matrix}
    payload = encode(update, ratio=50)
    assert inspect(payload).tensors[0].kind == "factors + plain"
    assert nmse(update, decode(payload)) < 0.02


@given(st.sampled_from(["constant", "one row", "one column", "zero columns", "diagonal", "rank 1"]), st.data())
def test_degenerate_matrices(kind: str, data: st.DataObject) -> None:
    """No warning, no NaN, and the budget is kept, at any scale."""
    height, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    scale = data.draw(st.sampled_from([1e-38, 1e-30, 1e-10, 1.0, 1e10, 1e30, 1e37]))
    rng = np.random.default_rng(height * 41 + width)
    matrix = {
        "constant": np.ones((height, width)),
        "one row": np.eye(height, 1) @ rng.standard_normal((1, width)),
        "one column": rng.standard_normal((height, 1)) @ np.eye(1, width),
        "zero columns": rng.standard_normal((height, width)) * (rng.random(width) < 0.3),
        "diagonal": np.eye(height, width),
        "rank 1": np.outer(rng.standard_normal(height), rng.standard_normal(width)),
    }[kind]
    update = {"w": (matrix * scale).astype(np.float32)}
    budget = 60 + data.draw(st.integers(0, 2000))
    with np.errstate(all="raise", under="ignore"):
        payload = encode(update, max_bytes=budget)
        decoded = decode(payload)["w"]
    assert len(payload) <= budget
    assert np.isfinite(decoded).all()
    if budget > 1500 + height * width:
        assert np.abs(decoded - update["w"]).max() <= 1e-2 * np.abs(update["w"]).max()


def test_same_seed_same_bytes_with_factors() -> None:
    update = {"w": low_rank(200, 300, 8, 0.1)}
    codec = Codec(ratio=100)
    assert codec.encode(update, seed=3) == codec.encode(update, seed=3)
    assert codec.encode(update, seed=3) == Codec(ratio=100, threads=2).encode(update, seed=3)
