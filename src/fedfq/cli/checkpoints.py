"""Checkpoints as input: the difference of two, one plus an update, and whether one was given by mistake.

Weights and updates differ in two ways, and only what has both marks is taken for weights:

- Scale. Networks are initialised, and stay, near the scale at which a layer passes on what it gets: the root mean
  square of its weights times sqrt(inputs) is 0.58 (PyTorch's default) to 1.4 (He et al.). An update is far below it.
- Noise. The information in weights is spread over all of them: they compress hardly better than white noise, whose
  error at b bits per parameter is 4^-b of its energy. Updates are of low rank and their entries of all sizes.

Measured, as root mean square of the scale and as error over 4^-b at ratios from 8 to 1024: networks of `tasks.models`
as initialised and as trained, 0.58-1.38 and 0.56-1.52; updates of up to 100 local steps, 0.002-0.19 and 0.00-0.72. A
whole training in one update (1500 steps from the initial model) is taken for weights, from a ratio of 512 on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedfq.files import Array

LEAST_SCALE = 0.25  # of weights, times sqrt(inputs)
LEAST_SHARE_OF_NOISE = 0.55  # of the error that white noise would have: that of weights is at least as large


def looks_like_checkpoint(tensors: Mapping[str, Array], bits_per_parameter: float, nmse: float) -> bool:
    """Whether these are weights rather than an update, going by what became of them at so many bits."""
    return nmse >= LEAST_SHARE_OF_NOISE * 4.0**-bits_per_parameter and _measure_scale(tensors) >= LEAST_SCALE


def _measure_scale(tensors: Mapping[str, Array]) -> float:
    """Weights times sqrt(inputs) of their layer, root mean square over all that have inputs."""
    layers = [array for array in tensors.values() if array.ndim >= 2 and array.size and array.dtype.kind == "f"]
    squares = math.fsum(array[0].size * float(np.square(array, dtype=np.float64).sum()) for array in layers)
    return math.sqrt(squares / max(1, sum(array.size for array in layers)))


# Differences and sums


def subtract(new: Mapping[str, Array], base: Mapping[str, Array], base_path: Path) -> dict[str, Array]:
    """new - base. Integers wrap around, as `add` does, and booleans are compared: both come back exactly."""
    if only := sorted(set(new) ^ set(base)):
        where = "lacks" if only[0] in new else "has, and the input lacks,"
        raise ValueError(f"{base_path} {where} the tensor {only[0]!r}")
    result = {}
    for name, array in new.items():
        other = base[name]
        if array.shape != other.shape:
            raise ValueError(f"tensor {name!r} has shape {array.shape}, in {base_path} {other.shape}")
        if array.dtype != other.dtype and not (array.dtype.kind == other.dtype.kind == "f"):
            raise ValueError(f"tensor {name!r} has dtype {array.dtype}, in {base_path} {other.dtype}")
        with np.errstate(over="ignore", invalid="ignore"):  # the codec refuses what is not finite
            if array.dtype.kind == "f":
                result[name] = np.subtract(array, other, dtype=np.result_type(array, other, np.float32))
            elif array.dtype.kind in "iu":
                result[name] = np.subtract(array, other)
            elif array.dtype.kind == "b":
                result[name] = array ^ other
            else:
                raise ValueError(f"tensor {name!r} has dtype {array.dtype}, which is no kind of number")
    return result


def add(model: Mapping[str, Array], update: Mapping[str, Array]) -> dict[str, Array]:
    """model + update, in the model's order and dtypes."""
    result = {}
    for name, array in model.items():
        if array.dtype.kind == "b":
            result[name] = array ^ update[name]
            continue
        try:
            with np.errstate(over="raise" if array.dtype.kind == "f" else "ignore"):
                result[name] = np.asarray(array + update[name])
        except FloatingPointError:
            raise ValueError(f"tensor {name!r}: the sum does not fit into {array.dtype}") from None
    return result
