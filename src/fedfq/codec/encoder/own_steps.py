"""Tensors with a step of their own: statistics of normalisation layers, and tensors whose range is out of the common.

Statistics are not weights: a variance that is off by half ruins what a layer computes, and their scale says nothing of
how much they matter. So each of these tensors is quantised relative to its own size, as finely as a share of the budget
allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fedfq.types import Array

from ..format.layout import Spec, sort_by_name
from ..format.sections import IntegerSection, OwnStepSection, PlainSection, Section, ZeroSection
from ..format.small import STEP_BIAS, SmallSections, is_small, matrix_spec, step_of
from ..format.tiles import cut_into_tiles
from ..tensors import EXACT, Tensor
from .quantize import MAX_MAGNITUDE
from .tiles import encode_levels

# A statistic's step is its root mean square over 2 to the power of the first of these at which all statistics take no
# more than this share of the budget. Below an error of some percent, a finer step is worth little.
FINENESS = (
    (12, 0.02),
    (8, 0.02),
    (5, 0.2),
    (4, 0.2),
    (3, 0.2),
    (2, 0.33),
    (1, 0.33),
    (0, 0.33),
    (-1, 0.33),
    (-2, 0.33),
)
DEFAULT_FINENESS = 5  # where there is no budget


def choose_step(tensor: Tensor, fineness: int, most: float | None = None) -> float:
    """The power of two near the root mean square, over 2^fineness, of a tensor that is not all zero; or near `most`."""
    h = tensor.array.astype(np.float64).reshape(-1)
    peak = float(np.abs(h).max())
    step = peak * math.sqrt(float(np.mean((h / peak) ** 2))) / 2.0**fineness
    return nearest_step(max(step if most is None else min(step, most), finest_step(peak)))


def finest_step(peak: float) -> float:
    """The finest power of two for entries so large."""
    return nearest_step(2.0 * peak / MAX_MAGNITUDE)


def nearest_step(step: float) -> float:
    """The power of two that is nearest, of those that a small tensor may have."""
    return step_of(min(max(round(math.log2(step)) + STEP_BIAS, 1), 255))


def code(
    tensors: Sequence[Tensor], steps: Mapping[str, float], *, share: bool, as_digest: bool
) -> tuple[dict[str, Section], SmallSections | None]:
    """The sections of tensors with `steps` of their own and of integers, and what small ones of these share.

    With `share` unset, small tensors have sections of their own as well.
    """
    sections: dict[str, Section] = {}
    small: dict[str, Tensor] = {}
    for tensor in tensors:
        name, spec = tensor.spec.name, tensor.spec
        if tensor.kind != EXACT and name not in steps:
            continue
        if share and is_small(spec):
            small[name] = tensor
        elif tensor.kind == EXACT:
            sections[name] = IntegerSection.of(tensor.array)
        else:
            coded = encode_levels(quantize(tensor, steps[name]), tensor.tiles)
            sections[name] = OwnStepSection(steps[name], coded) if any(coded) else ZeroSection()
    if not share:
        return sections, None
    layout = [tensor.spec for tensor in tensors]
    return sections, _join_small(sort_by_name(layout) if as_digest else layout, small, steps)


def _join_small(layout: Sequence[Spec], small: Mapping[str, Tensor], steps: Mapping[str, float]) -> SmallSections:
    owners = [small[spec.name] for spec in layout if spec.name in small and small[spec.name].kind != EXACT]
    shared = matrix_spec([tensor.spec for tensor in owners])
    levels = np.zeros(shared.size, np.int32)
    end = 0
    for tensor in owners:
        start, end = end, end + tensor.spec.size
        levels[start:end] = quantize(tensor, steps[tensor.spec.name])
    tiles = encode_levels(levels, cut_into_tiles(shared.shape))
    return SmallSections(
        layout,
        {tensor.spec.name: int(math.log2(steps[tensor.spec.name])) + STEP_BIAS for tensor in owners},
        PlainSection(tiles) if any(tiles) else ZeroSection(),
        {name: tensor.array for name, tensor in small.items() if tensor.kind == EXACT},
    )


def quantize(tensor: Tensor, step: float) -> Array:
    """Levels, each the nearest one; but for a variance's fall, the one below: |q| <= |h| keeps it above zero."""
    sizes = tensor.array.astype(np.float64).reshape(-1) / step
    levels = np.rint(sizes)
    if "var" in tensor.spec.name.lower():
        levels = np.where(sizes < 0, np.trunc(sizes), levels)
    return np.clip(levels, -MAX_MAGNITUDE, MAX_MAGNITUDE).astype(np.int32)
