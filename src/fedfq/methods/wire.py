"""What the payloads of the simple methods share: float tensors as flat vectors, the rest as it is, checked reading.

Names and shapes are not sent: the server knows its model. Statistics of normalisation layers go as float16 and
integers as they are, before anything else, as with fedfq: a method's quantiser would break them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedfq.codec.codec import KEEP
from fedfq.codec.errors import BudgetError, PayloadError
from fedfq.codec.format.layout import raw_bytes
from fedfq.codec.kernels import FLOAT32_MAX
from fedfq.codec.tensors import EXACT, KEPT, QUANTIZED, Tensor, read, specs

from .method import Array, State, Update

FLOAT16_MAX = float(np.finfo(np.float16).max)


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
            carried.append(np.clip(tensor.array, -FLOAT16_MAX, FLOAT16_MAX).astype("<f2").tobytes())
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
            values = _read_carried(tensor, reader)
        if spec.is_float and not np.isfinite(values).all():
            raise PayloadError("malformed", f"tensor {spec.name!r} has entries that are not finite")
        result[spec.name] = _cast(values, spec.dtype).reshape(spec.shape)
    reader.finish()
    return result


def _cast(values: Array, dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "f" and dtype.itemsize < values.dtype.itemsize:
        limit = np.finfo(dtype).max
        values = np.clip(values, -limit, limit)
    return values.astype(dtype, copy=False)


def join(vectors: Mapping[str, Array]) -> Array:
    """All vectors as one."""
    return np.concatenate([np.empty(0, np.float32), *vectors.values()])


def split(flat: Array, sizes: Mapping[str, int]) -> dict[str, Array]:
    """The inverse of `join`."""
    ends = np.cumsum([0, *sizes.values()])
    return {name: flat[start:end] for name, start, end in zip(sizes, ends, ends[1:])}


def finite(values: Array) -> Array:
    """As float32; what lies beyond is clipped."""
    return np.clip(values, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)


def check_budget(budget: int, minimum: int) -> None:
    if budget < minimum:
        raise BudgetError(budget, minimum)


def budget_bytes(like: Update, ratio: float) -> int:
    """The largest payload with this ratio to what the update takes raw."""
    return int(raw_bytes(specs(like)) / ratio)


def carried_bytes(like: Update) -> int:
    """What the tensors that a method does not compress take."""
    tensors = [tensor for tensor in read(like, KEEP) if tensor.kind != QUANTIZED]
    return sum(t.spec.size * (2 if t.kind == KEPT else t.spec.dtype.itemsize) for t in tensors)


def correct(vectors: Mapping[str, Array], memory: State) -> dict[str, Array]:
    """p = h + e: the vectors and what earlier payloads left out of them."""
    result = {}
    for name, h in vectors.items():
        e = memory.get(name, np.zeros(h.size, np.float32))
        if e.shape != h.shape:
            raise ValueError(f"tensor {name!r} has {h.size} entries, its memory has shape {e.shape}")
        with np.errstate(over="ignore"):
            result[name] = h + e.astype(np.float32, copy=False)
        if not np.isfinite(result[name]).all():
            raise ValueError(f"tensor {name!r} and its memory have a sum that is not finite in float32")
    return result


def _read_carried(tensor: Tensor, reader: Reader) -> Array:
    spec = tensor.spec
    if tensor.kind == KEPT:
        return reader.floats("<f2", spec.size).astype(np.float32)
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

    def floats(self, dtype: Any, count: int) -> Array:
        """Numbers that are finite: some that are not (signalling NaN) cannot even be cast without a warning."""
        values = self.array(dtype, count)
        if not np.isfinite(values).all():
            raise PayloadError("malformed", "a number that is not finite")
        return values

    def scales(self, count: int) -> Array:
        """Float32 numbers that are finite and not negative, as float64."""
        values = self.floats("<f4", count)
        if not (values >= 0).all():
            raise PayloadError("malformed", "a scale below 0")
        return values.astype(np.float64)

    def scale(self) -> float:
        return float(self.scales(1)[0])

    def finish(self) -> None:
        if self.at != len(self.payload):
            raise PayloadError("malformed", f"{len(self.payload) - self.at:,} bytes too many")
