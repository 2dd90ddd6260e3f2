"""One tensor: what each way to code it takes is estimated well from a sample, and the best way is chosen."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfq.codec.encoder.quantize import LAMBDA, deadzone
from fedfq.codec.encoder.tensor_coder import (
    FACTORS_HEADER_BYTES,
    PLAIN_SLOPE,
    PROBE_CELLS,
    CodedTensor,
    Coding,
    TensorCoder,
    take_sample,
)
from fedfq.codec.encoder.tiles import encode_tile
from fedfq.codec.format.sections import FactorsSection, PlainSection, ZeroSection
from fedfq.codec.tensors import Tensor
from tests.updates import Array, draw, low_rank, scaled


def coder_of(array: Array, *, share: float = 1.0, step: float | None = None) -> TensorCoder:
    """With its basis, if a step is given at which that is worth a look."""
    coder = TensorCoder(Tensor("w", array), 0, share, "deadzone", None)
    if step is not None:
        coder.seek_basis(step, share, math.inf, seed=0)
    return coder


def error_of(coded: CodedTensor, step: float) -> float:
    """D, from D + lambda R."""
    return coded.cost - LAMBDA * step**2 * 8 * coded.size


def plain_size_and_error(array: Array, step: float) -> tuple[int, float]:
    """What plain coefficients of the whole tensor really take."""
    tensor = Tensor("w", array)
    size, error = 0, float(np.square(array, dtype=np.float64).sum())
    for tile in tensor.tiles:
        matrix = tensor.matrix(tile)
        sparse = deadzone(matrix, step)
        encoded = encode_tile(sparse, matrix.width)
        size += 0 if encoded is None else len(encoded.coded.stream)
        levels, excess = np.abs(sparse.levels).astype(np.float64), sparse.excess.astype(np.float64)
        error += step**2 * float((excess**2 - (levels + excess) ** 2).sum())
    return size, error


# --- Plain coefficients ------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(1, 90), st.integers(1, 90), st.floats(0.02, 5.0), st.integers(0, 2**32))
def test_a_small_tensor_is_its_own_sample(height: int, width: int, step: float, seed: int) -> None:
    array = draw("laplace", (height, width), seed)
    coded = coder_of(array).code_plain(step)
    size, error = plain_size_and_error(array, step)
    assert coded.coding == Coding() and coded.size == size
    assert error_of(coded, step) == pytest.approx(error, rel=1e-3, abs=1e-3)


LARGE = {
    "normal": draw("normal", (500, 700)),
    "laplace": draw("laplace", (700, 500)),
    "low rank and noise": low_rank(500, 700, 8, 0.5),
    "kernel": draw("laplace", (128, 64, 7, 7)),
    "vector": draw("laplace", (300_000,)),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("step", [0.05, 0.5, 2.0])
def test_estimates_from_a_sample_are_close_to_the_real_sizes(name: str, step: float) -> None:
    """From a quarter of the entries: to 5%, and the error likewise."""
    coder = coder_of(LARGE[name], share=4.0)
    assert sum(sample.matrix.flat.size for sample in coder.samples) < 0.6 * LARGE[name].size
    coded = coder.code_plain(step)
    size, error = plain_size_and_error(LARGE[name], step)
    assert coded.size == pytest.approx(size, rel=0.05)
    assert error_of(coded, step) == pytest.approx(error, rel=0.05)


def test_rows_and_columns_of_very_different_scales_are_harder_to_sample() -> None:
    """As few of them hold most of the energy; the search settles on real sizes, so this only costs time."""
    array = scaled(500, 700)
    size, error = plain_size_and_error(array, 0.05)
    coded = coder_of(array, share=4.0).code_plain(0.05)
    assert coded.size == pytest.approx(size, rel=0.25)
    assert error_of(coded, 0.05) == pytest.approx(error, rel=0.25)


def test_a_sample_takes_from_rows_and_columns_alike_but_leaves_small_sides_whole() -> None:
    for shape, every in (((640, 640), (3, 3)), ((130, 640), (2, 3)), ((60, 640), (1, 3)), ((60, 60), (1, 1))):
        tensor = Tensor("w", draw("normal", shape))
        sample = take_sample(tensor.matrix(tensor.tiles[0]), 9.0)
        assert (sample.rows, sample.columns) == every
        np.testing.assert_array_equal(
            sample.matrix.flat.reshape(sample.matrix.height, -1), tensor.array[:: every[0], :: every[1]]
        )
        whole = float(np.square(tensor.array).sum())
        assert sample.energy * sample.rows * sample.columns == pytest.approx(whole, rel=0.05)


# --- Factors -----------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(20, 120), st.integers(20, 120), st.integers(1, 8), st.floats(0.0, 0.1), st.integers(0, 2**32))
def test_the_size_of_factors_is_that_of_their_section(
    height: int, width: int, rank: int, noise: float, seed: int
) -> None:
    """Streams are counted, the rest is about FACTORS_HEADER_BYTES; the error is known to 1/2000 of the energy."""
    array, step = low_rank(height, width, rank, noise, seed), 0.3
    coder = coder_of(array, step=step)
    coded = coder.code_factors(step, Coding(rank, plain=False))
    assert coded is not None and coded.factors is not None
    assert abs(coded.section([]).size - coded.size) <= FACTORS_HEADER_BYTES
    rest = coder.subtract(coded.factors).array
    np.testing.assert_allclose(rest, array - coded.factors.left @ coded.factors.right.T, atol=1e-5)
    error = float(np.square(rest, dtype=np.float64).sum())
    assert error_of(coded, step) == pytest.approx(error, rel=0.02, abs=5e-4 * float(np.square(array).sum()))


@pytest.mark.parametrize("step", [0.1, 1.0])
def test_a_model_of_size_and_cost_is_near_without_coding(step: float) -> None:
    """Within a half at steps of a third to three times: where the search starts from."""
    low = coder_of(low_rank(300, 400, 8, 0.02), step=step)
    for at in (step / 3, step, 3 * step):
        coded = low.choose(at)
        assert coded.factors is not None
        assert low.model(step)(at) == pytest.approx((coded.size, coded.cost), rel=0.5)
    dense = coder_of(draw("normal", (120, 160)), step=step)
    model, plain = dense.model(step), dense.code_plain(step)
    assert model(step) == (plain.size, plain.cost) and model(2 * step)[0] == pytest.approx(plain.size * 2**PLAIN_SLOPE)


def test_nothing_is_left_of_factors_at_a_coarse_step_nor_do_their_levels_fit_at_a_fine_one() -> None:
    array = low_rank(40, 50, 3)
    coder = coder_of(array, step=1.0)
    assert coder.code_factors(1e3, Coding(3)) is None
    assert coder.finest > 0 and coder.code_factors(coder.finest, Coding(3)) is not None
    assert coder.code_factors(0.99 * coder.finest, Coding(3)) is None


@pytest.mark.parametrize(
    "array",
    [draw("normal", (900,)), draw("normal", (7, 300)), np.zeros((30, 40), np.float32)],
    ids=["1-d", "thin", "0"],
)
def test_tensors_that_have_no_basis(array: Array) -> None:
    coder = coder_of(array, step=0.1)
    assert coder.low is None and coder.finest == 0.0
    assert coder.choose(0.1) == coder.code_plain(0.1)


def test_a_look_with_few_columns_spares_large_matrices_a_useless_basis() -> None:
    shape = (1100, 1000)
    assert math.prod(shape) > PROBE_CELLS
    assert coder_of(draw("laplace", shape), share=8.0, step=1.0).low is None
    assert coder_of(low_rank(*shape, 8, 0.05), share=8.0, step=1.0).low is not None


# --- The best of them --------------------------------------------------------------------------------------


def test_each_kind_of_tensor_is_coded_in_its_own_way() -> None:
    spiky = low_rank(120, 160, 4)
    spiky.reshape(-1)[np.random.default_rng(1).choice(spiky.size, 60, replace=False)] += 8.0
    assert coder_of(draw("normal", (120, 160)), step=2.0).choose(2.0).coding == Coding()
    assert coder_of(low_rank(120, 160, 4), step=2.0).choose(2.0).coding == Coding(4, plain=False)
    assert coder_of(spiky, step=2.0).choose(2.0).coding == Coding(4, plain=True)


@settings(max_examples=40)
@given(
    st.integers(10, 100),
    st.integers(10, 100),
    st.integers(1, 10),
    st.floats(0.0, 2.0),
    st.floats(0.02, 5.0),
    st.integers(0, 2**32),
)
def test_the_choice_is_never_estimated_to_be_worse_than_plain(
    height: int, width: int, rank: int, noise: float, step: float, seed: int
) -> None:
    coder = coder_of(low_rank(height, width, rank, noise, seed), step=step)
    assert coder.choose(step).cost <= coder.code_plain(step).cost


def test_sections_follow_the_coding() -> None:
    coder = coder_of(low_rank(40, 50, 3), step=0.5)
    tensor = coder.tensor
    tiles = [encode_tile(deadzone(tensor.matrix(tile), 0.5), 50) for tile in tensor.tiles]
    assert isinstance(coder.code_plain(0.5).section(tiles), PlainSection)
    assert isinstance(coder.code_plain(0.5).section([None]), ZeroSection)
    factors = coder.code_factors(0.5, Coding(3))
    assert factors is not None
    alone = factors.section([])
    both = factors._replace(coding=Coding(3, plain=True)).section(tiles)
    assert isinstance(alone, FactorsSection) and isinstance(both, FactorsSection)
    assert (alone.rank, alone.tiles) == (3, None) and both.tiles is not None and both.size > alone.size
