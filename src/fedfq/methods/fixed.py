"""FedAvg with one width for all parameters, the fixed-precision rows of the paper's Table 1.

The quantizer is the paper's Eq. 5 with b_j = b: |h_j| / scale times s levels, rounded up or down at random so that the
mean is right, and a sign. Deviation: a code that fits b bits has s = 2^(b-1) - 1 levels and a sign (2^b - 1 symbols;
the printed s = 2^(b-1) has 2^b + 1), and the scale is max |h| of the tensor, not its l2 norm, at which 2 bits would
send next to nothing. So does the authors' code. Levels are packed b bits each; nothing is entropy coded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .bits import fields, read_fields, write
from .method import Array, Method, Order, State, Update, Upload
from .quantizer import dequantize, peak, random_levels
from .wire import Reader, divide, lengths, unite


@dataclass(frozen=True)
class Fixed(Method):
    bits: int = 8

    paper: ClassVar[str] = "FedFQ, Table 1 (fixed precision)"
    claims: ClassVar[str] = "b bits a parameter"
    unbiased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits must be 2, 4 or 8, got {self.bits!r}")

    @property
    def levels(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        parts = divide(update)
        rng = np.random.default_rng(order.seed)
        payload = [self._encode_vector(h, rng) for h in parts.vectors.values()]
        return Upload(b"".join(payload) + parts.carried, self.bits * sum(h.size for h in parts.vectors.values()))

    def _encode_vector(self, h: Array, rng: np.random.Generator) -> bytes:
        """The scale, then l + s for every level l in -s .. s."""
        scale = peak(h)
        codes = random_levels(h, scale, self.levels, rng) + self.levels
        return scale.astype("<f4").tobytes() + write(fields(codes, self.bits))

    def decode(self, payload: bytes, like: Update) -> dict[str, Array]:
        reader = Reader(payload)
        return unite(like, {name: self._decode_vector(reader, size) for name, size in lengths(like).items()}, reader)

    def _decode_vector(self, reader: Reader, size: int) -> Array:
        scale = reader.scale()
        codes = read_fields(reader, size, self.bits, 2 * self.levels)
        return dequantize(codes.astype(np.int64) - self.levels, scale, self.levels)
