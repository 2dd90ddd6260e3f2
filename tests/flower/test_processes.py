"""Processes of Flower's are started by us and ended by us, whatever ends us."""

import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from fedfq.flower.processes import environment, write_app
from tests.network.test_links import alive, heed_signals

PROGRAM = """
import sys, time
from pathlib import Path
from fedfq.flower.processes import running
from fedfq.signals import ending_by_signal

command = ["bash", "-c", "trap '' TERM; setsid sleep 1234 & sleep 1234"]  # one of them leaves its session
with ending_by_signal(), running(command, {"PATH": "/usr/bin:/bin"}, Path(sys.argv[1])) as process:
    print(process.pid, flush=True)
    time.sleep(1000)
"""


def family(parent: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True).stdout
    return [int(line) for line in found.split()]


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_nothing_is_left_whatever_ends_us_and_however_impatiently(tmp_path: Path, kind: int, code: int) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed_signals) as process:
        assert process.stdout is not None
        parent = int(process.stdout.readline())
        while len(children := family(parent)) < 2:
            time.sleep(0.05)
        process.send_signal(kind)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)  # while it waits for them
        assert process.wait(30) == code
    assert not any(Path("/proc", str(pid)).exists() and alive(str(pid)) for pid in (parent, *children))


@pytest.mark.parametrize("path", ["/home/anna/runs", 'a "quoted" one', "back\\slash", "with 😀 in it", "line\nbreak"])
def test_any_path_can_stand_in_an_apps_configuration(tmp_path: Path, path: str) -> None:
    settings = {"out": path, "ratio": 64, "gain": True, "lr": 0.1}
    write_app(tmp_path / "app", "name", "fedfq.flower.app", settings)
    described = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text("utf-8"))
    assert described["tool"]["flwr"]["app"]["config"] == settings


def test_ray_leaves_its_files_where_ours_are_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert environment(Path("/tmp/short"))["RAY_TMPDIR"] == "/tmp/short"
    assert "RAY_TMPDIR" not in environment(Path("/tmp", "long" * 20))  # the names of its sockets would not fit
    monkeypatch.setenv("RAY_TMPDIR", "/data")
    assert environment(Path("/tmp/short"))["RAY_TMPDIR"] == "/data"
