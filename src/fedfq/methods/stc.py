"""STC, sparse ternary compression (Sattler et al., 2019): the largest entries, as one magnitude and signs.

Of each tensor of p = h + e, the k = max(1, n * sparsity) largest are sent as mu * sign with mu = mean |p| over them,
and e = p minus what was sent. Positions are Golomb-coded: with b* = 1 + floor(log2(log(phi - 1) / log(1 - k/n))), a gap
takes b* + 1 / (1 - (1 - k/n)^(2^b*)) bits on average, and one more for the sign. The paper uses
sparsities from 1/25 to 1/400.

Deviations: with `ratio` the sparsity is the largest whose payload fits, and a number that says which is sent. b* comes
from each tensor's k/n, which differs from the sparsity in small tensors. Only uploads are compressed; the paper treats
downloads alike and has clients catch up on what they missed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from fedfq.codec.errors import PayloadError
from fedfq.codec.ratio import check_ratio

from .bits import BitReader, Codes, fields, golomb, golomb_bits, golomb_parameter, write
from .method import ANY_ROUND, ERROR_FEEDBACK, RATIO, Array, Method, Order, RoundContext, State, Update, Upload
from .sparse import Ranked, largest_that_fits
from .wire import Reader, budget_bytes, check_budget, correct, divide, lengths, unite

DEFAULT_SPARSITY = 1 / 400
NUMBER_BYTES, SCALE_BYTES = 4, 4


@dataclass(frozen=True)
class STC(Method):
    ratio: Annotated[float | None, RATIO] = None
    sparsity: Annotated[float | None, "share of the entries that is sent; 1/400 if no ratio is given"] = None
    error_feedback: Annotated[bool, ERROR_FEEDBACK] = True

    summary: ClassVar[str] = "the largest entries of each tensor, as one magnitude and signs"
    paper: ClassVar[str] = "STC (Sattler et al. 2019)"
    claims: ClassVar[str] = "Golomb bits and a sign per entry sent, 32 bits per tensor"
    client_memory: ClassVar[str] = "one model, with error feedback"
    down_ratio: ClassVar[float | Literal["auto", "own"]] = "own"

    def __post_init__(self) -> None:
        if self.ratio is not None:
            check_ratio(self.ratio)
            if self.sparsity is not None:
                raise ValueError("give ratio or sparsity, not both")
        if self.sparsity is not None and not 0 < self.sparsity <= 1:
            raise ValueError(f"sparsity must be above 0 and at most 1, got {self.sparsity!r}")

    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        parts = divide(update)
        p = correct(parts.vectors, memory if self.error_feedback else {})
        ranked = {name: Ranked(vector) for name, vector in p.items()}
        counts, head = self._choose(update, ranked, len(parts.carried))
        places = {name: ranked[name].top(k) for name, k in counts.items()}
        scales = {name: np.float32(_mean(p[name][at])) for name, at in places.items()}
        signs = [fields(p[name][at] < 0, 1) for name, at in places.items()]
        payload = head + np.array(list(scales.values()), "<f4").tobytes()
        payload += write(*(_positions(at, p[name].size) for name, at in places.items()), *signs) + parts.carried
        for name, at in places.items():  # p is ours: what is sent leaves it
            p[name][at] -= np.where(p[name][at] < 0, -scales[name], scales[name])
        return Upload(payload, self._count_claimed_bits(counts, lengths(update)), p if self.error_feedback else {})

    def _choose(self, update: Update, ranked: dict[str, Ranked], carried: int) -> tuple[dict[str, int], bytes]:
        """How many entries of each tensor are sent, and what says so in the payload."""
        sizes = {name: vector.p.size for name, vector in ranked.items()}
        if self.ratio is None:
            return _shares(sizes, self.sparsity or DEFAULT_SPARSITY), b""
        budget, total = budget_bytes(update, self.ratio), sum(sizes.values())
        fixed = carried + SCALE_BYTES * len(sizes) + (NUMBER_BYTES if total else 0)
        if total == 0:
            check_budget(budget, fixed)
            return _shares(sizes, 1.0), b""

        def size_of(number: int) -> int:
            counts = _shares(sizes, number / total)
            bits = sum(_positions(ranked[name].top(k), sizes[name]).bits + k for name, k in counts.items())
            return fixed + -(-bits // 8)

        number = largest_that_fits(size_of, min(total, 4 * budget), budget)  # two bits per entry at least
        return _shares(sizes, number / total), number.to_bytes(NUMBER_BYTES, "little")

    def _count_claimed_bits(self, counts: dict[str, int], sizes: dict[str, int]) -> float:
        return sum(32 + k * (golomb_bits(k / sizes[name]) + 1) for name, k in counts.items() if k)

    def decode(self, payload: bytes, like: Update, context: RoundContext = ANY_ROUND) -> dict[str, Array]:
        sizes = lengths(like)
        total = sum(sizes.values())
        reader = Reader(payload)
        share = self.sparsity or DEFAULT_SPARSITY
        if self.ratio is not None and total:
            share = _number(reader, total) / total
        counts = _shares(sizes, share)
        scales = dict(zip(sizes, reader.scales(len(sizes))))
        bits = BitReader(reader)
        places = {name: bits.golomb(k, _parameter(k, sizes[name]), sizes[name]) for name, k in counts.items()}
        vectors = {}
        for name, at in places.items():
            vectors[name] = np.zeros(sizes[name], np.float32)
            vectors[name][at] = np.where(bits.fields(at.size, 1), -scales[name], scales[name])
        bits.close()
        return unite(like, vectors, reader)


def _shares(sizes: dict[str, int], share: float) -> dict[str, int]:
    return {name: min(n, max(1, int(share * n))) for name, n in sizes.items()}


def _parameter(k: int, size: int) -> int:
    return golomb_parameter(k / size) if size else 0


def _positions(places: Array, size: int) -> Codes:
    return golomb(places, _parameter(places.size, size))


def _mean(values: Array) -> float:
    return float(np.abs(values).mean(dtype=np.float64)) if values.size else 0.0


def _number(reader: Reader, most: int) -> int:
    number = int.from_bytes(reader.take(NUMBER_BYTES), "little")
    if not 1 <= number <= most:
        raise PayloadError("malformed", f"{number:,} entries of {most:,}")
    return number
