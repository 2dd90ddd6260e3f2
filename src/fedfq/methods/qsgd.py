"""QSGD (Alistarh et al., 2017): random rounding to s levels of the norm, and Elias' code for what is not zero.

Each bucket v of n entries is sent as its norm and levels: Q(v_j) = ||v||_2 sign(v_j) l_j / s, with s |v_j| / ||v||
rounded up or down to l_j at random so that the mean is right. Unbiased, with a variance of at most
min(n / s^2, sqrt(n) / s) ||v||^2. Code_s (Theorem 3.2) is a float32 for the norm and, for every level that
is not zero, the gap since the last one, its sign, and its magnitude, both numbers in Elias' recursive code (omega).

s = sqrt(n) is the paper's dense regime, s = 1 the sparse one. [ours] Buckets of 512 entries, as is usual for QSGD, and
s = 16, the power of two next below sqrt(512).

Deviations: buckets end with their tensor; gaps run on from bucket to bucket; gaps, signs and magnitudes are three
streams, with the same bits in another order, after the number of levels that are not zero (also in Elias' code), which
the paper's decoder would have to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedfq.codec.errors import PayloadError
from fedfq.codec.kernels import FLOAT32_MAX

from .bits import BitReader, Codes, fields, omega, write
from .method import ANY_ROUND, LEVELS, Array, Method, Order, RoundContext, State, Update, Upload
from .quantizer import random_levels
from .wire import Reader, divide, finite, lengths, split, unite

MAX_LEVELS = 2**20


@dataclass(frozen=True)
class QSGD(Method):
    levels: Annotated[int, LEVELS] = 16
    bucket: Annotated[int, "entries that have a norm of their own"] = 512

    summary: ClassVar[str] = "entries rounded at random to levels of their bucket's norm; only what is not zero is sent"
    paper: ClassVar[str] = "QSGD (Alistarh et al. 2017)"
    claims: ClassVar[str] = "the bits of Code_s"
    is_unbiased = True

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= MAX_LEVELS:
            raise ValueError(f"levels must be from 1 to {MAX_LEVELS}, got {self.levels!r}")
        if self.bucket < 1:
            raise ValueError(f"bucket must be at least 1, got {self.bucket!r}")

    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        parts = divide(update)
        rng = np.random.default_rng(order.seed)
        norms, levels = [np.empty(0, "<f4")], [np.empty(0, np.int32)]
        for h in parts.vectors.values():
            rows = np.zeros((-(-h.size // self.bucket), self.bucket))
            rows.reshape(-1)[: h.size] = h
            norms.append(np.minimum(np.sqrt((rows * rows).sum(axis=1)), FLOAT32_MAX).astype("<f4"))
            scales = np.repeat(norms[-1], self.bucket)[: h.size]
            levels.append(random_levels(h, scales, self.levels, rng))
        head = np.concatenate(norms)
        count, codes = code_levels(np.concatenate(levels))
        payload = head.tobytes() + write(count, *codes) + parts.carried
        return Upload(payload, 32 * head.size + sum(stream.bits for stream in codes))

    def decode(self, payload: bytes, like: Update, context: RoundContext = ANY_ROUND) -> dict[str, Array]:
        sizes = lengths(like)
        reader = Reader(payload)
        buckets = [-(-size // self.bucket) for size in sizes.values()]
        norms = reader.scales(sum(buckets))
        places, levels = read_levels(reader, sum(sizes.values()), self.levels)
        flat = np.zeros(sum(sizes.values()), np.float32)
        flat[places] = finite(levels * norms[self._bucket_of(places, list(sizes.values()))] / self.levels)
        return unite(like, split(flat, sizes), reader)

    def _bucket_of(self, places: Array, sizes: list[int]) -> Array:
        """The bucket that each place of the joined vector lies in."""
        starts = np.cumsum([0, *sizes])
        first_buckets = np.cumsum([0, *(-(-size // self.bucket) for size in sizes)])
        tensor = np.searchsorted(starts, places, side="right") - 1
        return first_buckets[tensor] + (places - starts[tensor]) // self.bucket


def code_levels(levels: Array) -> tuple[Codes, list[Codes]]:
    """The number of levels that are not zero; their gaps, signs and magnitudes (Code_s)."""
    places = np.flatnonzero(levels)
    sent = levels[places]
    gaps = np.diff(places, prepend=-1)
    return omega(np.array([places.size + 1])), [omega(gaps), fields(sent < 0, 1), omega(np.abs(sent))]


def read_levels(reader: Reader, size: int, most: int) -> tuple[Array, Array]:
    """The places below `size` whose levels are not zero, and these, of magnitudes up to `most`."""
    bits = BitReader(reader)
    count = int(bits.omega(1)[0]) - 1
    if count > size:
        raise PayloadError("malformed", f"{count:,} levels in {size:,} entries")
    places = np.cumsum(bits.omega(count)) - 1  # no overflow: a gap below 2^32, no more than 2^31 of them
    signs = bits.fields(count, 1)
    magnitudes = bits.omega(count)
    bits.close()
    if count and (places[-1] >= size or magnitudes.max() > most):
        raise PayloadError("malformed", "a place beyond the last entry or a level beyond the largest")
    return places, np.where(signs, -magnitudes, magnitudes)
