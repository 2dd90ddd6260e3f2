"""Arrays of other libraries are read as numpy's; torch is loaded only by those who have it."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from fedfq import ErrorFeedback, SharedBasis, decode, encode
from fedfq.codec.arrays import as_torch
from fedfq.codec.codec import Codec
from fedfq.codec.tensors import read, specs
from tests.updates import Array, assert_identical, network


class WithArray:
    """Has `__array__` only."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return self.array


class WithDLPack:
    """Has what DLPack asks for only."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class LikeJax(WithArray):
    """Says its shape and dtype; reading its numbers is what a model must be spared."""

    reads = 0

    def __init__(self, array: Array) -> None:
        super().__init__(array)
        self.shape, self.dtype = array.shape, array.dtype

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        LikeJax.reads += 1
        return self.array


def made_of(kind: Any, update: dict[str, Array]) -> dict[str, Any]:
    return {name: kind(value) for name, value in update.items()}


class Derived(torch.Tensor):
    """Such as those of other packages."""


KINDS = [WithArray, WithDLPack, LikeJax]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["full", "digest"])
def test_any_array_is_a_tensor(kind: Any, layout: Any) -> None:
    update, foreign = network(), made_of(kind, network())
    payload = encode(foreign, ratio=20, layout=layout)
    assert payload == encode(update, ratio=20, layout=layout)
    assert_identical(decode(payload, like=foreign), decode(payload, like=update))
    assert specs(foreign) == specs(update)
    assert ErrorFeedback(Codec(ratio=20)).encode(foreign) == ErrorFeedback(Codec(ratio=20)).encode(update)
    assert SharedBasis(foreign, update).digest == SharedBasis(update, update).digest


def test_the_numbers_of_a_model_are_not_read() -> None:
    LikeJax.reads = 0
    specs(made_of(LikeJax, network()))
    assert LikeJax.reads == 0


def test_tensors_of_classes_derived_from_torchs_are_torchs() -> None:
    value = torch.randn(30, 40).as_subclass(Derived).requires_grad_()
    payload = encode({"w": value}, ratio=4)
    assert payload == encode({"w": value.detach().numpy()}, ratio=4)
    assert decode(payload, like={"w": value})["w"].dtype == torch.float32


class Broken:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        raise RuntimeError("it was deleted\non the device")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Broken(), "tensor 'w', a Broken, cannot be read as an array: it was deleted on the device"),
        (WithArray(np.array(["a"])), "tensor 'w' has dtype"),
        (WithDLPack(torch.zeros(3, dtype=torch.bfloat16)), "tensor 'w', a WithDLPack, cannot be read as an array"),
        (np.ma.masked_array(np.zeros(3), [0, 1, 0]), "tensor 'w' must be an array"),
        ([1.0], "tensor 'w' must be an array or a dense torch tensor with data, got list"),
        (WithArray, "tensor 'w' must be an array or a dense torch tensor with data, got type"),
        ({"kernel": np.zeros(3)}, "give its tensors one by one, as 'w/...'"),
    ],
)
def test_what_cannot_be_read(value: Any, message: str) -> None:
    for use in (read, specs):
        with pytest.raises(TypeError, match=message):
            use({"w": value})


def test_a_torch_tensor_shares_memory_where_numpy_has_its_dtype() -> None:
    array = np.zeros((3, 4), np.float32)
    as_torch(array, torch.float32)[0, 0] = 1
    assert array[0, 0] == 1
    assert as_torch(np.array(7), torch.int64).shape == ()


def test_torch_is_not_imported_for_numpy_arrays() -> None:
    code = (
        "import sys, numpy as np, fedfq\n"
        "model = {'w': np.ones((30, 40), np.float32)}\n"
        "payload = fedfq.encode(model, ratio=8)\n"
        "mean = fedfq.Accumulator(model)\n"
        "mean.add(payload)\n"
        "assert isinstance(fedfq.decode(payload, like=model)['w'], np.ndarray)\n"
        "assert isinstance(mean.mean()['w'], np.ndarray) and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_tensor_without_data_is_named_for_what_it_is() -> None:
    with pytest.raises(TypeError, match=r"got a torch tensor \(torch.strided, meta\)"):
        read({"w": torch.zeros(3, device="meta")})
