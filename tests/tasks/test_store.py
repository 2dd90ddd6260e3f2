"""The cache: complete or not there."""

import hashlib
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedfq import FedFQError
from fedfq.tasks import DataMissing, store
from tests.tasks import miniatures

NAMES = ("train_images", "train_labels", "test_images", "test_labels")


@pytest.fixture
def archive(tmp_path):
    np.savez(tmp_path / "cifar10.npz", **miniatures.cifar10())
    return tmp_path / "cifar10.npz"


def contents(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# Where


def test_which_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/anna")
    monkeypatch.delenv("FEDFQ_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert store.cache() == Path("/home/anna/.cache/fedfq")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert store.cache() == Path("/cache/fedfq")
    monkeypatch.setenv("FEDFQ_DATA", "/data")
    assert store.cache() == Path("/data")
    assert store.cache(Path("here")) == Path("here")


# Fetch and load


def test_fetch_then_load(cache, archive):
    message = store.fetch("cifar10", archive)
    assert message == f"cifar10: 50 training and 10 test images, in {cache / 'cifar10'}"
    assert contents(cache) == ["cifar10"] and contents(cache / "cifar10") == sorted(f"{name}.npy" for name in NAMES)
    images, labels, _, _ = store.load("cifar10")
    assert np.array_equal(images, miniatures.cifar10()["x_train"]) and isinstance(images.base, np.memmap)
    assert np.array_equal(labels, miniatures.cifar10()["y_train"]) and not labels.flags.writeable


def test_a_second_fetch_changes_nothing(cache, archive):
    store.fetch("cifar10", archive)
    before = {path: path.stat().st_mtime_ns for path in (cache / "cifar10").iterdir()}
    archive.unlink()
    assert store.fetch("cifar10") == f"cifar10 is in {cache / 'cifar10'} already"
    assert store.fetch("cifar10", archive) == f"cifar10 is in {cache / 'cifar10'} already; {archive} was not read"
    assert {path: path.stat().st_mtime_ns for path in (cache / "cifar10").iterdir()} == before


@pytest.mark.parametrize("content", ["data_batch_1", None])
def test_a_folder_of_something_else_is_not_taken_for_the_data_set(cache, archive, content):
    (cache / "cifar10").mkdir(parents=True)
    if content:
        (cache / "cifar10" / content).write_text("somebody's original")
    with pytest.raises(ValueError, match="holds something else than fedfq's cifar10; give another folder"):
        store.fetch("cifar10", archive)
    with pytest.raises(DataMissing, match="or holds something else"):
        store.load("cifar10")
    assert contents(cache / "cifar10") == ([content] if content else [])


def test_a_folder_of_ones_own(cache, archive, tmp_path):
    store.fetch("cifar10", archive, tmp_path / "a" / "b")
    assert contents(tmp_path / "a" / "b") == ["cifar10"] and contents(cache) == []
    assert len(store.load("cifar10", tmp_path / "a" / "b")) == 4


def test_unknown_data_set(cache):
    with pytest.raises(ValueError, match=r"unknown data set 'cifar' \(did you mean 'cifar10'\?\)"):
        store.fetch("cifar")


def test_missing_data_names_the_command(cache, tmp_path):
    assert issubclass(DataMissing, FedFQError)
    with pytest.raises(DataMissing, match=f"cifar10 is not in {cache}: fedfq data fetch cifar10 "):
        store.load("cifar10")
    with pytest.raises(DataMissing, match=f"fedfq data fetch shakespeare --data-dir {tmp_path} "):
        store.load("shakespeare", tmp_path)


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"text" * 100, None])
def test_damaged_data(filled, damage):
    path = filled / "cifar10" / "train_images.npy"
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    else:
        path.unlink()
    with pytest.raises(DataMissing, match=r"cifar10 is damaged, or .*: move it away, then fedfq data fetch cifar10"):
        store.load("cifar10")


# Nothing half-done


def test_a_refused_file_leaves_nothing(cache, tmp_path):
    np.savez(tmp_path / "a.npz", **{**miniatures.cifar10(), "y_train": np.zeros(50, int)})
    with pytest.raises(ValueError, match="50 images of class 0, not 5"):
        store.fetch("cifar10", tmp_path / "a.npz")
    assert contents(cache) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_fetch_leaves_nothing(cache, archive, monkeypatch, error):
    calls = []

    def fail_at_the_third(file, array, allow_pickle):
        calls.append(array)
        if len(calls) == 3:
            raise error

    monkeypatch.setattr(np, "save", fail_at_the_third)
    with pytest.raises(type(error)):
        store.fetch("cifar10", archive)
    assert contents(cache) == []


def test_a_killed_fetch_leaves_nothing_that_counts(cache, archive):
    code = (
        "import os, sys\n"
        "from functools import partial\n"
        "from pathlib import Path\n"
        "from dataclasses import replace\n"
        "from fedfq.tasks import cifar10_files, store\n"
        "read = partial(cifar10_files.read, train=50, test=10)\n"
        "store.SOURCES['cifar10'] = replace(store.SOURCES['cifar10'], read=read)\n"
        "os.fsync = lambda file: os._exit(9)\n"
        "store.fetch('cifar10', Path(sys.argv[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(archive)]).returncode == 9
    with pytest.raises(DataMissing):
        store.load("cifar10")
    store.fetch("cifar10", archive)
    assert len(store.load("cifar10")) == 4


def test_two_at_once(cache, archive, monkeypatch):
    """The other one is quicker; what it wrote stays."""
    origin = store.SOURCES["cifar10"]

    def slow_read(path):
        monkeypatch.setitem(store.SOURCES, "cifar10", origin)
        store.fetch("cifar10", archive)
        return origin.read(path)

    monkeypatch.setitem(store.SOURCES, "cifar10", replace(origin, read=slow_read))
    store.fetch("cifar10", archive)
    assert contents(cache) == ["cifar10"] and len(store.load("cifar10")) == 4


# Downloads, from an address on this disk


def at(monkeypatch, name, path, **changes):
    source = replace(store.SOURCES[name], url=path.as_uri(), **{"md5": None, **changes})
    monkeypatch.setitem(store.SOURCES, name, source)


def test_download(cache, archive, monkeypatch):
    at(monkeypatch, "cifar10", archive, md5=hashlib.md5(archive.read_bytes()).hexdigest())
    store.fetch("cifar10")
    assert contents(cache) == ["cifar10"] and len(store.load("cifar10")) == 4


def test_the_official_addresses():
    assert store.SOURCES["cifar10"].url == "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    assert store.SOURCES["cifar10"].md5 == "c58f30108f718f92721af3b95e74349a"
    assert store.SOURCES["shakespeare"].url == "https://www.gutenberg.org/files/100/old/1994-01-100.zip"


def test_a_download_of_something_else(cache, archive, monkeypatch):
    at(monkeypatch, "cifar10", archive, md5="0" * 32)
    with pytest.raises(ValueError, match="sent something else than cifar10: its MD5 is not 000"):
        store.fetch("cifar10")
    assert contents(cache) == []


def test_a_download_that_ends_early(cache, archive, monkeypatch):
    """A server that promises more than it sends."""

    class Short(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(archive.stat().st_size))
            self.end_headers()
            self.wfile.write(archive.read_bytes()[:1000])

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Short) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/cifar10.npz"
        monkeypatch.setitem(store.SOURCES, "cifar10", replace(store.SOURCES["cifar10"], url=address))
        with pytest.raises(DataMissing, match="ended after 1,000 of .* get it elsewhere, then"):
            store.fetch("cifar10")
        thread.join()
    assert contents(cache) == []


def test_a_download_without_end(cache, archive, monkeypatch):
    at(monkeypatch, "cifar10", archive, max_bytes=1000)
    with pytest.raises(ValueError, match="sends more than the 1,000 bytes expected of cifar10"):
        store.fetch("cifar10")
    assert contents(cache) == []


def test_nothing_to_download(cache, tmp_path, monkeypatch):
    at(monkeypatch, "shakespeare", tmp_path / "missing.zip")
    with pytest.raises(
        DataMissing, match=r"cannot be downloaded .*; get it elsewhere, then .* shakespeare --from PATH"
    ):
        store.fetch("shakespeare")
    assert contents(cache) == []
