"""Small tensors, of up to 1,024 entries: they share sections, as one for each would cost more than what it holds.

Those of floats are written one after the other as a matrix with rows of 32, whose classes follow their scales: first
those with the payload's step, then those with a step of their own, a power of two. Those of integers are one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedfq.types import Array

from ..errors import PayloadError
from ..kernels import FLOAT32_MAX
from .layout import Spec
from .parts import Part
from .probability import SHIFTS
from .reader import ByteReader, deflate, inflate, refuse_malformed, varint
from .sections import PLAIN, SECTIONS, ZERO, RawSection, Section, Surroundings, ZeroSection

SMALL_ENTRIES = 1024  # at most, of a tensor that shares its section
ROW = 32  # entries
STEP_BIAS = 140  # byte b of a tensor is the step 2^(b - 140); 0 is the payload's step

_STEPS = Surroundings(1.0, 1.0, np.zeros(SHIFTS, np.float32))  # in which values are levels


def is_small(spec: Spec) -> bool:
    return spec.size <= SMALL_ENTRIES


def matrix_spec(specs: Sequence[Spec]) -> Spec:
    """The tensor as which several are coded: rows of 32, the last one filled up with zeros."""
    size = sum(spec.size for spec in specs)
    return Spec("small tensors", (-(-size // ROW), ROW), np.dtype(np.float32))


def step_of(byte: int) -> float:
    return float(2.0 ** (byte - STEP_BIAS))


class SmallSections:
    """What small tensors share, but for the section of the payload's step, which is not settled before the rest is."""

    def __init__(
        self, layout: Sequence[Spec], steps: Mapping[str, int], own: Section, integers: Mapping[str, Array]
    ) -> None:
        """`steps` are the bytes of tensors with a step of their own, `own` is their section, in the layout's order."""
        floats = [spec for spec in layout if spec.is_float and is_small(spec)]
        packed = deflate(bytes(steps.get(spec.name, 0) for spec in floats)) if steps else b""
        self._head = varint(len(packed)) + packed
        words = [integers[spec.name].reshape(-1).astype("<i8") for spec in layout if spec.name in integers]
        block = np.concatenate([np.empty(0, "<i8"), *words])
        packed = deflate(block.tobytes()) if block.any() else b""
        self._tail = (own.to_bytes() if steps else b"") + varint(len(packed)) + packed

    def to_bytes(self, common: Section | None) -> bytes:
        """The steps, the section of the payload's step, the one of other steps, the integers."""
        return self._head + (common or ZeroSection()).to_bytes() + self._tail

    def size(self, common: Section | None) -> int:
        """The length of `to_bytes`."""
        return len(self._head) + (common or ZeroSection()).size + len(self._tail)


@dataclass(frozen=True)
class RawSmall:
    """What small tensors share of a payload, not yet looked into."""

    floats: Sequence[Spec]
    integers: Sequence[Spec]
    steps: bytes  # one for each of `floats`
    common: RawSection
    own: RawSection | None
    integer_block: memoryview
    size: int  # bytes in the payload

    @classmethod
    def read(cls, reader: ByteReader, layout: Sequence[Spec], has_step: bool) -> RawSmall:
        start = reader.at
        floats = [spec for spec in layout if spec.is_float and is_small(spec)]
        integers = [spec for spec in layout if not spec.is_float and is_small(spec)]
        packed = reader.take(reader.varint())
        steps = inflate(packed, len(floats), "the steps of small tensors") if packed else bytes(len(floats))
        common = _read_section(reader)
        if common.kind == PLAIN and not has_step:
            refuse_malformed("small tensors in a payload without a step")
        own = _read_section(reader) if any(steps) else None
        block = reader.take(reader.varint())
        return cls(floats, integers, steps, common, own, block, reader.at - start)

    def decode(self, around: Surroundings) -> Iterator[tuple[str, Part]]:
        """Every tensor that is not all zero."""
        common = [spec for spec, byte in zip(self.floats, self.steps) if byte == 0]
        for spec, values in zip(common, _split(_decode_vector(self.common, common, around), common)):
            if values.any():
                yield spec.name, Part(None, values)
        if self.own is not None:
            owners = [(spec, byte) for spec, byte in zip(self.floats, self.steps) if byte]
            specs = [spec for spec, _ in owners]
            for (spec, byte), levels in zip(owners, _split(_decode_vector(self.own, specs, _STEPS), specs)):
                sizes = levels.astype(np.float64) * step_of(byte)
                yield spec.name, Part(None, np.clip(sizes, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32))
        if len(self.integer_block):
            size = 8 * sum(spec.size for spec in self.integers)
            words = np.frombuffer(inflate(self.integer_block, size, "the small integers"), "<i8").astype(np.int64)
            for spec, numbers in zip(self.integers, _split(words, self.integers)):
                yield spec.name, Part(None, _as_integers(numbers, spec))

    def nonzeros(self) -> int:
        """How many floats are sent that are not zero."""
        common = [spec for spec, byte in zip(self.floats, self.steps) if byte == 0]
        own = [spec for spec, byte in zip(self.floats, self.steps) if byte]
        parts = [(self.common, common), *([(self.own, own)] if self.own is not None else [])]
        return sum(raw.read(matrix_spec(specs)).nonzeros(matrix_spec(specs)) for raw, specs in parts)


def _read_section(reader: ByteReader) -> RawSection:
    raw = RawSection.read_from(reader)
    if raw.kind not in SECTIONS:
        raise PayloadError("version", f"a section of unknown kind {raw.kind}")
    if raw.kind not in (ZERO, PLAIN):
        refuse_malformed("small tensors share a section that is neither zero nor plain")
    return raw


def _decode_vector(raw: RawSection, specs: Sequence[Spec], around: Surroundings) -> Array:
    shared = matrix_spec(specs)
    total = np.zeros(shared.size, np.float32)
    for job in raw.read(shared).jobs(shared, around):
        job().add_to(total, shared.shape, 1.0)
    if total[sum(spec.size for spec in specs) :].any():
        refuse_malformed("entries behind the last small tensor")
    return total


def _split(vector: Array, specs: Sequence[Spec]) -> Iterator[Array]:
    end = 0
    for spec in specs:
        start, end = end, end + spec.size
        yield vector[start:end]


def _as_integers(numbers: Array, spec: Spec) -> Array:
    """Words as numbers of the tensor's dtype; of uint64, they are its bits."""
    if spec.dtype == np.uint64:
        return numbers.view(np.uint64)
    low, high = (0, 1) if spec.dtype == np.bool_ else (np.iinfo(spec.dtype).min, np.iinfo(spec.dtype).max)
    if numbers.size and not (low <= numbers.min() and numbers.max() <= high):
        raise PayloadError("layout", f"tensor {spec.name!r} has numbers that are not of {spec.dtype}")
    return numbers.astype(spec.dtype)
