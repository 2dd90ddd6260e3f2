"""The paper's scheme: one of the widths 0, 2, 4, 8 for every parameter (Eq. 23), and the quantizer of Eq. 5."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import payload as pay
from .allocate import cgsa, exact, find_step
from .kernels import Array
from .layout import Tensor, Tile
from .plan import Plan
from .quantize import class_scales, deadzone_levels, nonzero, stochastic_levels
from .tile import Encoded, encode_tile

MAX_TRIALS = 16

# A level of a section of widths is one number: 1-2 for a width of 2 bits, 3-10 for 4 bits, 11-138 for 8 bits.
WIDTH_OFFSETS = np.array([0, 0, 0, 0, 2, 0, 0, 0, 10], np.int32)


class Widths:
    """The tensors of one update, ready to be coded with any number of bits."""

    def __init__(self, tensors: Sequence[Tensor], allocator: str, rounding: str, seed: int) -> None:
        self.tensors = tensors
        self.allocator = allocator
        self.rounding = rounding
        self.seed = seed
        self.h = np.concatenate([tensor.array.reshape(-1).astype(np.float32, copy=False) for tensor in tensors])

    def with_bits(self, plan: Plan, bits: int) -> bytes:
        """B bits in all, as the paper counts; the payload takes what it takes."""
        if self.allocator == "exact":
            widths = exact(self.h, bits)
        else:
            widths = cgsa(self.h, min(bits, 8 * self.h.size), seed=self.seed)
        sections, end = {}, 0
        for number, tensor in enumerate(self.tensors):
            start, end = end, end + tensor.spec.size
            sections[tensor.spec.name] = self._section(tensor, self.h[start:end], widths[start:end], number)
        return plan.build(sections)

    def in_budget(self, plan: Plan, budget: int) -> bytes:
        """As many bits as fit."""

        def fits(coarseness: float) -> tuple[int, bytes]:
            result = self.with_bits(plan, int(8 * self.h.size / coarseness))
            return len(result), result

        def above(coarseness: float) -> tuple[int, bytes]:
            size, result = fits(coarseness)
            return size - plan.minimum, result

        limits = (1.0, 8.0 * self.h.size)
        guess = max(1.0, self.h.size / budget)
        best = find_step(fits, budget, *limits, guess, slope=-1.0, tolerance=0.01, trials=MAX_TRIALS)[2]
        if best is None:  # near the smallest payload, sizes follow a line only in what they are above that one
            spare = budget - plan.minimum
            guess = max(1.0, self.h.size / max(spare, 1))
            best = find_step(above, spare, *limits, guess, slope=-1.0, tolerance=0.01, trials=2 * MAX_TRIALS)[2]
        return best if best is not None else plan.build({})

    def _section(self, tensor: Tensor, h: Array, widths: Array, number: int) -> pay.Section:
        scales = class_scales(h, widths)
        if self.rounding == "stochastic":
            levels = stochastic_levels(h, widths, scales, self.seed, number)
        else:
            levels = deadzone_levels(h, widths, scales)
        codes = np.sign(levels) * (np.abs(levels).astype(np.int32) + WIDTH_OFFSETS[widths])
        tiles = [_encode_codes(codes, tile) for tile in tensor.tiles]
        if not any(tiles):
            return pay.Section(pay.ZERO)
        return pay.Section(pay.WIDTHS, scales[[2, 4, 8]].astype("<f4").tobytes() + pay.write_tiles(tiles))


def _encode_codes(codes: Array, tile: Tile) -> Encoded | None:
    rows = np.lib.stride_tricks.as_strided(
        codes[tile.start :],
        (tile.height, tile.width),
        (tile.stride * codes.itemsize, codes.itemsize),
        writeable=False,
    )
    sparse = nonzero(rows)
    return encode_tile(sparse, tile.width, by_size=False) if sparse.levels.size else None
