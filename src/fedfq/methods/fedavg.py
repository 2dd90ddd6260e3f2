"""FedAvg (McMahan et al., 2017): every update as float32, really serialised. The yardstick of all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .method import ANY_ROUND, Array, Method, Order, RoundContext, State, Update, Upload
from .wire import Reader, divide, lengths, unite


@dataclass(frozen=True)
class FedAvg(Method):
    summary: ClassVar[str] = "every update as float32; what all others are compared with"
    paper: ClassVar[str] = "McMahan et al. 2017"
    claims: ClassVar[str] = "32 bits per parameter"
    is_unbiased = True

    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        parts = divide(update)
        payload = b"".join(h.astype("<f4").tobytes() for h in parts.vectors.values()) + parts.carried
        return Upload(payload, 32 * sum(h.size for h in parts.vectors.values()))

    def decode(self, payload: bytes, like: Update, context: RoundContext = ANY_ROUND) -> dict[str, Array]:
        reader = Reader(payload)
        return unite(like, {name: reader.array("<f4", size) for name, size in lengths(like).items()}, reader)
