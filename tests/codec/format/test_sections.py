"""Sections: each kind comes back as it was, and names what a stranger got wrong."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfq import PayloadError, decode, encode
from fedfq.codec.format.container import parse
from fedfq.codec.format.fold import max_rank
from fedfq.codec.format.layout import DTYPES, Spec
from fedfq.codec.format.reader import varint
from fedfq.codec.format.sections import FACTORS, INTEGER, ZERO, IntegerSection, Section, WholeSection
from fedfq.types import Array
from tests.payloads import write
from tests.updates import low_rank


def read_back(section: Section, spec: Spec) -> Array:
    """The entries in the bytes of a section that holds all of them."""
    again = type(section).from_bytes(section.kind, bytes(section.body), spec)
    assert isinstance(again, WholeSection)
    return again.values(spec)


@given(st.sampled_from(DTYPES[4:]), st.integers(1, 40), st.integers(0, 64), st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_integers_round_trip_in_the_narrowest_dtype(name: str, size: int, bits: int, seed: int) -> None:
    dtype = np.dtype(name)
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        values = rng.random(size) < 0.5
    else:
        info = np.iinfo(dtype)
        bound = min(2**bits, int(info.max))
        values = rng.integers(max(-bound, int(info.min)), bound, size, dtype, endpoint=True)
    section = IntegerSection.of(values)
    if not values.any():
        assert section.kind == ZERO
        return
    np.testing.assert_array_equal(read_back(section, Spec("n", (size,), dtype)), values)
    assert len(section.body) <= 1 + values.nbytes
    if dtype.kind != "b" and np.abs(values.astype(object)).max() < 100:
        assert len(section.body) <= 1 + size


def test_integers_at_the_ends_of_their_dtype() -> None:
    for name in DTYPES[5:]:
        info = np.iinfo(name)
        values = np.array([info.min, info.max, 0, 1], name)
        for arranged in (values, values.astype(np.dtype(name).newbyteorder(">")), np.repeat(values, 2)[::2]):
            section = IntegerSection.of(arranged)
            np.testing.assert_array_equal(read_back(section, Spec("n", (4,), np.dtype(name))), values)


def test_a_rank_beyond_the_matrix_is_refused() -> None:
    update = {"w": low_rank(60, 80, 3)}
    parsed = parse(encode(update, step=0.3), None)
    (section,) = parsed.sections.values()
    assert section.kind == FACTORS
    for rank in (0, max_rank(60, 80) + 1, 2**40):
        body = varint(rank) + bytes(section.body)[1:]
        forged = write(parsed.layout, [(FACTORS, body)], step=parsed.step)
        with pytest.raises(PayloadError, match="rank"):
            decode(forged)


@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "uint64"])
def test_booleans_may_stand_for_integers_and_become_them(dtype: str) -> None:
    """The storage dtype may be narrower than the tensor's; what is decoded has the tensor's."""
    body = bytes([DTYPES.index("bool"), 0, 1, 1])
    values = IntegerSection(INTEGER, body).values(Spec("n", (3,), np.dtype(dtype)))
    assert values.dtype == dtype and values.tolist() == [0, 1, 1]
