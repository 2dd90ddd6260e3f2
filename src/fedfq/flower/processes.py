"""Flower's own processes, started by us and ended by us, in folders and with settings of our own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedfq.signals import undisturbed

APP = """\
[project]
name = "{name}"
version = "1.0.0"
description = "A run of fedfq"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedfq"

[tool.flwr.app.components]
serverapp = "fedfq_run:server"
clientapp = "fedfq_run:client"

[tool.flwr.app.config]
{config}
"""
# Flower looks for assignments to single names in it, without running it.
MODULE = """\
from {home} import client as _client
from {home} import server as _server

client = _client
server = _server
"""
CONNECTION = '[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
START_TIMEOUT_S = 60.0  # for a process to start
LONGEST_RAY_HOME = 36  # characters: the names of Ray's sockets, 70 characters below it, must not exceed 107
END_TIMEOUT_S = 3.0  # for a process to end by itself


def write_app(folder: Path, name: str, home: str, config: Mapping[str, Any]) -> None:
    """A Flower app that is the `client` and `server` of our module `home`."""
    folder.mkdir()
    lines = "\n".join(f"{key} = {_toml(value)}" for key, value in config.items())
    (folder / "pyproject.toml").write_text(APP.format(name=name, config=lines), "utf-8")
    (folder / "fedfq_run.py").write_text(MODULE.format(home=home))


def environment(home: Path) -> dict[str, str]:
    """For a process of Flower's: no calls home, its files in `home`, our tools before others."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    own = {"FLWR_HOME": str(home), "PATH": path}
    if "RAY_TMPDIR" not in os.environ and len(str(home)) < LONGEST_RAY_HOME:
        own["RAY_TMPDIR"] = str(home)  # else Ray leaves a folder behind in the system's
    return os.environ | OFFLINE | own


def tool(name: str) -> str:
    """A command of Flower's, from the environment that we run in."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ValueError(f"{name} is not installed: pip install 'fedfq[flower]'")
    return str(path)


def start(command: list[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A process that Ctrl-C does not reach; `end` ends it."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


@contextmanager
def running(command: list[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with all that it starts, ended when we leave."""
    process = start(command, environment, log)
    try:
        yield process
    finally:
        end([process])


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End processes and all that descend from them: Flower gives some a session of their own. They are asked first.

    A second Ctrl-C does not hurry it: nobody else would end them.
    """
    with undisturbed():
        _end(processes)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    family = _descendants([process.pid for process in processes])
    for kind in (signal.SIGTERM, signal.SIGKILL):
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, kind)
        deadline = time.monotonic() + END_TIMEOUT_S
        while any([process.poll() is None for process in processes]) and time.monotonic() < deadline:
            time.sleep(0.05)


def _descendants(pids: list[int]) -> list[int]:
    """These processes, their children, and so on."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(child): int(parent) for child, parent in (line.split() for line in listed.splitlines())}
    found = list(pids)
    for member in found:  # grows as we go
        found += [child for child, parent in parents.items() if parent == member]
    return found


def tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-lines:])


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
