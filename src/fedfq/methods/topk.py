"""Top-k with error feedback (Stich et al., 2018; Aji and Heafield, 2017): only the largest entries, the rest later.

Of p = h + e, all tensors as one vector, the k largest magnitudes are sent, and e = p minus what was sent. The papers
count k values of 32 bits and k indices of log2 d bits.

Ours sends less for the same: values as float16 times one float32 (max |p|; what rounding leaves goes to e as well), and
positions in the Golomb code, which becomes a bitmap where k is large (b* = 0 takes one bit per entry). So k is the
largest whose payload fits the ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedfq.codec.errors import PayloadError
from fedfq.codec.ratio import DEFAULT_RATIO, check_ratio

from .bits import BitReader, golomb, golomb_parameter, write
from .method import ANY_ROUND, ERROR_FEEDBACK, RATIO, Array, Method, Order, RoundContext, State, Update, Upload
from .quantizer import peak
from .sparse import Ranked, largest_that_fits
from .wire import Reader, budget_bytes, check_budget, correct, divide, join, lengths, split, unite

HEAD_BYTES, VALUE_BYTES = 8, 2


@dataclass(frozen=True)
class TopK(Method):
    ratio: Annotated[float, RATIO] = DEFAULT_RATIO
    error_feedback: Annotated[bool, ERROR_FEEDBACK] = True

    summary: ClassVar[str] = "only the largest entries, the rest later"
    paper: ClassVar[str] = "top-k with memory (Stich et al. 2018)"
    claims: ClassVar[str] = "32 + log2 d bits per entry sent"
    client_memory: ClassVar[str] = "one model, with error feedback"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        parts = divide(update)
        budget = budget_bytes(update, self.ratio)
        p = join(correct(parts.vectors, memory if self.error_feedback else {}))
        if p.size == 0:
            check_budget(budget, len(parts.carried))
            return Upload(parts.carried, 0)
        ranked = Ranked(p)

        def size_of(k: int) -> int:
            bits = golomb(ranked.top(k), golomb_parameter(k / p.size)).bits
            return HEAD_BYTES + VALUE_BYTES * k + -(-bits // 8) + len(parts.carried)

        k = largest_that_fits(size_of, min(p.size, budget // VALUE_BYTES), budget)
        at, scale = ranked.top(k), peak(p)
        values = (p[at] / (np.float64(scale) or 1.0)).astype("<f2")
        payload = k.to_bytes(4, "little") + scale.astype("<f4").tobytes() + values.tobytes()
        payload += write(golomb(at, golomb_parameter(k / p.size))) + parts.carried
        claimed = k * (32 + math.log2(p.size))
        if not self.error_feedback:
            return Upload(payload, claimed)
        p[at] -= _values(values, float(scale))
        return Upload(payload, claimed, split(p, lengths(update)))

    def decode(self, payload: bytes, like: Update, context: RoundContext = ANY_ROUND) -> dict[str, Array]:
        sizes = lengths(like)
        flat = np.zeros(sum(sizes.values()), np.float32)
        reader = Reader(payload)
        if flat.size == 0:
            return unite(like, split(flat, sizes), reader)
        k = int.from_bytes(reader.take(4), "little")
        if not 1 <= k <= flat.size:
            raise PayloadError("malformed", f"{k:,} entries of {flat.size:,}")
        scale, values = reader.scale(), reader.floats("<f2", k)
        if not (np.abs(values) <= 1).all():
            raise PayloadError("malformed", "a value above the largest")
        bits = BitReader(reader)
        flat[bits.golomb(k, golomb_parameter(k / flat.size), flat.size)] = _values(values, scale)
        bits.close()
        return unite(like, split(flat, sizes), reader)


def _values(values: Array, scale: float) -> Array:
    return (values * np.float64(scale)).astype(np.float32)
