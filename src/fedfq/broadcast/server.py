"""The server's half of the way down: what each client is to be sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedfq.codec.codec import Codec
from fedfq.codec.encoder.own_steps import finest_step
from fedfq.codec.errors import BudgetError
from fedfq.codec.format.layout import raw_bytes
from fedfq.codec.format.message import EXACT, HELD, MOST_STEPS, NOTHING, Message, Step, hash_model, write_exact
from fedfq.codec.tensors import Tensor
from fedfq.types import Array

from .held import Held, State, read_model, reading_state

# The step, over the root mean square of a round's change (docs/benchmarks.md says how it was found). A bit lowers the
# squared error by some tenth of step^2: so a byte is spent where it lowers what is left out, over a round's change, by
# as much as anywhere else, and at any time in training.
STEP = 30.0
TOO_MUCH = 1.0  # left out, over the energy of a round's change: with a fixed size, the next anchor is due
MEMORY = 0.8  # of means over rounds
OVERHEAD = 64  # bytes of a message around the newest payload, at most
TRUE, ANCHOR, PAYLOAD, LAST = "true/", "anchor/", "payload/", "last"  # of a state


class Anchor(NamedTuple):
    """A version that later ones are relative to, and the payload that leads to it from the anchor before."""

    version: int
    digest: bytes
    payload: bytes


class Broadcast:
    """The server's half.

    model          the initial one: a module, or a mapping from names to arrays
    ratio          float32 bytes / bytes of what a client is sent that was there in the last round, at least. By default
                   as many bytes as it takes to leave out about as much as a round changes
    initial_ratio  by default clients hold the initial model, or are sent all of its bits. With a ratio, they are sent a
                   payload so many times smaller, and what that decodes to is the initial model for the server as well

    After every round, `advance` takes the new model; `model` is what clients hold then, and train from. `message(held)`
    is all that a client needs that holds version `held`; `None` for one that holds nothing.

    Raises `BudgetError` for ratios that no payload can have.

    >>> import fedfq, numpy as np
    >>> initial = {"w": np.zeros((100, 100), np.float32)}
    >>> server, replica = fedfq.Broadcast(initial), fedfq.Replica(initial)
    >>> server.advance({"w": np.random.default_rng(0).standard_normal((100, 100)).astype(np.float32)})
    >>> model = replica.receive(server.message(replica.version))
    >>> bool((model["w"] == server.model["w"]).all()), replica.version
    (True, 1)
    """

    def __init__(self, model: Any, *, ratio: float | None = None, initial_ratio: float | None = None) -> None:
        start, payload = Held.of(model), b""
        if initial_ratio is not None:
            codec = Codec(ratio=initial_ratio, layout="digest", keep=())
            payload, change = codec.encode_and_decode(start.zeros().difference(start), 0, None)
            start = start.zeros().add(change)
        self.version = 0
        self.left_out = 0.0  # energy of what clients' model lacks of w, over that of a round's change
        self._budget = None if ratio is None else int(raw_bytes(start.layout) / ratio) - OVERHEAD
        if self._budget is not None:
            self._encode_in_budget(start.zeros().difference(start.zeros()), self._budget)  # refused here if ever
        self._true = self._anchor = self._held = start
        self._digest = hash_model(start.arrays)
        self._anchors = [Anchor(0, self._digest, payload)]
        self._last = b""
        self._change = 0.0  # energy of a round's, in the mean
        self._gap = 1.0  # versions from one message of a client to the next, in the mean
        self._gaps: list[int] = []  # since the last `advance`
        self._extra = 0.0  # bytes by which messages since the newest anchor were longer than the first
        self._fresh = (0, 0.0)  # bytes of the first payload after the newest anchor, and what it left out

    @property
    def model(self) -> dict[str, Any]:
        """What clients hold: names, shapes and dtypes of the given model. Do not change its arrays."""
        return self._held.returned()

    def advance(self, new_model: Any) -> None:
        """The next version: what one round made of the model. Raises `ValueError` for one that is not finite, or of
        another layout; then nothing has changed."""
        new = Held.of(new_model)
        self._anchor.refuse_other(new)
        change = new.distance(self._true)
        mean = change if self._change == 0.0 else MEMORY * self._change + (1 - MEMORY) * change
        gap = self._gap
        if self._gaps:
            gap = MEMORY * gap + (1 - MEMORY) * sum(self._gaps) / len(self._gaps)
        anchors, anchor, fresh = self._anchors, self._anchor, None
        if self._last and self._is_due(gap):
            anchors = [*anchors, Anchor(self.version, self._digest, self._last)]
            anchor = self._held
        else:
            fresh = self._fresh if self._last else None
        difference = anchor.difference(new)
        if self._budget is None:
            payload, decoded = self._encode_at_worth(difference, mean)
        else:
            payload, decoded = self._encode_in_budget(difference, self._budget)
        held = anchor.add(decoded)
        lost = new.distance(held)
        # Nothing fails from here on
        self.version += 1
        self.left_out = lost / mean if mean else 0.0
        self._true, self._anchor, self._held, self._last = new, anchor, held, payload
        self._digest, self._anchors = hash_model(held.arrays), self._shorten_chain(anchors)
        self._change, self._gap = mean, gap
        self._gaps.clear()
        if fresh is None:
            self._extra, self._fresh = 0.0, (len(payload), self.left_out)

    def _is_due(self, gap: float) -> bool:
        """Should what was sent last become an anchor?

        Clients that were away have to be sent it then. With sizes that follow from what is left out, it is worth that
        once old differences have cost as much; with a fixed size, once too much is left out, if that helps.
        """
        if self._budget is None:
            return self._extra >= (gap - 1.0) * len(self._last)
        return gap == 1.0 or self.left_out > max(TOO_MUCH, 2 * self._fresh[1])

    def _encode_in_budget(self, difference: list[Tensor], budget: int) -> tuple[bytes, dict[str, Array]]:
        if budget <= 0:
            raise BudgetError(budget + OVERHEAD, OVERHEAD + 32, raw_bytes([t.spec for t in difference]))
        codec = Codec(max_bytes=budget, layout="digest", keep=())
        return codec.encode_and_decode(difference, self.version, None)

    def _encode_at_worth(self, difference: list[Tensor], change: float) -> tuple[bytes, dict[str, Array]]:
        """With the step at which a byte is worth what it lowers of what is left out, beside such a change."""
        weights = [tensor for tensor in difference if tensor.spec.is_float]
        entries = sum(tensor.spec.size for tensor in weights)
        peak = max((tensor.peak() for tensor in weights), default=0.0)
        step = max(STEP * math.sqrt(change / entries), finest_step(peak)) if peak else 1.0
        return Codec(step=step, layout="digest", keep=()).encode_and_decode(difference, self.version, None)

    def _shorten_chain(self, anchors: list[Anchor]) -> list[Anchor]:
        """Without payloads that nobody is sent, as all bits of the model would be shorter."""
        most, keep = raw_bytes(self._anchor.layout), 1
        while keep < min(len(anchors), MOST_STEPS) and most > 0:
            most -= len(anchors[-keep].payload)
            keep += 1
        return anchors[-keep:]

    def message(self, held: int | None) -> bytes:
        """All that a client needs which holds this version. Raises `ValueError` for a version that never was."""
        if held is not None and not 0 <= held <= self.version:
            raise ValueError(f"there is no version {held!r}: the newest is {self.version}")
        if held is not None and held < self.version:
            self._gaps.append(self.version - held)
        self._extra += len(self._last) - self._fresh[0]
        newest = self.version, self._digest
        if held == self.version:
            return Message(HELD, held, self._digest, b"", (), *newest, b"").to_bytes()
        place = None if held is None else self._find_anchor(held)
        if place is not None:
            base = self._anchors[place]
            message = Message(
                HELD, base.version, base.digest, b"", self._steps_after(place), *newest, self._last
            ).to_bytes()
        elif held is None and self._anchors[0].payload and self._anchors[0].version == 0:
            message = Message(NOTHING, 0, bytes(8), b"", self._steps_after(-1), *newest, self._last).to_bytes()
        else:
            return self._whole_message()
        if len(message) > raw_bytes(self._anchor.layout) / 2:  # perhaps
            message = min(message, self._whole_message(), key=len)
        return message

    def _whole_message(self) -> bytes:
        newest, exact = self._anchors[-1], write_exact(self._anchor.arrays)
        message = Message(EXACT, newest.version, newest.digest, exact, (), self.version, self._digest, self._last)
        return message.to_bytes()

    def _find_anchor(self, held: int) -> int | None:
        """Which anchor a client has that holds this version; None if it is no longer kept."""
        places = [i for i, anchor in enumerate(self._anchors) if anchor.version <= held]
        return places[-1] if places else None

    def _steps_after(self, place: int) -> list[Step]:
        return [Step(anchor.version, anchor.payload) for anchor in self._anchors[place + 1 :]]

    def state_dict(self) -> State:
        """All of the state, as plain arrays for any file format. Later rounds do not change them."""
        state = {TRUE + name: array for name, array in self._true.arrays.items()}
        state |= {ANCHOR + name: array for name, array in self._anchor.arrays.items()}
        for place, anchor in enumerate(self._anchors):
            state[f"{PAYLOAD}{place}"] = np.frombuffer(anchor.payload, np.uint8)
        state[LAST] = np.frombuffer(self._last, np.uint8)
        state["digests"] = np.frombuffer(b"".join(anchor.digest for anchor in self._anchors), np.uint8)
        state["versions"] = np.array([self.version, *(anchor.version for anchor in self._anchors)])
        state["gaps"] = np.array(self._gaps, np.int64)
        numbers = self.left_out, self._change, self._gap, self._extra, *self._fresh
        state["numbers"] = np.array(numbers)
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what `state_dict` gave, of a server with the same options. Nothing changes if it is no such state."""
        with reading_state("Broadcast"):
            true, anchor = (read_model(state, prefix, self._anchor) for prefix in (TRUE, ANCHOR))
            version, *versions = state["versions"].tolist()
            digests = state["digests"].tobytes()
            payloads = [state[f"{PAYLOAD}{place}"].tobytes() for place in range(len(versions))]
            anchors = [
                Anchor(at, digests[8 * place : 8 * place + 8], payloads[place]) for place, at in enumerate(versions)
            ]
            last, gaps = state[LAST].tobytes(), state["gaps"].tolist()
            left_out, change, gap, extra, fresh_bytes, fresh_left = state["numbers"].tolist()
            held = anchor.apply(last) if last else anchor
        self.version, self.left_out = version, left_out
        self._true, self._anchor, self._held, self._last = true, anchor, held, last
        self._anchors, self._digest = anchors, hash_model(held.arrays)
        self._change, self._gap, self._gaps, self._extra = change, gap, gaps, extra
        self._fresh = int(fresh_bytes), fresh_left
