"""signSGD with majority vote (Bernstein et al., 2018), and EF-signSGD (Karimireddy et al., 2019): one bit per entry.

Majority: a client sends sign(h), the server steps by eta * sign(sum of the signs). With error feedback, p = h + e is
sent as mean |p| * sign(p), tensor by tensor, e = p minus that, and the server takes the mean.

Deviation: signSGD's eta is a rate to be tuned. Here updates have a size of their own, so each tensor's mean |h| is sent
with its signs (32 bits per tensor, as EF-signSGD does anyway) and eta is the mean of those. Votes have the weights of
the mean. A zero is sent as plus; a tensor of zeros has no vote. Tensors that are not compressed are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from .bits import fields, read_fields, write
from .method import ANY_ROUND, ERROR_FEEDBACK, Array, Method, Order, RoundContext, Server, State, Update, Upload
from .wire import Reader, correct, divide, lengths, unite


@dataclass(frozen=True)
class SignSGD(Method):
    error_feedback: Annotated[bool, ERROR_FEEDBACK] = False

    summary: ClassVar[str] = "one bit per entry; the server follows the majority, or the mean with error feedback"
    paper: ClassVar[str] = "signSGD (Bernstein et al. 2018), EF-signSGD (Karimireddy et al. 2019)"
    claims: ClassVar[str] = "1 bit per parameter"
    client_memory: ClassVar[str] = "one model, with error feedback"

    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        parts = divide(update)
        p = correct(parts.vectors, memory if self.error_feedback else {})
        payload, left = [], {}
        for name, vector in p.items():
            scale = np.float32(np.abs(vector).mean(dtype=np.float64) if vector.size else 0.0)
            negative = vector < 0
            payload.append(scale.astype("<f4").tobytes() + write(fields(negative, 1)))
            left[name] = vector - np.where(negative, -scale, scale)
        claimed = sum(vector.size for vector in p.values())
        return Upload(b"".join(payload) + parts.carried, claimed, left if self.error_feedback else {})

    def decode(self, payload: bytes, like: Update, context: RoundContext = ANY_ROUND) -> dict[str, Array]:
        reader = Reader(payload)
        vectors = {}
        for name, size in lengths(like).items():
            scale = np.float32(reader.scale())
            vectors[name] = np.where(read_fields(reader, size, 1, 1), -scale, scale)
        return unite(like, vectors, reader)

    def server(self, like: Update) -> Server:
        return Server(self, like) if self.error_feedback else Majority(self, like)


class Majority(Server):
    """Of compressed tensors, the sums are of votes, and the sizes that the votes came with are added up beside them."""

    def _clear(self) -> None:
        super()._clear()
        self._sizes = dict.fromkeys(lengths(self.like), 0.0)

    def _add(self, update: Update, weight: float) -> None:
        votes = {name: np.sign(array) if name in self._sizes else array for name, array in update.items()}
        super()._add(votes, weight)
        for name in self._sizes:
            if update[name].size:
                self._sizes[name] += weight * abs(float(update[name].flat[0]))  # all have the same

    def finish(self, loss: float) -> Update:
        for name, size in self._sizes.items():
            self._sums[name] = np.sign(self._sums[name]) * size  # `finish` divides by the weights
        return super().finish(loss)
