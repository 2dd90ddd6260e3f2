"""Tensors with a step of their own: relative to their own size, and a variance's fall is never overstated."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedfq.codec.encoder.own_steps import FINENESS, Statistics, code, code_small, finest_step
from fedfq.codec.encoder.quantize import MAX_MAGNITUDE
from fedfq.codec.format.parts import Part
from fedfq.codec.format.sections import OwnStepSection, Section, Surroundings, ZeroSection
from fedfq.codec.tensors import Tensor
from tests.updates import Array

NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30)
VECTORS = arrays(np.float32, st.integers(1, 40), elements=NUMBERS).filter(lambda h: bool(h.any()))
NOTHING = Surroundings(math.nan, math.nan, np.full(16, math.nan, np.float32))  # of the payload plays a part


def gaussian(*shape: int, scale: float = 1.0) -> Array:
    return (scale * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


def decode(section: Section, tensor: Tensor) -> Array:
    total = np.zeros(tensor.spec.size, np.float32)
    for job in section.jobs(tensor.spec, NOTHING):
        part: Part = job()
        part.add_to(total, tensor.spec.shape, 1.0)
    return total


def step_at(tensor: Tensor, fineness: float) -> float | None:
    return Statistics([tensor]).choose(fineness).get(tensor.spec.name)


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e12])
def test_the_step_follows_the_root_mean_square(scale: float) -> None:
    tensor = Tensor("bn.running_mean", gaussian(500, scale=scale))
    for fineness in (0.0, 5.0, 12.0):
        step = step_at(tensor, fineness)
        assert step is not None and math.log2(step) == int(math.log2(step))  # a power of two
        assert 0.4 < step * 2.0**fineness / scale < 3.0


def test_a_step_that_was_asked_for_is_not_exceeded_by_much() -> None:
    statistics = Statistics([Tensor("bn.running_mean", gaussian(500))])
    assert statistics.choose(0.0, most=0.01) == {"bn.running_mean": 2.0**-7}  # the nearest power
    assert statistics.choose(0.0, most=1e-30)["bn.running_mean"] == statistics.finest[0]  # levels are limited


@given(VECTORS)
def test_the_finest_step_reaches_the_largest_entry(h: Array) -> None:
    peak = float(np.abs(h).max())
    assert peak / finest_step(peak) <= MAX_MAGNITUDE


@given(VECTORS, st.sampled_from([-2, 0, 3, 8]))
def test_every_entry_is_within_half_a_step(h: Array, exponent: int) -> None:
    tensor = Tensor("bn.running_mean", h)
    peak = float(np.abs(h).max())
    step = max(finest_step(peak), 2.0 ** (round(math.log2(peak)) - exponent))
    error = np.abs(decode(code(tensor, step), tensor).astype(np.float64) - h)
    assert (error <= step / 2 * (1 + 1e-6)).all()


@given(VECTORS, st.sampled_from([-2, 0, 3, 8]))
def test_a_variance_never_falls_by_more_than_it_did(h: Array, exponent: int) -> None:
    tensor = Tensor("bn.running_var", h)
    peak = float(np.abs(h).max())
    decoded = decode(code(tensor, max(finest_step(peak), 2.0 ** (round(math.log2(peak)) - exponent))), tensor)
    assert (decoded[h < 0] >= h[h < 0]).all()


def test_what_all_entries_have_in_common_is_sent_once() -> None:
    """As at the beginning of training, when all variances fall from 1."""
    falls = Tensor("bn.running_var", (-0.9 + 0.01 * gaussian(2000)).astype(np.float32))
    section = code(falls, 2.0**-4)
    assert isinstance(section, OwnStepSection) and section.offset == -14 and section.size < 250
    np.testing.assert_allclose(decode(section, falls), falls.array, atol=2.0**-4)
    alone = code(Tensor("bn.running_var", np.full(2000, -0.9, np.float32)), 2.0**-4)
    assert alone.size < 15


def test_a_uniform_fall_is_sent_even_where_bits_are_dear() -> None:
    for value in (-0.9, -1.0, -0.51):
        fall = Tensor("bn.running_var", np.full(64, value, np.float32))
        step = step_at(fall, FINENESS[-1][0])
        assert step is not None and np.abs(decode(code(fall, step), fall) / value).min() > 0.7


def test_where_room_is_scarce_what_is_worth_most_per_bit_comes_first() -> None:
    uniform, noisy = Tensor("a.running_var", np.full(300, -0.9, np.float32)), Tensor("b.running_mean", gaussian(300))
    statistics = Statistics([noisy, uniform])
    assert list(statistics.choose_within(5, -1.0)) == ["a.running_var"]
    assert list(statistics.choose_within(100, -1.0)) == ["a.running_var", "b.running_mean"]


def test_a_tensor_that_does_not_fit_hides_none_behind_it_and_is_sent_coarser() -> None:
    tensors = [Tensor("a.running_mean", gaussian(10_000)), Tensor("b.running_mean", gaussian(3))]
    statistics = Statistics(tensors)
    assert statistics.estimate_bytes(-1.0) > 625
    chosen = statistics.choose_within(625, -1.0)
    assert set(chosen) == {"a.running_mean", "b.running_mean"}


def test_small_tensors_share_a_section_and_have_steps_and_offsets() -> None:
    tensors = [Tensor("a.running_mean", gaussian(10)), Tensor("b.running_var", np.full(7, -0.75, np.float32))]
    steps, section = code_small(tensors, {"a.running_mean": 0.5, "b.running_var": 0.25})
    assert steps == {"a.running_mean": (142, 0), "b.running_var": (141, -3)}
    assert not isinstance(section, ZeroSection)
    assert isinstance(code_small(tensors[1:], {"b.running_var": 0.25})[1], ZeroSection)  # the offset says it all


def test_nothing_is_written_of_what_is_below_its_step() -> None:
    assert isinstance(code(Tensor("bn.running_mean", 1e-6 * gaussian(2000)), 1.0), ZeroSection)
