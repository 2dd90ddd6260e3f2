"""Tensors: any of them is seen as float32, tile by tile, without copying more than needed."""

from collections import OrderedDict

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fedfq.codec.format.layout import raw_bytes
from fedfq.codec.tensors import EXACT, KEPT, QUANTIZED, Matrix, Tensor, read, specs


def values_of(matrix: Matrix) -> npt.NDArray[np.float32]:
    rows = [matrix.flat[matrix.start + i * matrix.stride :][: matrix.width] for i in range(matrix.height)]
    return np.array(rows, np.float32)


def gathered(tensor: Tensor) -> npt.NDArray[np.float32]:
    """The tensor put together from its tiles."""
    flat = np.full(tensor.spec.size, np.nan, np.float32)
    for tile in tensor.tiles:
        values = values_of(tensor.matrix(tile))
        for i in range(tile.height):
            flat[tile.start + i * tile.stride :][: tile.width] = values[i]
    return flat.reshape(tensor.spec.shape)


# --- Values ------------------------------------------------------------------------------------------------


def test_contiguous_float32_is_never_copied() -> None:
    array = np.arange(5000, dtype=np.float32)
    weight = torch.randn(40, 50)
    for value in (array, array.reshape(50, 100), array.reshape(10, 20, 25), weight, weight.requires_grad_()):
        tensor = Tensor("w", value)
        source = value.detach().numpy() if isinstance(value, torch.Tensor) else value
        for tile in tensor.tiles:
            assert np.shares_memory(tensor.matrix(tile).flat, source)


def test_other_matrices_are_copied_a_tile_at_a_time() -> None:
    array = np.zeros((3000, 4000), np.float64).T
    for value in (array, array.astype(np.float32), array.T.astype(np.float16)):
        tensor = Tensor("w", value)
        assert len(tensor.tiles) > 1
        assert all(tensor.matrix(tile).flat.size == tile.height * tile.width for tile in tensor.tiles)


BASE = np.random.default_rng(0).normal(size=(12, 20, 50)).astype(np.float32)
UNALIGNED = np.frombuffer(b"\0" + BASE.tobytes(), np.uint8)[1:].view(np.float32)
RECORDS = np.zeros(3000, dtype=[("tag", "u1"), ("value", "f4")])
RECORDS["value"] = BASE.reshape(-1)[:3000]

ARRANGED = {
    "contiguous": BASE,
    "transposed": BASE.transpose(2, 0, 1),
    "transposed matrix": BASE.reshape(120, 100).T,
    "every other column": BASE.reshape(120, 100)[:, ::2],
    "every other row": BASE.reshape(120, 100)[::2],
    "every other entry": BASE.reshape(-1)[::2],
    "every third of the last axis": BASE[:, :, ::3],
    "reversed": BASE.reshape(-1)[::-1],
    "reversed rows": BASE.reshape(120, 100)[::-1],
    "broadcast scalar": np.broadcast_to(np.float32(0.7), (3000,)),
    "broadcast row": np.broadcast_to(BASE[0, 0], (30, 50)),
    "Fortran order": np.asfortranarray(BASE),
    "thin, transposed": BASE.reshape(4000, 3).T[:, :2001],
    "narrow, strided": BASE.reshape(2000, 6)[:513, ::2],
    "read-only": np.frombuffer(BASE.tobytes(), np.float32),
    "unaligned": UNALIGNED,
    "field of records": RECORDS["value"],
    "0-d": np.array(0.7, np.float32),
    "scalar": np.float32(0.7),
    "empty": np.zeros((0, 3), np.float32),
    "big-endian": BASE.astype(">f4"),
    "float16": BASE.astype(np.float16),
    "float64": BASE.astype(np.float64),
    "big-endian float64, strided": BASE.reshape(-1).astype(">f8")[::3],
    "float64, strided": BASE.reshape(-1).astype(np.float64)[::2],
    "longdouble": BASE.astype(np.longdouble).transpose(1, 0, 2),
}


@pytest.mark.parametrize("name", ARRANGED)
def test_values_are_read_whatever_dtype_and_memory_order(name: str) -> None:
    array = ARRANGED[name]
    tensor = Tensor("w", array)
    np.testing.assert_array_equal(gathered(tensor), np.asarray(array).astype(np.float32))
    assert tensor.spec.shape == np.shape(array)
    assert tensor.spec.dtype == (np.float64 if array.dtype == np.longdouble else array.dtype.newbyteorder("="))
    assert tensor.peak() == float(np.abs(np.asarray(array).astype(np.float32)).max(initial=0))


def test_torch_tensors_are_read() -> None:
    base = torch.from_numpy(BASE.copy())
    for value in (base, base.permute(2, 0, 1), base[:, ::2], base.double(), base.half(), base[0, 0, :1].expand(2000)):
        tensor = Tensor("w", value)
        np.testing.assert_array_equal(gathered(tensor), value.float().numpy())
        assert str(value.dtype) == f"torch.{tensor.spec.dtype}"
    parameter = Tensor("w", torch.nn.Parameter(base))
    np.testing.assert_array_equal(gathered(parameter), BASE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_floats_that_numpy_lacks_become_float32(dtype: torch.dtype) -> None:
    value = torch.from_numpy(BASE.copy()).to(dtype).permute(1, 0, 2)
    tensor = Tensor("w", value)
    assert tensor.spec.dtype == np.float32
    np.testing.assert_array_equal(gathered(tensor), value.float().numpy())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int32, torch.bool]
)
def test_a_models_layout_is_read_without_its_numbers(dtype: torch.dtype) -> None:
    """Which may be many, on another device, and of another type: `meta` has none at all."""
    here, nowhere = (torch.zeros(3, 2, 1, dtype=dtype, device=device) for device in ("cpu", "meta"))
    assert specs({"w": nowhere}) == [Tensor("w", here).spec]


def test_a_sample_is_every_so_many_th_row_and_column() -> None:
    array = BASE.reshape(120, 100)
    sample = Matrix(array.reshape(-1), 203, 100, 50, 60).sample(7, 4)
    np.testing.assert_array_equal(values_of(sample), array[2:52, 3:63][::7, ::4])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_entries_that_are_not_finite_are_refused(bad: float, dtype: type) -> None:
    array = np.ones((50, 40), dtype)
    array[49, 39] = bad
    for value in (array, array.T):
        with pytest.raises(ValueError, match="'layer.weight' has entries that are not finite"):
            Tensor("layer.weight", value).peak()


def test_a_float64_beyond_float32_is_refused() -> None:
    with pytest.raises(ValueError, match="'w' has entries that are not finite in float32"):
        Tensor("w", np.array([1.0, 1e39])).peak()


# --- Updates -----------------------------------------------------------------------------------------------


def test_an_update_is_a_mapping_pairs_or_a_module() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = module.state_dict()
    for update in (module, state, dict(state), list(state.items()), iter(state.items()), OrderedDict(state)):
        assert [tensor.spec.name for tensor in read(update)] == list(state)
    assert read({}) == []


def test_kinds_follow_dtype_and_name() -> None:
    update = {
        "a.weight": np.zeros(3, np.float32),
        "a.running_var": np.zeros(3, np.float64),
        "running_counts": np.zeros(3, np.int32),
        "a.count": np.zeros((), np.int64),
        "mask": np.zeros(3, bool),
        "A.RUNNING_VAR": np.zeros(3, np.float32),
    }
    kinds = [tensor.kind for tensor in read(update, keep=("*running_var", "running_*"))]
    assert kinds == [QUANTIZED, KEPT, EXACT, EXACT, EXACT, QUANTIZED]


def test_duplicate_names_and_names_that_are_not_str() -> None:
    array = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="two tensors are named 'w'"):
        read([("w", array), ("v", array), ("w", array)])
    with pytest.raises(TypeError, match="names must be str, got 3"):
        read({3: array})
    with pytest.raises(TypeError, match="names must be str"):
        read({b"w": array})


@pytest.mark.parametrize(
    "update", [None, 3, "w", b"w", np.zeros(3), [np.zeros(3)], [("a", 1, 2)], torch.zeros(3)], ids=repr
)
def test_what_is_no_update(update: object) -> None:
    with pytest.raises(TypeError, match="expected a mapping from names to arrays"):
        read(update)


REFUSED = {
    "complex": np.zeros(3, np.complex64),
    "str": np.array(["a"]),
    "object": np.array([None]),
    "datetime": np.zeros(3, "M8[s]"),
    "records": RECORDS,
    "list": [1.0, 2.0],
    "float": 1.0,
    "none": None,
    "torch complex": torch.zeros(3, dtype=torch.complex64),
    "torch sparse": torch.eye(4).to_sparse(),
    "torch meta": torch.zeros(3, device="meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_tensor(name: str) -> None:
    with pytest.raises(TypeError, match="tensor 'layer.weight'"):
        read({"layer.weight": REFUSED[name]})


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_compressed_sparse_tensors_are_refused_too() -> None:
    with pytest.raises(TypeError, match="tensor 'layer.weight' must be an array or a dense torch tensor"):
        read({"layer.weight": torch.eye(4).to_sparse_csr()})


# --- Size --------------------------------------------------------------------------------------------------


def test_raw_bytes_count_four_bytes_a_float_and_native_bytes_else() -> None:
    update = {
        "a": np.zeros((3, 5), np.float64),
        "b": np.zeros(7, np.float16),
        "c": np.zeros((), np.int64),
        "d": np.zeros(9, bool),
        "e": torch.zeros(11, dtype=torch.bfloat16),
        "f": np.zeros((0, 4), np.float32),
    }
    assert raw_bytes(specs(update)) == 15 * 4 + 7 * 4 + 8 + 9 + 11 * 4
