"""What small tensors share: steps, one matrix per kind of step, and a block of integers."""

import numpy as np
import pytest

from fedfq import PayloadError
from fedfq.codec.encoder.tiles import encode_levels
from fedfq.codec.format.layout import Spec
from fedfq.codec.format.reader import ByteReader
from fedfq.codec.format.sections import IntegerSection, PlainSection, Section, Surroundings, ZeroSection
from fedfq.codec.format.small import SMALL_ENTRIES, RawSmall, SmallSections, is_small, matrix_spec, step_of
from fedfq.codec.format.tiles import cut_into_tiles
from tests.updates import Array

AROUND = Surroundings(gain=1.0, step=0.5, shifts=np.zeros(16, np.float32))


def spec(name: str, size: int, dtype: str = "float32") -> Spec:
    return Spec(name, (size,), np.dtype(dtype))


def plain(levels: list[int], specs: list[Spec]) -> PlainSection:
    shared = matrix_spec(specs)
    padded = np.zeros(shared.size, np.int32)
    padded[: len(levels)] = levels
    return PlainSection(encode_levels(padded, cut_into_tiles(shared.shape)))


def words(*values: int) -> Section:
    return IntegerSection.of(np.array(values, np.int64))


def decode(layout: list[Spec], data: bytes, has_step: bool = True) -> dict[str, Array]:
    raw = RawSmall.read(ByteReader(data), layout, has_step)
    assert raw.size == len(data)
    return {name: part.values for name, part in raw.decode(AROUND)}


def test_a_tensor_is_small_up_to_1024_entries() -> None:
    assert is_small(spec("w", SMALL_ENTRIES)) and not is_small(spec("w", SMALL_ENTRIES + 1))
    assert is_small(spec("empty", 0))


@pytest.mark.parametrize("sizes, rows", [([], 0), ([1], 1), ([32], 1), ([20, 13], 2)])
def test_they_are_rows_of_32_one_after_the_other(sizes: list[int], rows: int) -> None:
    assert matrix_spec([spec(str(k), size) for k, size in enumerate(sizes)]).shape == (rows, 32)


def test_each_tensor_has_the_payloads_step_or_its_own_and_integers_are_exact() -> None:
    a, b, n = spec("a", 3), spec("b", 2), spec("n", 2, "int16")
    shared = SmallSections([a, b, n], {"b": (145, 3)}, plain([7, -1], [b]), words(-5, 300))
    common = plain([1, 0, -2], [a])
    data = shared.to_bytes(common)
    assert len(data) == shared.size(common)
    decoded = decode([a, b, n], data)
    assert decoded["a"].tolist() == [0.5, 0.0, -1.0]
    assert decoded["b"].tolist() == [40.0, 8.0] and step_of(145) == 4.0  # (7 + 3) 4, (-1 + 3) 4
    assert decoded["n"].tolist() == [-5, 300] and decoded["n"].dtype == np.int16


def test_what_is_all_zero_takes_three_bytes() -> None:
    layout = [spec("a", 3), spec("b", 2), spec("n", 2, "int16")]
    shared = SmallSections(layout, {}, ZeroSection(), words(0, 0))
    assert shared.to_bytes(None) == bytes(3)
    assert decode(layout, bytes(3), has_step=False) == {}


def test_integers_take_the_bytes_of_the_narrowest_dtype_for_all() -> None:
    """Not 8 each: random bytes of 20 tensors take no more than their own bytes."""
    layout = [spec(str(k), 1000, "uint8") for k in range(20)]
    drawn = np.random.default_rng(0).integers(0, 256, 20_000)
    data = SmallSections(layout, {}, ZeroSection(), IntegerSection.of(drawn)).to_bytes(None)
    assert len(data) < 20_010
    assert np.array_equal(np.concatenate(list(decode(layout, data).values())), drawn)


def test_integers_of_64_bits_keep_every_bit() -> None:
    signed, unsigned = spec("signed", 2, "int64"), spec("unsigned", 2, "uint64")
    values = {"signed": np.array([-(2**63), 2**63 - 1]), "unsigned": np.array([2**64 - 1, 1], np.uint64)}
    section = IntegerSection.of(np.concatenate([array.view(np.int64) for array in values.values()]))
    decoded = decode([signed, unsigned], SmallSections([signed, unsigned], {}, ZeroSection(), section).to_bytes(None))
    for name, array in values.items():
        assert decoded[name].dtype == array.dtype and decoded[name].tolist() == array.tolist()


def test_a_step_is_refused_where_the_payload_has_none() -> None:
    a = spec("a", 3)
    data = SmallSections([a], {}, ZeroSection(), ZeroSection()).to_bytes(plain([1], [a]))
    with pytest.raises(PayloadError, match="without a step"):
        decode([a], data, has_step=False)


def test_nonzeros_count_both_kinds_of_steps() -> None:
    a, b = spec("a", 3), spec("b", 2)
    shared = SmallSections([a, b], {"b": (143, 0)}, plain([7, -1], [b]), ZeroSection())
    data = shared.to_bytes(plain([1, 0, -2], [a]))
    assert RawSmall.read(ByteReader(data), [a, b], True).nonzeros() == 4
