"""What goes down to the clients of a round, the same in every engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np

from fedfq.broadcast.held import read_numbers, reading_state
from fedfq.broadcast.server import Broadcast
from fedfq.methods import Method, Order, State
from fedfq.methods.method import ANY_ROUND
from fedfq.methods.warm import make_up
from fedfq.types import Array

Model = Mapping[str, Array]
AUTO, OWN = "auto", "own"  # as a ratio: that of `Broadcast`; or as the method's paper does it
Ratio = float | Literal["auto", "own"]


class Downlink:
    """All bits of the model to everybody, every time."""

    def __init__(self, initial: Model, uses_initial: bool) -> None:
        self.initial = self.model = initial  # what clients hold: at first, and now
        self.uses_initial = uses_initial
        self.held: dict[int, int] = {}  # the version that a client holds; here, of the initial model

    @property
    def newest(self) -> int:
        """The newest version that a client may hold."""
        return 0

    def send(self, clients: Iterable[int]) -> dict[int, int]:
        """The bytes that each of them is sent: the model and, once it has moved, the initial one to who lacks that."""
        moved = self.uses_initial and not _same(self.model, self.initial)
        size = sum(value.nbytes for value in self.model.values())
        return {client: 2 * size if moved and client not in self.held else size for client in clients}

    def settle(self, client: int) -> None:
        """Its answer was accepted, so it has the initial model."""
        self.held[client] = 0

    def forget(self, client: int) -> None:
        """Perhaps it has another initial model."""
        self.held.pop(client, None)

    def advance(self, theta: Model) -> None:
        """A round has ended with this model."""
        self.model = theta

    def describe(self) -> dict[str, float | None]:
        """For the ledger."""
        return {}

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State, theta: Model) -> None:
        """Go on from a checkpoint with this model."""
        if state:
            raise ValueError("this way down keeps no state")
        self.model = theta


class BroadcastDownlink(Downlink):
    """A `Broadcast`: clients hold an approximation of the model.

    Clients make the initial model themselves, from the seed; with an initial ratio, they are sent it, so many times
    smaller than float32.
    """

    def __init__(self, initial: Model, ratio: Ratio, initial_ratio: float | None) -> None:
        self.broadcast = Broadcast(initial, ratio=None if ratio == AUTO else float(ratio), initial_ratio=initial_ratio)
        super().__init__(self.broadcast.model, uses_initial=False)
        self._first = 0 if initial_ratio is None else None  # what a client holds that was never there
        _warm_up(initial)

    @property
    def newest(self) -> int:
        return self.broadcast.version

    def forget(self, client: int) -> None:
        """It holds what it was sent."""

    def send(self, clients: Iterable[int]) -> dict[int, int]:
        sent = {}
        for client in clients:
            sent[client] = len(self.broadcast.message(self.held.get(client, self._first)))
            self.held[client] = self.broadcast.version
        return sent

    def settle(self, client: int) -> None:
        """It has what it was sent, whatever became of its answer."""

    def advance(self, theta: Model) -> None:
        try:
            self.broadcast.advance(theta)
        except ValueError:  # the training diverged: clients go on with the last model that was finite
            return
        self.model = self.broadcast.model

    def describe(self) -> dict[str, float | None]:
        return {"left_out": self.broadcast.left_out}

    def state_dict(self) -> State:
        return self.broadcast.state_dict()

    def load_state_dict(self, state: State, theta: Model) -> None:
        self.broadcast.load_state_dict(state)
        self.model = self.broadcast.model


class OwnDownlink(Downlink):
    """The method's payloads, with what they leave out added to the next: STC's way down.

    A client is sent the payloads of all rounds that it missed, or the model where that is less.
    """

    def __init__(self, initial: Model, method: Method) -> None:
        super().__init__(initial, uses_initial=False)
        self.method = method
        self.sizes = np.zeros(0, np.int64)  # of the payload that led to version 1, 2, ...

    @property
    def newest(self) -> int:
        return len(self.sizes)

    def forget(self, client: int) -> None:
        """It holds what it was sent."""

    def send(self, clients: Iterable[int]) -> dict[int, int]:
        whole = sum(value.nbytes for value in self.model.values())
        missed = {client: int(self.sizes[self.held.get(client, 0) :].sum()) for client in clients}
        self.held |= dict.fromkeys(missed, len(self.sizes))
        return {client: min(size, whole) for client, size in missed.items()}

    def settle(self, client: int) -> None:
        """It has what it was sent, whatever became of its answer."""

    def advance(self, theta: Model) -> None:
        difference = {name: value - self.model[name] for name, value in theta.items()}
        try:
            payload = self.method.encode(difference, {}, Order(ANY_ROUND, client=0, seed=len(self.sizes))).payload
        except ValueError:  # the training diverged: clients go on with the last model that was finite
            return
        assert payload is not None
        decoded = self.method.decode(payload, self.model)
        self.model = {name: value + decoded[name] for name, value in self.model.items()}
        self.sizes = np.append(self.sizes, len(payload))

    def state_dict(self) -> State:
        return {"sizes": self.sizes} | {f"model/{name}": value for name, value in self.model.items()}

    def load_state_dict(self, state: State, theta: Model) -> None:
        with reading_state("way down"):
            sizes, model = state["sizes"], {name: state[f"model/{name}"] for name in theta}
            if min(read_numbers(sizes, np.int64), default=0) < 0:
                raise ValueError("its sizes are none")
            if any(model[name].shape != v.shape or model[name].dtype != v.dtype for name, v in theta.items()):
                raise ValueError("its model has other tensors")
        self.sizes, self.model = sizes, model


def _warm_up(initial: Model) -> None:
    """No round's time is that of a compiler."""
    scratch, rng, model = Broadcast(initial), np.random.default_rng(0), dict(initial)
    for _ in range(2):
        model = {name: value + make_up(value, rng) for name, value in model.items()}
        scratch.advance(model)


def _same(model: Model, other: Model) -> bool:
    """Whether two models have the same bits."""
    return all(value.tobytes() == other[name].tobytes() for name, value in model.items())
