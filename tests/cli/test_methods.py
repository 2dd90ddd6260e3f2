"""`fedfq methods`: what there is, in full at any width."""

import os
import pty
import re
import subprocess
import sys

import pytest

from fedfq.methods import METHODS, make, meanings_of, options_of, written
from tests.cli.runner import ok, refused


def on_a_terminal(columns: int, *arguments: str) -> str:
    """What is printed where stdout is a terminal of that width."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", "fedfq", "methods", *arguments]
    with subprocess.Popen(command, stdout=theirs, env=environment) as process:
        os.close(theirs)
        said = b""
        try:
            while piece := os.read(ours, 1 << 16):
                said += piece
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(ours)
    assert process.returncode == 0
    return said.decode()


def test_methods_are_listed_with_their_options() -> None:
    lines = ok("methods").splitlines()
    for name in METHODS:
        [line] = [line for line in lines if line.startswith(f"{name} ") and "explains" not in line]
        assert make(name).paper in line and make(name).claims in line and make(name).client_memory in line
    assert any("ratio=256" in line for line in lines) and any("error_feedback=true" in line for line in lines)


@pytest.mark.parametrize("columns", [30, 80, 200])
def test_names_are_never_cut(columns: int) -> None:
    """Nor what else one has to type: options and their defaults."""
    words = re.split(r"\s+", on_a_terminal(columns))
    for name in METHODS:
        assert name in words
        assert all(f"{option}={written(getattr(make(name), option))}" in words for option in options_of(name))
    assert set(options_of("fedfq")) <= set(re.split(r"\s+", on_a_terminal(columns, "fedfq")))


@pytest.mark.parametrize("name", METHODS)
def test_one_is_explained(name: str) -> None:
    shown, made = ok("methods", name), make(name)
    for text in (made.summary, made.paper, made.claims, made.client_memory, made.server_memory):
        assert text in shown
    assert re.search(rf"unbiased +{'yes' if made.is_unbiased else 'no'}", shown)
    for option, (values, meaning) in meanings_of(name).items():
        row = rf"{option} +{re.escape(written(getattr(made, option)))} +{re.escape(values)} +{re.escape(meaning)}"
        assert re.search(row, shown)


def test_an_example_can_be_typed() -> None:
    for name in METHODS:
        for spec in re.findall(r"for instance: fedfq run --method (\S+)", ok("methods", name)):
            assert spec.startswith(name)
            refusal = refused("run", "--method", spec, "--rounds", "0")
            assert "rounds must be" in refusal  # so the method was fine


def test_an_unknown_one_is_refused() -> None:
    assert "unknown method 'stcc' (did you mean 'stc'?)" in refused("methods", "stcc")
