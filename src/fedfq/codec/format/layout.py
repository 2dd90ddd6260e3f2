"""Names, shapes and dtypes of an update: the table in a payload, and the digest that may stand for it."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import PayloadError
from .reader import ByteReader, deflate, refuse_malformed, varint

# The code of a dtype in a payload is its place in this list. Code 3 is bfloat16, which numpy lacks: read as float32.
DTYPES = (
    *("float32", "float64", "float16", "bfloat16"),
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
BFLOAT16 = 3
INTEGERS = range(4, len(DTYPES))  # codes of integers and bool
DIGEST_BYTES = 8

MAX_NAME_BYTES = 1 << 12
MAX_DIMENSIONS = 32
MAX_ENTRIES = 1 << 59  # per tensor; below this, numpy can shape even an empty array of 16-byte entries
MAX_TENSORS = 1 << 17  # the largest mixtures of experts have 10^5
MAX_TABLE_BYTES = 1 << 24  # of the inflated table
TABLE_BYTES_PER_BYTE = 64  # inflated, for each byte of the deflated table: those of models have about 10
TABLE_SLACK_BYTES = 1 << 16  # so much more is inflated; than the model's own table, to say what differs


@dataclass(frozen=True)
class Spec:
    """One tensor's entry in a layout. `dtype` is that of the decoded tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    torch_dtype: Any = field(default=None, compare=False)  # of a model's tensor that is torch's: so it is returned

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype.kind == "f"

    @property
    def raw_bytes(self) -> int:
        """What the tensor takes uncompressed: 4 bytes per floating-point entry, native bytes otherwise."""
        return self.size * (4 if self.is_float else self.dtype.itemsize)


def raw_bytes(layout: Iterable[Spec]) -> int:
    """The update's size uncompressed, which ratios refer to."""
    return sum(spec.raw_bytes for spec in layout)


def sort_by_name(layout: Iterable[Spec]) -> list[Spec]:
    return sorted(layout, key=lambda spec: spec.name)


def digest(layout: Iterable[Spec]) -> bytes:
    """Eight bytes that stand for names, shapes and which tensors hold floats, whatever their order and dtypes."""
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for spec in sort_by_name(layout):
        hashed.update(_write_name(spec) + bytes([spec.is_float]) + _write_shape(spec))
    return hashed.digest()


def _write_name(spec: Spec) -> bytes:
    name = spec.name.encode()
    return varint(len(name)) + name


def _write_shape(spec: Spec) -> bytes:
    return bytes([len(spec.shape)]) + b"".join(map(varint, spec.shape))


def write_table(layout: Sequence[Spec]) -> bytes:
    """The deflated table of names, dtypes and shapes."""
    if len(layout) > MAX_TENSORS:
        raise ValueError(f'a layout has at most {MAX_TENSORS} tensors, not {len(layout)}: use layout="digest"')
    table = bytearray()
    for spec in layout:
        if len(spec.name.encode()) > MAX_NAME_BYTES or len(spec.shape) > MAX_DIMENSIONS:
            limits = f"at most {MAX_NAME_BYTES} bytes of name and {MAX_DIMENSIONS} dimensions"
            raise ValueError(f"tensor {spec.name[:40]!r} does not fit the format, which has {limits}")
        table += _write_name(spec) + bytes([DTYPES.index(spec.dtype.name)]) + _write_shape(spec)
    if len(table) > MAX_TABLE_BYTES:
        raise ValueError(f'names and shapes take more than {MAX_TABLE_BYTES} bytes: use layout="digest"')
    packed = deflate(bytes(table))
    return packed if len(table) <= _most_inflated(len(packed)) else deflate(bytes(table), level=0)


def read_table(packed: memoryview, like: list[Spec] | None, most_tensors: int) -> list[Spec]:
    """The layout in a deflated table. With `like`, any other layout is refused, and dtypes are those of `like`, though
    floats stay floats."""
    entries = read_entries(_inflate(packed, like), min(most_tensors, MAX_TENSORS))
    return list(entries) if like is None else _match_model(entries, like)


def _most_inflated(packed_bytes: int) -> int:
    """Bytes that a deflated table of this size may hold: time is bounded by the payload."""
    return min(MAX_TABLE_BYTES, TABLE_SLACK_BYTES + TABLE_BYTES_PER_BYTE * packed_bytes)


def _inflate(packed: memoryview, like: list[Spec] | None) -> bytes:
    most = limit = _most_inflated(len(packed))
    if like is not None:  # of UTF-8 a character has up to 4 bytes, of a varint a dimension up to 9
        limit = min(most, TABLE_SLACK_BYTES + sum(4 * len(spec.name) + 9 * len(spec.shape) + 4 for spec in like))
    inflate = zlib.decompressobj(-15)
    try:
        table = inflate.decompress(packed, limit + 1)
    except zlib.error as error:
        raise PayloadError("malformed", "the layout cannot be decompressed") from error
    if len(table) > limit and limit < most:
        raise PayloadError("layout", "the payload's layout is larger than the model's")
    if len(table) > limit or not inflate.eof or inflate.unused_data:
        refuse_malformed("the layout is not one whole compressed block of acceptable size")
    return table


def read_entries(table: bytes, most_tensors: int) -> Iterator[Spec]:
    """The entries of an inflated table, one by one."""
    reader = ByteReader(table)
    names: set[str] = set()
    while reader.left():
        size = reader.varint()
        if size > MAX_NAME_BYTES:
            refuse_malformed(f"a tensor name of {size} bytes")
        try:
            name = bytes(reader.take(size)).decode()
        except UnicodeDecodeError as error:
            raise PayloadError("malformed", "a tensor name is not UTF-8") from error
        if name in names:
            refuse_malformed(f"two tensors are named {name!r}")
        names.add(name)
        if len(names) > most_tensors:
            refuse_malformed(f"more than {most_tensors} tensors")
        code, dimensions = reader.byte(), reader.byte()
        if code >= len(DTYPES):
            raise PayloadError("version", f"tensor {name!r} has an unknown dtype (code {code})")
        if dimensions > MAX_DIMENSIONS:
            refuse_malformed(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reader.varint() for _ in range(dimensions))
        if math.prod(side for side in shape if side) >= MAX_ENTRIES:
            refuse_malformed(f"tensor {name!r} has an impossible shape {shape}")
        yield Spec(name, shape, np.dtype("float32" if code == BFLOAT16 else DTYPES[code]))


def _match_model(entries: Iterable[Spec], like: list[Spec]) -> list[Spec]:
    """The payload's tensors in its order with the model's dtypes, or a refusal that names the first difference.

    Entries are taken one by one, so a payload of other tensors costs no more than the model's own.
    """
    model = {spec.name: spec for spec in like}
    layout = []
    for spec in entries:
        if spec.name not in model:
            raise PayloadError("layout", f"the payload has a tensor {spec.name!r} that the model lacks")
        if spec.shape != model[spec.name].shape:
            expected = model[spec.name].shape
            raise PayloadError("layout", f"tensor {spec.name!r} has shape {spec.shape}, the model's is {expected}")
        if spec.is_float != model[spec.name].is_float:
            theirs = f"{spec.dtype}, the model's of {model[spec.name].dtype}"
            raise PayloadError("layout", f"tensor {spec.name!r} is of {theirs}: integers are never taken for floats")
        layout.append(model[spec.name])
    if len(layout) != len(model):
        found = {spec.name for spec in layout}
        missing = next(name for name in model if name not in found)
        raise PayloadError("layout", f"the payload lacks the model's tensor {missing!r}")
    return layout
