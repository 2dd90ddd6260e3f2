"""What the payloads of the simple methods share: float tensors as flat vectors, the rest as it is, checked reading.

Names and shapes are not sent: the server knows its model. Statistics of normalisation layers go as float16 and
integers as they are, before anything else, as with fedfq: a method's quantiser would break them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedfq.codec.codec import KEEP
from fedfq.codec.errors import PayloadError
from fedfq.codec.layout import EXACT, KEPT, QUANTIZED, Tensor, read

from .method import Array, Update

HALF_LARGEST = float(np.finfo(np.float16).max)


class Parts(NamedTuple):
    """An update, divided."""

    vectors: dict[str, Array]  # flat float32: what the method compresses
    carried: bytes  # the rest


def divide(update: Update) -> Parts:
    """The parts of an update; entries that are not finite are refused."""
    vectors, carried = {}, []
    for tensor in read(update, KEEP):
        if tensor.kind != EXACT:
            tensor.peak()
        if tensor.kind == QUANTIZED:
            vectors[tensor.spec.name] = np.ascontiguousarray(tensor.array, np.float32).reshape(-1)
        elif tensor.kind == KEPT:
            carried.append(np.clip(tensor.array, -HALF_LARGEST, HALF_LARGEST).astype("<f2").tobytes())
        else:
            carried.append(_as_little(tensor.array).tobytes())
    return Parts(vectors, b"".join(carried))


def lengths(like: Update) -> dict[str, int]:
    """The lengths of the vectors of an update like this."""
    return {tensor.spec.name: tensor.spec.size for tensor in read(like, KEEP) if tensor.kind == QUANTIZED}


def unite(like: Update, vectors: Mapping[str, Array], reader: Reader) -> dict[str, Array]:
    """The update of these vectors, with the carried tensors from the reader, which must be at its end then."""
    result = {}
    for tensor in read(like, KEEP):
        spec = tensor.spec
        if tensor.kind == QUANTIZED:
            values = vectors[spec.name]
        else:
            values = _carried(tensor, reader)
        if spec.is_float and not np.isfinite(values).all():
            raise PayloadError("malformed", f"tensor {spec.name!r} has entries that are not finite")
        result[spec.name] = values.reshape(spec.shape)
    reader.finish()
    return result


def _carried(tensor: Tensor, reader: Reader) -> Array:
    spec = tensor.spec
    if tensor.kind == KEPT:
        return reader.array("<f2", spec.size).astype(np.float32)
    if spec.dtype.kind == "b":
        return reader.array("u1", spec.size) != 0
    return reader.array(spec.dtype.newbyteorder("<"), spec.size).astype(spec.dtype)


def _as_little(array: Array) -> Array:
    return np.asarray(array, array.dtype.newbyteorder("<"))


class Reader:
    """Bytes from a client, read in order and never beyond their end."""

    def __init__(self, payload: bytes) -> None:
        self.payload = bytes(payload)
        self.at = 0

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self.payload) - self.at:
            raise PayloadError("truncated", f"the payload ends after {len(self.payload):,} bytes, too early")
        self.at += count
        return self.payload[self.at - count : self.at]

    def array(self, dtype: Any, count: int) -> Array:
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(kind.itemsize * count), kind)

    def scale(self) -> float:
        """A float32 that is finite and not negative."""
        value = float(self.array("<f4", 1)[0])
        if not (math.isfinite(value) and value >= 0):
            raise PayloadError("malformed", f"a scale of {value}")
        return value

    def finish(self) -> None:
        if self.at != len(self.payload):
            raise PayloadError("malformed", f"{len(self.payload) - self.at:,} bytes too many")
