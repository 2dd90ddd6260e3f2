"""Models in one Array, views of Arrays, and models that are decoded when they are read."""

from io import BytesIO

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib import format as npy

from fedfq.flower.arrays import Decoded, add_update, as_dtype, difference, digest, pack, packed_views, unpack, views
from fedfq.flower.protocol import MODEL
from tests.flower.local import arrays, record
from tests.updates import assert_identical, network

ODD = {
    "scalar": np.array(3, np.int64),
    "empty": np.zeros((0, 4), np.float32),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "mask": np.array([True, False]),
    "half": np.ones(3, np.float16),
    "ünïcode/name": np.ones((2, 1, 2), np.float64),
}


@pytest.mark.parametrize("model", [network(1), ODD, {}])
def test_a_packed_model_comes_back_as_it_was(model):
    packed = pack(record(model))
    assert packed.stype == MODEL
    back = unpack(packed)
    assert_identical(arrays(ArrayRecord(back)), model)
    assert_identical(views(back), model)
    assert digest(packed_views(packed)) == digest(model) != digest(model | {"more": np.ones(1)})


def test_views_share_the_arrays_memory():
    array = Array(np.arange(5, dtype=np.float32))
    view = views({"weight": array})["weight"]
    assert not view.flags.owndata and not view.flags.writeable


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_numpys_files_can_be_viewed(version):
    file, values = BytesIO(), np.arange(6, dtype=np.float32).reshape(2, 3)
    npy.write_array(file, values, version)
    array = Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=file.getvalue())
    assert_identical(views({"weight": array}), {"weight": values})


@pytest.mark.parametrize("length", [0, 5, 8, 9, 20, 127])
def test_an_array_that_ends_in_its_header_is_refused_by_name(length):
    data = Array(np.ones(5, np.float32)).data[:length]
    with pytest.raises(ValueError, match="'weight'"):
        views({"weight": Array(dtype="float32", shape=(5,), stype="numpy.ndarray", data=data)})


def test_a_damaged_array_is_refused_by_name():
    array = Array(dtype="float32", shape=(5,), stype="numpy.ndarray", data=Array(np.ones(5, np.float32)).data[:-1])
    with pytest.raises(ValueError, match="'weight'"):
        views({"weight": array})
    with pytest.raises(ValueError, match="'weight' is serialised as 'custom'"):
        views({"weight": Array(dtype="float32", shape=(5,), stype="custom", data=b"")})


@given(st.sampled_from(["float16", "float32", "float64", "int8", "uint8", "int64", "bool"]), st.integers(0, 1000))
def test_moved_undoes_difference(dtype, seed):
    rng = np.random.default_rng(seed)
    old, new = ((8 * rng.normal(size=(2, 5))).astype(np.int64).astype(dtype) for _ in range(2))
    update = difference(new, old)
    assert update.dtype == (np.float32 if old.dtype.kind == "f" else old.dtype)
    np.testing.assert_array_equal(add_update(old, update.astype(old.dtype)), new)  # small whole numbers, so exactly


def test_aggregates_return_to_their_dtype():
    means = np.array([-1.0, 2.4, 2.6, 300.0])
    assert_identical({"": as_dtype(means, np.dtype(np.uint8))}, {"": np.array([0, 2, 3, 255], np.uint8)})
    assert_identical({"": as_dtype(means, np.dtype(np.float32))}, {"": means.astype(np.float32)})
    assert_identical({"": as_dtype(means, np.dtype(bool))}, {"": np.array([False, True, True, True])})
    assert as_dtype(np.array(2.0**63), np.dtype(np.int64)) > 2**62


class Counting:
    """A payload that counts how often it is decoded."""

    def __init__(self):
        self.times = 0

    def __call__(self):
        self.times += 1
        return network(2)


def decoded():
    payload = Counting()
    base = network(1)
    return payload, Decoded(base, payload).record(), {name: base[name] + network(2)[name] for name in base}


@pytest.mark.parametrize("keep_input", [True, False])
def test_a_pass_over_a_reply_decodes_it_once(keep_input):
    payload, lazy, model = decoded()
    names = list(lazy)
    assert payload.times == 0
    assert_identical(dict(zip(names, lazy.to_numpy_ndarrays(keep_input=keep_input))), model)
    assert payload.times == 1
    if keep_input:
        assert_identical(arrays(lazy), model)
        assert payload.times == 2


def test_a_lazy_array_can_be_copied_like_any_other():
    _, lazy, model = decoded()
    copied = ArrayRecord(dict(lazy.items()))
    assert_identical(arrays(copied), model)
    assert {type(array) for array in copied.values()} == {Array}
    assert {name: (array.dtype, array.shape) for name, array in lazy.items()} == {
        name: (str(value.dtype), value.shape) for name, value in model.items()
    }
