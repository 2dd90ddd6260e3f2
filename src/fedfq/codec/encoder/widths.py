"""The paper's scheme: one of the widths 0, 2, 4, 8 for every parameter (Eq. 23), and the quantizer of Eq. 5."""

from __future__ import annotations

import numpy as np

from fedfq.types import Array

from ..format.container import Encoding
from ..format.sections import WIDTH_OFFSETS, WIDTHS_SENT, Section, WidthsSection, ZeroSection
from ..tensors import Tensor
from .allocate import cgsa, exact
from .request import Request
from .search import BudgetSearch
from .tiles import encode_levels
from .width_levels import class_scales, deadzone_levels, stochastic_levels

MAX_TRIALS = 16
TOLERANCE = 0.01  # share of the budget that may stay unused


class Widths:
    """The tensors of one update, ready to be coded with any number of bits."""

    def __init__(self, request: Request, allocator: str) -> None:
        self.container = request.container
        self.tensors = request.tensors
        self.allocator = allocator
        self.rounding = request.rounding
        self.seed = request.seed
        self.h = np.concatenate([tensor.array.reshape(-1).astype(np.float32, copy=False) for tensor in request.tensors])

    def encode_with_bits(self, bits: int) -> Encoding:
        """B bits in all, as the paper counts; the payload takes what it takes."""
        if self.allocator == "exact":
            widths = exact(self.h, bits)
        else:
            widths = cgsa(self.h, min(bits, 8 * self.h.size), seed=self.seed)
        sections, end = {}, 0
        for number, tensor in enumerate(self.tensors):
            start, end = end, end + tensor.spec.size
            sections[tensor.spec.name] = self._section(tensor, self.h[start:end], widths[start:end], number)
        return Encoding(sections)

    def encode_in_budget(self, budget: int) -> Encoding:
        """As many bits as fit. What is sought is the coarseness, that is 8 bits per entry over B."""
        minimum = self.container.minimum

        def encode(coarseness: float) -> tuple[int, Encoding]:
            encoding = self.encode_with_bits(int(8 * self.h.size / coarseness))
            return self.container.size(encoding), encoding

        def encode_above(coarseness: float) -> tuple[int, Encoding]:
            size, encoding = encode(coarseness)
            return size - minimum, encoding

        search = BudgetSearch(1.0, 8.0 * self.h.size, -1.0, TOLERANCE, MAX_TRIALS)
        best = search.solve(encode, budget, start=max(1.0, self.h.size / budget)).outcome
        if best is None:  # near the smallest payload, sizes follow a line only in what they are above that one
            spare = budget - minimum
            search = BudgetSearch(1.0, 8.0 * self.h.size, -1.0, TOLERANCE, 2 * MAX_TRIALS)
            best = search.solve(encode_above, spare, start=max(1.0, self.h.size / max(spare, 1))).outcome
        return best or Encoding()

    def _section(self, tensor: Tensor, h: Array, widths: Array, number: int) -> Section:
        scales = class_scales(h, widths)
        if self.rounding == "stochastic":
            levels = stochastic_levels(h, widths, scales, self.seed, number)
        else:
            levels = deadzone_levels(h, widths, scales)
        codes = np.sign(levels) * (np.abs(levels).astype(np.int32) + WIDTH_OFFSETS[widths])
        tiles = encode_levels(codes, tensor.tiles, by_size=False)
        return WidthsSection(scales[list(WIDTHS_SENT)], tiles) if any(tiles) else ZeroSection()
