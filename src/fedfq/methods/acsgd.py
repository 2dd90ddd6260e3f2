"""AC-SGD (Yan et al., 2022): how many entries and how many bits each, from a budget of C bits. Two forms.

`acsgd`, the authors': C_n = r d alpha^((N - n) / 2) G_n at step n of N, with G_n the mean norm of recent gradients;
b = floor(log2(C_n) / 2 + 1/4) bits for each of k = (C_n - 32) / (b + log2 d) entries. These are drawn at random and
multiplied by d / k, then rounded at random to s = 2^(b-1) - 1 levels of their l2 norm. Unbiased, no memory. Deviations:
- The authors measure G_n over 100 steps of all clients. A client here has one update per round: G_n is its norm, in
  units of that of the client's first update, which it remembers. So r counts bits per parameter, and C_n does not
  depend on the units of h. n is the round.
- The authors count log2 d bits for each index. The indices are random, so 8 bytes of seed stand for all.

`acsgd-topk`, as compared with by FedFQ's authors: C = ceil(32 d / claimed_ratio) whatever the norm, b = floor(v) and
k = floor(C / v) with v = log2(2 ln(2) C) / 2; the k largest of p = h + e, rounded at random to s levels of max |p|,
with error feedback. They count C bits: neither positions nor scale. Ours sends the positions in the Golomb code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from fedfq.codec.errors import PayloadError
from fedfq.codec.format.random_numbers import stream_key
from fedfq.codec.ratio import check_ratio

from .bits import MAX_FIELD_BITS, BitReader, fields, golomb, golomb_parameter, read_fields, write
from .method import ANY_ROUND, CLAIMED_RATIO, ERROR_FEEDBACK, Array, Method, Order, RoundContext, State, Update, Upload
from .quantizer import dequantize, l2, peak, random_levels
from .sparse import Ranked, sample
from .wire import Reader, correct, divide, join, lengths, split, unite

SEED_BYTES, COUNT_BYTES = 8, 4
FIRST_NORM = "first norm"


class Split(NamedTuple):
    """How a budget is spent."""

    bits: int
    entries: int

    @property
    def levels(self) -> int:
        return 2 ** (self.bits - 1) - 1


@dataclass(frozen=True)
class ACSGD(Method):
    rate: Annotated[float, "bits per parameter of a client's first update, before alpha"] = 1.024
    alpha: Annotated[float, "factor of the budget, per two rounds that are left"] = 0.99
    rounds: Annotated[int, "rounds after which the budget stops growing"] = 100

    summary: ClassVar[str] = "entries drawn at random, and rounded at random, as many as the update's norm deserves"
    paper: ClassVar[str] = "AC-SGD (Yan et al. 2022)"
    claims: ClassVar[str] = "32 bits, and b + log2 d bits per entry sent"
    client_memory: ClassVar[str] = "one number"
    is_unbiased = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(f"rate must be positive and finite, got {self.rate!r}")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha must be above 0 and at most 1, got {self.alpha!r}")
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds!r}")

    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        parts = divide(update)
        h, seed = join(parts.vectors), order.seed % 2**64
        if h.size == 0:
            return Upload(parts.carried, 0, memory)
        norm = float(l2(h))
        first = float(memory.get(FIRST_NORM, norm))
        spent = self._split(h.size, norm / first if first > 0 else 1.0, order.context.number)
        chosen = h[sample(stream_key(seed, 0), h.size, spent.entries)]
        scale = l2(chosen)
        codes = random_levels(chosen, scale, spent.levels, np.random.default_rng(order.seed)) + spent.levels
        payload = seed.to_bytes(SEED_BYTES, "little") + spent.entries.to_bytes(COUNT_BYTES, "little")
        payload += bytes([spent.bits]) + scale.astype("<f4").tobytes()
        payload += write(fields(codes, spent.bits)) + parts.carried
        claimed = 32 + spent.entries * (spent.bits + math.log2(h.size))
        return Upload(payload, claimed, memory if first > 0 and memory else {FIRST_NORM: np.array(norm)})

    def _split(self, size: int, relative_norm: float, number: int) -> Split:
        budget = self.rate * size * self.alpha ** (0.5 * max(0, self.rounds - number)) * relative_norm
        budget = min(max(budget, 32.0), 32.0 * size)
        bits = min(max(2, math.floor(0.5 * math.log2(budget) + 0.25)), MAX_FIELD_BITS)
        return Split(bits, min(max(1, int((budget - 32) / (bits + math.log2(size)))), size))

    def decode(self, payload: bytes, like: Update, context: RoundContext = ANY_ROUND) -> dict[str, Array]:
        sizes = lengths(like)
        reader = Reader(payload)
        flat = np.zeros(sum(sizes.values()), np.float32)
        if flat.size:
            seed = int.from_bytes(reader.take(SEED_BYTES), "little")
            spent = Split(entries=int.from_bytes(reader.take(COUNT_BYTES), "little"), bits=reader.take(1)[0])
            if not (1 <= spent.entries <= flat.size and 2 <= spent.bits <= MAX_FIELD_BITS):
                raise PayloadError("malformed", f"{spent.entries:,} entries of {flat.size:,}, {spent.bits} bits each")
            scale = reader.scale() * (flat.size / spent.entries)
            codes = read_fields(reader, spent.entries, spent.bits, 2 * spent.levels)
            values = dequantize(codes.astype(np.int64) - spent.levels, scale, spent.levels)
            flat[sample(stream_key(seed, 0), flat.size, spent.entries)] = values
        return unite(like, split(flat, sizes), reader)


@dataclass(frozen=True)
class ACSGDTopK(Method):
    claimed_ratio: Annotated[float, CLAIMED_RATIO] = 31.25
    error_feedback: Annotated[bool, ERROR_FEEDBACK] = True

    summary: ClassVar[str] = "the largest entries, rounded at random, with as many bits each as the budget suggests"
    paper: ClassVar[str] = "AC-SGD as in FedFQ's Table 2"
    claims: ClassVar[str] = "32 / claimed_ratio bits per parameter (positions are free)"
    client_memory: ClassVar[str] = "one model, with error feedback"

    def __post_init__(self) -> None:
        check_ratio(self.claimed_ratio, "claimed_ratio")

    def _budget(self, size: int) -> int:
        return math.ceil(32 * size / self.claimed_ratio)

    def _split(self, size: int) -> Split:
        budget = self._budget(size)
        bits = max(1.0, 0.5 * math.log2(2 * math.log(2) * budget))
        return Split(min(max(2, math.floor(bits)), MAX_FIELD_BITS), min(max(1, math.floor(budget / bits)), size))

    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        parts = divide(update)
        p = join(correct(parts.vectors, memory if self.error_feedback else {}))
        if p.size == 0:
            return Upload(parts.carried, 0)
        spent = self._split(p.size)
        at, scale = Ranked(p).top(spent.entries), peak(p)
        levels = random_levels(p[at], scale, spent.levels, np.random.default_rng(order.seed))
        positions = golomb(at, golomb_parameter(at.size / p.size))
        codes = write(positions, fields(levels + spent.levels, spent.bits))
        payload = scale.astype("<f4").tobytes() + codes + parts.carried
        if not self.error_feedback:
            return Upload(payload, self._budget(p.size))
        p[at] -= dequantize(levels, scale, spent.levels)
        return Upload(payload, self._budget(p.size), split(p, lengths(update)))

    def decode(self, payload: bytes, like: Update, context: RoundContext = ANY_ROUND) -> dict[str, Array]:
        sizes = lengths(like)
        reader = Reader(payload)
        flat = np.zeros(sum(sizes.values()), np.float32)
        if flat.size:
            spent, scale = self._split(flat.size), reader.scale()
            bits = BitReader(reader)
            at = bits.golomb(spent.entries, golomb_parameter(spent.entries / flat.size), flat.size)
            codes = bits.fields(spent.entries, spent.bits).astype(np.int64)
            bits.close()
            if codes.max() > 2 * spent.levels:
                raise PayloadError("malformed", f"a level beyond {spent.levels:,}")
            flat[at] = dequantize(codes - spent.levels, scale, spent.levels)
        return unite(like, split(flat, sizes), reader)
