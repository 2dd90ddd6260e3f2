"""A model on its way down: a frame around payloads, each the difference from the model that the one before leads to.

Docs: FORMAT.md. What a message says is checked here against its own bytes only; whether it fits a replica, the replica
has to say.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedfq.types import Array

from ..errors import PayloadError
from .layout import DIGEST_BYTES, Spec, digest, raw_bytes, sort_by_name
from .reader import ByteReader, deflate, inflate, refuse_malformed, varint

MAGIC = b"FD"
VERSION = 1
HEAD = struct.Struct("<2sBBI")  # magic, version, what it starts from, checksum

HELD, NOTHING, EXACT = 0, 1, 2  # a message starts from a model that is held, from zeros, or brings one
MOST_VERSIONS = 1 << 62
MOST_STEPS = 64  # of a message: each takes the time of a model


class Step(NamedTuple):
    """A payload that leads to a version of the model."""

    version: int
    payload: bytes


class Message(NamedTuple):
    """The way to the newest model, from one that the client has.

    `steps` lead from one anchor to the next; `last` is the difference of the newest model from the anchor that they
    lead to, empty where that is the newest model itself.
    """

    start: int  # HELD, NOTHING or EXACT
    held: int  # the version of the client that it is for; of the model that it brings, for EXACT; 0 for NOTHING
    held_digest: bytes  # of that version, where the client has to have it
    base: int  # the version that the steps start from: the held one, or an older anchor
    exact: bytes  # the deflated model, for EXACT
    steps: Sequence[Step]
    version: int
    digest: bytes  # of the newest model
    last: bytes

    def to_bytes(self) -> bytes:
        body = bytearray(varint(self.held))
        if self.start == HELD:
            body += self.held_digest + varint(self.held - self.base)
        if self.start == EXACT:
            body += varint(len(self.exact)) + self.exact
        body += varint(len(self.steps))
        before = self.base
        for step in self.steps:
            body += varint(step.version - before) + varint(len(step.payload)) + step.payload
            before = step.version
        body += varint(self.version - before) + self.digest + self.last
        head = HEAD.pack(MAGIC, VERSION, self.start, 0)[:4]
        return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + bytes(body)

    @staticmethod
    def parse(data: bytes) -> Message:
        """Take a message apart, or raise `PayloadError`; payloads in it are not looked at."""
        reader = ByteReader(data)
        magic, version, start, checksum = HEAD.unpack(reader.take(HEAD.size))
        if magic != MAGIC:
            raise PayloadError("magic", "not a message of fedfq with a model")
        if version != VERSION or start not in (HELD, NOTHING, EXACT):
            raise PayloadError("version", f"a message of version {version}, kind {start}: another release made it")
        if zlib.crc32(data[HEAD.size :], zlib.crc32(data[:4])) != checksum:
            raise PayloadError("checksum", "the message is damaged: its checksum does not match")
        base = held = reader.varint()
        held_digest = exact = b""
        if start == HELD:
            held_digest = bytes(reader.take(DIGEST_BYTES))
            base -= reader.varint()
        if base < 0 or (start == NOTHING and base):
            refuse_malformed(f"it starts from version {base}")
        if start == EXACT:
            exact = bytes(reader.take(reader.varint()))
        count = reader.varint()
        if count > MOST_STEPS:
            refuse_malformed(f"{count} steps, more than {MOST_STEPS}")
        steps, before = [], base
        for _ in range(count):
            before += reader.varint()
            steps.append(Step(before, bytes(reader.take(reader.varint()))))
        newest = before + reader.varint()
        if newest >= MOST_VERSIONS:
            refuse_malformed(f"version {newest}")
        digest = bytes(reader.take(DIGEST_BYTES))
        return Message(start, held, held_digest, base, exact, steps, newest, digest, bytes(reader.rest()))


def hash_model(model: Mapping[str, Array]) -> bytes:
    """The digest of a model's layout and bits: the same for the same model, on every machine."""
    layout = digest([Spec(name, array.shape, array.dtype) for name, array in model.items()])
    hashed = hashlib.sha256(layout)  # processors have instructions for it
    for name in sorted(model):
        array = model[name]
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        hashed.update(little.reshape(-1).view(np.uint8).data)
    return hashed.digest()[:DIGEST_BYTES]


def write_exact(model: Mapping[str, Array]) -> bytes:
    """All bits of a model: first bytes of all numbers, then second ones, and so on, deflated; tensors by name."""
    planes = []
    for name in sorted(model):
        flat = np.ascontiguousarray(model[name], model[name].dtype.newbyteorder("<")).reshape(-1)
        planes.append(flat.view(np.uint8).reshape(flat.size, flat.itemsize).T.tobytes())
    return deflate(b"".join(planes), level=1)


def read_exact(packed: bytes, layout: Sequence[Spec]) -> dict[str, Array]:
    """The model in these bytes, of this layout: floats as float32, finite."""
    data, at = inflate(packed, raw_bytes(layout), "the model"), 0
    model = {}
    for spec in sort_by_name(layout):
        dtype = np.dtype("<f4") if spec.is_float else spec.dtype.newbyteorder("<")
        size = spec.size * dtype.itemsize
        planes = np.frombuffer(data, np.uint8, size, at).reshape(dtype.itemsize, spec.size)
        at += size
        if dtype == np.bool_ and planes.max(initial=0) > 1:
            refuse_malformed(f"tensor {spec.name!r} holds what is neither true nor false")
        array = np.ascontiguousarray(planes.T).view(dtype).reshape(spec.shape)
        model[spec.name] = array.astype(dtype.newbyteorder("="), copy=False)
        if spec.is_float and not np.isfinite(model[spec.name]).all():
            refuse_malformed(f"tensor {spec.name!r} has entries that are not finite")
    return model
