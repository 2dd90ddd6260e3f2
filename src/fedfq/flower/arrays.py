"""Flower's Arrays: a whole model in one of them, views without copies, and one that is decoded when it is read.

Flower sends every Array with requests of its own, about 2 KB in the *other* direction for each. So a model of 100
tensors travels as one Array, which holds the others' bytes as they are.
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.common.constant import SType
from numpy.lib import format as npy

from fedfq.codec.format.layout import Spec
from fedfq.codec.format.message import hash_model
from fedfq.codec.tensors import specs
from fedfq.types import Array as NDArray

from .protocol import MODEL

ALIGNMENT_BYTES = 64  # where each tensor begins
MAX_TABLE_BYTES = 1 << 22  # enough for 40,000 tensors
MAX_DIMENSIONS = 64  # numpy's own limit
MAX_HEADER_BYTES = 10_100  # of an .npy file: numpy reads 10,000 bytes at most


def record(tensors: Mapping[str, Any]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value, order="C")) for name, value in tensors.items()})


def tensors(record: Mapping[str, Array]) -> dict[str, NDArray]:
    """Copies of the tensors."""
    return {name: array.numpy() for name, array in record.items()}


def size(content: RecordDict) -> int:
    """Bytes of all Arrays in a message."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def blob(data: bytes, stype: str) -> Array:
    return Array(dtype="uint8", shape=(len(data),), stype=stype, data=data)


def pack(record: Mapping[str, Array]) -> Array:
    """A model as one Array: the length of a JSON table, the table, and the Arrays' bytes, all from multiples of 64."""
    table = [[name, array.dtype, list(array.shape), array.stype, len(array.data)] for name, array in record.items()]
    header = json.dumps(table).encode()
    if len(header) > MAX_TABLE_BYTES:
        raise ValueError(
            f"a model whose names and shapes take {len(header)} bytes; at most {MAX_TABLE_BYTES} can travel"
        )
    parts = [len(header).to_bytes(8, "little"), header, bytes(-(8 + len(header)) % ALIGNMENT_BYTES)]
    for array in record.values():
        parts += array.data, bytes(-len(array.data) % ALIGNMENT_BYTES)
    return blob(b"".join(parts), MODEL)


def unpack(packed: Array) -> dict[str, Array]:
    """The Arrays that `pack` was given. What `pack` cannot have made is refused, whatever the bytes are."""
    return {
        name: Array(dtype=str(view.dtype), shape=view.shape, stype=SType.NUMPY, data=bytes(data))
        for name, data, view in _entries(packed)
    }


def packed_views(packed: Array) -> dict[str, NDArray]:
    """The tensors of a packed model, in its memory; checked like those of `unpack`."""
    return {name: view for name, _, view in _entries(packed)}


def _entries(packed: Array) -> list[tuple[str, memoryview, NDArray]]:
    """Names, bytes and views of the tensors in a packed model."""
    if packed.stype != MODEL:
        raise ValueError(f"a model packed as {packed.stype!r:.60}: install one version of fedfq on all machines")
    data = memoryview(packed.data)
    table, start = _table(data)
    found = []
    for name, dtype, shape, stype, size in table:
        start += -start % ALIGNMENT_BYTES
        if size > len(data) - start:
            raise ValueError(f"a packed model of {len(data)} bytes, in which tensor {name!r:.60} ends behind them")
        part = data[start : start + size]
        view = _view(name, dtype, stype, part)
        if (str(view.dtype), view.shape) != (dtype, tuple(shape)):
            stated = f"{dtype!r:.30} of shape {tuple(shape)!r:.60}"
            raise ValueError(f"tensor {name!r:.60} is {view.dtype} of shape {view.shape}, and is said to be {stated}")
        found.append((name, part, view))
        start += size
    if start + -start % ALIGNMENT_BYTES != len(data):
        raise ValueError(f"a packed model of {len(data)} bytes, where {start} were expected")
    return found


def _table(data: memoryview) -> tuple[list[Any], int]:
    """The table of a packed model, every type in it checked, and where it ends."""
    length = int.from_bytes(data[:8], "little")
    if length > min(len(data) - 8, MAX_TABLE_BYTES):
        raise ValueError(f"a packed model of {len(data)} bytes with a table of {length}")
    try:
        table = json.loads(bytes(data[8 : 8 + length]))
    except (ValueError, RecursionError) as error:
        raise ValueError("a packed model with a table that cannot be read") from error
    if not isinstance(table, list) or not all(_is_row(row) for row in table):
        raise ValueError("a packed model with a table that is not one of tensors")
    if len({row[0] for row in table}) < len(table):
        raise ValueError("a packed model with two tensors of one name")
    return table, 8 + length


def _is_row(row: Any) -> bool:
    if not isinstance(row, list) or [type(value) for value in row] != [str, str, list, str, int]:
        return False
    name, _, shape, _, size = row
    is_text = not any("\ud800" <= character <= "\udfff" for character in name)  # half a character, which JSON may hold
    return is_text and size >= 0 and len(shape) <= MAX_DIMENSIONS and all(type(side) is int for side in shape)


def digest(model: Mapping[str, NDArray], layout: Sequence[Spec] | None = None) -> str:
    """A name for a model as nodes hold it: its names, shapes, dtypes (`layout` says those of the caller, if they are
    others), and its bits, of floats as float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide = {name: a.astype(np.float32, copy=False) if a.dtype.kind == "f" else a for name, a in model.items()}
    dtypes = {spec.name: str(spec.torch_dtype or spec.dtype) for spec in layout or specs(model)}
    named = json.dumps([[name, dtypes[name].removeprefix("torch.")] for name in sorted(dtypes)])
    return hashlib.sha256(hash_model(wide) + named.encode()).hexdigest()[:16]


def views(record: Mapping[str, Array]) -> dict[str, NDArray]:
    """The tensors, in the Arrays' own memory; not to be written to."""
    return {name: _view(name, array.dtype, array.stype, memoryview(array.data)) for name, array in record.items()}


def _view(name: str, dtype: str, stype: str, data: memoryview) -> NDArray:
    if stype != SType.NUMPY:
        raise ValueError(f"tensor {name!r:.60} is serialised as {stype!r:.60}, not as {SType.NUMPY!r}")
    try:
        shape, fortran, numpy_dtype = _header(start := _start(data))
        if numpy_dtype.kind not in "fiub":
            raise ValueError(_unfit(dtype))
        count = math.prod(shape)
        if min(shape, default=0) < 0 or len(data) != len(start) + count * numpy_dtype.itemsize:
            raise ValueError(f"{len(data) - len(start)} bytes of {numpy_dtype} are not of shape {shape!r:.60}")
        if count == 0:
            return np.empty(shape, numpy_dtype)
        flat = np.frombuffer(data, numpy_dtype, count, offset=len(start))
        return flat.reshape(shape, order="F" if fortran else "C")
    except ValueError as error:
        raise ValueError(f"tensor {name!r:.60}: {error}") from error


def _start(data: memoryview) -> bytes:
    """All of an .npy file before the entries: 8 bytes, the length of the header in 2 or (from version 2 on) 4, it."""
    length = 2 if data[6:7] == b"\x01" else 4
    return bytes(data[: min(8 + length + int.from_bytes(data[8 : 8 + length], "little"), MAX_HEADER_BYTES)])


@lru_cache(1024)  # a model has few different shapes, and numpy takes longer for a header than for most tensors
def _header(start: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    file = BytesIO(start)
    try:
        read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
        return read(file)
    except Exception as error:  # numpy reads it as Python's own literals, which fail in a dozen ways
        raise ValueError("its header cannot be read") from error


def _unfit(dtype: str) -> str:
    if dtype.startswith(("bfloat", "float8")):
        return f"{dtype:.30}, which Flower's Array cannot carry: {HOW_TO_SEND_BFLOAT16}"
    return f"dtype {dtype:.30} is neither floating point, integer nor boolean"


HOW_TO_SEND_BFLOAT16 = (
    "send float32, as in ArrayRecord({name: tensor.float() for name, tensor in model.state_dict().items()}), and let "
    "load_state_dict convert it back; what travels is small either way"
)


def difference(new: NDArray, old: NDArray) -> NDArray:
    """The update from old to new: in float32 for floats; exact for integers; which ones changed for booleans."""
    if old.dtype.kind == "b":
        return new ^ old
    if old.dtype.kind != "f":
        return (new - old).astype(old.dtype, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):  # the codec refuses what is not finite
        wide = np.result_type(new, old, np.float32)
        return np.subtract(new, old, dtype=wide).astype(np.float32, copy=False)


def add_update(old: NDArray, update: NDArray) -> NDArray:
    """old + update, in the update's memory: the inverse of `difference`."""
    with np.errstate(over="ignore"):
        return (np.logical_xor if old.dtype.kind == "b" else np.add)(old, update, out=update)


def as_dtype(values: NDArray, dtype: np.dtype[Any]) -> NDArray:
    """Values that an aggregation made of a tensor, in the tensor's own dtype again; integers are rounded."""
    if dtype.kind == "f" or values.dtype.kind != "f":
        with np.errstate(over="ignore"):
            return values.astype(dtype, copy=False)
    if dtype.kind == "b":
        return np.asarray(values >= 0.5)
    info = np.iinfo(dtype)
    return np.asarray(np.clip(np.rint(values), info.min, np.nextafter(float(info.max) + 1, 0))).astype(dtype)


class Decoded:
    """The model in one reply: decoded when a tensor is asked for, and forgotten tensor by tensor as they are taken.

    A strategy that goes through the replies one after the other (all that average) has one decoded reply in memory at
    a time; one that goes through them tensor by tensor (median, trimmed mean) has all of them.
    """

    def __init__(self, base: Mapping[str, NDArray], decode: Callable[[], dict[str, NDArray]]) -> None:
        self._base = base
        self._decode = decode
        self._updates: dict[str, NDArray] = {}

    def take(self, name: str) -> NDArray:
        if name not in self._updates:
            self._updates = self._decode()
        return add_update(self._base[name], self._updates.pop(name))

    def record(self) -> ArrayRecord:
        record = ArrayRecord()
        for name, old in self._base.items():
            record[name] = LazyArray(self, name, old)
        return record


class LazyArray(Array):
    """A tensor of a `Decoded` reply."""

    def __init__(self, reply: Decoded, name: str, like: NDArray) -> None:
        self.__dict__.update(dtype=str(like.dtype), shape=like.shape, stype=SType.NUMPY)
        self._reply = reply
        self._name = name
        self._last: weakref.ref[NDArray] | None = None

    def numpy(self) -> NDArray:
        taken = self._reply.take(self._name)
        self._last = weakref.ref(taken)
        return taken

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """Serialised as Flower does it, for code that copies Arrays or counts their bytes.

        `to_numpy_ndarrays` does so right after `numpy`: what that gave is then still there, and need not be decoded.
        """
        last = None if self._last is None else self._last()
        return Array(self.numpy() if last is None else last).data
