"""Where machine code is kept, so that kernels are compiled once per machine and not in every process.

Numba can do that too, but it compares the file of a kernel alone with what it was, not those of the kernels that are
called from it; processes that compile at once may write different code under one name; and where neither the package
nor a home can be written, it fails. Here a folder belongs to one state of all kernels (`_digest`), and a file in it to
one kernel, its types and the processor. A file appears whole, and what is damaged counts as absent.

Machine code is run, so it is read only where nobody else can have put it: as sshd does with its keys, the folder, all
above it and the file itself must belong to root or to us, and be writable for nobody else (folders like /tmp, where
nobody can rename what is not theirs, may be above). The package's own folder is as good as its code.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import os
import pickle
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import compiler, serialize

from fedfq.version import __version__

LOG = logging.getLogger("fedfq")
CONFIG: Any = numba.config  # what NUMBA_... variables say
COMPILE_S = 15  # to compile all that encoding and decoding need, about
PREFIX = "kernels-"
KEPT_FOLDERS = 4  # of older states
CHECKSUM_BYTES = 32  # at the beginning of a file
SHARED_WRITE = stat.S_IWGRP | stat.S_IWOTH
PACKAGE = Path(__file__).parents[1]


def keep(compiled: Any) -> None:
    """Let a kernel that numba has not compiled yet be loaded from disk, and be stored there.

    Of numba, this needs a dispatcher's `_cache`. Where there is none (another version), nothing
    is kept.
    """
    if hasattr(compiled, "_cache"):
        compiled._cache = KernelCache(compiled.py_func)


class KernelCache:
    """What numba asks for the machine code of one kernel (in place of its `FunctionCache`).

    Whatever goes wrong here, perhaps as a later numba has changed, is said once, and the kernel is compiled.
    """

    cache_path: str | None = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = f"{function.__module__}.{function.__qualname__}"
        _digest()  # of the sources as they are now: they may change before the first call

    def load_overload(self, types: Any, target_context: Any) -> Any:
        """The code for arguments of these types; None lets numba compile."""
        target_context.refresh()
        name = self._file(types, target_context.codegen())
        for folder in _store().folders:
            if (content := _read(folder / name)) is not None:
                try:
                    return compiler.CompileResult._rebuild(target_context, *pickle.loads(content))
                except Exception as error:
                    _complain(f"compiled code in {folder} cannot be loaded: {error!r}")
        _announce()
        return None

    def save_overload(self, types: Any, result: Any) -> None:
        target = _store().target
        if target is None or result.library.has_dynamic_globals:  # addresses, which mean nothing in another process
            return
        try:
            _write(target / self._file(types, result.codegen), serialize.dumps(result._reduce()))
        except Exception as error:
            _complain(f"compiled code cannot be kept in {target}: {error!r}")

    def _file(self, types: Any, codegen: Any) -> str:
        key = repr((types, codegen.magic_tuple())).encode()  # the tuple is the processor
        return f"{self._name}-{hashlib.sha256(key).hexdigest()[:32]}"

    def enable(self) -> None: ...

    def disable(self) -> None: ...

    def flush(self) -> None: ...


# What is said, once in a process


@functools.cache
def _announce() -> None:
    """Say why the first use takes its time. Nobody asked for this, so it is a warning: others are not shown."""
    store = _store()
    if store.target is None:
        why = "; ".join(store.problems)
        LOG.warning("fedfq compiles: up to %d s, in every process, as no folder can keep it (%s)", COMPILE_S, why)
    else:
        refused = f" (not in {store.problems[0]})" if CONFIG.CACHE_DIR and store.problems else ""
        LOG.warning(
            "fedfq compiles what was not used here before: up to %d s; kept in %s%s",
            COMPILE_S,
            store.target,
            refused,
        )


@functools.cache
def _complain(message: str) -> None:
    LOG.warning(message)


# Folders


class Store(NamedTuple):
    """Folders to read from, the one of them to write to, and what is wrong with others."""

    folders: list[Path]
    target: Path | None
    problems: list[str]


@functools.cache
def _store() -> Store:
    """The places in their order, up to the first that can be written."""
    store = Store([], None, [])
    for place, checked in _places():
        folder = place / (PREFIX + _digest())
        try:
            is_new = _make(folder)
            problem = _distrust(folder, checked)
        except OSError as error:
            problem = error.strerror or str(error)
        if problem is None:
            store.folders.append(folder)
            if os.access(folder, os.W_OK):
                if is_new:
                    _remove_old(place)
                return store._replace(target=folder)
            problem = "cannot be written"
        store.problems.append(f"{place}: {problem}")
    return store


def _places() -> Iterator[tuple[Path, bool]]:
    """Where code may be kept, and whether all folders above are to be checked."""
    if not _sources():
        return  # the package is in an archive: what it was compiled from cannot be told
    if CONFIG.CACHE_DIR:
        yield Path(os.path.realpath(CONFIG.CACHE_DIR)), True
    yield PACKAGE / "codec" / "__pycache__", False
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):
        yield Path(os.path.realpath(home)) / "fedfq", True
    if hasattr(os, "getuid"):
        yield Path(os.path.realpath(os.environ.get("TMPDIR") or "/tmp")) / f"fedfq-{os.getuid()}", True


@functools.cache
def _digest() -> str:
    """Names the state of everything that makes the code what it is, but for the processor."""
    versions = (__version__, numba.__version__, np.__version__, sys.implementation.cache_tag)
    found = hashlib.sha256(repr((versions, bool(CONFIG.BOUNDSCHECK))).encode())
    for path in _sources():
        found.update(str(path.relative_to(PACKAGE)).encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def _sources() -> list[Path]:
    """All files that may have kernels, and what these call."""
    return sorted(path for folder in ("codec", "methods") for path in (PACKAGE / folder).rglob("*.py"))


def _make(folder: Path) -> bool:
    """Make a folder and those above, which others may read; whether it is new."""
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    for path in reversed(missing):
        try:
            path.mkdir(0o755)
        except FileExistsError:
            if not path.is_dir():  # a file, or a link to nowhere
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    return bool(missing)


def _distrust(folder: Path, all_above: bool) -> str | None:
    """Why code in a folder may be somebody else's; None if it cannot be."""
    for path in (folder, *(folder.parents if all_above else ())):
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return f"{path} is no folder"
        is_like_tmp = path != folder and status.st_mode & stat.S_ISVTX
        if not (_is_safe(status) or (is_like_tmp and _is_owned(status))):
            return f"others may write {path}"
    return None


def _is_safe(status: os.stat_result) -> bool:
    return _is_owned(status) and (os.name == "nt" or not status.st_mode & SHARED_WRITE)


def _is_owned(status: os.stat_result) -> bool:
    """By root, by us, or by whose package we run."""
    return os.name == "nt" or status.st_uid in (0, os.getuid(), os.stat(__file__).st_uid)


def _remove_old(place: Path) -> None:
    """Leave only some folders of older states. Who still uses one that goes compiles again."""
    with suppress(OSError):  # another process is at it, too
        found = sorted(place.glob(PREFIX + "*"), key=lambda path: path.lstat().st_mtime)
        for path in found[: -KEPT_FOLDERS - 1]:
            shutil.rmtree(path, ignore_errors=True)


# Files: a checksum, and what numba makes of compiled code


def _read(path: Path) -> bytes | None:
    """The content of a file that is whole and nobody else's; None if there is no such."""
    try:
        with path.open("rb") as file:
            if not _is_safe(os.fstat(file.fileno())):
                return None
            content = file.read()
    except OSError:
        return None
    body = content[CHECKSUM_BYTES:]
    return body if hashlib.sha256(body).digest() == content[:CHECKSUM_BYTES] else None


def _write(path: Path, content: bytes) -> None:
    """Write a file that others may read, and that appears whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(hashlib.sha256(content).digest() + content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
