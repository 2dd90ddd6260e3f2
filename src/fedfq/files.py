"""Tensors from and to `.safetensors` and `.npz` files.

Nothing is ever unpickled, and an output file appears whole or not at all.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from fedfq.types import Array

SUFFIXES = (".safetensors", ".npz")
CHUNK_BYTES = 1 << 20  # of a file that are read at a time

LONGEST_REASON = 300  # characters
MAX_MEMBER_NAME_BYTES = (1 << 16) - 1  # in a zip archive


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Array]:
    """The named tensors of a file. Floating-point types that numpy lacks, such as bfloat16, come back as float32.

    Raises `OSError` where the file cannot be read and `ValueError` where it is not what its suffix says.
    """
    path = Path(path)
    read = _read_safetensors if suffix(path) == ".safetensors" else _read_npz
    with open(path, "rb") as file, _refusing(path):
        return read(file, path)


class _Unreadable(ValueError):
    """What is wrong with a file, in words for the user."""


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Whatever the readers of damaged files raise is a `ValueError` of one line that names the file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # which an impossible offset is
            raise
        reason = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
        if not isinstance(error, _Unreadable):
            reason = f"not a readable {suffix(path)} file ({reason})"
        raise ValueError(f"{path}: {reason}") from error


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Array], *, durable: bool = True) -> None:
    """Write tensors in the format that the suffix names. On failure, what was there before is still there.

    What is not `durable` survives the end of the process, but perhaps not that of the machine; it takes less time.
    """
    path = Path(path)
    write = _write_safetensors if suffix(path) == ".safetensors" else _write_npz
    _write_whole(path, lambda file: write(file, tensors, path), durable)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file. On failure, what was there before is still there."""
    _write_whole(Path(path), lambda file: file.write(data))


def secure(path: str | os.PathLike[str]) -> None:
    """See to it that what was written to a file is on the disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def checksum(path: str | os.PathLike[str], size: int | None = None) -> int:
    """CRC-32 of a file, or of its first `size` bytes: it shows damage, but not who did it."""
    result, left = 0, math.inf if size is None else size
    with open(path, "rb") as file:
        while part := file.read(int(min(CHUNK_BYTES, left))):
            result = zlib.crc32(part, result)
            left -= len(part)
    return result


def suffix(path: str | os.PathLike[str]) -> str:
    """The suffix, if it is that of a file of tensors."""
    found = Path(path).suffix.lower()
    if found not in SUFFIXES:
        raise ValueError(f"{path}: a file of tensors is named {' or '.join(SUFFIXES)}")
    return found


def _write_whole(path: Path, write: Callable[[BinaryIO], Any], durable: bool = True) -> None:
    """Write to a temporary file beside `path`, and rename it when every byte is written (`durable`: on the disk)."""
    target = Path(os.path.realpath(path))  # behind a symbolic link, replace the file and not the link
    if target.exists() and not target.is_file():
        raise ValueError(f"{path}: exists and is not a regular file")
    temporary = target.parent / f".fedfq-{secrets.token_hex(8)}.part"
    try:
        with open(temporary, "xb") as file:
            write(file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:  # name the file that was asked for
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        if temporary.exists():
            temporary.unlink()


# .npz: a zip archive with one .npy file per tensor


def _read_npz(file: BinaryIO, path: Path) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    with zipfile.ZipFile(file) as archive:
        for member in archive.namelist():
            name = member.removesuffix(".npy")
            if name == member:
                raise _Unreadable(f"{member!r} in it is not an array")
            if name in tensors:
                raise _Unreadable(f"two tensors are named {name!r}")
            with archive.open(member) as data:
                tensors[name] = _read_npy(data, name)
    return tensors


def _read_npy(data: Any, name: str) -> Array:
    try:
        return npy.read_array(data, allow_pickle=False)
    except ValueError as error:
        if "Object arrays" in str(error):
            raise _Unreadable(f"tensor {name!r}: it holds Python objects, which are never loaded") from error
        raise ValueError(f"tensor {name!r}: {error}") from error


def _write_npz(file: BinaryIO, tensors: Mapping[str, Array], path: Path) -> None:
    members = {name: _member(name, path) for name in tensors}
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in tensors.items():
            member = zipfile.ZipInfo(members[name])  # dated 1980, so that same tensors make the same file
            with archive.open(member, "w", force_zip64=True) as data:
                npy.write_array(data, np.asarray(array), allow_pickle=False)


def _member(name: str, path: Path) -> str:
    """The tensor's file in the archive. Names may come from strangers: unpacked, all files must lie in one folder."""
    member = f"{name}.npy"
    folders = member.split("/")[:-1]
    outside = re.match("[A-Za-z]:", member) or any(not folder.strip(". ") for folder in folders)
    if outside or re.search(r"[\\\x00-\x1f\x7f]", member) or len(member.encode()) > MAX_MEMBER_NAME_BYTES:
        raise ValueError(f"{path}: tensor {name[:80]!r} has a name that no file may have: write .safetensors instead")
    return member


# .safetensors: the length of a JSON header, the header, and the tensors' bytes

_NUMPY = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8", "BOOL": "?"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1"},
}


def _read_safetensors(file: BinaryIO, path: Path) -> dict[str, Array]:
    """The library checks the header; the bytes are read here, because it needs PyTorch for bfloat16."""
    from safetensors import safe_open

    with safe_open(path, framework="np"):
        pass
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size), object_pairs_hook=_without_duplicates)
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        file.seek(8 + size + entry["data_offsets"][0])
        tensors[name] = _read_entry(file, name, entry)
    return tensors


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise _Unreadable(f"two tensors are named {name!r}")
        result[name] = value
    return result


def _read_entry(file: BinaryIO, name: str, entry: dict[str, Any]) -> Array:
    dtype, count = entry["dtype"], math.prod(entry["shape"])
    if dtype in _NUMPY:
        stored = np.dtype(_NUMPY[dtype])
        flat = np.fromfile(file, stored, count).astype(stored.newbyteorder("="), copy=False)
    elif dtype == "BF16":
        flat = (np.fromfile(file, "<u2", count).astype(np.uint32) << 16).view(np.float32)
    elif dtype.startswith("F8_"):
        flat = _float8_values(dtype)[np.fromfile(file, np.uint8, count)]
    else:
        raise _Unreadable(f"tensor {name!r} has dtype {dtype}, which cannot be read here")
    return flat.reshape(entry["shape"])


def _float8_values(dtype: str) -> Array:
    """What each of the 256 bytes stands for, as float32."""
    codes = np.arange(256)
    if dtype == "F8_E8M0":  # a power of two, without a sign
        values, nans = np.ldexp(1.0, codes - 127), [0xFF]
    else:
        exponent_bits, bias, nans = {
            "F8_E4M3": (4, 7, [0x7F, 0xFF]),
            "F8_E4M3FNUZ": (4, 8, [0x80]),
            "F8_E5M2": (5, 15, [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]),
            "F8_E5M2FNUZ": (5, 16, [0x80]),
        }[dtype]
        mantissa_bits = 7 - exponent_bits
        exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
        mantissa = codes & (1 << mantissa_bits) - 1
        significand = mantissa + ((exponent > 0) << mantissa_bits)
        values = np.ldexp(significand.astype(float), np.maximum(exponent, 1) - bias - mantissa_bits)
        values[128:] *= -1
    values[nans] = np.nan
    if dtype == "F8_E5M2":
        values[[0x7C, 0xFC]] = np.inf, -np.inf
    return values.astype(np.float32)


def _write_safetensors(file: BinaryIO, tensors: Mapping[str, Array], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save

    if "__metadata__" in tensors:
        raise ValueError(f"{path}: a .safetensors file cannot have a tensor named '__metadata__'")
    try:
        file.write(save({name: np.asarray(array, order="C") for name, array in tensors.items()}))
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}") from error
