"""What server and client agree on: the order beside the model, the names of what is sent, the tag that binds a reply.

An order is a message from a stranger: nothing in it is used before it was checked, and nothing of it becomes a name.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedfq.codec.errors import FedFQError
from fedfq.codec.format.layout import DIGEST_BYTES

ORDER = "fedfq.order"  # the name of the order's ConfigRecord
# Serialisation types. An app without the mod fails on a packed model with "Unsupported serialization type ...": so the
# type says what to do.
UPDATE = "fedfq.v1"
MODEL = "fedfq.model.v1 (to read it, add fedfq.flower.fedfq_mod() to the mods of the ClientApp)"
# Metrics of a reply
BYTES, RATIO, NMSE = "fedfq-bytes", "fedfq-ratio", "fedfq-nmse"
HELD = "fedfq-held"  # the version of the model that the node holds, and the digest of its bits
LACKS = "fedfq.lacks"  # a record instead of an answer: the node holds something else than the message starts from

LAST_ROUND = 2**31 - 1
TOKEN_BYTES = 16
TAG_BYTES = 8
LONGEST_REASON = 500  # characters of a reason

DIGEST = re.compile("[0-9a-f]{16}")


class Refusal(FedFQError):
    """What the server is told instead of an update."""


class ModelOrder(NamedTuple):
    """What `Compressed` sends with a model that is to be evaluated."""

    round: int
    initial: str  # the digest of the initial model, that is of version 0

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> ModelOrder:
        """The order in a record that may hold anything."""
        order = cls(**_fields(cls, record))
        _check(_is_whole(order.round, 0, LAST_ROUND), "round", order.round)
        _check(_is_digest(order.initial), "initial", order.initial)
        return order


class TrainOrder(NamedTuple):
    """What `Compressed` sends with a model that is to be trained."""

    round: int
    initial: str  # as above
    accepted: int  # the round of this node's last reply that the server took; 0 if there is none
    basis: bool  # whether payloads may be in the directions in which the model has moved
    sketch: bool  # whether payloads may be unbiased: their noise is for strategies that only average
    token: bytes  # of this node and round, known to no one else

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> TrainOrder:
        """The order in a record that may hold anything."""
        order = cls(**_fields(cls, record))
        _check(_is_whole(order.round, 1, LAST_ROUND), "round", order.round)
        _check(_is_digest(order.initial), "initial", order.initial)
        _check(_is_whole(order.accepted, 0, order.round - 1), "accepted", order.accepted)
        _check(isinstance(order.basis, bool), "basis", order.basis)
        _check(isinstance(order.sketch, bool), "sketch", order.sketch)
        _check(isinstance(order.token, bytes) and len(order.token) == TOKEN_BYTES, "token", order.token)
        return order


def _fields(kind: type[ModelOrder] | type[TrainOrder], record: Mapping[str, Any]) -> dict[str, Any]:
    if set(record) != set(kind._fields):
        raise Refusal("the server's order is of another version: install one version of fedfq on all machines")
    return dict(record)


class HeldVersion(NamedTuple):
    """What a node says it holds: a version of the model, or nothing, which is -1."""

    version: int
    digest: str  # of its bits

    def write(self) -> list[int]:
        """As a metric."""
        return [self.version, int.from_bytes(bytes.fromhex(self.digest), "big", signed=True)]

    @classmethod
    def read(cls, metric: object) -> HeldVersion | None:
        """What a node claims; None if it is no claim."""
        if not isinstance(metric, list) or len(metric) != 2 or not all(isinstance(n, int) for n in metric):
            return None
        version, number = metric
        if not -(2**63) <= number < 2**63:
            return None
        return cls(version, number.to_bytes(DIGEST_BYTES, "big", signed=True).hex())


NOTHING_HELD = HeldVersion(-1, "00" * DIGEST_BYTES)


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and DIGEST.fullmatch(value) is not None


def _check(fits: bool, name: str, value: object) -> None:
    if not fits:
        raise Refusal(f"the server's order cannot be followed: its {name!r} is {value!r:.60}")


def new_token() -> bytes:
    return secrets.token_bytes(TOKEN_BYTES)


def seal(payload: bytes, token: bytes) -> bytes:
    """What a reply carries: the payload, and behind it the tag that only the order's receiver can make."""
    return payload + _tag(payload, token)


def unseal(sealed: bytes) -> tuple[memoryview, memoryview]:
    """The payload and its tag, neither of them checked, in the memory where they are."""
    view = memoryview(sealed)
    return view[:-TAG_BYTES], view[-TAG_BYTES:]


def fits(payload: memoryview, tag: memoryview, token: bytes) -> bool:
    return hmac.compare_digest(_tag(payload, token), tag)


def _tag(payload: bytes | memoryview, token: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=TAG_BYTES, key=token).digest()


def printable(text: str) -> str:
    """What another machine says, for a log: short, on one line, without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:LONGEST_REASON])
