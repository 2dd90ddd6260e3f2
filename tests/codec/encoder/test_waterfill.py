"""Water-filling: one step for all, low-rank factors where they pay, plain coefficients where they do not."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfq import Codec, decode, encode, inspect
from fedfq.codec.encoder.quantize import LAMBDA, MAX_MAGNITUDE, MAX_THRESHOLD
from fedfq.codec.encoder.request import Request
from fedfq.codec.encoder.waterfill import SAFE_PEAKS, SAMPLE_CELLS, SMALL_TOLERANCE, Waterfill
from fedfq.codec.format.coefficients import decode_tile
from fedfq.codec.format.container import Container, Encoding
from fedfq.codec.format.fold import Product, fold
from fedfq.codec.format.layout import raw_bytes
from fedfq.codec.format.sections import FactorsSection, PlainSection
from fedfq.codec.format.tiles import cut_into_tiles
from fedfq.codec.tensors import read
from fedfq.metrics import nmse
from tests.updates import Array, draw, low_rank, scaled

FLOAT32_MAX = float(np.finfo(np.float32).max)


def ask(update: dict[str, Array], **options: Any) -> Request:
    """Without threads, and without a shared basis unless told."""
    tensors = read(update)
    return Request(
        tensors=tensors,
        peak=max(tensor.peak() for tensor in tensors),
        container=Container([tensor.spec for tensor in tensors], {}, as_digest=False),
        spread=lambda function, items: [function(item) for item in items],
        **{"rounding": "deadzone", "adaptive": True, "known": {}, "seed": 0} | options,
    )


def payload(request: Request, encoding: Encoding) -> bytes:
    """What is sent, having checked that its size was known."""
    written = request.container.to_bytes(encoding)
    assert len(written) == request.container.size(encoding)
    return written


def spikes_on_low_rank() -> Array:
    matrix = low_rank(120, 160, 4)
    matrix.reshape(-1)[np.random.default_rng(1).choice(matrix.size, 60, replace=False)] += 8.0
    return matrix


UPDATES: dict[str, dict[str, Array]] = {
    "low rank": {"w": low_rank(120, 160, 6, 0.02)},
    "nearly low rank": {"w": low_rank(120, 160, 8, 0.3), "b": draw("normal", (50,))},
    "dense": {"w": draw("normal", (120, 160)), "k": draw("laplace", (16, 8, 3, 3))},
    "scales": {"w": scaled(100, 200)},
    "spikes": {"w": spikes_on_low_rank(), "b": draw("heavy tails", (60,))},
}


# --- At a step ---------------------------------------------------------------------------------------------


def total_cost(update: dict[str, Array], step: float, **options: Any) -> float:
    """D + lambda R of the whole payload."""
    request = ask(update, **options)
    sent = payload(request, Waterfill(request).encode_at_step(step))
    decoded = decode(sent)
    error = sum(np.square(update[name].astype(np.float64) - decoded[name]).sum() for name in update)
    return float(error + LAMBDA * step**2 * 8 * len(sent))


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2, 0.5, 1.0, 2.0])  # of the largest entry
@pytest.mark.parametrize("name", UPDATES)
def test_what_is_chosen_costs_no_more_than_plain_coefficients(name: str, share: float) -> None:
    """In error and bits together, at one step. (Headers and reconstruction points are not in the estimates.)"""
    update = UPDATES[name]
    step = float(np.float32(share * max(np.abs(array).max() for array in update.values())))
    assert total_cost(update, step) <= 1.01 * total_cost(update, step, adaptive=False)


@pytest.mark.parametrize("step", [0.05, 0.3, 1.0])
def test_factors_for_low_rank_plain_for_a_dense_gaussian(step: float) -> None:
    """In one update: what is best is decided by tensor."""
    update = {"low": low_rank(120, 160, 6, 0.002), "dense": draw("normal", (120, 160)), "bias": draw("normal", (50,))}
    sections = Waterfill(ask(update)).encode_at_step(step).sections
    assert isinstance(sections["low"], FactorsSection) and 1 <= sections["low"].rank <= 6
    assert isinstance(sections["dense"], PlainSection) and isinstance(sections["bias"], PlainSection)


def test_the_coarser_the_step_the_fewer_the_ranks() -> None:
    """A rank is sent as long as it is worth its bits."""
    coding = Waterfill(ask(UPDATES["low rank"]))
    ranks = [coding.encode_at_step(step).sections["w"].rank for step in (0.1, 3.0, 8.0, 30.0)]
    assert ranks == sorted(ranks, reverse=True) and ranks[0] == 6 and ranks[-1] == 0


def test_one_step_serves_all_tensors() -> None:
    """A tensor's section is what it would be alone at that step, however large the others are."""
    update = {
        "w": low_rank(60, 80, 4, 0.02),
        "loud": 30 * draw("laplace", (40, 50)),
        "quiet": draw("laplace", (40, 50)),
    }
    request = ask(update)
    together = Waterfill(request).encode_at_step(0.5)
    assert together.step == 0.5
    for name, array in update.items():
        alone = Waterfill(ask({name: array})).encode_at_step(0.5).sections[name]
        assert together.sections[name].to_bytes() == alone.to_bytes()
    decoded = decode(payload(request, together))
    for name in ("loud", "quiet"):
        assert np.abs(update[name] - decoded[name]).max() < MAX_THRESHOLD * 0.5


def test_a_step_too_fine_for_the_levels_is_refused() -> None:
    coding = Waterfill(ask({"w": draw("normal", (40, 50))}, adaptive=False))
    section = coding.encode_at_step(coding.finest).sections["w"]
    assert isinstance(section, PlainSection) and section.tiles[0] is not None
    largest = np.abs(decode_tile(section.tiles[0], cut_into_tiles((40, 50))[0])[1]).max()
    assert MAX_MAGNITUDE - 3 <= largest <= MAX_MAGNITUDE
    finer = float(np.nextafter(np.float32(coding.finest), np.float32(0)))
    with pytest.raises(ValueError, match=f"step={finer:.6g} is too fine: entries of .* need at least"):
        coding.encode_at_step(finer)


@pytest.mark.parametrize("exponent", [-130, -100, -40, 40, 100, 120])
def test_scale_changes_the_step_and_nothing_else(exponent: int) -> None:
    """By powers of two, and within SAFE_PEAKS for factors: beyond, their products would leave float32."""
    update = {"w": low_rank(60, 80, 4, 0.02), "b": draw("normal", (60,))}
    larger = {name: np.ldexp(array, exponent) for name, array in update.items()}
    safe = SAFE_PEAKS[0] < float(np.abs(larger["w"]).max()) < SAFE_PEAKS[1]
    one = Waterfill(ask(update, adaptive=safe)).encode_at_step(0.5)
    other = Waterfill(ask(larger)).encode_at_step(math.ldexp(0.5, exponent))
    assert (one.sections["w"].rank > 0) == safe
    assert {name: section.to_bytes() for name, section in one.sections.items()} == {
        name: section.to_bytes() for name, section in other.sections.items()
    }


# --- In a budget -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"adaptive": False}, {"adaptive": False, "rounding": "stochastic"}], ids=str)
@pytest.mark.parametrize("name", UPDATES)
def test_budgets_up_to_raw_are_filled_or_the_step_is_the_finest(name: str, options: dict[str, Any]) -> None:
    """To a hundredth, or to what sizes leap by, which is more beside spikes. More than that is left over where the
    levels of a finer step would no longer fit."""
    tolerance = 0.04 if name == "spikes" else SMALL_TOLERANCE
    request = ask(UPDATES[name], **options)
    for share in (1.0, 0.5, 0.1, 0.02, 0.005):
        budget = int(share * raw_bytes([tensor.spec for tensor in request.tensors]))
        coding = Waterfill(request)
        encoding = coding.encode_in_budget(budget)
        unused = budget - len(payload(request, encoding))
        assert unused >= 0
        assert unused <= max(tolerance * budget, 4) or encoding.step == coding.finest


@pytest.mark.parametrize("rounding", ["deadzone", "stochastic"])
@pytest.mark.parametrize("name", UPDATES)
def test_a_few_bytes_above_the_minimum(name: str, rounding: str) -> None:
    """Nothing is worse than the zeros that the smallest payload decodes to; from some 30 bytes on, most are used."""
    update = UPDATES[name]
    request = ask(update, rounding=rounding, adaptive=rounding == "deadzone")
    for spare in (0, 1, 4, 5, 6, 10, 20, 30, 60):
        sent = payload(request, Waterfill(request).encode_in_budget(request.container.minimum + spare))
        used = len(sent) - request.container.minimum
        assert 0 <= used <= spare
        if spare >= 30:
            assert used >= 0.6 * spare
        if rounding == "deadzone":
            assert nmse(update, decode(sent)) <= 1.0 + 1e-12  # sums are rounded


def test_more_bytes_are_less_error() -> None:
    update = UPDATES["nearly low rank"]
    request = ask(update)
    errors = [
        nmse(update, decode(payload(request, Waterfill(request).encode_in_budget(budget))))
        for budget in (200, 400, 800, 1600, 3200, 6400, 12800, 25600)
    ]
    assert errors == sorted(errors, reverse=True)


def test_large_updates_are_sought_on_a_sample() -> None:
    """And fill their budget all the same."""
    update = {"w": scaled(500, 600), "v": low_rank(300, 400, 6, 0.001)}
    request = ask(update)
    assert request.cells > 2 * SAMPLE_CELLS
    coding = Waterfill(request)
    assert sum(sample.matrix.flat.size for coder in coding.coders for sample in coder.samples) < 0.6 * request.cells
    assert 0.99 * 20_000 <= len(payload(request, coding.encode_in_budget(20_000))) <= 20_000


@pytest.mark.parametrize("rounding", ["deadzone", "stochastic"])
@pytest.mark.parametrize("peak", [1e-45, 1e-38, 1e-14, 1e14, 1e30, FLOAT32_MAX])
def test_entries_at_the_ends_of_float32(peak: float, rounding: str) -> None:
    """No warning, no overflow: not in the search for a step that hardly anything is left at, either."""
    matrix = low_rank(20, 30, 3).astype(np.float64)
    update = {"w": (matrix * (peak / np.abs(matrix).max())).astype(np.float32)}
    request = ask(update, rounding=rounding, adaptive=rounding == "deadzone")
    for spare in (0, 4, 9, 20, 50, 200, 2000):
        with np.errstate(all="raise", under="ignore"):
            sent = payload(request, Waterfill(request).encode_in_budget(request.container.minimum + spare))
            decoded = decode(sent)["w"]
        assert len(sent) <= request.container.minimum + spare and np.isfinite(decoded).all()


def test_stochastic_rounding_follows_the_seed_and_has_no_factors() -> None:
    update = UPDATES["nearly low rank"]
    requests = [ask(update, rounding="stochastic", adaptive=False, seed=seed) for seed in (1, 1, 2)]
    encodings = [Waterfill(request).encode_in_budget(3000) for request in requests]
    one, same, other = (payload(*pair) for pair in zip(requests, encodings, strict=True))
    assert one == same != other
    for encoding in encodings:
        assert encoding.shifts is not None and not encoding.shifts.any()  # which would be biased
        assert all(section.rank == 0 for section in encoding.sections.values())


@settings(max_examples=60)
@given(
    st.sampled_from(["normal", "laplace", "heavy tails", "constant", "sparse"]),
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(0, 4000),
    st.sampled_from([{}, {"adaptive": False}, {"adaptive": False, "rounding": "stochastic"}]),
    st.integers(0, 2**32),
)
def test_sizes_are_known_before_anything_is_written(
    kind: str, height: int, width: int, spare: int, options: dict[str, Any], seed: int
) -> None:
    update = {"w": draw(kind, (height, width), seed), "b": draw("normal", (width,), seed)}
    request = ask(update, seed=seed, **options)
    budget = request.container.minimum + spare
    assert len(payload(request, Waterfill(request).encode_in_budget(budget))) <= budget


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
