"""The user's tensors by name: numpy arrays and torch tensors as float32, tile by tile.

Which of them are quantised, kept more precisely or carried exactly is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fedfq.types import Array

from .arrays import as_numpy, is_foreign, is_torch
from .format.layout import DTYPES, Spec
from .format.small import matrix_spec
from .format.tiles import Tile, cut_into_tiles
from .kernels import LANES, U, kernel, large_lanes

QUANTIZED, KEPT, EXACT, SMALL = "quantized", "kept", "exact", "small"  # the last is several tensors in one
EXTENSIONS = ("bfloat", "float8")  # how the names of floats begin that not every reader has


class Matrix(NamedTuple):
    """A tile and the flat float32 array it lies in."""

    flat: Array
    start: int
    stride: int
    height: int
    width: int

    def sample(self, rows: int, columns: int) -> Matrix:
        """Every so-many-th row and column, copied."""
        shape, strides = (self.height, self.width), (4 * self.stride, 4)
        view = as_strided(self.flat[self.start :], shape, strides, writeable=False)[::rows, ::columns]
        return Matrix(np.ascontiguousarray(view).reshape(-1), 0, view.shape[1], *view.shape)


class Tensor:
    """A tensor of an update: its spec, and its values tile by tile."""

    def __init__(self, name: str, value: Any, keep: tuple[str, ...] = (), dtype: np.dtype[Any] | None = None) -> None:
        self.array = as_numpy(name, value)
        if self.array.ndim > 2:  # tile by tile, another memory order would cost a copy of all of it each time
            self.array = np.ascontiguousarray(self.array)
        self.spec = Spec(name, self.array.shape, dtype or _decoded_dtype(name, self.array.dtype))
        self.kind = EXACT
        if self.spec.is_float:
            self.kind = KEPT if any(fnmatchcase(name, pattern) for pattern in keep) else QUANTIZED
        self.tiles = cut_into_tiles(self.array.shape)

    @classmethod
    def join(cls, tensors: Sequence[Tensor]) -> Tensor:
        """Small tensors as the one that they are coded as; statistics among them are left out, as zeros."""
        spec = matrix_spec([tensor.spec for tensor in tensors])
        array = np.zeros(spec.size, np.float32)
        flat = [(t.array if t.kind == QUANTIZED else np.zeros_like(t.array)).reshape(-1) for t in tensors]
        np.concatenate(flat, out=array[: sum(map(len, flat))], casting="unsafe")
        joined = cls(spec.name, array.reshape(spec.shape))
        joined.kind = SMALL
        return joined

    def matrix(self, tile: Tile) -> Matrix:
        """A tile's values as float32: a view, or a copy of this tile where dtype or memory order ask for one."""
        if self.array.ndim == 2 and not self.array.flags.c_contiguous and tile.stride == self.array.shape[1]:
            top, left = divmod(tile.start, tile.stride)
            values = self.array[top : top + tile.height, left : left + tile.width]
        else:
            flat = self.array.reshape(-1)
            if flat.dtype == np.float32 and flat.dtype.isnative and flat.flags.c_contiguous:
                return Matrix(flat, *tile)
            strides = (tile.stride * flat.strides[0], flat.strides[0])
            values = as_strided(flat[tile.start :], (tile.height, tile.width), strides, writeable=False)
        with np.errstate(over="ignore"):  # `peak` sees what does not fit into float32
            copy = np.ascontiguousarray(values, np.float32).reshape(-1)
        return Matrix(copy, 0, tile.width, tile.height, tile.width)

    def peak(self) -> float:
        """The largest magnitude. NaN and infinity, also as float32, are refused."""
        peak = 0.0
        for tile in self.tiles:
            largest = _peak(*self.matrix(tile))
            if not math.isfinite(largest):
                raise ValueError(f"tensor {self.spec.name!r} has entries that are not finite in float32")
            peak = max(peak, largest)
        return peak


def read(update: Any, keep: tuple[str, ...] = ()) -> list[Tensor]:
    """The tensors of a mapping from names to arrays or torch tensors, of pairs, or of a module."""
    return [Tensor(name, value, keep) for name, value in _iterate_named(update)]


def specs(model: Any) -> list[Spec]:
    """The layout of a model: of anything that `read` takes. Its numbers are not looked at."""
    return [_spec(name, value) for name, value in _iterate_named(model)]


def _spec(name: str, value: Any) -> Spec:
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        return Spec(name, value.shape, _decoded_dtype(name, value.dtype))
    if is_torch(value) and str(value.layout) == "torch.strided":
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype in DTYPES or dtype.startswith(EXTENSIONS):
            numbers = np.dtype(np.float32 if dtype.startswith(EXTENSIONS) else dtype)
            return Spec(name, tuple(value.shape), numbers, value.dtype)
    if is_foreign(value):
        with suppress(AttributeError, TypeError):  # not all have a shape and a dtype of numpy
            return Spec(name, tuple(map(int, value.shape)), _decoded_dtype(name, np.dtype(value.dtype)))
    return Tensor(name, value).spec


def _iterate_named(update: Any) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for name, value in _items(update):
        if not isinstance(name, str):
            raise TypeError(f"tensor names must be str, got {name!r}")
        if name in seen:
            raise ValueError(f"two tensors are named {name!r}")
        seen.add(name)
        yield name, value


def _items(update: Any) -> Iterator[tuple[Any, Any]]:
    if hasattr(update, "state_dict"):
        update = update.state_dict()
    if isinstance(update, Mapping):
        return iter(update.items())
    if isinstance(update, Iterable) and not isinstance(update, (str, bytes, np.ndarray)):
        pairs = list(update)
        if all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            return iter(pairs)
    raise TypeError(f"expected a mapping from names to arrays, got {type(update).__name__}")


def _decoded_dtype(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.name.startswith(EXTENSIONS):
        return np.dtype(np.float32)
    if dtype.name in DTYPES:
        return dtype.newbyteorder("=")
    if dtype == np.longdouble:  # another one on every platform
        return np.dtype(np.float64)
    raise TypeError(f"tensor {name!r} has dtype {dtype}, which is neither floating point, integer nor boolean")


@kernel
def _peak(flat: Array, start: int, stride: int, height: int, width: int) -> float:
    """max |h|; infinity or NaN if there is one. Magnitudes of floats are ordered as their bits are."""
    bits = flat.view(np.int32)
    largest = np.int32(0)
    for i in range(height):
        first = start + i * stride
        whole = width - width % LANES
        for j in range(0, whole, LANES):
            if large_lanes(flat, first + j, np.int32(largest + 1)):  # rarely, once the largest so far is large
                for k in range(first + j, first + j + LANES):
                    largest = max(largest, bits[U(k)] & np.int32(0x7FFFFFFF))
        for k in range(first + whole, first + width):
            largest = max(largest, bits[U(k)] & np.int32(0x7FFFFFFF))
    return float(np.array([largest], np.int32).view(np.float32)[0])
