"""Tensors of any library as numpy arrays, and numpy arrays as torch tensors.

PyTorch is never imported here before the caller has done so.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from fedfq.types import Array


def is_torch(value: Any) -> bool:
    """Is it a tensor of PyTorch, or of a class derived from it? Without importing it."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def is_foreign(value: Any) -> bool:
    """Is it an array of another library, such as JAX, that numpy can read?"""
    known = isinstance(value, (np.ndarray, np.generic, type)) or is_torch(value)
    return not known and (hasattr(value, "__array__") or hasattr(value, "__dlpack__"))


def as_numpy(name: str, value: Any) -> Array:
    """The tensor's numbers, not copied where that can be avoided."""
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.ma.MaskedArray):
        return np.asarray(value)
    if is_torch(value):
        with suppress(TypeError, RuntimeError):
            return np.asarray(value.detach().cpu().numpy())
        with suppress(TypeError, RuntimeError):  # bfloat16 and the like
            if value.is_floating_point():
                return np.asarray(value.detach().cpu().float().numpy())
    elif is_foreign(value):
        return _foreign_as_numpy(name, value)
    if isinstance(value, Mapping):
        raise TypeError(f"tensor {name!r} is a mapping: give its tensors one by one, as '{name}/...', not nested")
    what = f"a torch tensor ({value.layout}, {value.device})" if is_torch(value) else type(value).__name__
    raise TypeError(f"tensor {name!r} must be an array or a dense torch tensor with data, got {what}")


def _foreign_as_numpy(name: str, value: Any) -> Array:
    """By `__array__`, which also knows other devices and bfloat16, or else by DLPack."""
    try:
        return np.asarray(value) if hasattr(value, "__array__") else np.from_dlpack(value)
    except Exception as error:  # of whatever library it is
        reason = " ".join(str(error).split())
        raise TypeError(f"tensor {name!r}, a {type(value).__name__}, cannot be read as an array: {reason}") from error


def as_torch(array: Array, dtype: Any) -> Any:
    """A torch tensor on the CPU, in the memory of the array unless numpy lacks the dtype; finite numbers stay so."""
    import torch

    tensor = torch.from_numpy(array)
    if tensor.dtype != dtype:  # bfloat16 or 8 bits, whose largest numbers are smaller than those of float32
        limits = torch.finfo(dtype)
        tensor = tensor.clamp(limits.min, limits.max).to(dtype)
    return tensor
