"""FedAvg with one width for all parameters, the fixed-precision rows of the paper's Table 1.

The quantizer is the paper's Eq. 5 with b_j = b: |h_j| / scale times s levels, rounded up or down at random so that the
mean is right, and a sign. Deviation: a code that fits b bits has s = 2^(b-1) - 1 levels and a sign (2^b - 1 symbols;
the printed s = 2^(b-1) has 2^b + 1), and the scale is max |h| of the tensor, not its l2 norm, at which 2 bits would
send next to nothing. So does the authors' code. Levels are packed b bits each; nothing is entropy coded: the bytes are
those of FedPAQ with s levels of max |h|.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .fedpaq import FedPAQ
from .method import ANY_ROUND, Array, Method, Order, RoundContext, State, Update, Upload
from .wire import lengths


@dataclass(frozen=True)
class Fixed(Method):
    bits: int = 8

    summary: ClassVar[str] = "every entry rounded at random to one of a few evenly spaced levels, all of one width"
    paper: ClassVar[str] = "FedFQ, Table 1 (fixed precision)"
    claims: ClassVar[str] = "b bits per parameter"
    is_unbiased = True

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits must be 2, 4 or 8, got {self.bits!r}")

    @property
    def _levels(self) -> FedPAQ:
        return FedPAQ(levels=2 ** (self.bits - 1) - 1, norm="max")

    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        upload = self._levels.encode(update, memory, order)
        return upload._replace(claimed_bits=self.bits * sum(lengths(update).values()))

    def decode(self, payload: bytes, like: Update, context: RoundContext = ANY_ROUND) -> dict[str, Array]:
        return self._levels.decode(payload, like, context)
