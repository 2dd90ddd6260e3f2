"""Payloads back to tensors: `decode`, and `Accumulator` for a server that averages many."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedfq.types import Array

from .errors import PayloadError
from .format import container
from .format.container import DEFAULT_MAX_BYTES, Payload
from .format.directions import KnownDirections
from .format.layout import Spec
from .format.parts import Part
from .format.sections import Job, Surroundings
from .kernels import FLOAT32_MAX
from .parallel import Spread, workers
from .shared_basis import SharedBasis
from .tensors import specs


def decode(
    payload: bytes | bytearray | memoryview,
    *,
    like: Any = None,
    shared_basis: SharedBasis | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    threads: int = 1,
) -> dict[str, Array]:
    """The update in a payload: names, shapes and dtypes as they were encoded.

    `like` is the model (a mapping or module) that the update belongs to: a payload with other names or shapes is
    refused before anything is allocated, and dtypes are the model's. It is needed for `layout="digest"`. Without it, an
    update that takes more than `max_bytes` decoded is refused. dtypes that numpy lacks come back as float32.
    `shared_basis` is the one that the payload was made with; one that was made without is decoded without.
    Whatever the bytes are, this returns finite arrays or raises `PayloadError`.
    """
    parsed = parse(payload, None if like is None else specs(like), max_bytes)
    return decode_parsed(parsed, shared_basis, threads)


def decode_parsed(parsed: Payload, shared_basis: SharedBasis | None, threads: int = 1) -> dict[str, Array]:
    """`decode`, for a payload that was taken apart already."""
    assert parsed.layout is not None
    known = _find_known(parsed, shared_basis)
    with workers(threads) as spread:
        parts = _decode_parts(parsed, known, spread)
        arrays = spread(lambda item: _assemble(*item), zip(parsed.layout, parts))
    return {spec.name: array for spec, array in zip(parsed.layout, arrays)}


def _assemble(spec: Spec, parts: list[Part]) -> Array:
    """The tensor that its parts make."""
    flat = np.zeros(spec.size, np.float32 if spec.is_float else spec.dtype)
    for part in parts:
        if spec.is_float:
            part.add_to(flat, spec.shape, 1.0)
        else:
            flat = part.values
    return _as_dtype(flat, spec.dtype).reshape(spec.shape)


class Accumulator:
    """The weighted mean of any number of payloads in the memory of one model.

    Plain sections touch only their non-zero entries. A payload that is refused leaves no trace.
    """

    def __init__(self, like: Any, *, threads: int = 1) -> None:
        self.layout = specs(like)
        self.threads = threads
        self.weight = 0.0
        self._sums: dict[str, Array] = {
            spec.name: np.zeros(spec.size, np.float32 if spec.is_float else np.float64) for spec in self.layout
        }

    def add(
        self, payload: bytes | bytearray | memoryview, weight: float = 1.0, *, shared_basis: SharedBasis | None = None
    ) -> None:
        """Add weight times the payload's update."""
        with np.errstate(over="ignore"):
            rounded = np.float32(weight)
        if not (math.isfinite(rounded) and rounded > 0):
            raise ValueError(f"weight must be positive and finite as float32, got {weight!r}")
        weight = float(weight)  # of an integer beyond 64 bits as well
        parsed = parse(payload, self.layout)
        assert parsed.layout is not None
        known = _find_known(parsed, shared_basis)
        with workers(self.threads) as spread:
            parts = _decode_parts(parsed, known, spread)  # all of them, before anything is added
            sums = [self._sums[spec.name] for spec in parsed.layout]

            def add(item: tuple[Array, Spec, list[Part]]) -> None:
                for part in item[2]:
                    part.add_to(item[0], item[1].shape, weight)

            spread(add, zip(sums, parsed.layout, parts))
        self.weight += weight

    def mean(self) -> dict[str, Array]:
        """The mean so far, in the model's dtypes; integers are rounded."""
        if self.weight == 0.0:
            raise ValueError("nothing was added yet")
        result = {}
        for spec in self.layout:
            with np.errstate(over="ignore"):  # a mean of the largest numbers may round up
                mean = self._sums[spec.name] / self._sums[spec.name].dtype.type(self.weight)
            np.clip(mean, -FLOAT32_MAX, FLOAT32_MAX, out=mean)
            result[spec.name] = _as_dtype(mean if spec.is_float else np.rint(mean), spec.dtype).reshape(spec.shape)
        return result


def parse(data: bytes | bytearray | memoryview, like: list[Spec] | None, max_bytes: int = DEFAULT_MAX_BYTES) -> Payload:
    """`container.parse`, for payloads that can be decoded here."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"a payload is bytes, got {type(data).__name__}")
    parsed = container.parse(bytes(data), like, max_bytes)
    if parsed.layout is None:
        raise PayloadError("layout", "the payload names its layout by digest only: pass like=model")
    return parsed


def _find_known(parsed: Payload, shared_basis: SharedBasis | None) -> Mapping[str, KnownDirections]:
    """The directions that the payload was made with, by tensor."""
    if parsed.basis is None:
        return {}
    needed = f"the payload was made with the shared basis {parsed.basis.hex()}"
    if shared_basis is None:
        raise PayloadError("basis", f"{needed}: pass shared_basis=")
    if parsed.basis != shared_basis.digest:
        reason = f"{needed}, not with {shared_basis.digest.hex()}: another round, or another initial model"
        raise PayloadError("basis", reason)
    assert parsed.layout is not None
    if (other := shared_basis.other_than(parsed.layout)) is not None:
        raise PayloadError("basis", f"{needed}, and is of another model: {other}")
    return shared_basis.held


def _decode_parts(parsed: Payload, known: Mapping[str, KnownDirections], spread: Spread) -> list[list[Part]]:
    """What is not zero, decoded, by tensor: all of it, or an error."""
    assert parsed.layout is not None
    work: list[tuple[int, Job]] = []
    for number, (spec, section) in enumerate(zip(parsed.layout, parsed.sections)):
        around = Surroundings(parsed.gain, parsed.step, parsed.shifts, known.get(spec.name))
        work += [(number, job) for job in section.read(spec).jobs(spec, around)]
    parts: list[list[Part]] = [[] for _ in parsed.layout]
    for (number, _), part in zip(work, spread(lambda item: item[1](), work)):
        parts[number].append(part)
    return parts


def _as_dtype(flat: Array, dtype: np.dtype[Any]) -> Array:
    if dtype == np.float16:  # rounding up must not leave the range
        limit = np.float32(np.finfo(np.float16).max)
        flat = np.clip(flat, -limit, limit)
    elif dtype.kind in "iu" and flat.dtype.kind == "f":  # nor may that of a mean of the largest 64-bit integers
        info = np.iinfo(dtype)
        flat = np.clip(flat, info.min, np.nextafter(float(info.max) + 1, 0))
    return flat.astype(dtype, copy=False)
