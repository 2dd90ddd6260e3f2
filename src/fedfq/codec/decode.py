"""Payloads back to tensors: `decode`, and `Accumulator` for a server that averages many."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from fedfq.types import Array

from .arrays import as_torch
from .errors import PayloadError
from .format import container
from .format.container import Payload
from .format.directions import KnownDirections
from .format.layout import Spec
from .format.parts import Part
from .format.sections import Job, Surroundings
from .format.sketch import SketchPart
from .kernels import FLOAT32_MAX
from .parallel import Spread, check_threads, with_workers
from .shared_basis import SharedBasis
from .tensors import specs

PIECE_ENTRIES = 1 << 16  # that are cast at a time

T = TypeVar("T")
AnyPart = Part | SketchPart


def decode(
    payload: bytes | bytearray | memoryview,
    *,
    like: Any = None,
    shared_basis: SharedBasis | None = None,
    max_bytes: int | None = None,
    threads: int = 1,
) -> dict[str, Any]:
    """The update in a payload: names, shapes and dtypes as they were encoded.

    `like` is the model (a mapping or module) that the update belongs to: a payload with other names or shapes is
    refused before anything is allocated; order and dtypes are the model's. It is needed for `layout="digest"`. Without
    it, an update that takes more than `max_bytes` decoded is refused (4 bytes per entry, or what its dtype takes if
    that is more); by default 65,536 times the payload's size, but 32 MiB at least and 1 GiB at most.
    Where the model's tensors are torch's, so are the results, on the CPU, with its dtypes: as `model.load_state_dict`
    takes them. All others are numpy arrays, of float32 where numpy lacks the dtype (bfloat16).
    `shared_basis` is the one that the payload was made with; one that was made without is decoded without.
    Whatever the bytes are, this returns finite numbers or raises `PayloadError`. Any threads may call it side by side.

    >>> import fedfq, numpy as np
    >>> payload = fedfq.encode({"b": np.ones(100, np.float32)}, max_bytes=60)
    >>> fedfq.decode(payload)["b"][:3].round(3)
    array([1., 1., 1.], dtype=float32)
    >>> fedfq.decode(payload[:-1])
    Traceback (most recent call last):
        ...
    fedfq.codec.errors.PayloadError: the payload is damaged: its checksum does not match
    """
    check_threads(threads)
    if max_bytes is not None and not max_bytes >= 0:
        raise ValueError(f"max_bytes must not be negative, got {max_bytes!r}")
    layout = None if like is None else specs(like)
    parsed = parse(payload, layout, max_bytes)
    return as_in(parsed.layout if layout is None else layout, decode_parsed(parsed, shared_basis, threads))


def as_in(layout: Sequence[Spec], arrays: Mapping[str, Array]) -> dict[str, Any]:
    """The tensors in the order of the layout, as those of the model: torch's where its are."""
    return {
        spec.name: arrays[spec.name] if spec.torch_dtype is None else as_torch(arrays[spec.name], spec.torch_dtype)
        for spec in layout
    }


def decode_parsed(parsed: Payload, shared_basis: SharedBasis | None, threads: int = 1) -> dict[str, Array]:
    """`decode`, for a payload that was taken apart already: numpy arrays in the payload's order."""
    layout = parsed.layout
    known = _find_known(parsed, shared_basis)

    def assemble(spread: Spread) -> list[Array]:
        parts = _decode_parts(parsed, layout, known, spread)
        return spread(lambda item: _assemble(*item), zip(layout, parts))

    arrays = with_workers(threads, assemble)
    return {spec.name: array for spec, array in zip(layout, arrays)}


def decode_each(
    payload: bytes | bytearray | memoryview,
    look: Callable[[Array], T],
    *,
    like: Any,
    shared_basis: SharedBasis | None = None,
) -> list[tuple[T, T]]:
    """What `look` says of each tensor without its sketch, and with it, in the order of `like`.

    One tensor is decoded at a time; all is checked before.
    """
    order = specs(like)
    parsed = parse(payload, order)
    layout = parsed.layout
    known = _find_known(parsed, shared_basis)

    def look_at(spec: Spec, parts: list[AnyPart]) -> tuple[T, T]:
        sections = [part for part in parts if isinstance(part, Part)]
        without = look(_assemble(spec, sections))
        return without, without if len(sections) == len(parts) else look(_assemble(spec, parts))

    def look_at_each(spread: Spread) -> list[tuple[T, T]]:
        parts = dict(zip((spec.name for spec in layout), _decode_parts(parsed, layout, known, spread)))
        return [look_at(spec, parts.pop(spec.name)) for spec in order]

    return with_workers(1, look_at_each)


def _assemble(spec: Spec, parts: Sequence[AnyPart]) -> Array:
    """The tensor that its parts make, in the memory that `container.decoded_bytes` counts."""
    if not parts:
        return np.zeros(spec.shape, spec.dtype)
    if isinstance(parts[0], Part) and not spec.is_float:
        return parts[0].values.reshape(spec.shape)
    flat = np.zeros(max(1, spec.dtype.itemsize // 4) * spec.size, np.float32)  # room for wider numbers
    for part in parts:
        part.add_to(flat[: spec.size], spec.shape, 1.0)
    return _cast_in_place(flat, spec.size, spec.dtype).reshape(spec.shape)


def _cast_in_place(flat: Array, size: int, dtype: np.dtype[Any]) -> Array:
    """The first `size` numbers of `flat`, float32, as floats of another dtype in the same memory, a piece at a time.

    Wider numbers go from the last to the first, so that none is overwritten before it was read.
    """
    if dtype == flat.dtype:
        return flat
    result = flat.view(dtype)[:size]
    starts = range(0, size, PIECE_ENTRIES)
    for start in starts if dtype.itemsize < 4 else reversed(starts):
        piece = slice(start, min(start + PIECE_ENTRIES, size))
        numbers = flat[piece].copy()
        result[piece] = numbers if dtype.itemsize > 4 else as_dtype(numbers, dtype)
    if dtype.itemsize < 4:
        del result
        flat.resize(-(-size * dtype.itemsize // 4), refcheck=False)  # what is no longer needed goes back
    return flat.view(dtype)[:size]


class Accumulator:
    """The weighted mean of any number of payloads in the memory of one model.

    Plain sections touch only their non-zero entries. A payload that is refused leaves no trace. Any number of threads
    may add to it and ask for the mean: payloads are decoded side by side and added one after the other. (Sums in
    another order may differ in their last bits.) An addition that was interrupted halfway, by Ctrl-C for instance,
    leaves sums that are of no use, and is remembered: `add` and `mean` refuse from then on.

    >>> import fedfq, numpy as np
    >>> model = {"b": np.zeros(100, np.float32)}
    >>> mean = fedfq.Accumulator(like=model)
    >>> for value in (1.0, 2.0):
    ...     mean.add(fedfq.encode({"b": np.full(100, value, np.float32)}, max_bytes=60), weight=value)
    >>> mean.mean()["b"][:2].round(2)
    array([1.67, 1.67], dtype=float32)
    """

    def __init__(self, like: Any, *, threads: int = 1) -> None:
        check_threads(threads)
        self.layout = specs(like)
        self.threads = threads
        self._lock = Lock()
        self._clear()

    def _clear(self) -> None:
        self.weight = 0.0
        self._sums: dict[str, Array] = {}  # those of tensors to which anything was added
        self._halfway = False  # some of a payload was added, and not all of it

    def __getstate__(self) -> dict[str, Any]:
        """For copies, also in other processes: they have sums and a lock of their own."""
        with self._lock:
            state = self.__dict__ | {"_sums": {name: total.copy() for name, total in self._sums.items()}}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())

    def add(
        self,
        payload: bytes | bytearray | memoryview,
        weight: float = 1.0,
        *,
        shared_basis: SharedBasis | None = None,
        scales: Mapping[str, float] | None = None,
    ) -> None:
        """Add weight times the payload's update; of tensors that are named in `scales`, so many times of it.

        Raises `PayloadError` for a payload that cannot be decoded, and `ValueError` for a weight that is not positive
        and finite as float32.
        """
        weight = _check_weight(weight)
        parsed = parse(payload, self.layout)
        layout = parsed.layout
        known = _find_known(parsed, shared_basis)

        def add(item: tuple[Spec, list[AnyPart]]) -> None:
            spec, parts = item
            scale = 1.0 if scales is None else scales.get(spec.name, 1.0)
            if parts and spec.name not in self._sums:
                self._sums[spec.name] = _zeros(spec)
            for part in parts:
                part.add_to(self._sums[spec.name], spec.shape, weight * scale)

        def add_all(spread: Spread) -> None:
            parts = _decode_parts(parsed, layout, known, spread)  # all of them, before anything is added
            with self._lock:
                self._refuse_halfway()
                self._halfway = True
                spread(add, zip(layout, parts))
                self.weight += weight
                self._halfway = False

        with_workers(self.threads, add_all)

    def mean(self) -> dict[str, Any]:
        """The mean so far, in the model's order and dtypes, as `decode` returns them; integers are rounded."""
        with self._lock:
            self._refuse_halfway()
            if self.weight == 0.0:
                raise ValueError("nothing was added yet")
            means = {
                spec.name: _divide(self._sums.get(spec.name, _zeros(spec)), self.weight, spec) for spec in self.layout
            }
        return as_in(self.layout, means)

    def drain(self) -> Iterator[tuple[str, Any]]:
        """The mean, tensor by tensor; afterwards the accumulator is as new.

        Each sum is forgotten when its mean is made, so that the two never take two models' memory.
        """
        with self._lock:
            self._refuse_halfway()
            weight, sums = self.weight, self._sums
            if weight == 0.0:
                raise ValueError("nothing was added yet")
            self._clear()
        for spec in self.layout:
            mean = _divide(sums.pop(spec.name, _zeros(spec)), weight, spec)
            yield from as_in([spec], {spec.name: mean}).items()

    def _refuse_halfway(self) -> None:
        if self._halfway:
            raise ValueError("an addition was interrupted halfway, so the sums are of no use: begin again")


def _check_weight(weight: float) -> float:
    """The weight as a float, also of an integer beyond 64 bits."""
    number = math.nan
    if isinstance(weight, (int, float, np.integer, np.floating)) and not isinstance(weight, bool):
        with suppress(OverflowError):
            number = float(weight)
    with np.errstate(over="ignore"):
        rounded = np.float32(number)
    if not (math.isfinite(rounded) and rounded > 0):
        raise ValueError(f"weight must be positive and finite as float32, got {weight!r:.60}")
    return number


def _zeros(spec: Spec) -> Array:
    """An empty sum."""
    return np.zeros(spec.size, np.float32 if spec.is_float else np.float64)


def _divide(total: Array, weight: float, spec: Spec) -> Array:
    with np.errstate(over="ignore"):  # a mean of the largest numbers may round up
        mean = total / total.dtype.type(weight)
    np.clip(mean, -FLOAT32_MAX, FLOAT32_MAX, out=mean)
    return as_dtype(mean if spec.is_float else np.rint(mean), spec.dtype).reshape(spec.shape)


def parse(data: bytes | bytearray | memoryview, like: list[Spec] | None, max_bytes: int | None = None) -> Payload:
    """`container.parse`, for whatever a caller passes."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"a payload is bytes, got {type(data).__name__}")
    return container.parse(bytes(data), like, max_bytes)


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
    if (other := shared_basis.other_than(parsed.layout)) is not None:
        raise PayloadError("basis", f"{needed}, and is of another model: {other}")
    return shared_basis.held


def _decode_parts(
    parsed: Payload, layout: Sequence[Spec], known: Mapping[str, KnownDirections], spread: Spread
) -> list[list[AnyPart]]:
    """What is not zero, decoded, by tensor: all of it, or an error."""
    parts: dict[str, list[AnyPart]] = {spec.name: [] for spec in layout}
    work: list[tuple[str, Job]] = []
    for spec in layout:
        if spec.name in parsed.sections:
            around = Surroundings(parsed.gain, parsed.step, parsed.shifts, known.get(spec.name))
            section = parsed.sections[spec.name].read(spec)
            work += [(spec.name, job) for job in section.jobs(spec, around)]
    for (name, _), part in zip(work, spread(lambda item: item[1](), work)):
        parts[name].append(part)
    if parsed.small is not None:
        for name, part in parsed.small.decode(Surroundings(parsed.gain, parsed.step, parsed.shifts)):
            parts[name].append(part)
    if parsed.sketch is not None:
        for name, estimate in parsed.sketch.decode(layout, known):
            parts[name].append(estimate)
    return list(parts.values())


def as_dtype(flat: Array, dtype: np.dtype[Any]) -> Array:
    if dtype == np.float16:  # rounding up must not leave the range
        limit = np.float32(np.finfo(np.float16).max)
        flat = np.clip(flat, -limit, limit)
    elif dtype.kind in "iu" and flat.dtype.kind == "f":  # nor may that of a mean of the largest 64-bit integers
        info = np.iinfo(dtype)
        flat = np.clip(flat, info.min, np.nextafter(float(info.max) + 1, 0))
    return flat.astype(dtype, copy=False)
