"""The container: head, layout, step and sections of a payload. docs/FORMAT.md says it in words.

Untrusted bytes are read in this package only. Nothing is allocated from a number in a payload before that number was
checked against the bytes that are there, the layout or the caller's limit.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedfq.types import Array

from ..errors import PayloadError
from .layout import DIGEST_BYTES, Spec, digest, read_table, sort_by_name, write_table
from .probability import SHIFTS
from .reader import ByteReader, refuse_malformed, varint
from .sections import SECTIONS, RawSection, Section, ZeroSection, kind_name, needs_basis
from .sketch import Sketch
from .small import RawSmall, SmallSections, is_small

MAGIC = b"FQ"
VERSION = 1
HEAD = struct.Struct("<2sBBI")  # magic, version, flags, checksum

LAYOUT_IS_DIGEST = 1
HAS_STEP = 2
HAS_GAIN = 4
HAS_BASIS = 8
SHARES_SMALL = 16
HAS_SKETCH = 32  # 64 and 128 are kept for what comes: see docs/FORMAT.md

SHIFT_UNIT = 1 / 256  # of a step
# Of a decoded update whose model is not given, unless the caller says otherwise: so many at most, and for each byte of
# the payload not more than an update at 65,536x has; but a few megabytes are never too many.
DEFAULT_MAX_BYTES = 1 << 30
BYTES_PER_BYTE = 1 << 16
FREE_BYTES = 1 << 25


# Writing


@dataclass(frozen=True)
class Encoding:
    """What an encoder decided: the sections of quantised tensors by name, the step and the shifts that they share.

    Tensors that are not named are all zero. `small` is the section of the small tensors with this step.
    """

    sections: Mapping[str, Section] = field(default_factory=dict)
    step: float | None = None
    shifts: Array | None = None  # int8, in units of SHIFT_UNIT; with a step only
    small: Section | None = None

    def step_bytes(self) -> bytes:
        """The step and those shifts that are used."""
        if self.step is None or self.shifts is None:
            return b""
        used = np.flatnonzero(self.shifts)
        first, last = (int(used[0]), int(used[-1])) if used.size else (1, 0)
        return struct.pack("<fB", self.step, first << 4 | last) + self.shifts[first : last + 1].tobytes()


def describe_layout(layout: Sequence[Spec], as_digest: bool) -> bytes:
    """What stands for names, shapes and dtypes in a payload."""
    if as_digest:
        return digest(layout)
    table = write_table(layout)
    return varint(len(table)) + table


class Container:
    """A payload without its quantised tensors. It tells what an encoding will take, and writes it."""

    def __init__(
        self,
        layout: Sequence[Spec],
        fixed: Mapping[str, Section],
        *,
        as_digest: bool,
        with_gain: bool = False,
        basis: bytes | None = None,
        small: SmallSections | None = None,
        description: bytes | None = None,
    ) -> None:
        """`fixed` are the sections of tensors that are not quantised; `basis` is the digest of the shared basis.

        `small` is what small tensors share; None: every tensor has a section of its own. `description` is what
        `describe_layout` says of the layout, where that is known.

        A digest does not tell the order of names, so sections then follow their sorted order.
        """
        self.fixed = fixed
        self.small = small
        ordered = sort_by_name(layout) if as_digest else layout
        self.order = [spec.name for spec in ordered if small is None or not is_small(spec)]
        self.with_gain = with_gain
        self._flags = LAYOUT_IS_DIGEST * as_digest | HAS_GAIN * with_gain | HAS_BASIS * (basis is not None)
        self._flags |= SHARES_SMALL * (small is not None)
        self._table = (basis or b"") + (description or describe_layout(layout, as_digest))
        self._fixed_size = HEAD.size + 4 * with_gain + len(self._table)
        self.minimum = self.size(Encoding())

    def _sections(self, encoding: Encoding) -> list[Section]:
        zero = ZeroSection()
        return [self.fixed.get(name) or encoding.sections.get(name) or zero for name in self.order]

    def size(self, encoding: Encoding) -> int:
        """The length of `to_bytes(encoding)`."""
        sections = sum(section.size for section in self._sections(encoding))
        small = 0 if self.small is None else self.small.size(encoding.small)
        return self._fixed_size + len(encoding.step_bytes()) + small + sections

    def to_bytes(self, encoding: Encoding, gain: float = 1.0) -> bytes:
        """The payload. The gain is written where the container has one."""
        body = bytearray(struct.pack("<f", gain) if self.with_gain else b"")
        body += self._table
        step = encoding.step_bytes()
        body += step
        body += b"" if self.small is None else self.small.to_bytes(encoding.small)
        for section in self._sections(encoding):
            body += section.to_bytes()
        return _finish(self._flags | HAS_STEP * bool(step), bytes(body))


def _finish(flags: int, body: bytes) -> bytes:
    head = HEAD.pack(MAGIC, VERSION, flags, 0)[:4]
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body


def has_sketch(payload: bytes | memoryview) -> bool:
    """Whether a payload that was decoded already has a sketch."""
    return bool(payload[3] & HAS_SKETCH)


def add_sketch(payload: bytes, sketch: Sketch) -> bytes:
    """A payload that has no sketch yet, with this one."""
    return _finish(payload[3] | HAS_SKETCH, payload[HEAD.size :] + sketch.to_bytes())


# Reading


@dataclass(frozen=True)
class Payload:
    """A payload taken apart, nothing decoded."""

    layout: list[Spec]
    digest: bytes | None
    basis: bytes | None  # the digest of the shared basis it was made with
    gain: float  # what all quantised tensors are multiplied with
    step: float
    shifts: Array  # float32: reconstruction of |level| is |level| + shift, in steps
    small: RawSmall | None  # what small tensors share
    sections: dict[str, RawSection]  # of the other tensors, or of all
    sketch: Sketch | None  # of what the sections leave out
    sketch_bytes: int


def parse(data: bytes | memoryview, like: list[Spec] | None, max_bytes: int | None = None) -> Payload:
    """Take a payload apart. With `like`, another layout is refused here, before anything is allocated."""
    flags, reader = _open(data)
    gain = reader.float32() if flags & HAS_GAIN else 1.0
    if not (math.isfinite(gain) and gain > 0):
        refuse_malformed(f"a gain of {gain}")
    basis = bytes(reader.take(8)) if flags & HAS_BASIS else None
    named = None
    if flags & LAYOUT_IS_DIGEST:
        named = bytes(reader.take(DIGEST_BYTES))
        if like is None:
            raise PayloadError("layout", "the payload names its layout by digest only: pass like=model")
        if digest(like) != named:
            raise PayloadError("layout", "the payload's layout digest is not that of the given model")
        layout = sort_by_name(like)
    else:
        layout = read_table(reader.take(reader.varint()), like, most_tensors=len(data))
    if like is None:
        _check_decoded_size(decoded_bytes(layout), len(data), max_bytes)
    step, shifts = _read_step(reader) if flags & HAS_STEP else (0.0, np.zeros(SHIFTS, np.float32))
    small = RawSmall.read(reader, layout, bool(flags & HAS_STEP)) if flags & SHARES_SMALL else None
    sections = {spec.name: _read_section(reader, spec, flags) for spec in layout if small is None or not is_small(spec)}
    sketch, left = None, reader.left()
    if flags & HAS_SKETCH:
        sketch = Sketch.read(reader, layout, basis is not None)
    elif left:
        refuse_malformed(f"{left} bytes follow the last section")
    return Payload(layout, named, basis, gain, step, shifts, small, sections, sketch, left)


def _check_decoded_size(size: int, payload: int, max_bytes: int | None) -> None:
    """Refuse what would take more memory than the caller allows or, by default, than such a payload is worth."""
    limit = max_bytes
    if limit is None:
        limit = min(DEFAULT_MAX_BYTES, max(FREE_BYTES, BYTES_PER_BYTE * payload))
    if size > limit:
        advice = "" if max_bytes is not None else ": pass like=model, or max_bytes="
        raise PayloadError("limit", f"the update takes {size} bytes decoded, more than the limit of {limit}{advice}")


def decoded_bytes(layout: Sequence[Spec]) -> int:
    return sum(spec.size * max(4, spec.dtype.itemsize) for spec in layout)


def _open(data: bytes | memoryview) -> tuple[int, ByteReader]:
    reader = ByteReader(data)
    if bytes(reader.data[:2]) != MAGIC[: len(reader.data)]:
        raise PayloadError("magic", "this is not a fedfq payload")
    if reader.left() < HEAD.size:
        raise PayloadError("truncated", f"{reader.left()} bytes are too few for a fedfq payload")
    _, version, flags, checksum = HEAD.unpack(reader.take(HEAD.size))
    if version != VERSION:
        raise PayloadError("version", f"payload version {version} is not supported (this release reads {VERSION})")
    if zlib.crc32(reader.data[8:], zlib.crc32(reader.data[:4])) != checksum:
        raise PayloadError("checksum", "the payload is damaged: its checksum does not match")
    if flags & ~(LAYOUT_IS_DIGEST | HAS_STEP | HAS_GAIN | HAS_BASIS | SHARES_SMALL | HAS_SKETCH):
        raise PayloadError("version", f"the payload uses features this release does not know (flags {flags:#04x})")
    return flags, reader


def _read_step(reader: ByteReader) -> tuple[float, Array]:
    step = reader.float32()
    if not (math.isfinite(step) and step > 0):
        refuse_malformed(f"a step of {step}")
    span = reader.byte()
    first, last = span >> 4, span & 15
    shifts = np.zeros(SHIFTS, np.float32)
    packed = reader.take(max(0, last + 1 - first))
    shifts[first : first + len(packed)] = np.frombuffer(packed, np.int8) * np.float32(SHIFT_UNIT)
    return step, shifts


def _read_section(reader: ByteReader, spec: Spec, flags: int) -> RawSection:
    raw = RawSection.read_from(reader)
    if raw.kind not in SECTIONS:
        raise PayloadError("version", f"a section of unknown kind {raw.kind}")
    section = SECTIONS[raw.kind]
    if not (section.for_floats if spec.is_float else section.for_integers):
        refuse_malformed(f"tensor {spec.name!r} of dtype {spec.dtype} cannot have a {kind_name(raw.kind)} section")
    if section.needs_step and not flags & HAS_STEP:
        refuse_malformed(f"a {kind_name(raw.kind)} section in a payload without a step")
    if needs_basis(raw.kind) and not flags & HAS_BASIS:
        refuse_malformed(f"a {kind_name(raw.kind)} section in a payload without a shared basis")
    return raw
