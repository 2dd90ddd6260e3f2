"""CIFAR-10 from the files that people have of it, checked: the official archive, its folder, or an `.npz` file."""

from __future__ import annotations

import codecs
import gzip
import io
import pickle
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from fedfq.files import read_tensors
from fedfq.types import Array

TRAIN, TEST, CLASSES, SIDE = 50_000, 10_000, 10, 32
BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
MAX_BATCH_BYTES = 40_000_000  # a batch has 31 million
MAX_ARCHIVE_BYTES = 300_000_000  # all of them, unpacked, have 186 million


def read(path: Path, train: int = TRAIN, test: int = TEST) -> dict[str, Array]:
    """`train_images` and `test_images` of shape (n, 32, 32, 3) as bytes, `train_labels` and `test_labels` as int64.

    `path` is cifar-10-python.tar.gz, the folder cifar-10-batches-py or one that holds it, or an `.npz` file with
    x_train, y_train, x_test and y_test. `train` and `test` are how many images there must be.
    """
    path.stat()  # raises where there is nothing
    if path.is_dir():
        arrays = _from_batches(dict(_folder_batches(path)), path)
    elif path.suffix.lower() == ".npz":
        arrays = _from_npz(path)
    elif path.name.lower().endswith((".tar.gz", ".tgz")):
        arrays = _from_batches(dict(_archive_batches(path)), path)
    else:
        raise ValueError(f"{path}: neither the folder cifar-10-batches-py nor a .tar.gz or .npz file")
    for part, count in (("train", train), ("test", test)):
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        try:
            arrays[f"{part}_images"], arrays[f"{part}_labels"] = _images(images, count), _labels(labels, count)
        except ValueError as error:
            raise ValueError(f"{path}: not CIFAR-10: the {part} set has {error}") from None
    return arrays


def summary(arrays: Mapping[str, Array]) -> str:
    return f"{len(arrays['train_labels']):,} training and {len(arrays['test_labels']):,} test images"


# Checks


def _images(images: Array, count: int) -> Array:
    """The images as (count, 32, 32, 3)."""
    if images.dtype != np.uint8:
        raise ValueError(f"images of dtype {images.dtype}, not uint8")
    if images.shape == (count, 3, SIDE, SIDE):
        return np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    if images.shape != (count, SIDE, SIDE, 3):
        raise ValueError(f"images of shape {images.shape}, not {(count, SIDE, SIDE, 3)} or {(count, 3, SIDE, SIDE)}")
    return images


def _labels(labels: Array, count: int) -> Array:
    """The labels as int64; every class occurs equally often."""
    if labels.dtype.kind not in "iu":
        raise ValueError(f"labels of dtype {labels.dtype}, not integers")
    if labels.shape not in ((count,), (count, 1)):
        raise ValueError(f"labels of shape {labels.shape}, not {(count,)}")
    flat = labels.reshape(-1).astype(np.int64)
    if flat.min() < 0 or flat.max() >= CLASSES:
        raise ValueError(f"labels from {flat.min()} to {flat.max()}, not from 0 to {CLASSES - 1}")
    frequencies = np.bincount(flat, minlength=CLASSES)
    if (frequencies != count // CLASSES).any():
        rare = int(np.abs(frequencies - count // CLASSES).argmax())
        raise ValueError(f"{frequencies[rare]:,} images of class {rare}, not {count // CLASSES:,}")
    return flat


# .npz


def _from_npz(path: Path) -> dict[str, Array]:
    tensors = read_tensors(path)
    names = {"train_images": "x_train", "train_labels": "y_train", "test_images": "x_test", "test_labels": "y_test"}
    if missing := [name for name in names.values() if name not in tensors]:
        raise ValueError(f"{path}: there is no {missing[0]} in it")
    return {ours: tensors[theirs] for ours, theirs in names.items()}


# The official files: pickled batches of images in a tar archive


def _folder_batches(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    inner = path / "cifar-10-batches-py"
    folder = inner if inner.is_dir() else path
    for name in (*BATCHES, "test_batch"):
        if (folder / name).is_file():
            with open(folder / name, "rb") as file:
                yield name, _unpickle(file, f"{folder / name}")


def _archive_batches(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with gzip.open(path) as stream, tarfile.open(fileobj=cast(BinaryIO, _Bounded(stream)), mode="r|") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if name in (*BATCHES, "test_batch") and member.isfile():
                    yield name, _unpickle(archive.extractfile(member), f"{path}, {name}")
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: not a readable .tar.gz file ({error})") from error


class _Bounded:
    """A stream that fails where it gets much longer than the real archive: a small gzip file can unpack to anything."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self.stream = stream
        self.left = MAX_ARCHIVE_BYTES

    def read(self, size: int) -> bytes:
        data = self.stream.read(min(size, self.left + 1))
        self.left -= len(data)
        if self.left < 0:
            raise tarfile.TarError(f"it unpacks to more than {MAX_ARCHIVE_BYTES:,} bytes")
        return data


def _from_batches(batches: dict[str, dict[str, Any]], path: Path) -> dict[str, Array]:
    if missing := [name for name in (*BATCHES, "test_batch") if name not in batches]:
        raise ValueError(f"{path}: there is no {missing[0]} in it")
    arrays = {}
    for part, names in (("train", BATCHES), ("test", ["test_batch"])):
        try:
            pixels = np.concatenate([np.asarray(batches[name]["data"]) for name in names])
            arrays[f"{part}_images"] = pixels.reshape(-1, 3, SIDE, SIDE)
            arrays[f"{part}_labels"] = np.concatenate([np.asarray(batches[name]["labels"]) for name in names])
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{path}: not CIFAR-10: its batches do not hold data and labels ({error})") from error
    return arrays


# Unpickling: a pickle can name any function of any module, and have it called. Here it can name three.


def _unpickle(file: Any, name: str) -> dict[str, Any]:
    """A pickled dictionary, with its keys as text. Only arrays of bytes, lists, numbers and strings can be in it."""
    data = file.read(MAX_BATCH_BYTES + 1)
    if len(data) > MAX_BATCH_BYTES:
        raise ValueError(f"{name}: larger than {MAX_BATCH_BYTES:,} bytes")
    try:
        content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # damaged pickles raise whatever the calls in them raise
        raise ValueError(f"{name}: not a readable batch ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name}: not a readable batch (it holds no dictionary)")
    return {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in content.items()}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


_NDARRAY = object()  # stands for numpy.ndarray, which a pickle names but has no reason to call


def _empty_array(subtype: object, shape: tuple[int, ...], code: Any) -> Array:
    """What numpy's pickles start from; shape, type and content follow as state."""
    if subtype is not _NDARRAY or shape != (0,):
        raise pickle.UnpicklingError("an array that no pickle of numpy starts from")
    return np.empty(0, np.uint8)


def _byte_type(code: Any, *_: Any) -> Any:
    if code not in ("u1", b"u1"):
        raise pickle.UnpicklingError(f"an array of type {code!r}, not of bytes")
    return np.dtype(np.uint8, copy=True)


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into pickles that Python 2 can read."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"text in encoding {encoding!r}")
    return codecs.encode(text, "latin1")


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _byte_type,
    ("_codecs", "encode"): _latin1,
}
