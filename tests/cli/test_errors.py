"""What bad input raises is one line; what a bug raises keeps its traceback."""

import errno
import json
import subprocess
import sys

import numpy as np
import pytest

import fedfq
from fedfq.cli import codec
from fedfq.cli.errors import explain
from fedfq.codec.ratio import check_ratio
from fedfq.files import write_tensors
from fedfq.metrics import nmse
from tests.cli.runner import refused, run


def raised(function, *arguments):
    with pytest.raises(Exception) as found:
        function(*arguments)
    return found.value


def raise_(error):
    raise error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (raised(check_ratio, 0.5), "ratio must be at least 1 and finite, got 0.5"),
        (raised(fedfq.encode, {"w": np.array(["text"])}), "tensor 'w' has dtype <U4, which is neither"),  # a TypeError
        (raised(fedfq.decode, b"text"), "this is not a fedfq payload"),
        (raised(raise_, fedfq.FedFQError("whoever raises it")), "whoever raises it"),
        (raised(open, "missing.npz"), "missing.npz: No such file or directory"),
        (raised(raise_, OSError(errno.ENOSPC, "No space left on device")), "No space left on device"),
        (raised(raise_, ModuleNotFoundError(name="flwr.app")), "this needs flwr, which is not installed: pip install"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_refusal_is_explained(error, line):
    assert line in explain(error)


@pytest.mark.parametrize(
    "error",
    [
        raised(nmse, {"w": np.zeros(3)}, {"w": np.zeros(4)}),  # numpy's, from C, where we call it
        raised(nmse, {"w": np.zeros(3)}, {}),
        raised(nmse, {}),  # a TypeError: called in a wrong way
        raised(json.loads, "{"),
        raised(raise_, ValueError("of another package")),
        raised(raise_, MemoryError()),
        raised(raise_, OSError("of no operating system")),
        raised(raise_, ModuleNotFoundError(name="fedfq.misspelt")),
        raised(raise_, RuntimeError()),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_bug_is_not(error):
    assert explain(error) is None


@pytest.fixture
def update(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tensors("update.npz", {"w": np.ones((40, 40), np.float32)})


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, AssertionError, RuntimeError, MemoryError])
def test_a_bug_in_a_command_reaches_the_caller(update, monkeypatch, kind):
    bug = kind("a bug")
    monkeypatch.setattr(codec, "measure_nmse", lambda *_: raise_(bug))
    result = run("encode", "update.npz", "update.fq", "--ratio", 4)
    assert result.exit_code == 1 and result.exception is bug and "fedfq:" not in result.stderr


def test_a_bug_in_the_codec_is_not_taken_for_a_bad_file(update, monkeypatch):
    monkeypatch.setattr(fedfq.Codec, "encode", lambda *_: np.zeros(3) + np.zeros(4))
    result = run("encode", "update.npz", "update.fq", "--ratio", 4)
    assert result.exit_code == 1 and "broadcast" in str(result.exception)


def test_the_traceback_of_a_bug_is_shown(update):
    code = "from fedfq.cli import codec, main; codec.measure_nmse = lambda *_: int('a bug'); main()"
    command = [sys.executable, "-c", code, "encode", "update.npz", "update.fq", "--ratio", "4"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.count("Traceback") == 1
    assert "in encode" in result.stderr and "ValueError: invalid literal for int()" in result.stderr


def test_bad_input_of_a_command_is_one_line(update):
    assert "ratio must be at least 1" in refused("encode", "update.npz", "update.fq", "--ratio", 0)
