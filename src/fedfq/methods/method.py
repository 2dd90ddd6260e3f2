"""What a method is: one half that a client runs, one that the server runs, and only bytes between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from fedfq.codec.kernels import FLOAT32_MAX
from fedfq.codec.shared_basis import SharedBasis
from fedfq.codec.tensors import specs
from fedfq.types import Array

Update = Mapping[str, Array]
State = dict[str, Array]

# What options mean that several methods have; `fedfq methods NAME` shows it.
RATIO = "float32 bytes / payload bytes, at least"
CLAIMED_RATIO = "float32 bits / bits as the method's paper counts them"
ERROR_FEEDBACK = "what one payload leaves out is added to the client's next update"
LEVELS = "levels of magnitude to which entries are rounded"


class RoundContext(NamedTuple):
    """What server and clients both know in a round, besides the model."""

    number: int = 0  # of the round, from 1 on
    shared_basis: SharedBasis | None = None  # of methods that use one


ANY_ROUND = RoundContext()


class Order(NamedTuple):
    """What a client is told with the model."""

    context: RoundContext
    client: int
    seed: int  # of this client in this round: all its random numbers come from here
    announcement: bytes = b""  # what `Server.announce` made for it


class Upload(NamedTuple):
    """What a client answers."""

    payload: bytes | None  # None: it has nothing worth sending
    claimed_bits: float  # what the method's own paper would count
    memory: State = {}  # noqa: RUF012 (never changed) What the client keeps, once the server has taken the payload


@dataclass(frozen=True)
class Method(ABC):
    """How updates travel. Its fields are its options; it holds no state, so both sides may have a copy.

    Options are annotated with what they mean: `ratio: Annotated[float, RATIO] = 64`.
    """

    summary: ClassVar[str]  # what it does, in a sentence
    paper: ClassVar[str]
    claims: ClassVar[str]  # the cost as the paper counts it, in words
    client_memory: ClassVar[str] = "none"
    server_memory: ClassVar[str] = "none"
    down_ratio: ClassVar[float | Literal["auto", "own"]] = (
        1  # of the model on its way to clients, unless a run says otherwise
    )

    @property
    def is_unbiased(self) -> bool:
        """Whether the mean of what is decoded, over the method's random numbers, is the update."""
        return False

    @property
    def uses_initial(self) -> bool:
        """Whether `open_round` needs the initial model, which every client then has to be sent once."""
        return False

    @abstractmethod
    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        """The client's half. `memory` is what the last upload that was accepted left; it is not changed."""

    @abstractmethod
    def decode(self, payload: bytes, like: Update, context: RoundContext = ANY_ROUND) -> Update:
        """What the server makes of a payload: names, shapes and dtypes of `like`, all finite, or `PayloadError`."""

    def open_round(self, number: int, model: Update, initial: Update) -> RoundContext:
        """What both sides work out, once per round, from the global model and the initial one; for most, nothing."""
        return RoundContext(number)

    def server(self, like: Update) -> Server:
        return Server(self, like)


class Server:
    """The server's half: the weighted mean of what arrives (Eq. 4), in one model's memory."""

    def __init__(self, method: Method, like: Update) -> None:
        self.method = method
        self.like = like
        self.context = ANY_ROUND
        self._clear()

    def _clear(self) -> None:
        self._weight = 0.0
        self._sums = {spec.name: np.zeros(spec.shape) for spec in specs(self.like)}

    def open_round(self, context: RoundContext) -> None:
        """Begin a round. What arrives from now on was made in this context."""
        self.context = context

    def announce(self, weights: Mapping[int, float]) -> dict[int, bytes]:
        """What goes to the round's clients with the model, by client; `weights` are those of the mean."""
        return {}

    def receive(self, client: int, payload: bytes | None, weight: float) -> None:
        """Take one client's answer into account. A `PayloadError` leaves everything as it was."""
        if payload is not None:
            self._add(self.method.decode(payload, self.like, self.context), weight)

    def _add(self, update: Update, weight: float) -> None:
        for name, array in update.items():
            self._sums[name] += weight * np.asarray(array, np.float64)
        self._weight += weight

    def finish(self, loss: float) -> Update:
        """By what the model changes in this round. `loss` is the clients' mean training loss."""
        mean = {}
        for spec in specs(self.like):
            values = self._sums[spec.name] / (self._weight or 1.0)
            if spec.is_float:
                mean[spec.name] = np.clip(values, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)
            else:
                mean[spec.name] = _as_integers(values, spec.dtype)
        self._clear()
        return mean

    def state_dict(self) -> State:
        """What lasts from round to round, for a checkpoint. Its arrays are replaced by later rounds, never changed."""
        return {}

    def load_state_dict(self, state: State) -> None:
        if state:
            raise ValueError(f"this server keeps no state, got {', '.join(state)}")


def _as_integers(values: Array, dtype: np.dtype[Any]) -> Array:
    if dtype.kind in "iu":  # the mean of the largest integers, as a float, may lie beyond them
        info = np.iinfo(dtype)
        values = np.clip(values, info.min, np.nextafter(float(info.max) + 1, 0))
    return np.rint(values).astype(dtype)
