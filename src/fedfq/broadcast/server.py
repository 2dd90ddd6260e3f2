"""The server's half of the way down: what each client is to be sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedfq.codec.codec import Codec
from fedfq.codec.errors import BudgetError
from fedfq.codec.format.layout import DIGEST_BYTES, raw_bytes
from fedfq.codec.format.message import EXACT, HELD, MOST_STEPS, NOTHING, Message, Step, hash_model, write_exact
from fedfq.codec.ratio import down_bytes
from fedfq.types import Array

from .held import Held, State, read_model, read_numbers, reading_state

# What clients' model lacks of w, over the energy of a round's change: with more, the next anchor is due if that helps.
TOO_MUCH = 4.0
HELPS = 2.0  # what is left out is as many times more than with a fresh anchor
MEMORY = 0.8  # of the mean over rounds of their changes
OVERHEAD = 64  # bytes of a message around the newest payload, at most
TRUE, ANCHOR, PAYLOAD, LAST = "true/", "anchor/", "payload/", "last"  # of a state


class Anchor(NamedTuple):
    """A version that later ones are relative to, and the payload that leads to it from the anchor before."""

    version: int
    payload: bytes


class Broadcast:
    """The server's half.

    model          the initial one: a module, or a mapping from names to arrays
    ratio          float32 bytes / a message's for who has its anchor, at least; 128 by default, but 4 KB or more. Where
                   integers and statistics change so much that they alone take more, a message is as long as they need.
                   An anchor is the version that messages are relative to. A new one comes when clients lack too much of
                   the model, every ten rounds or so: who missed it is sent it as well
    initial_ratio  by default clients hold the initial model, or are sent all of its bits. With a ratio, they are sent a
                   payload so many times smaller, and what that decodes to is the initial model for the server as well

    After every round, `advance` takes the new model; `model` is what clients hold then, and train from: their updates
    are for the server's own model. `message(held)` is all that a client needs that holds version `held`; `None` for one
    that holds nothing. `version` is the newest; `left_out` is what clients' model lacks, over the energy of a round's
    change.

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
        if ratio is not None:
            Codec(ratio=ratio)  # refuses what is no ratio
        self._budget = down_bytes(raw_bytes(start.layout), ratio) - OVERHEAD
        self._true = self._anchor = self._held = start
        self._digests = [hash_model(start.arrays)]  # of all versions
        self._anchors = [Anchor(0, payload)]
        self._last = b""
        self._change = 0.0  # energy of a round's, in the mean
        self._fresh = 0.0  # what the first payload after the newest anchor left out
        self._encode(start, start.with_others(), may_grow=ratio is None)  # what no payload can have is refused now

    @property
    def model(self) -> dict[str, Any]:
        """A copy of what clients hold: names, shapes and dtypes of the given model."""
        return self._held.returned()

    def digest(self, version: int) -> bytes:
        """That of a version's bits: a replica that holds it has the same."""
        return self._digests[version]

    def advance(self, new_model: Any) -> None:
        """The next version: what one round made of the model. Raises `ValueError` for one that is not finite, or of
        another layout; then nothing has changed."""
        new = Held.of(new_model)
        self._anchor.refuse_other(new)
        change = new.distance(self._true)
        mean = change if self._change == 0.0 else MEMORY * self._change + (1 - MEMORY) * change
        due = bool(self._last) and self.left_out > max(TOO_MUCH, HELPS * self._fresh)
        anchor = self._held if due else self._anchor
        payload, held = self._encode(anchor, new)
        # Nothing fails from here on
        if due:
            self._anchors = self._shorten_chain([*self._anchors, Anchor(self.version, self._last)])
        self.left_out = new.distance(held) / mean if mean else 0.0
        if due or not self._last:
            self._fresh = self.left_out
        self.version += 1
        self._true, self._anchor, self._held, self._last = new, anchor, held, payload
        self._change = mean
        self._digests.append(hash_model(held.arrays))

    def _encode(self, anchor: Held, new: Held, *, may_grow: bool = True) -> tuple[bytes, Held]:
        """The difference, and what clients make of it."""
        difference = anchor.difference(new)
        budget = max(self._budget, 1)
        try:
            codec = Codec(max_bytes=budget, layout="digest", keep=())
            payload, change = codec.encode_and_decode(difference, self.version, None)
        except BudgetError as error:  # for integers and statistics
            if not may_grow:
                raise BudgetError(budget + OVERHEAD, error.minimum + OVERHEAD, error.raw) from None
            codec = Codec(max_bytes=error.minimum, layout="digest", keep=())
            payload, change = codec.encode_and_decode(difference, self.version, None)
        return payload, anchor.add(change)

    def _shorten_chain(self, anchors: list[Anchor]) -> list[Anchor]:
        """Without payloads that nobody is sent, as all bits of the model take less."""
        most, keep = raw_bytes(self._anchor.layout), 1
        while keep < min(len(anchors), MOST_STEPS) and most > 0:
            most -= len(anchors[-keep].payload)
            keep += 1
        return anchors[-keep:]

    def message(self, held: int | None) -> bytes:
        """All that a client needs which holds this version. Raises `ValueError` for a version that never was."""
        if held is not None and not (isinstance(held, (int, np.integer)) and 0 <= held <= self.version):
            raise ValueError(f"there is no version {held!r}: the newest is {self.version}")
        held = None if held is None else int(held)
        newest = self.version, self._digests[-1]
        if held == self.version:
            return Message(HELD, held, newest[1], held, b"", (), *newest, b"").to_bytes()
        place = None if held is None else self._find_anchor(held)
        if held is not None and place is not None:
            digest, base = self._digests[held], self._anchors[place].version
            way = Message(HELD, held, digest, base, b"", self._steps_after(place), *newest, self._last)
        elif held is None and self._anchors[0].version == 0 and self._anchors[0].payload:
            way = Message(NOTHING, 0, b"", 0, b"", self._steps_after(-1), *newest, self._last)
        else:
            return self._write_whole()
        message = way.to_bytes()
        if len(message) > raw_bytes(self._anchor.layout) / 2:  # all bits may take less
            message = min(message, self._write_whole(), key=len)
        return message

    def _write_whole(self) -> bytes:
        """For who holds nothing that helps: all bits of the newest anchor."""
        version, exact = self._anchors[-1].version, write_exact(self._anchor.arrays)
        way = Message(EXACT, version, b"", version, exact, (), self.version, self._digests[-1], self._last)
        return way.to_bytes()

    def _find_anchor(self, held: int) -> int | None:
        """Which anchor a client has that holds this version; None if it is no longer kept."""
        places = [i for i, anchor in enumerate(self._anchors) if anchor.version <= held]
        return places[-1] if places else None

    def _steps_after(self, place: int) -> list[Step]:
        return [Step(anchor.version, anchor.payload) for anchor in self._anchors[place + 1 :]]

    def state_dict(self) -> State:
        """All of the state, copied, as plain arrays for any file format."""
        state = {TRUE + name: array.copy() for name, array in self._true.arrays.items()}
        state |= {ANCHOR + name: array.copy() for name, array in self._anchor.arrays.items()}
        for place, anchor in enumerate(self._anchors):
            state[f"{PAYLOAD}{place}"] = np.frombuffer(anchor.payload, np.uint8)
        state[LAST] = np.frombuffer(self._last, np.uint8)
        state["digests"] = np.frombuffer(b"".join(self._digests), np.uint8)
        state["anchors"] = np.array([anchor.version for anchor in self._anchors])
        state["numbers"] = np.array([self.left_out, self._change, self._fresh])
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what `state_dict` gave, of a server with the same options. Nothing changes if it is no such state."""
        with reading_state("Broadcast"):
            true, anchor = (read_model(state, prefix, self._anchor) for prefix in (TRUE, ANCHOR))
            joined = state["digests"].tobytes()
            digests = [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]
            versions = read_numbers(state["anchors"], np.int64)
            if not versions or versions[0] < 0 or versions[-1] >= len(digests) or sorted(set(versions)) != versions:
                raise ValueError("its anchors are no versions")
            anchors = [Anchor(at, state[f"{PAYLOAD}{place}"].tobytes()) for place, at in enumerate(versions)]
            last = state[LAST].tobytes()
            left_out, change, fresh = read_numbers(state["numbers"], np.float64)
            held = anchor.apply(last) if last else anchor
            if hash_model(held.arrays) != digests[-1]:
                raise ValueError("it does not lead to the newest version")
        self.version, self.left_out, self._change, self._fresh = len(digests) - 1, left_out, change, fresh
        self._true, self._anchor, self._held, self._last = true, anchor, held, last
        self._anchors, self._digests = anchors, digests
