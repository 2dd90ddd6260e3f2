"""A client's half of the way down: messages in, models out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from fedfq.codec.errors import PayloadError
from fedfq.codec.format.message import EXACT, NOTHING, Message, hash_model, read_exact
from fedfq.types import Array

from .held import Held, State, makes_models, read_model, read_numbers, reading_state

ANCHOR, LAST = "anchor/", "last"  # of a state


class Replica:
    """The client's half.

    initial  the model from which training began: a module, a mapping from names to arrays, or a function that makes it,
             which is called when it is needed. Names and shapes matter always, numbers where the server takes it for
             granted that clients have them

    `receive` turns a message into the newest model; `version` is what the client holds then, and tells the server in
    the next round (0 before: the initial model; where the server sends that one, its first message is `message(None)`).
    What is no message for this client is refused with a `PayloadError`, and nothing has changed then: `message(None)`
    brings everything.

    >>> import fedfq, numpy as np
    >>> replica = fedfq.Replica({"w": np.zeros(10, np.float32)})
    >>> replica.version
    0
    >>> replica.receive(b"FD, or so")
    Traceback (most recent call last):
        ...
    fedfq.codec.errors.PayloadError: a message of version 44, kind 32: another release made it
    """

    def __init__(self, initial: Any | Callable[[], Any]) -> None:
        makes = makes_models(initial)
        self._make = initial if makes else None
        self._anchor: Held | None = None if makes else Held.of(initial)  # None: the initial model, made when needed
        self._like: Held | None = None  # without its arrays
        self._anchor_version = 0
        self._last = b""  # from the anchor to the newest model
        self._digest = b""  # of the newest model; of the initial one it is found when it is needed
        self.version = 0

    @property
    def digest(self) -> bytes:
        """That of the held model's bits: `Broadcast.digest` has it for every version."""
        return self._find_digest()

    def receive(self, message: bytes | bytearray | memoryview) -> dict[str, Any]:
        """The newest model: names, shapes and dtypes of the initial one. The caller may change it."""
        if not isinstance(message, (bytes, bytearray, memoryview)):
            raise TypeError(f"a message is bytes, got {type(message).__name__}")
        parsed = Message.parse(bytes(message))
        if parsed.version == self.version and parsed.digest == self._find_digest():
            return self._current().returned()  # a transport may deliver a message twice
        anchor = self._find_base(parsed)
        for step in parsed.steps:
            anchor = anchor.apply(step.payload)
        model = anchor.apply(parsed.last) if parsed.last else anchor
        if hash_model(model.arrays) != parsed.digest:
            _refuse("the message leads to another model than the server's")
        self._anchor, self._last, self._digest, self.version = anchor, parsed.last, parsed.digest, parsed.version
        self._anchor_version = parsed.steps[-1].version if parsed.steps else parsed.base
        return model.returned()

    def _find_base(self, message: Message) -> Held:
        """The model that the message starts from."""
        if message.start == NOTHING:
            return self._find_like().zeros()
        if message.start == EXACT:
            like = self._find_like()
            return like._replace(arrays=read_exact(message.exact, like.layout))
        if message.held != self.version:
            _refuse(f"a message for who has version {message.held}: version {self.version} is held")
        if message.held_digest != self._find_digest():
            _refuse(
                f"version {message.held} of the server is another model, perhaps of another run: "
                "message(None) brings everything"
            )
        if message.version < self.version:
            _refuse(f"a message for version {message.version}: version {self.version} is held already")
        if message.base == self.version:
            return self._current()
        if message.base != self._anchor_version:
            _refuse(f"the message starts from version {message.base}: the anchor is version {self._anchor_version}")
        return self._find_anchor()

    def _find_digest(self) -> bytes:
        if not self._digest:
            self._digest = hash_model(self._current().arrays)
        return self._digest

    def _find_anchor(self) -> Held:
        if self._anchor is not None:
            return self._anchor
        assert self._make is not None
        return Held.of(self._make())

    def _current(self) -> Held:
        anchor = self._find_anchor()
        return anchor.apply(self._last) if self._last else anchor

    def _find_like(self) -> Held:
        if self._like is None:
            self._like = self._find_anchor()._replace(arrays={})
        return self._like

    def state_dict(self) -> State:
        """All of the state, copied, as plain arrays for any file format: a model, or none while a function makes it."""
        anchor = {} if self._anchor is None else self._anchor.arrays
        state = {ANCHOR + name: array.copy() for name, array in anchor.items()}
        state[LAST] = np.frombuffer(self._last, np.uint8)
        state["digest"] = np.frombuffer(self._find_digest(), np.uint8)
        state["versions"] = np.array([self.version, self._anchor_version])
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what `state_dict` gave, of a replica with the same initial model. Nothing changes if it is no such
        state."""
        with reading_state("Replica"):
            version, anchor_version = read_numbers(state["versions"], np.int64)
            if not 0 <= anchor_version <= version:
                raise ValueError("its versions are none")
            last, digest = state[LAST].tobytes(), state["digest"].tobytes()
            anchor, base = self._anchor, self._find_anchor()
            if any(name.startswith(ANCHOR) for name in state):
                anchor = base = read_model(state, ANCHOR, base)
            elif anchor_version or self._anchor_version:
                raise ValueError("it lacks its anchor")
            if hash_model((base.apply(last) if last else base).arrays) != digest:
                raise ValueError("it does not lead to the model that it says")
        self._anchor, self._last, self._digest = anchor, last, digest
        self.version, self._anchor_version = version, anchor_version


def _refuse(why: str) -> NoReturn:
    raise PayloadError("held", why)
