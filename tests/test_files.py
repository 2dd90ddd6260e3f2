"""Files of tensors: round trips, dtypes that numpy lacks, and everything that is refused."""

import io
import json
import os
import random
import stat
import time
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


# --- Files that are not what they seem ---------------------------------------------------------------------


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


def test_a_name_that_is_repeated_among_many_is_found_at_once(tmp_path):
    """It took a minute, as each name was looked for among all of them."""
    count = 60_000
    pairs = [f'"tensor.{k}":{{"dtype":"U8","shape":[1],"data_offsets":[{k},{k + 1}]}}' for k in range(count)]
    pairs.append(pairs[-1])
    (tmp_path / "m.safetensors").write_bytes(safetensors_bytes(f"{{{','.join(pairs)}}}".encode(), bytes(count)))
    began = time.process_time()
    with pytest.raises(ValueError, match="two tensors are named 'tensor.59999'"):
        read_tensors(tmp_path / "m.safetensors")
    assert time.process_time() - began < 5


def npy_bytes(header, data=b"\0" * 12):
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


def zipped(**members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return file.getvalue()


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,), ",  # TokenError
        b"{'descr': '<f4',\n  'x': 1}\n 'y'\n",  # IndentationError
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,), [1]: 2}\n",  # TypeError
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (10**400,)}\n",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}\n",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 1000000)}\n",
        b"{'descr': ('<f4', {}), 'fortran_order': False, 'shape': (3,)}\n",
        b"(" * 9000,
        b"x" * 20_000,
        b"\xff\n",
        b"",
    ],
    ids=range(11),
)
def test_npz_headers_that_python_cannot_read(tmp_path, header):
    (tmp_path / "m.npz").write_bytes(zipped(w=npy_bytes(header)))
    with pytest.raises(ValueError, match="m.npz: not a readable .npz file") as caught:
        read_tensors(tmp_path / "m.npz")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


FRAGMENTS = (
    *(b"(", b")", b"'", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\n", b"\\", b"\0", b"\xff", b"  \t", b"#"),
    *(b"-1", b"9" * 20, b"1e400", b"None", b"null", b"true", b"NaN", b"'O'", b"<f4", b"|V0", b"BF16", b"F8_X"),
    *(b"dtype", b"data_offsets", b"\xed\xa0\x80", b"PK\x01\x02", b"PK\x05\x06"),
)


def mutant(data, noise):
    """Some bytes are changed, added, removed or replaced by what means something to one of the readers."""
    data = bytearray(data)
    for _ in range(noise.choice([1, 1, 1, 2, 4, 9])):
        at = noise.randrange(len(data) + 1)
        some = noise.choice(FRAGMENTS)
        what = noise.randrange(6)
        if what == 0:
            data[at : at + 1] = noise.randbytes(1)
        elif what == 1:
            data[at:at] = some
        elif what == 2:
            data[at : at + len(some)] = some
        elif what == 3:
            del data[at : at + noise.randrange(1, 9)]
        elif what == 4 and at < len(data):
            data[at] ^= 1 << noise.randrange(8)
        elif noise.random() < 0.2:
            del data[at:]
    return bytes(data)


def header_mutants(whole, noise):
    """A file of each format whose header alone is changed, and all that says how long it is put right."""
    size = int.from_bytes(whole[:8], "little")
    header = mutant(whole[8 : 8 + size], noise)
    yield "m.safetensors", safetensors_bytes(header, whole[8 + size :])
    yield "m.npz", zipped(w=npy_bytes(mutant(b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }\n", noise)))


@pytest.mark.filterwarnings("ignore")  # of numpy, at headers that look like those of Python 2
def test_mutants_are_read_or_refused_in_one_line(tmp_path):
    noise = random.Random(0)
    for name in ("m.npz", "m.safetensors"):
        write_tensors(tmp_path / name, {"a.weight": np.arange(6, dtype=np.float32), "n": np.array(7)})
    valid = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    refused = 0
    for _ in range(250):
        files_ = [(name, mutant(data, noise)) for name, data in valid.items()]
        for name, data in [*files_, *header_mutants(valid["m.safetensors"], noise)]:
            (tmp_path / name).write_bytes(data)
            try:
                assert all(isinstance(array, np.ndarray) for array in read_tensors(tmp_path / name).values())
            except ValueError as error:
                assert str(error).startswith(str(tmp_path / name)) and "\n" not in str(error)
                refused += 1
    assert 500 < refused < 1000


def test_a_disk_that_fails_is_not_the_files_fault(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    write_tensors(tmp_path / "m.npz", tensors())
    monkeypatch.setattr(files.npy, "read_array", fail)
    with pytest.raises(OSError, match="Input/output error"):
        read_tensors(tmp_path / "m.npz")


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


@pytest.mark.parametrize(
    "name",
    [
        *("../w", "a/../../w", "/etc/w", "//host/w", "a//w", "./w", "a/./w", ".. /w", ".../w", "..", "a/.."),
        *("..\\w", "C:\\w", "C:w", "c:/w", "\\\\host\\w", "w\0", "w.npy\0x", "w\nx", "w" * 70_000),
    ],
    ids=lambda name: repr(name[:20]),
)
def test_no_name_leads_out_of_the_folder_where_an_npz_is_unpacked(tmp_path, name):
    """Names may be those of a stranger's payload: refused, or harmless and read back as they were."""
    path = tmp_path / "m.npz"
    tensors_ = {"w": np.zeros(2), name: np.ones(3)}
    try:
        write_tensors(path, tensors_)
    except ValueError as error:
        assert str(error).startswith(f"{path}: tensor {name[:80]!r} has a name that no file may have")
        assert not path.exists() and leftovers(tmp_path) == []
        write_tensors(tmp_path / "m.safetensors", tensors_)
        assert read_tensors(tmp_path / "m.safetensors").keys() == tensors_.keys()
    else:
        assert name in ("..", "a/..")  # the files are named "...npy"
        assert read_tensors(path).keys() == tensors_.keys()


def test_names_with_folders_unpack_into_them(tmp_path):
    names = ["encoder/layer.0/w", "kernel:0", "ein Gewicht · 重み", "", "..w", "w..", "a b/c"]
    write_tensors(tmp_path / "m.npz", {name: np.arange(3) for name in names})
    assert list(read_tensors(tmp_path / "m.npz")) == names
    with zipfile.ZipFile(tmp_path / "m.npz") as archive:
        archive.extractall(tmp_path / "unpacked")
        assert sorted(archive.namelist()) == sorted(
            str(file.relative_to(tmp_path / "unpacked")) for file in (tmp_path / "unpacked").rglob("*.npy")
        )


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
    monkeypatch.setattr(files, "CHUNK_BYTES", 7)
    data = bytes(range(100))
    (tmp_path / "data").write_bytes(data)
    assert files.checksum(tmp_path / "data") == zlib.crc32(data)
    for size in (0, 5, 7, 20, 100, 1000):
        assert files.checksum(tmp_path / "data", size) == zlib.crc32(data[:size])
