"""`inspect`: what a payload holds and what each tensor takes of it, without decoding the coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import payload as pay
from .decode import parse
from .layout import Spec, raw_bytes, specs


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

    That is the model, a mapping or module; tensors are then in its order.
    """
    layout = None if like is None else specs(like)
    parsed = parse(payload, layout, max_bytes=1 << 62)
    assert parsed.layout is not None
    found = {spec.name: _tensor(spec, section) for spec, section in zip(parsed.layout, parsed.sections)}
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


def _tensor(spec: Spec, section: pay.Section) -> TensorReport:
    size = 1 + (len(section.body) + len(pay.varint(len(section.body))) if section.kind != pay.ZERO else 0)
    rank = 0
    nonzeros = spec.size
    if section.kind == pay.ZERO:
        nonzeros = 0
    elif section.kind in (pay.WIDTHS, *pay.STEPPED_KINDS):
        nonzeros, body = 0, section.body
        if section.kind == pay.WIDTHS:
            body = pay.read_scales(section)[1]
        elif section.kind != pay.PLAIN:
            rank, right, left, body = pay.read_factors(section, spec.shape)
            nonzeros = right.nonzeros + left.nonzeros
        if section.kind not in pay.FACTOR_KINDS or section.kind & pay.AND_PLAIN:
            nonzeros += sum(coded.header.nonzeros for coded in pay.read_tiles(body, spec.shape))
    return TensorReport(
        name=spec.name,
        shape=spec.shape,
        dtype=str(spec.dtype),
        kind=pay.KIND_NAMES[section.kind],
        bytes=size,
        nonzeros=nonzeros,
        rank=rank,
        bits_per_parameter=8 * size / max(1, spec.size),
    )
