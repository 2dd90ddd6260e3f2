"""Tensors with a step of their own: relative to their own size, and a variance's fall is never overstated."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedfq.codec.encoder.own_steps import choose_step, code, finest_step, quantize
from fedfq.codec.encoder.quantize import MAX_MAGNITUDE
from fedfq.codec.format.sections import IntegerSection, OwnStepSection, ZeroSection
from fedfq.codec.tensors import Tensor
from tests.updates import Array

NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30)
VECTORS = arrays(np.float32, st.integers(1, 40), elements=NUMBERS).filter(lambda h: bool(h.any()))


def gaussian(*shape: int, scale: float = 1.0) -> Array:
    return (scale * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e12])
def test_the_step_follows_the_root_mean_square(scale: float) -> None:
    tensor = Tensor("bn.running_mean", gaussian(500, scale=scale))
    for fineness in (-2, 0, 5, 12):
        step = choose_step(tensor, fineness)
        assert math.log2(step) == int(math.log2(step))  # a power of two
        assert 2**-0.6 < step * 2.0**fineness / scale < 2**0.6


def test_a_step_that_was_asked_for_is_not_exceeded_by_much() -> None:
    tensor = Tensor("bn.running_mean", gaussian(500))
    assert choose_step(tensor, 0, most=0.01) == 2.0**-7  # the nearest power
    assert choose_step(tensor, 8, most=10.0) == choose_step(tensor, 8)


@given(VECTORS)
def test_the_finest_step_reaches_the_largest_entry(h: Array) -> None:
    peak = float(np.abs(h).max())
    assert peak / finest_step(peak) <= MAX_MAGNITUDE


@given(VECTORS, st.integers(-2, 12))
def test_every_entry_is_within_half_a_step(h: Array, fineness: int) -> None:
    tensor = Tensor("bn.running_mean", h)
    step = choose_step(tensor, fineness)
    error = np.abs(quantize(tensor, step) * step - h.astype(np.float64))
    assert (error <= step / 2 * (1 + 1e-6)).all()


@given(VECTORS, st.integers(-2, 12))
def test_a_variance_never_falls_by_more_than_it_did(h: Array, fineness: int) -> None:
    tensor = Tensor("bn.running_var", h)
    step = choose_step(tensor, fineness)
    decoded = quantize(tensor, step) * step
    assert (decoded[h < 0] >= h[h < 0]).all()


def test_sections_are_of_integers_and_of_tensors_with_steps_and_small_ones_share() -> None:
    tensors = [
        Tensor("weight", gaussian(50, 40)),
        Tensor("bn.running_mean", gaussian(2000)),
        Tensor("ln.running_mean", gaussian(10)),
        Tensor("still.running_mean", 1e-6 * gaussian(2000)),
        Tensor("ids", np.arange(2000)),
        Tensor("count", np.array(7)),
    ]
    steps = {"bn.running_mean": 0.125, "ln.running_mean": 0.5, "still.running_mean": 1.0}
    sections, small = code(tensors, steps, share=True, as_digest=False)
    kinds = {name: type(section) for name, section in sections.items()}
    assert kinds == {"bn.running_mean": OwnStepSection, "still.running_mean": ZeroSection, "ids": IntegerSection}
    assert small is not None
    alone, nothing = code(tensors, steps, share=False, as_digest=False)
    assert nothing is None and set(alone) == {*sections, "ln.running_mean", "count"}
