"""CIFAR-10 out of the files that people have, and out of files that are not it."""

import os
import pickle

import numpy as np
import pytest

from fedfq.tasks import cifar10_files
from tests.tasks import miniatures
from tests.tasks.miniatures import TEST, TRAIN


def read(path):
    return cifar10_files.read(path, TRAIN, TEST)


def write_npz(path, **changes):
    np.savez(path, **{**miniatures.cifar10(), **changes})
    return path


def pickled(protocol=None):
    """The official files by name, pickled as Python 2 did or by this Python."""
    dump = miniatures.python2_pickle if protocol is None else lambda batch: pickle.dumps(batch, protocol)
    return {name: dump(batch) for name, batch in miniatures.batches(miniatures.cifar10()).items()}


def is_the_miniature(arrays):
    expected = miniatures.cifar10()
    for part in ("train", "test"):
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        assert images.dtype == np.uint8 and labels.dtype == np.int64
        assert np.array_equal(images, expected[f"x_{part}"]) and np.array_equal(labels, expected[f"y_{part}"])
    return True


# What is accepted


@pytest.mark.parametrize("protocol", [None, 2, 3])
def test_archive_and_folder(tmp_path, protocol):
    files = pickled(protocol)
    miniatures.write_archive(tmp_path / "cifar-10-python.tar.gz", {"readme.html": b"<html>", **files})
    assert is_the_miniature(read(tmp_path / "cifar-10-python.tar.gz"))
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert is_the_miniature(read(folder)) and is_the_miniature(read(tmp_path))


def test_npz(tmp_path):
    assert is_the_miniature(read(write_npz(tmp_path / "a.npz")))


def test_npz_with_channels_first_and_labels_in_a_column(tmp_path):
    arrays = {name: array.transpose(0, 3, 1, 2) for name, array in miniatures.cifar10().items() if name[0] == "x"}
    arrays |= {name: array[:, None].astype(np.uint8) for name, array in miniatures.cifar10().items() if name[0] == "y"}
    assert is_the_miniature(read(write_npz(tmp_path / "a.npz", **arrays)))


def test_the_real_sizes_are_asked_for(tmp_path):
    with pytest.raises(ValueError, match=r"shape \(50, 32, 32, 3\), not \(50000, 32, 32, 3\)"):
        cifar10_files.read(write_npz(tmp_path / "a.npz"))


def test_summary():
    arrays = {"train_labels": np.zeros(50_000), "test_labels": np.zeros(10_000)}
    assert cifar10_files.summary(arrays) == "50,000 training and 10,000 test images"


# What is not


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": np.zeros((TRAIN, 32, 32, 3))}, "the train set has images of dtype float64, not uint8"),
        ({"x_test": np.zeros((TEST, 28, 28), np.uint8)}, "the test set has images of shape"),
        ({"x_train": np.zeros((TRAIN - 1, 32, 32, 3), np.uint8)}, "the train set has images of shape"),
        ({"y_train": np.zeros(TRAIN)}, "labels of dtype float64"),
        ({"y_train": np.zeros(TRAIN - 1, int)}, "labels of shape"),
        ({"y_train": np.zeros((1, TRAIN), int)}, "labels of shape"),
        ({"y_train": np.arange(TRAIN) % 11}, "labels from 0 to 10"),
        ({"y_train": np.arange(TRAIN) % 10 - 1}, "labels from -1 to 8"),
        ({"y_train": np.arange(TRAIN) % 9}, "0 images of class 9, not 5"),
        ({"y_test": np.array([{}] * TEST, object)}, "it holds Python objects, which are never loaded"),
    ],
)
def test_other_npz_files(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        read(write_npz(tmp_path / "a.npz", **changes))
    assert str(error.value).startswith(str(tmp_path / "a.npz"))


def test_npz_without_labels(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=np.zeros(3))
    with pytest.raises(ValueError, match="there is no y_train in it"):
        read(tmp_path / "a.npz")


def test_neither_file_nor_folder(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"neither the folder .* nor"):
        read(tmp_path / "a.bin")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing")
    with pytest.raises(ValueError, match="there is no data_batch_1 in it"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch"])
def test_a_batch_is_missing(tmp_path, name):
    files = pickled()
    del files[name]
    miniatures.write_archive(tmp_path / "a.tar.gz", files)
    with pytest.raises(ValueError, match=f"there is no {name} in it"):
        read(tmp_path / "a.tar.gz")


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"no gzip", lambda data: b""])
def test_damaged_archives(tmp_path, damage):
    path = tmp_path / "a.tar.gz"
    miniatures.write_archive(path, pickled())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"a.tar.gz: not a readable .tar.gz file"):
        read(path)


def test_an_archive_that_unpacks_to_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10_files, "MAX_ARCHIVE_BYTES", 100_000)
    miniatures.write_archive(tmp_path / "a.tar.gz", {"readme.html": bytes(200_000), **pickled()})
    with pytest.raises(ValueError, match="unpacks to more than 100,000 bytes"):
        read(tmp_path / "a.tar.gz")


def test_a_batch_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10_files, "MAX_BATCH_BYTES", 10_000)
    miniatures.write_archive(tmp_path / "a.tar.gz", pickled())
    with pytest.raises(ValueError, match="data_batch_1: larger than 10,000 bytes"):
        read(tmp_path / "a.tar.gz")


# Pickles


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def hostile(tmp_path, content):
    """An otherwise good folder with a bad batch."""
    for name, data in {**pickled(), "data_batch_2": content}.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_cannot_call_the_system(tmp_path, protocol):
    command = f"touch {tmp_path / 'pwned'}"
    content = pickle.dumps({"data": Calls(os.system, command), "labels": []}, protocol)
    with pytest.raises(ValueError, match=r"data_batch_2: not a readable batch \(it asks for (posix|nt).system\)"):
        read(hostile(tmp_path, content))
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(Calls(eval, "1"), 2), "it asks for __builtin__.eval"),
        (pickle.dumps(Calls(getattr, "", "join"), 2), "it asks for __builtin__.getattr"),
        (pickle.dumps(np.float64(1), 2), "it asks for numpy"),
        (pickle.dumps(Calls(np.ndarray, (1 << 40,)), 2), "not callable"),
        (pickle.dumps({"data": np.ones((10, 3072)), "labels": []}, 2), "an array of type 'f8', not of bytes"),
        (pickle.dumps({"data": np.array([{}] * 10, object), "labels": []}, 2), "an array of type 'O8', not of bytes"),
        (b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(J\xff\xff\xff\x7ftU\x01btR.", "no pickle of numpy"),
        (b"c_codecs\nencode\n(X\x01\0\0\0aX\x04\0\0\0zliltR.", "text in encoding 'zlil'"),
        (b"(dp0\nPpersistent\ns.", "not a readable batch"),
        (b"\x80\x02", "not a readable batch"),
        (b"", "not a readable batch"),
        (pickle.dumps([1, 2]), "it holds no dictionary"),
        (pickle.dumps({"data": [[1, 2], [3]], "labels": [1]}), "its batches do not hold data and labels"),
        (pickle.dumps({b"data": 3}), "its batches do not hold data and labels"),
    ],
)
def test_other_pickles(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read(hostile(tmp_path, content))
