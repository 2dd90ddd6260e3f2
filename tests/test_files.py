"""Files of tensors: round trips, dtypes that numpy lacks, and everything that is refused."""

import json
import os
import stat
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file as save_torch

from fedfq import files
from fedfq.files import read_tensors, write_bytes, write_tensors

DTYPES = ("float16", "float32", "float64", "bool", "int8", "int16", "int32", "int64", "uint8", "uint64")


def tensors():
    rng = np.random.default_rng(0)
    result = {f"layer.{dtype}": (100 * rng.random((3, 4))).astype(dtype) for dtype in DTYPES}
    result["file"] = np.arange(6, dtype=np.float32).reshape(2, 3).T  # a name and a memory order that need care
    result["scalar"] = np.array(7)
    result["empty"] = np.zeros((0, 3), np.float32)
    return result


def safetensors_bytes(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def leftovers(folder):
    return [path.name for path in folder.iterdir() if path.name.endswith(".part")]


@pytest.mark.parametrize("name", ["m.npz", "m.safetensors", "M.NPZ"])
def test_round_trip(tmp_path, name):
    write_tensors(tmp_path / name, tensors())
    read = read_tensors(tmp_path / name)
    assert read.keys() == tensors().keys()
    for key, array in tensors().items():
        assert read[key].dtype == array.dtype and read[key].shape == array.shape
        np.testing.assert_array_equal(read[key], array)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("name", ["m.npz", "m.safetensors"])
def test_same_tensors_make_the_same_file(tmp_path, name):
    write_tensors(tmp_path / name, tensors())
    first = (tmp_path / name).read_bytes()
    write_tensors(tmp_path / name, tensors())
    assert (tmp_path / name).read_bytes() == first


def test_files_of_numpy_and_torch_are_read(tmp_path):
    np.savez_compressed(tmp_path / "m.npz", a=np.arange(3.0), b=np.eye(2, dtype=np.int8))
    assert read_tensors(tmp_path / "m.npz")["b"].tolist() == [[1, 0], [0, 1]]
    save_torch({"a": torch.arange(3.0)}, tmp_path / "m.safetensors", metadata={"format": "pt"})
    assert read_tensors(tmp_path / "m.safetensors")["a"].tolist() == [0, 1, 2]


def test_bfloat16_comes_back_as_float32(tmp_path):
    value = torch.randn(5, 7).to(torch.bfloat16)
    save_torch({"w": value, "b": torch.ones(3)}, tmp_path / "m.safetensors")
    read = read_tensors(tmp_path / "m.safetensors")
    assert read["w"].dtype == np.float32
    np.testing.assert_array_equal(read["w"], value.float().numpy())
    np.testing.assert_array_equal(read["b"], np.ones(3))


@pytest.mark.parametrize(
    ("dtype", "in_torch"),
    [
        ("F8_E4M3", torch.float8_e4m3fn),
        ("F8_E4M3FNUZ", torch.float8_e4m3fnuz),
        ("F8_E5M2", torch.float8_e5m2),
        ("F8_E5M2FNUZ", torch.float8_e5m2fnuz),
        ("F8_E8M0", torch.float8_e8m0fnu),
    ],
)
def test_float8_is_what_torch_makes_of_it(tmp_path, dtype, in_torch):
    codes = bytes(range(256))
    header = {"w": {"dtype": dtype, "shape": [16, 16], "data_offsets": [0, 256]}}
    (tmp_path / "m.safetensors").write_bytes(safetensors_bytes(header, codes))
    expected = torch.frombuffer(bytearray(codes), dtype=torch.uint8).view(in_torch).float().reshape(16, 16)
    np.testing.assert_array_equal(read_tensors(tmp_path / "m.safetensors")["w"], expected.numpy())


def test_files_get_the_usual_permissions(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    usual = stat.S_IMODE(os.stat(tmp_path / "plain").st_mode)
    for name in ("m.npz", "m.safetensors"):
        write_tensors(tmp_path / name, tensors())
        assert stat.S_IMODE(os.stat(tmp_path / name).st_mode) == usual


def entry(begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": [1], "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable .safetensors file"),
        (b"just some text, and no tensors", "not a readable .safetensors file"),
        (safetensors_bytes({"a": entry(0, 4)}, b"12"), "not a readable .safetensors file"),
        (safetensors_bytes({"a": entry(0, 4)}, b"123456"), "not a readable .safetensors file"),
        (safetensors_bytes({"a": entry(4, 8)}, b"12345678"), "not a readable .safetensors file"),
        (
            safetensors_bytes(b'{"a":%s,"a":%s}' % (2 * (json.dumps(entry(0, 4)).encode(),)), b"1234"),
            "two tensors are named 'a'",
        ),
        (
            safetensors_bytes({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"1"),
            "tensor 'a' has dtype F4",
        ),
    ],
    ids=["empty", "text", "short", "long", "hole", "duplicate", "float4"],
)
def test_bad_safetensors_are_refused(tmp_path, content, message):
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_tensors(tmp_path / "m.safetensors")
    assert "m.safetensors" in str(caught.value)


def test_npz_is_never_unpickled(tmp_path):
    np.savez(tmp_path / "m.npz", a=np.array([{"x": 1}], object))
    with pytest.raises(ValueError, match="m.npz: tensor 'a': it holds Python objects"):
        read_tensors(tmp_path / "m.npz")
    np.array([{"x": 1}], object).dump(tmp_path / "p.npz")
    with pytest.raises(ValueError, match="p.npz: not a readable .npz file"):
        read_tensors(tmp_path / "p.npz")


def test_damaged_npz_is_refused(tmp_path):
    path = tmp_path / "m.npz"
    np.savez(path, a=np.arange(1000.0))
    whole = path.read_bytes()
    for damaged in (b"", b"text", whole[:500], whole[:300] + b"x" + whole[301:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="m.npz"):
            read_tensors(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_npz_with_other_members_is_refused(tmp_path):
    path = tmp_path / "m.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(ValueError, match="'readme.txt' in it is not an array"):
        read_tensors(path)
    np.savez(path, a=np.arange(3))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a.npy", archive.read("a.npy"))
    with pytest.raises(ValueError, match="two tensors are named 'a'"):
        read_tensors(path)


@pytest.mark.parametrize("name", ["m.pt", "m", "m.npz.gz"])
def test_other_suffixes_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="named .safetensors or .npz"):
        write_tensors(tmp_path / name, tensors())
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match="named .safetensors or .npz"):
        read_tensors(tmp_path / name)


@pytest.mark.parametrize("name", ["m.npz", "m.safetensors"])
def test_what_cannot_be_opened_is_an_os_error(tmp_path, name):
    with pytest.raises(FileNotFoundError):
        read_tensors(tmp_path / name)
    (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError):
        read_tensors(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "unwritable"),
    [
        ("m.npz", {"a": np.arange(3), "b": np.array([{}], object)}),
        ("m.safetensors", {"a": np.arange(3), "b": np.array(["x"])}),
        ("m.safetensors", {"a": np.arange(3), "__metadata__": np.arange(3)}),
    ],
)
def test_a_failed_write_leaves_the_old_file(tmp_path, name, unwritable):
    write_tensors(tmp_path / name, {"a": np.zeros(2)})
    with pytest.raises(ValueError):
        write_tensors(tmp_path / name, unwritable)
    assert read_tensors(tmp_path / name)["a"].tolist() == [0, 0]
    assert leftovers(tmp_path) == []


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left on device: .*out.fq"):
        write_bytes(tmp_path / "out.fq", b"12345")
    assert list(tmp_path.iterdir()) == []


def test_write_where_nothing_can_be_written(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        write_bytes(tmp_path / "no" / "out.fq", b"")
    assert caught.value.filename == str(tmp_path / "no" / "out.fq")
    with pytest.raises(ValueError, match="not a regular file"):
        write_bytes(tmp_path, b"")
    assert Path(os.devnull).exists()
    with pytest.raises(ValueError, match="not a regular file"):
        write_bytes(os.devnull, b"")


def test_a_symbolic_link_stays_one(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_bytes(tmp_path / "link", b"12345")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == b"12345"


def test_a_checksum_is_that_of_all_bytes_or_of_the_first_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 7)
    data = bytes(range(100))
    (tmp_path / "data").write_bytes(data)
    assert files.checksum(tmp_path / "data") == zlib.crc32(data)
    for size in (0, 5, 7, 20, 100, 1000):
        assert files.checksum(tmp_path / "data", size) == zlib.crc32(data[:size])
