"""FedPAQ (Reisizadeh et al., 2020): periodic averaging of updates that are rounded at random to s levels of a norm.

Q(h_j) = ||h|| sign(h_j) xi_j with xi_j = l/s or (l+1)/s, l = floor(s |h_j| / ||h||), drawn so that the mean is right
(Section 3, Example 1), tensor by tensor. Unbiased, with a variance of at most min(n / s^2, sqrt(n) / s) ||h||^2.
2s + 1 symbols take ceil(log2(2s + 1)) bits each, and every tensor one float32. The default s = 7 is four bits, as in
FedFQ's Table 2.

With the l2 norm, as published, the error of a tensor of a million entries is many times its energy unless s is near
1000; small steps bear it. `norm="max"` scales by max |h| instead; the variance is then at most n / (4 s^2) max |h|^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from .bits import MAX_FIELD_BITS, fields, read_fields, write
from .method import ANY_ROUND, LEVELS, Array, Method, Order, RoundContext, State, Update, Upload
from .quantizer import dequantize, l2, peak, random_levels
from .wire import Reader, divide, lengths, unite

MAX_LEVELS = 2 ** (MAX_FIELD_BITS - 1) - 1


@dataclass(frozen=True)
class FedPAQ(Method):
    levels: Annotated[int, LEVELS] = 7
    norm: Annotated[Literal["l2", "max"], "what levels are multiples of: the l2 norm, or the largest magnitude"] = "l2"

    summary: ClassVar[str] = "every entry rounded at random to evenly spaced levels of its tensor's norm"
    paper: ClassVar[str] = "FedPAQ (Reisizadeh et al. 2020)"
    claims: ClassVar[str] = "ceil(log2(2s + 1)) bits per parameter, 32 bits per tensor"
    is_unbiased = True

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= MAX_LEVELS:
            raise ValueError(f"levels must be from 1 to {MAX_LEVELS}, got {self.levels!r}")
        if self.norm not in ("l2", "max"):
            raise ValueError(f"norm must be 'l2' or 'max', got {self.norm!r}")

    @property
    def bits(self) -> int:
        return (2 * self.levels).bit_length()

    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        parts = divide(update)
        rng = np.random.default_rng(order.seed)
        payload = b"".join(self._encode_vector(h, rng) for h in parts.vectors.values()) + parts.carried
        return Upload(payload, sum(32 + self.bits * h.size for h in parts.vectors.values()))

    def _encode_vector(self, h: Array, rng: np.random.Generator) -> bytes:
        scale = l2(h) if self.norm == "l2" else peak(h)
        codes = random_levels(h, scale, self.levels, rng) + self.levels
        return scale.astype("<f4").tobytes() + write(fields(codes, self.bits))

    def decode(self, payload: bytes, like: Update, context: RoundContext = ANY_ROUND) -> dict[str, Array]:
        reader = Reader(payload)
        return unite(like, {name: self._decode_vector(reader, size) for name, size in lengths(like).items()}, reader)

    def _decode_vector(self, reader: Reader, size: int) -> Array:
        scale = reader.scale()
        codes = read_fields(reader, size, self.bits, 2 * self.levels)
        return dequantize(codes.astype(np.int64) - self.levels, scale, self.levels)
