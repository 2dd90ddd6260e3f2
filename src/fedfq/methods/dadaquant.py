"""DAdaQuant (Hönig et al., 2022): a number of levels that grows with time and differs from client to client.

Each tensor is rounded at random to q_i levels of max |h| and coded as by QSGD (gaps, signs, magnitudes in Elias' code).
- Time: with the smoothed loss G_t = psi G_(t-1) + (1 - psi) loss_t, q doubles when G_t >= G_(t - phi), unless it did
  so within the last phi rounds.
- Clients: q_i = q w_i^(2/3) sqrt(sum w^(2/3) / sum w^2), which minimises sum q_i at the variance sum w_i^2 / q^2 that
  q for all would have. Rounded, at least 1. The server announces q_i with the model: two bytes.

psi = 0.9; phi is the option `patience` (the paper: a tenth of the rounds). [ours] The scale is max |h|, for which the
paper derives the exponent 2/3; q_i is repeated in the payload, so that it can be decoded by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedfq.codec.errors import PayloadError

from .bits import write
from .method import ANY_ROUND, LEVELS, Array, Method, Order, RoundContext, Server, State, Update, Upload
from .qsgd import code_levels, read_levels
from .quantizer import dequantize, peak, random_levels
from .wire import Reader, divide, lengths, split, unite

SMOOTHING = 0.9  # psi
NUMBER_BYTES = 2
MAX_LEVELS = 2 ** (8 * NUMBER_BYTES) - 1


@dataclass(frozen=True)
class DAdaQuant(Method):
    levels: Annotated[int, f"{LEVELS}, at first"] = 1
    patience: Annotated[int, "rounds without progress after which levels double"] = 10

    summary: ClassVar[str] = "random rounding to a number of levels that grows with time and with a client's weight"
    paper: ClassVar[str] = "DAdaQuant (Hönig et al. 2022)"
    claims: ClassVar[str] = "the bits of the code, 32 bits per tensor"
    server_memory: ClassVar[str] = "the last losses"
    is_unbiased = True

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= MAX_LEVELS:
            raise ValueError(f"levels must be from 1 to {MAX_LEVELS}, got {self.levels!r}")
        if self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience!r}")

    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        parts = divide(update)
        rng = np.random.default_rng(order.seed)
        q = int.from_bytes(order.announcement, "little") if order.announcement else self.levels
        if not 1 <= q <= MAX_LEVELS:
            raise ValueError(f"the announced number of levels must be from 1 to {MAX_LEVELS}, got {q}")
        scales = [peak(h) for h in parts.vectors.values()]
        levels = [random_levels(h, scale, q, rng) for h, scale in zip(parts.vectors.values(), scales)]
        count, codes = code_levels(np.concatenate([np.empty(0, np.int32), *levels]))
        payload = q.to_bytes(NUMBER_BYTES, "little") + np.array(scales, "<f4").tobytes()
        payload += write(count, *codes) + parts.carried
        return Upload(payload, 32 * len(scales) + sum(stream.bits for stream in codes))

    def decode(self, payload: bytes, like: Update, context: RoundContext = ANY_ROUND) -> dict[str, Array]:
        sizes = lengths(like)
        reader = Reader(payload)
        q = int.from_bytes(reader.take(NUMBER_BYTES), "little")
        if q == 0:
            raise PayloadError("malformed", "no levels")
        scales = reader.scales(len(sizes))
        places, sent = read_levels(reader, sum(sizes.values()), q)
        flat = np.zeros(sum(sizes.values()), np.int32)
        flat[places] = sent
        vectors = {
            name: dequantize(levels, scale, q) for (name, levels), scale in zip(split(flat, sizes).items(), scales)
        }
        return unite(like, vectors, reader)

    def server(self, like: Update) -> Server:
        return AdaptingServer(self, like)


class AdaptingServer(Server):
    def __init__(self, method: DAdaQuant, like: Update) -> None:
        super().__init__(method, like)
        self.q = method.levels
        self._patience = method.patience
        self._losses: list[float] = []  # smoothed, since q last changed, no more than needed

    def announce(self, weights: Mapping[int, float]) -> dict[int, bytes]:
        return {
            client: levels.to_bytes(NUMBER_BYTES, "little") for client, levels in client_levels(self.q, weights).items()
        }

    def finish(self, loss: float) -> Update:
        if math.isfinite(loss):
            smoothed = SMOOTHING * self._losses[-1] + (1 - SMOOTHING) * loss if self._losses else loss
            self._losses = [*self._losses, smoothed][-self._patience - 1 :]
            if len(self._losses) > self._patience and smoothed >= self._losses[0]:
                self.q = min(2 * self.q, MAX_LEVELS)
                self._losses = [smoothed]
        return super().finish(loss)

    def state_dict(self) -> State:
        return {"q": np.array(self.q), "losses": np.array(self._losses)}

    def load_state_dict(self, state: State) -> None:
        if set(state) != {"q", "losses"}:
            raise ValueError(f"expected a state of q and losses, got {', '.join(state) or 'nothing'}")
        self.q, self._losses = int(state["q"]), [float(loss) for loss in state["losses"]]


def client_levels(q: int, weights: Mapping[int, float]) -> dict[int, int]:
    """q_i for every client of a round."""
    w = np.array(list(weights.values()), np.float64)
    squares = float((w * w).sum())
    share = w ** (2 / 3) * math.sqrt((w ** (2 / 3)).sum() / squares) if squares > 0 else np.ones(w.size)
    levels = np.clip(np.rint(q * share), 1, MAX_LEVELS)
    return {client: int(number) for client, number in zip(weights, levels)}
