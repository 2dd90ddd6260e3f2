"""The adaptive basis: low-rank factors where they pay, plain coefficients where they do not."""

import math
from typing import Any

import numpy as np
import pytest
from fedfq.codec.basis import LowRank, Product, fold, max_rank, unit_columns
from fedfq.codec.quantize import stream_key
from hypothesis import given
from hypothesis import strategies as st

from fedfq import Accumulator, Codec, PayloadError, decode, encode, inspect
from fedfq.codec import payload as pay
from fedfq.metrics import nmse
from tests.updates import draw, raw_size


def low_rank(height: int, width: int, rank: int, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    """A few outer products with falling weights, and some noise: what a client's update looks like."""
    rng = np.random.default_rng(seed)
    left = rng.standard_normal((height, rank)) * 0.7 ** np.arange(rank)
    matrix = left @ rng.standard_normal((rank, width)) + noise * rng.standard_normal((height, width))
    return matrix.astype(np.float32)


# --- The view ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [((64, 64, 5, 5), (320, 320)), ((64, 3, 5, 5), (64, 75)), ((384, 2304), (384, 2304)), ((64, 32, 3), (64, 96))],
)
def test_a_kernel_is_folded_to_the_shortest_sides(shape: tuple[int, ...], matrix: tuple[int, int]) -> None:
    view = fold(shape)
    assert view is not None
    assert sum(view.shape(shape)) <= sum(matrix)
    array = draw("normal", shape)
    np.testing.assert_array_equal(view.matrix(array), array.transpose(view.order).reshape(view.shape(shape)))
    total = np.zeros(array.size, np.float32)
    Product(view.matrix(array), np.eye(view.shape(shape)[1], dtype=np.float32)).add_to(total, shape)
    np.testing.assert_array_equal(total.reshape(shape), array)


@pytest.mark.parametrize("shape", [(), (100,), (7, 1000), (1000, 7), (0, 50), (1,) * 7])
def test_vectors_and_narrow_matrices_have_no_factors(shape: tuple[int, ...]) -> None:
    assert fold(shape) is None


# --- The subspace ------------------------------------------------------------------------------------------


def test_the_range_finder_finds_the_leading_singular_values() -> None:
    h = low_rank(120, 300, 40, noise=0.01)
    found = LowRank(h, 16, stream_key(0, 0))
    np.testing.assert_allclose(found.sigma, np.linalg.svd(h, compute_uv=False)[:16], rtol=5e-3)


def test_the_stated_error_is_that_of_the_factors() -> None:
    h = low_rank(120, 300, 40, noise=0.05)
    found = LowRank(h, 32, stream_key(0, 0))
    for step in (0.1, 0.5, 2.0):
        factors = found.factors(step, found.at(step).rank, 0, 0)
        error = np.square(h - factors.left @ factors.right.T, dtype=np.float64).sum()
        assert factors.error == pytest.approx(error, rel=0.02)
        np.testing.assert_allclose(np.linalg.norm(factors.right, axis=0), 1, rtol=1e-5)


def test_a_column_of_zeros_stays_one() -> None:
    assert not unit_columns(np.zeros((5, 2), np.float32)).any()


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


def test_accumulating_factors_equals_decoding_them() -> None:
    shape = (40, 30, 5, 5)
    updates = [{"w": low_rank(200, 150, 5, 0.1, seed).reshape(shape)} for seed in range(3)]
    payloads = [encode(update, ratio=50) for update in updates]
    assert any(inspect(payload).tensors[0].rank for payload in payloads)
    total = Accumulator(updates[0])
    for weight, payload in enumerate(payloads, 1):
        total.add(payload, weight)
    mean = sum(weight * decode(payload)["w"].astype(np.float64) for weight, payload in enumerate(payloads, 1)) / 6
    np.testing.assert_allclose(total.mean()["w"], mean, rtol=1e-4, atol=1e-5)


# --- The gain ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"basis": "identity"}, {"allocator": "exact"}], ids=str)
def test_with_a_gain_the_decoded_update_is_as_long_along_h_as_h(options: dict[str, Any]) -> None:
    update = {"w": low_rank(100, 120, 10, 0.3), "b": draw("normal", (40,)), "running_mean": draw("normal", (9,))}
    payload = encode(update, ratio=60, gain=True, **options)
    assert len(payload) <= raw_size(update) / 60
    decoded = decode(payload)
    energy = sum(float(np.vdot(update[name], update[name])) for name in ("w", "b"))
    product = sum(float(np.vdot(update[name], decoded[name])) for name in ("w", "b"))
    assert product == pytest.approx(energy, rel=1e-4)
    assert inspect(payload).gain > 1
    np.testing.assert_array_equal(decoded["running_mean"], update["running_mean"].astype(np.float16))


def test_a_gain_can_keep_the_norm() -> None:
    update = {"w": low_rank(60, 80, 6, noise=0.3), "b": draw("normal", (50,))}
    payload = encode(update, ratio=60, gain="norm")
    norms = [
        np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in d.values()))
        for d in (update, decode(payload))
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert 1 < inspect(payload).gain < inspect(encode(update, ratio=60, gain=True)).gain
    with pytest.raises(ValueError, match="gain must be one of False, True, 'norm'"):
        Codec(ratio=60, gain="double")  # type: ignore[arg-type]


def test_a_gain_where_nothing_is_sent_is_one() -> None:
    assert inspect(encode({"w": np.zeros((9, 9), np.float32)}, max_bytes=100, gain=True)).gain == 1


# --- Hostile factors ---------------------------------------------------------------------------------------


def test_a_rank_beyond_the_matrix_is_refused() -> None:
    update = {"w": low_rank(60, 80, 3)}
    parsed = pay.parse(encode(update, step=0.3), None)
    (section,) = parsed.sections
    assert section.kind == pay.FACTORS
    for rank in (0, max_rank(60, 80) + 1, 2**40):
        body = pay.varint(rank) + bytes(section.body)[1:]
        forged = pay.write(
            *(parsed.layout or [], [pay.Section(pay.FACTORS, body)]),
            **{"as_digest": False, "step": parsed.step, "shifts": np.zeros(16, np.int8)},
        )
        with pytest.raises(PayloadError, match="rank"):
            decode(forged)


def test_same_seed_same_bytes_with_factors() -> None:
    update = {"w": low_rank(200, 300, 8, 0.1)}
    codec = Codec(ratio=100)
    assert codec.encode(update, seed=3) == codec.encode(update, seed=3)
    assert codec.encode(update, seed=3) == Codec(ratio=100, threads=2).encode(update, seed=3)
