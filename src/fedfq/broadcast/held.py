"""A model as clients hold it, and how it changes: the same bits on the server and on every client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fedfq.codec.codec import KEEP
from fedfq.codec.decode import as_dtype, as_in, decode_parsed, parse
from fedfq.codec.errors import PayloadError
from fedfq.codec.format.layout import Spec
from fedfq.codec.shared_basis import difference
from fedfq.codec.tensors import KEPT, Tensor, read, specs
from fedfq.metrics import energy
from fedfq.types import Array

SHORT_BITS = 12  # of a statistic's mantissa that are not sent; 11 are, as many as float16 has
SINGLE = np.dtype(np.float32)

State = dict[str, Array]


class Held(NamedTuple):
    """A model as clients hold it: floats as float32, statistics that were sent with 11 bits of mantissa.

    Nothing changes its arrays.
    """

    layout: Sequence[Spec]  # of the caller's model
    arrays: dict[str, Array]
    statistics: frozenset[str]  # names of tensors that are no weights

    @classmethod
    def of(cls, model: Any) -> Held:
        """A copy of the caller's model, which must be finite."""
        if isinstance(model, Held):  # which nothing changes
            return model
        tensors = read(model, KEEP)
        for tensor in tensors:
            if tensor.spec.is_float:
                tensor.peak()  # refuses what is not finite
        arrays = {t.spec.name: np.array(t.array, held_dtype(t.spec), order="C") for t in tensors}
        kept = frozenset(tensor.spec.name for tensor in tensors if tensor.kind == KEPT)
        return cls(specs(model), arrays, kept)

    def zeros(self) -> Held:
        return self._replace(arrays={spec.name: np.zeros(spec.shape, held_dtype(spec)) for spec in self.layout})

    def with_others(self) -> Held:
        """This model with other statistics and integers: a difference that takes as many bytes as most."""
        rng = np.random.default_rng(0)
        arrays = dict(self.arrays)
        for name in sorted(arrays):
            if name in self.statistics:
                drawn = rng.standard_normal(arrays[name].shape, np.float32) * 10 ** rng.uniform(
                    -4, 4, arrays[name].shape
                )
                arrays[name] = np.asarray(drawn, np.float32)
            elif arrays[name].dtype != SINGLE:
                arrays[name] = np.asarray(rng.integers(0, 1 << 12, arrays[name].shape)).astype(arrays[name].dtype)
        return self._replace(arrays=arrays)

    @property
    def payload_layout(self) -> list[Spec]:
        """That of a difference: statistics are whole numbers there."""
        whole = np.dtype(np.int32)
        return [
            replace(spec, dtype=whole if spec.name in self.statistics else held_dtype(spec), torch_dtype=None)
            for spec in self.layout
        ]

    def difference(self, new: Held) -> list[Tensor]:
        """What leads from this model to another one, for a codec."""
        tensors = []
        for name, old in self.arrays.items():
            if name in self.statistics:
                change = _shorten(new.arrays[name]) - _shorten(old)
            elif old.dtype == np.bool_:
                change = new.arrays[name] ^ old
            else:
                with np.errstate(over="ignore"):
                    change = new.arrays[name] - old  # of integers, modulo their range
            tensors.append(Tensor(name, np.asarray(change)))
        return tensors

    def add(self, change: Mapping[str, Array]) -> Held:
        """The model that a difference leads to."""
        arrays = {}
        for name, old in self.arrays.items():
            if name in self.statistics:
                value = _lengthen(_shorten(old) + change[name])
            elif old.dtype == np.bool_:
                value = old ^ change[name]
            else:
                with np.errstate(over="ignore"):
                    value = old + change[name]
            arrays[name] = np.asarray(value)  # not a number, where there are no dimensions
            if old.dtype == SINGLE and not np.isfinite(arrays[name]).all():
                raise PayloadError("malformed", f"tensor {name!r} of the new model has entries that are not finite")
        return self._replace(arrays=arrays)

    def apply(self, payload: bytes) -> Held:
        """The model that a payload leads to."""
        parsed = parse(payload, self.payload_layout)
        if parsed.basis is not None or parsed.sketch is not None:
            raise PayloadError("malformed", "a model on its way down with a shared basis or a sketch")
        return self.add(decode_parsed(parsed, None))

    def refuse_other(self, new: Held) -> None:
        """Refuse a model that has other tensors than this one."""
        if (other := difference(self.layout, new.layout)) is not None:
            raise ValueError(f"the new model is another one: {other}")
        for name, array in self.arrays.items():
            if new.arrays[name].dtype != array.dtype:
                raise ValueError(f"tensor {name!r} of the new model is {new.arrays[name].dtype}, not {array.dtype}")

    def distance(self, other: Held) -> float:
        """||this - other||^2, over the weights."""
        weights = [n for n, array in self.arrays.items() if array.dtype == SINGLE and n not in self.statistics]
        differences = (np.subtract(self.arrays[n], other.arrays[n], dtype=np.float64) for n in weights)
        return sum(map(energy, differences))  # in float64, beyond whose range no model's is

    def returned(self) -> dict[str, Any]:
        """A copy, with the types and dtypes of the caller's model."""
        copies = {spec.name: as_dtype(self.arrays[spec.name].copy(), spec.dtype) for spec in self.layout}
        return as_in(self.layout, copies)


def makes_models(initial: Any) -> bool:
    """Whether it is a function, or a class, that gives the initial model, and not that model."""
    return callable(initial) and (isinstance(initial, type) or not hasattr(initial, "state_dict"))


def held_dtype(spec: Spec) -> np.dtype[Any]:
    return SINGLE if spec.is_float else spec.dtype


def _shorten(statistics: Array) -> Array:
    """Floats as whole numbers of 20 bits: their first ones, rounded."""
    bits = np.asarray(statistics).view(np.uint32)
    magnitudes = np.minimum(bits & 0x7FFFFFFF, 0x7F7FF000)  # what is rounded up stays finite
    rounded = (magnitudes + 0x7FF + (magnitudes >> SHORT_BITS & 1)) >> SHORT_BITS
    return ((bits >> 31 << 31 - SHORT_BITS) | rounded).astype(np.int32)


def _lengthen(numbers: Array) -> Array:
    return (numbers.astype(np.uint32) << SHORT_BITS).view(np.float32)


# States, for checkpoints


def read_model(state: Mapping[str, Array], prefix: str, like: Held) -> Held:
    """The model whose tensors have this prefix in a state."""
    names = {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
    if names != set(like.arrays):
        raise ValueError("its model has other tensors")
    arrays = {}
    for name, old in like.arrays.items():
        array = np.array(state[prefix + name])
        if array.shape != old.shape or array.dtype != old.dtype:
            raise ValueError(f"its tensor {name!r} has another shape or dtype")
        if old.dtype == SINGLE and not np.isfinite(array).all():
            raise ValueError(f"its tensor {name!r} has entries that are not finite")
        arrays[name] = array
    return like._replace(arrays=arrays)


def read_numbers(array: Array, dtype: type) -> list[Any]:
    """The numbers in a row of this dtype, finite."""
    if array.ndim != 1 or array.dtype != dtype or not np.isfinite(array).all():
        raise ValueError("it holds other numbers")
    return list(array.tolist())


@contextmanager
def reading_state(of: str) -> Iterator[None]:
    """Whatever is wrong with a state is a `ValueError`."""
    try:
        yield
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a state of this {of}: {error}") from error
