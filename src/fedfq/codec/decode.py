"""Payloads back to tensors: `decode`, and `Accumulator` for a server that averages many."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from . import payload as pay
from .basis import Known, Product, unit_columns
from .errors import PayloadError
from .kernels import LARGEST, Array, kernel
from .layout import Spec, specs
from .parallel import Spread, workers
from .quantize import LEVELS
from .shared import SharedBasis
from .tile import decode_tile

T = TypeVar("T")

# Width and level of the numbers that stand for them in a section of widths (codec.WIDTH_OFFSETS), as a share of a scale
_WIDTH_CLASS = np.repeat(np.arange(3), [LEVELS[2], LEVELS[4], LEVELS[8]])
_WIDTH_SHARE = np.concatenate([np.arange(1, s + 1) / s for s in (LEVELS[2], LEVELS[4], LEVELS[8])])


class _Part(NamedTuple):
    """Decoded entries of one tensor: `values` at `indices`; all of them; with `right`, the product values right^T."""

    tensor: int
    indices: Array | None
    values: Array
    right: Array | None = None

    def add_to(self, total: Array, shape: tuple[int, ...], weight: float) -> None:
        """total += weight * part."""
        if self.indices is not None:
            _scatter_add(total, self.indices, self.values, weight)
            return
        with np.errstate(over="ignore"):
            if self.right is None:
                total += self.values * total.dtype.type(weight)
                np.clip(total, -LARGEST, LARGEST, out=total)
            else:
                most = LARGEST / self.right.shape[1]  # an infinite A times a V of 0 would be NaN
                Product(np.clip(self.values * np.float32(weight), -most, most), self.right).add_to(total, shape)


def decode(
    payload: bytes | bytearray | memoryview,
    *,
    like: Any = None,
    shared_basis: SharedBasis | None = None,
    max_bytes: int = pay.DEFAULT_MAX_BYTES,
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


def decode_parsed(parsed: pay.Payload, shared_basis: SharedBasis | None, threads: int = 1) -> dict[str, Array]:
    """`decode`, for a payload that was taken apart already."""
    assert parsed.layout is not None
    known = _known(parsed, shared_basis)
    with workers(threads) as spread:
        parts = _parts(parsed, parsed.layout, known, spread)
        arrays = spread(lambda item: _assembled(*item), zip(parsed.layout, parts))
    return {spec.name: array for spec, array in zip(parsed.layout, arrays)}


def decode_each(
    payload: bytes | bytearray | memoryview,
    look: Callable[[Array], T],
    *,
    like: Any,
    shared_basis: SharedBasis | None = None,
) -> list[T]:
    """What `look` says of each tensor of a payload, with one decoded at a time; all of it is checked before."""
    parsed = parse(payload, specs(like))
    assert parsed.layout is not None
    with workers(1) as spread:
        parts = _parts(parsed, parsed.layout, _known(parsed, shared_basis), spread)
        return [look(_assembled(spec, own)) for spec, own in zip(parsed.layout, parts)]


def _assembled(spec: Spec, parts: list[_Part]) -> Array:
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
        self,
        payload: bytes | bytearray | memoryview,
        weight: float = 1.0,
        *,
        shared_basis: SharedBasis | None = None,
        scales: Mapping[str, float] | None = None,
    ) -> None:
        """Add weight times the payload's update; of tensors that are named in `scales`, so many times of it."""
        with np.errstate(over="ignore"):
            rounded = np.float32(weight)
        if not (math.isfinite(rounded) and rounded > 0):
            raise ValueError(f"weight must be positive and finite as float32, got {weight!r}")
        weight = float(weight)  # of an integer beyond 64 bits as well
        parsed = parse(payload, self.layout)
        assert parsed.layout is not None
        known = _known(parsed, shared_basis)
        with workers(self.threads) as spread:
            parts = _parts(parsed, parsed.layout, known, spread)  # all of them, before anything is added
            sums = [self._sums[spec.name] for spec in parsed.layout]

            def add(item: tuple[Array, Spec, list[_Part]]) -> None:
                scale = 1.0 if scales is None else scales.get(item[1].name, 1.0)
                for part in item[2]:
                    part.add_to(item[0], item[1].shape, weight * scale)

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
            np.clip(mean, -LARGEST, LARGEST, out=mean)
            result[spec.name] = _as_dtype(mean if spec.is_float else np.rint(mean), spec.dtype).reshape(spec.shape)
        return result


def parse(
    data: bytes | bytearray | memoryview, like: list[Spec] | None, max_bytes: int = pay.DEFAULT_MAX_BYTES
) -> pay.Payload:
    """`payload.parse`, for payloads that can be decoded here."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"a payload is bytes, got {type(data).__name__}")
    parsed = pay.parse(bytes(data), like, max_bytes)
    if parsed.layout is None:
        raise PayloadError("layout", "the payload names its layout by digest only: pass like=model")
    return parsed


def _known(parsed: pay.Payload, shared_basis: SharedBasis | None) -> Mapping[str, Known]:
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


def _parts(
    parsed: pay.Payload, layout: Sequence[Spec], known: Mapping[str, Known], spread: Spread
) -> list[list[_Part]]:
    """What is not zero, decoded, by tensor: all of it, or an error."""
    work: list[Callable[[], _Part]] = []
    for number, (spec, section) in enumerate(zip(layout, parsed.sections)):
        if section.kind in (pay.HALF, pay.SINGLE, pay.INTEGER, pay.INTEGER_DEFLATED):
            work.append(partial(_whole, number, section, spec))
        elif section.kind != pay.ZERO:
            scales, body = None, section.body
            if section.kind == pay.WIDTHS:
                scales, body = pay.read_scales(section)
            elif section.kind != pay.PLAIN:
                rank, right, left, body = pay.read_factors(section, spec.shape)
                step, directions = parsed.gain * parsed.step, known.get(spec.name)
                work.append(partial(_decode_factors, number, rank, right, left, directions, step))
                if not section.kind & pay.AND_PLAIN:
                    continue
            for coded in pay.read_tiles(body, spec.shape):
                work.append(partial(_decode_tile, number, coded, scales, parsed))
    parts: list[list[_Part]] = [[] for _ in layout]
    for part in spread(lambda decode_part: decode_part(), work):
        parts[part.tensor].append(part)
    return parts


def _whole(number: int, section: pay.Section, spec: Spec) -> _Part:
    read = pay.read_floats if section.kind in (pay.HALF, pay.SINGLE) else pay.read_integers
    return _Part(number, None, read(section, spec))


def _decode_tile(number: int, coded: pay.CodedTile, scales: Array | None, parsed: pay.Payload) -> _Part:
    if scales is None:
        return _Part(
            number, *decode_tile(coded.header, coded.stream, coded.tile, parsed.gain * parsed.step, parsed.shifts)
        )
    indices, codes = decode_tile(coded.header, coded.stream, coded.tile)
    sizes = np.abs(codes).astype(np.int64) - 1
    if sizes.max() >= _WIDTH_SHARE.size:
        raise PayloadError("malformed", "a level that no width has")
    values = np.sign(codes) * (parsed.gain * scales.astype(np.float64)[_WIDTH_CLASS[sizes]] * _WIDTH_SHARE[sizes])
    return _Part(number, indices, np.clip(values, -LARGEST, LARGEST).astype(np.float32))


def _decode_factors(
    number: int, rank: int, right: pay.CodedSide, left: pay.CodedSide, known: Known | None, step: float
) -> _Part:
    """A V^T with unit columns in V and the levels of A in steps. (No shifts: the rest was made for just this.)"""
    rows = _decode_side(left, None if known is None else known.left, rank)
    columns = _decode_side(right, None if known is None else known.right, rank)
    if step * max(1.0, float(np.abs(rows).max())) * rank > LARGEST:  # in known directions levels may be below 1
        raise PayloadError("malformed", "factors whose product exceeds float32")
    return _Part(number, None, rows * np.float32(step), unit_columns(columns))


def _decode_side(coded: pay.CodedSide, known: Array | None, rank: int) -> Array:
    """Levels of one factor: those of its entries, and those in known directions, which need not be whole numbers."""
    held = 0 if known is None else known.shape[1]
    if coded.directions > held:
        raise PayloadError("malformed", f"{coded.directions} known directions, of which the shared basis has {held}")
    if coded.inside is None:
        assert coded.rest is not None
        return _dense(coded.rest, rank)
    assert known is not None
    made = known[:, : coded.directions] @ _dense(coded.inside, rank)
    return made if coded.rest is None else made + _dense(coded.rest, rank)


def _dense(coded: pay.CodedTile, rank: int) -> Array:
    indices, levels = decode_tile(coded.header, coded.stream, coded.tile)
    dense = np.zeros(coded.tile.height * rank, np.float32)
    dense[indices] = levels
    return dense.reshape(-1, rank)


@kernel
def _scatter_add(flat: Array, indices: Array, values: Array, weight: float) -> None:
    for k in range(indices.size):
        total = flat[indices[k]] + weight * np.float64(values[k])
        flat[indices[k]] = min(max(total, -LARGEST), LARGEST)


def _as_dtype(flat: Array, dtype: np.dtype[Any]) -> Array:
    if dtype == np.float16:  # rounding up must not leave the range
        limit = np.float32(np.finfo(np.float16).max)
        flat = np.clip(flat, -limit, limit)
    elif dtype.kind in "iu" and flat.dtype.kind == "f":  # nor may that of a mean of the largest 64-bit integers
        info = np.iinfo(dtype)
        flat = np.clip(flat, info.min, np.nextafter(float(info.max) + 1, 0))
    return flat.astype(dtype, copy=False)
