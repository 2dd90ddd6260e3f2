"""AQG-style: what changed since a client's last upload, in as few bits as the model's motion allows, or not at all.

After AQG (Mao et al., 2022), whose full text we do not have, and LAQ (Sun et al., 2019), on which it builds. Client and
server both keep g_hat, the update of this client as the server knows it. With r = max |h - g_hat|, the client sends
h - g_hat on a grid of 2^b points from -r to r, of step 2 r / (2^b - 1), rounded to the nearest: Q is g_hat plus that.
- b is the smallest of 2, 4, 8 whose error bound d (r / (2^b - 1))^2 is within the motion term; 8 if none is.
- Nothing is sent if ||Q - g_hat||^2 <= motion + 3 (eps + eps_hat), with eps = ||h - Q||^2 and eps_hat that of the last
  upload, unless the client was silent for 100 rounds. The server then uses g_hat once more.
- motion = 1 / M^2 * sum of xi ||change of the model||^2 over the last D = 10 rounds, with xi = 0.8 / D and M clients
  per round. The server announces it: 8 bytes.

Deviations: LAQ's gradients are times a rate alpha what updates are, so its 1 / alpha^2 is 1 here. LAQ's server adds up
all clients every step; ours averages those of the round, so that g_hat is as old as a client's last turn. LAQ skips at
less, not less or equal: with equality an update that did not change is not sent twice.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedfq.codec.errors import PayloadError

from .bits import fields, read_fields, write
from .method import ANY_ROUND, Array, Method, Order, RoundContext, Server, State, Update, Upload
from .quantizer import energy, peak
from .wire import Reader, divide, finite, join, lengths, split, unite

WIDTHS = (2, 4, 8)
MOTION_ROUNDS = 10  # D
MOTION_WEIGHT = 0.8 / MOTION_ROUNDS  # xi
MAX_SILENT_ROUNDS = 100  # after which a client sends in any case
MOTION = struct.Struct("<d")
SENT, ROUND, ERROR = "sent", "round", "error"  # of a client's memory
MOTION_KEY = "motion"  # of the server's; its others are client/tensor


@dataclass(frozen=True)
class AQG(Method):
    summary: ClassVar[str] = (
        "what changed since the client's last upload, in 2, 4 or 8 bits, or nothing if that is little"
    )
    paper: ClassVar[str] = "AQG-style (after Mao et al. 2022; LAQ, Sun et al. 2019)"
    claims: ClassVar[str] = "b bits per parameter and 32 bits, where anything is sent"
    client_memory: ClassVar[str] = "one model"
    server_memory: ClassVar[str] = "one model per client"

    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        parts = divide(update)
        h = join(parts.vectors)
        known = memory.get(SENT, np.zeros(h.size, np.float32))
        if known.shape != h.shape:
            raise ValueError(f"the update has {h.size} entries, its memory has shape {known.shape}")
        motion = _read_announcement(order.announcement) if order.announcement else 0.0
        change = finite(h.astype(np.float64) - known)
        scale = peak(change)
        bits = _width(h.size, float(scale), motion)
        codes = _codes(change, scale, bits)
        sent = finite(known.astype(np.float64) + _values(codes, float(scale), bits))
        error = energy(h - sent.astype(np.float64))
        silent = order.context.number - int(memory.get(ROUND, order.context.number))
        if memory and silent < MAX_SILENT_ROUNDS:
            allowed = motion + 3 * (error + float(memory[ERROR]))
            if energy(sent - known.astype(np.float64)) <= allowed:
                return Upload(None, 0, memory)
        payload = bytes([bits]) + scale.astype("<f4").tobytes() + write(fields(codes, bits)) + parts.carried
        kept = {SENT: sent, ROUND: np.array(order.context.number), ERROR: np.array(error)}
        return Upload(payload, bits * h.size + 32, kept)

    def decode(self, payload: bytes, like: Update, context: RoundContext = ANY_ROUND) -> dict[str, Array]:
        """The change since the last upload."""
        flat, reader = self.change(payload, like)
        return unite(like, split(finite(flat), lengths(like)), reader)

    def change(self, payload: bytes, like: Update) -> tuple[Array, Reader]:
        """The change of the compressed tensors, in float64, and the reader at what follows."""
        reader = Reader(payload)
        bits = reader.take(1)[0]
        if bits not in WIDTHS:
            raise PayloadError("malformed", f"a width of {bits} bits")
        scale = reader.scale()
        codes = read_fields(reader, sum(lengths(like).values()), bits, 2**bits - 1)
        return _values(codes, scale, bits), reader

    def server(self, like: Update) -> Server:
        return Remembering(self, like)


class Remembering(Server):
    """Keeps every client's update as it was last sent, and how far the model moved lately."""

    def __init__(self, method: AQG, like: Update) -> None:
        super().__init__(method, like)
        self._changes = method.change
        self._known: dict[int, dict[str, Array]] = {}
        self._motion: deque[float] = deque(maxlen=MOTION_ROUNDS)

    def announce(self, weights: Mapping[int, float]) -> dict[int, bytes]:
        motion = MOTION_WEIGHT * sum(self._motion) / max(1, len(weights)) ** 2
        return dict.fromkeys(weights, MOTION.pack(motion))

    def receive(self, client: int, payload: bytes | None, weight: float) -> None:
        if payload is not None:
            self._known[client] = self._decode_update(client, payload)
        if client in self._known:
            self._add(self._known[client], weight)

    def _decode_update(self, client: int, payload: bytes) -> dict[str, Array]:
        """The client's update, with the change that it sent: the same numbers as the client has."""
        sizes = lengths(self.like)
        flat, reader = self._changes(payload, self.like)
        if client in self._known:
            flat = flat + join({name: self._known[client][name].reshape(-1) for name in sizes})
        vectors = split(finite(flat), sizes)
        update = unite(self.like, vectors, reader)
        return {
            name: vectors[name].reshape(array.shape) if name in vectors else array for name, array in update.items()
        }

    def finish(self, loss: float) -> Update:
        mean = super().finish(loss)
        self._motion.append(sum(energy(mean[name]) for name in lengths(self.like)))
        return mean

    def state_dict(self) -> State:
        known = {f"{client}/{name}": array for client, update in self._known.items() for name, array in update.items()}
        return {MOTION_KEY: np.array(self._motion), **known}

    def load_state_dict(self, state: State) -> None:
        if MOTION_KEY not in state:
            raise ValueError(f"expected a state with {MOTION_KEY}, got {', '.join(state) or 'nothing'}")
        self._motion = deque((float(square) for square in state[MOTION_KEY]), MOTION_ROUNDS)
        self._known = {}
        for key, array in state.items():
            client, slash, name = key.partition("/")
            if slash:
                self._known.setdefault(int(client), {})[name] = array


def _read_announcement(data: bytes) -> float:
    motion = float(MOTION.unpack(data)[0]) if len(data) == MOTION.size else math.nan
    if not (math.isfinite(motion) and motion >= 0):
        raise ValueError(f"the announced motion must be a number >= 0 in {MOTION.size} bytes, got {data.hex()}")
    return motion


def _width(size: int, scale: float, motion: float) -> int:
    for bits in WIDTHS:
        if size * (scale / (2**bits - 1)) ** 2 <= motion:
            return bits
    return WIDTHS[-1]


def _codes(change: Array, scale: np.float32, bits: int) -> Array:
    """The nearest point of the grid, counted from -scale on."""
    if scale == 0:
        return np.zeros(change.size, np.uint8)
    steps = (change / np.float64(scale) + 1) * ((2**bits - 1) / 2)
    return np.clip(np.floor(steps + 0.5), 0, 2**bits - 1).astype(np.uint8)


def _values(codes: Array, scale: float, bits: int) -> Array:
    return (codes * (2 / (2**bits - 1)) - 1) * scale
