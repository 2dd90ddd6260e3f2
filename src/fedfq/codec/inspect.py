"""`inspect`: what a payload holds and what each tensor takes of it, without decoding the coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .decode import parse
from .format.container import RawSection
from .format.layout import Spec, raw_bytes
from .format.sections import kind_name
from .tensors import specs


@dataclass(frozen=True)
class TensorReport:
    """One tensor's share. `nonzeros` counts what is sent and not zero, in factors of rank `rank` too."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    bytes: int
    nonzeros: int
    rank: int
    bits_per_parameter: float


@dataclass(frozen=True)
class Report:
    """A payload's sizes. `header_bytes` is what does not belong to one tensor: layout, step, checksum.
    `shared_basis` is the digest of the one it was made with."""

    bytes: int
    raw_bytes: int
    ratio: float
    bits_per_parameter: float
    header_bytes: int
    layout: str
    step: float | None
    gain: float
    shared_basis: str | None
    nonzeros: int
    tensors: tuple[TensorReport, ...]


def inspect(payload: bytes | bytearray | memoryview, *, like: Any = None) -> Report:
    """Sizes per tensor, bits per parameter, non-zeros, step. A payload whose layout is a digest needs `like=`.

    That is the model, a mapping or module; tensors are then in its order. Nothing is decoded but the frame of the
    payload. Raises `PayloadError` for bytes that are no payload.

    >>> import fedfq, numpy as np
    >>> report = fedfq.inspect(fedfq.encode({"b": np.ones(100, np.float32)}, max_bytes=60))
    >>> report.raw_bytes, report.tensors[0].kind
    (400, 'plain')
    """
    layout = None if like is None else specs(like)
    parsed = parse(payload, layout, max_bytes=1 << 62)
    assert parsed.layout is not None
    found = {spec.name: _describe(spec, section) for spec, section in zip(parsed.layout, parsed.sections)}
    tensors = tuple(found[spec.name] for spec in layout or parsed.layout)
    raw = raw_bytes(parsed.layout)
    parameters = sum(spec.size for spec in parsed.layout if spec.is_float)  # as `Codec(bits_per_parameter=)` counts
    return Report(
        bytes=len(payload),
        raw_bytes=raw,
        ratio=raw / len(payload),
        bits_per_parameter=8 * len(payload) / max(1, parameters),
        header_bytes=len(payload) - sum(tensor.bytes for tensor in tensors),
        layout="full" if parsed.digest is None else "digest",
        step=parsed.step or None,
        gain=parsed.gain,
        shared_basis=None if parsed.basis is None else parsed.basis.hex(),
        nonzeros=sum(tensor.nonzeros for tensor in tensors),
        tensors=tensors,
    )


def _describe(spec: Spec, raw: RawSection) -> TensorReport:
    section = raw.read(spec)
    return TensorReport(
        name=spec.name,
        shape=spec.shape,
        dtype=str(spec.dtype),
        kind=kind_name(raw.kind),
        bytes=raw.size,
        nonzeros=section.nonzeros(spec),
        rank=section.rank,
        bits_per_parameter=8 * raw.size / max(1, spec.size),
    )
