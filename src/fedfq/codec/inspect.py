"""`inspect`: what a payload holds and what each tensor takes of it, without decoding the coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .decode import parse
from .format.layout import Spec, raw_bytes
from .format.sections import RawSection, kind_name
from .tensors import specs


@dataclass(frozen=True)
class TensorReport:
    """One tensor's share. `nonzeros` counts what is sent and not zero, in factors of rank `rank` too.

    Those of kind "small" share their bytes, which are the payload's `small_bytes`; they have none of their own here. A
    statistic of kind "small" is not sent: one that is has a step of its own, and is "small, own step".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    bytes: int
    nonzeros: int
    rank: int
    bits_per_parameter: float

    @property
    def is_small(self) -> bool:
        return self.kind.startswith("small")


@dataclass(frozen=True)
class Report:
    """A payload's sizes. `header_bytes` is what belongs to no tensor: layout, step, checksum; `small_bytes` what small
    tensors share; `sketch_bytes` what the estimate of all that is left out takes. `shared_basis` is the digest of the
    one it was made with."""

    bytes: int
    raw_bytes: int
    ratio: float
    bits_per_parameter: float
    header_bytes: int
    small_bytes: int
    sketch_bytes: int
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
    own = set() if parsed.small is None else parsed.small.own_steps
    found = {spec.name: _describe(spec, parsed.sections.get(spec.name), spec.name in own) for spec in parsed.layout}
    tensors = tuple(found[spec.name] for spec in layout or parsed.layout)
    raw = raw_bytes(parsed.layout)
    small_bytes = parsed.small.size if parsed.small else 0
    parameters = sum(spec.size for spec in parsed.layout if spec.is_float)  # as `Codec(bits_per_parameter=)` counts
    return Report(
        bytes=len(payload),
        raw_bytes=raw,
        ratio=raw / len(payload),
        bits_per_parameter=8 * len(payload) / max(1, parameters),
        header_bytes=len(payload) - small_bytes - sum(tensor.bytes for tensor in tensors) - parsed.sketch_bytes,
        small_bytes=small_bytes,
        sketch_bytes=parsed.sketch_bytes,
        layout="full" if parsed.digest is None else "digest",
        step=parsed.step or None,
        gain=parsed.gain,
        shared_basis=None if parsed.basis is None else parsed.basis.hex(),
        nonzeros=sum(tensor.nonzeros for tensor in tensors) + (parsed.small.nonzeros() if parsed.small else 0),
        tensors=tensors,
    )


def _describe(spec: Spec, raw: RawSection | None, has_own_step: bool) -> TensorReport:
    section = None if raw is None else raw.read(spec)
    size = 0 if raw is None else raw.size
    return TensorReport(
        name=spec.name,
        shape=spec.shape,
        dtype=str(spec.dtype),
        kind=("small, own step" if has_own_step else "small") if raw is None else kind_name(raw.kind),
        bytes=size,
        nonzeros=0 if section is None else section.nonzeros(spec),
        rank=0 if section is None else section.rank,
        bits_per_parameter=8 * size / max(1, spec.size),
    )
