"""The frame of a payload: what does not depend on the step, and putting it together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import payload as pay
from .kernels import Array
from .layout import KEPT, QUANTIZED, Tensor


class Plan:
    """What does not depend on the step: the layout, and the sections of tensors that are not quantised."""

    def __init__(self, tensors: Sequence[Tensor], *, as_digest: bool, with_gain: bool, basis: bytes | None) -> None:
        self.layout = [tensor.spec for tensor in tensors]
        self.as_digest = as_digest
        self.with_gain = with_gain
        self.basis = basis
        self.fixed = {tensor.spec.name: _fixed_section(tensor) for tensor in tensors if tensor.kind != QUANTIZED}
        self.minimum = len(self.build({}))

    def build(
        self,
        quantized: dict[str, pay.Section],
        step: float | None = None,
        shifts: Array | None = None,
    ) -> bytes:
        sections = [
            self.fixed.get(spec.name) or quantized.get(spec.name) or pay.Section(pay.ZERO) for spec in self.layout
        ]
        return pay.write(
            self.layout,
            sections,
            as_digest=self.as_digest,
            with_gain=self.with_gain,
            basis=self.basis,
            step=step,
            shifts=shifts,
        )


def _fixed_section(tensor: Tensor) -> pay.Section:
    if tensor.kind == KEPT:
        return _kept_section(tensor)
    return pay.write_integers(tensor.array)


def _kept_section(tensor: Tensor) -> pay.Section:
    """float16, or float32 where float16 does not reach."""
    tensor.peak()
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(tensor.array, np.float32).reshape(-1)
        halves = values.astype("<f2")
    if not values.any():
        return pay.Section(pay.ZERO)
    if np.isfinite(halves).all():
        return pay.Section(pay.HALF, halves.tobytes())
    return pay.Section(pay.SINGLE, values.astype("<f4").tobytes())
