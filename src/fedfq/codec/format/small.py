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
from .layout import Spec
from .parts import Part
from .probability import SHIFTS
from .reader import ByteReader, deflate, inflate, refuse_malformed, varint
from .sections import (
    INTEGER,
    INTEGER_DEFLATED,
    PLAIN,
    SECTIONS,
    ZERO,
    IntegerSection,
    RawSection,
    Section,
    Surroundings,
    ZeroSection,
    kind_name,
    with_own_step,
)

SMALL_ENTRIES = 1024  # at most, of a tensor that shares its section
ROW = 32  # entries
STEP_BIAS = (
    143  # byte b of a tensor is the step 2^(b - 143), for numbers up to float32's largest; 0 is the payload's step
)

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
        self, layout: Sequence[Spec], steps: Mapping[str, tuple[int, int]], own: Section, integers: Section
    ) -> None:
        """`steps` are the byte and the offset of tensors with a step of their own, `own` is the section of these.

        `integers` is that of all integers, as one tensor of int64. Both are in the layout's order.
        """
        floats = [spec for spec in layout if spec.is_float and is_small(spec)]
        every = [steps.get(spec.name, (0, 0)) for spec in floats] if steps else []
        packed = (
            deflate(bytes(step for step, _ in every) + bytes(offset & 0xFF for _, offset in every)) if steps else b""
        )
        self._head = varint(len(packed)) + packed
        self._tail = (own.to_bytes() if steps else b"") + integers.to_bytes()

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
    steps: Array  # uint8, one for each of `floats`
    offsets: Array  # int8, likewise
    common: RawSection
    own: RawSection | None
    words: RawSection  # all integers
    size: int  # bytes in the payload

    @classmethod
    def read(cls, reader: ByteReader, layout: Sequence[Spec], has_step: bool) -> RawSmall:
        start = reader.at
        floats = [spec for spec in layout if spec.is_float and is_small(spec)]
        integers = [spec for spec in layout if not spec.is_float and is_small(spec)]
        packed = reader.take(reader.varint())
        both = inflate(packed, 2 * len(floats), "the steps of small tensors") if packed else bytes(2 * len(floats))
        steps, offsets = np.frombuffer(both, np.uint8).reshape(2, len(floats))
        if (offsets[steps == 0] != 0).any():
            refuse_malformed("an offset of a small tensor without a step of its own")
        common = _read_section(reader, (ZERO, PLAIN))
        if common.kind == PLAIN and not has_step:
            refuse_malformed("small tensors in a payload without a step")
        own = _read_section(reader, (ZERO, PLAIN)) if steps.any() else None
        words = _read_section(reader, (ZERO, INTEGER, INTEGER_DEFLATED))
        return cls(floats, integers, steps, offsets.view(np.int8), common, own, words, reader.at - start)

    def decode(self, around: Surroundings) -> Iterator[tuple[str, Part]]:
        """Every tensor that is not all zero."""
        common, own = self._part_floats()
        for spec, values in _split(_decode_vector(self.common, common, around), common):
            yield spec.name, Part(None, values)
        if self.own is not None:
            sizes = np.array([spec.size for spec in own])
            used = self.steps != 0
            steps = np.repeat(np.ldexp(1.0, self.steps[used].astype(np.int32) - STEP_BIAS), sizes)
            offsets = np.repeat(self.offsets[used].astype(np.float64), sizes)
            decoded = with_own_step(_decode_vector(self.own, own, _STEPS), offsets, steps)
            for spec, values in _split(decoded, own):
                yield spec.name, Part(None, values)
        if self.words.kind != ZERO:
            joined = _join_integers(self.integers)
            section = self.words.read(joined)
            assert isinstance(section, IntegerSection)
            for spec, numbers in _split(section.values(joined), self.integers):
                yield spec.name, Part(None, _as_integers(numbers, spec))

    def _part_floats(self) -> tuple[list[Spec], list[Spec]]:
        """Those with the payload's step, and those with steps of their own."""
        owners = self.steps.tolist()
        common = [spec for spec, step in zip(self.floats, owners) if not step]
        return common, [spec for spec, step in zip(self.floats, owners) if step]

    @property
    def own_steps(self) -> set[str]:
        """The names of tensors with a step of their own."""
        return {spec.name for spec in self._part_floats()[1]}

    def nonzeros(self) -> int:
        """How many floats are sent that are not zero."""
        common, own = self._part_floats()
        parts = [(self.common, common), *([(self.own, own)] if self.own is not None else [])]
        return sum(raw.read(matrix_spec(specs)).nonzeros(matrix_spec(specs)) for raw, specs in parts)


def _read_section(reader: ByteReader, kinds: tuple[int, ...]) -> RawSection:
    raw = RawSection.read_from(reader)
    if raw.kind not in SECTIONS:
        raise PayloadError("version", f"a section of unknown kind {raw.kind}")
    if raw.kind not in kinds:
        refuse_malformed(f"small tensors cannot share a {kind_name(raw.kind)} section there")
    return raw


def _decode_vector(raw: RawSection, specs: Sequence[Spec], around: Surroundings) -> Array:
    shared = matrix_spec(specs)
    total = np.zeros(shared.size, np.float32)
    for job in raw.read(shared).jobs(shared, around):
        job().add_to(total, shared.shape, 1.0)
    size = sum(spec.size for spec in specs)
    if total[size:].any():
        refuse_malformed("entries behind the last small tensor")
    return total[:size]


def _split(vector: Array, specs: Sequence[Spec]) -> Iterator[tuple[Spec, Array]]:
    """What each tensor has of the vector, where that is not all zero."""
    if not vector.any():
        return
    end = 0
    for spec in specs:
        start, end = end, end + spec.size
        if vector[start:end].any():
            yield spec, vector[start:end]


def _join_integers(specs: Sequence[Spec]) -> Spec:
    """The tensor as which those of integers are written."""
    return Spec("small integers", (sum(spec.size for spec in specs),), np.dtype(np.int64))


def _as_integers(numbers: Array, spec: Spec) -> Array:
    """Words as numbers of the tensor's dtype; of uint64, they are its bits."""
    if spec.dtype == np.uint64:
        return numbers.view(np.uint64)
    low, high = (0, 1) if spec.dtype == np.bool_ else (np.iinfo(spec.dtype).min, np.iinfo(spec.dtype).max)
    if numbers.size and not (low <= numbers.min() and numbers.max() <= high):
        raise PayloadError("layout", f"tensor {spec.name!r} has numbers that are not of {spec.dtype}")
    return numbers.astype(spec.dtype)
