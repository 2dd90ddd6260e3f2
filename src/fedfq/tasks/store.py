"""Data sets on disk: fetched once, checked, and kept as `.npy` files that all processes share in memory.

The cache is `$FEDFQ_DATA`, or `fedfq` in `$XDG_CACHE_HOME` or `~/.cache`. A data set is a folder there. The folder is
filled under another name and renamed when it is complete: if it is there, it is whole.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np

from fedfq.codec.errors import FedFQError
from fedfq.hints import nearest
from fedfq.tasks import cifar10_files, shakespeare_text
from fedfq.types import Array

TIMEOUT_S = 30  # without an answer
CHUNK_BYTES = 1 << 20  # of a download that are read at a time
MIB = 1 << 20


class DataMissing(FedFQError):
    """A data set is not in the cache. The message says which command fetches it."""


@dataclass(frozen=True)
class Source:
    """Where a data set comes from, and how its files become arrays.

    `read` checks all that it reads, and raises `ValueError` if it is not the data set. `summary` says what is in it.
    """

    url: str
    md5: str | None
    max_bytes: int
    arrays: tuple[str, ...]  # that a folder of it has
    read: Callable[[Path], Mapping[str, Array]]
    summary: Callable[[Mapping[str, Array]], str]


SOURCES = {
    "cifar10": Source(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
        max_bytes=200 * MIB,
        arrays=("train_images", "train_labels", "test_images", "test_labels"),
        read=cifar10_files.read,
        summary=cifar10_files.summary,
    ),
    "shakespeare": Source(
        url="https://www.gutenberg.org/files/100/old/1994-01-100.zip",
        md5=None,  # none is published; what is in it is checked
        max_bytes=shakespeare_text.MAX_BYTES,
        arrays=("codes", "train_starts", "test_starts", "train_sizes"),
        read=shakespeare_text.read,
        summary=shakespeare_text.summary,
    ),
}


def cache(data_dir: Path | None = None) -> Path:
    """The folder that holds the data sets."""
    if data_dir is not None:
        return data_dir
    if chosen := os.environ.get("FEDFQ_DATA"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedfq"


def fetch(name: str, source: Path | None = None, data_dir: Path | None = None) -> str:
    """Put a data set into the cache, from a file or folder or else from its official address. Returns what happened."""
    if name not in SOURCES:
        valid = list(SOURCES)
        raise ValueError(f"unknown data set {name!r}{nearest(name, valid)}; the data sets are {', '.join(valid)}")
    target = cache(data_dir) / name
    if target.exists():
        if not all((target / f"{array}.npy").is_file() for array in SOURCES[name].arrays):
            raise ValueError(f"{target} holds something else than fedfq's {name}; give another folder with --data-dir")
        return f"{name} is in {target} already" + (f"; {source} was not read" if source is not None else "")
    target.parent.mkdir(parents=True, exist_ok=True)
    origin = SOURCES[name]
    # On the same disk as the target: a rename across disks would be a copy, which can stop half-way.
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as work:
        path = _download(name, origin, Path(work)) if source is None else source
        arrays = origin.read(path)
        _place(arrays, Path(work) / name, target)
    return f"{name}: {origin.summary(arrays)}, in {target}"


def load(name: str, data_dir: Path | None = None) -> list[Array]:
    """The arrays of a data set, mapped from disk and read-only."""
    folder = cache(data_dir) / name
    option = f" --data-dir {data_dir}" if data_dir is not None else ""
    if not folder.is_dir():
        raise DataMissing(f"{name} is not in {folder.parent}: fedfq data fetch {name}{option} (or with --from PATH)")
    try:
        # As plain arrays: numpy's memmap does some book-keeping at every index.
        return [np.asarray(np.load(folder / f"{array}.npy", mmap_mode="r")) for array in SOURCES[name].arrays]
    except (FileNotFoundError, ValueError, EOFError) as error:
        what = f"{folder} is damaged, or holds something else ({error})"
        raise DataMissing(f"{what}: move it away, then fedfq data fetch {name}{option}") from error


def _place(arrays: Mapping[str, Array], work: Path, target: Path) -> None:
    work.mkdir()
    for name, array in arrays.items():
        with open(work / f"{name}.npy", "wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    try:
        work.rename(target)
    except OSError:
        if not target.is_dir():  # else somebody else fetched the same meanwhile, which is as good
            raise


def _download(name: str, origin: Source, folder: Path) -> Path:
    path = folder / origin.url.rpartition("/")[2]
    digest = hashlib.md5(usedforsecurity=False)
    size = 0
    try:
        with urllib.request.urlopen(origin.url, timeout=TIMEOUT_S) as answer, open(path, "wb") as file:
            expected = answer.headers.get("Content-Length")
            while chunk := answer.read(CHUNK_BYTES):
                size += len(chunk)
                if size > origin.max_bytes:
                    raise ValueError(f"{origin.url} sends more than the {origin.max_bytes:,} bytes expected of {name}")
                digest.update(chunk)
                file.write(chunk)
            if expected is not None and size < int(expected):
                raise HTTPException(f"it ended after {size:,} of {int(expected):,} bytes")
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise DataMissing(
            f"{origin.url} cannot be downloaded ({reason}); get it elsewhere, then fedfq data fetch {name} --from PATH"
        ) from error
    if origin.md5 and digest.hexdigest() != origin.md5:
        raise ValueError(f"{origin.url} sent something else than {name}: its MD5 is not {origin.md5}")
    return path
