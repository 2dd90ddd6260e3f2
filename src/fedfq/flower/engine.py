"""`fedfq run --engine flower`: the app in `fedfq.flower.app`, run by Flower's own simulation.

A SuperLink of our own is started on a free port of this machine with a folder of its own, and ended with the run:
`flwr run` by itself would leave one behind.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedfq.codec.errors import FedFQError
from fedfq.federation.config import Config
from fedfq.federation.folder import Folder
from fedfq.federation.loop import Watch

APP = """\
[project]
name = "fedfq-run"
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
MODULE = "from {package} import {module} as app\n\nclient = app.client\nserver = app.server\n"
CONNECTION = '[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
PATIENCE = 60.0  # seconds for a SuperLink to start
GRACE = 15.0  # seconds for a process to end
POLL = 0.2


def run(config: Config, out: Path, *, workers: int = 1, data_dir: Path | None = None, watch: Watch) -> None:
    """Train a federation in Flower's simulation, with so many clients at a time. `watch` is told of every round."""
    from fedfq.flower.app import configuration, run_config

    folder = Folder(out)
    folder.refuse_if_taken()
    settings = run_config(config)
    configuration(settings)  # what cannot be run is refused here
    paths = {"out": str(out.resolve()), "data-dir": str(data_dir.resolve()) if data_dir else ""}
    seen = 0

    def finished() -> bool:
        nonlocal seen
        for line in folder.rounds()[seen:]:
            watch(line, {})
            seen += 1
        return (out / "model.safetensors").exists()

    simulate("fedfq.flower.app", settings | paths, config.clients, workers, finished)


def simulate(app: str, run_config: Mapping[str, Any], nodes: int, workers: int, finished: Callable[[], bool]) -> None:
    """Run `client` and `server` of a module as a Flower app on so many simulated nodes, until it has `finished`."""
    package, _, module = app.rpartition(".")
    with tempfile.TemporaryDirectory(prefix="fedfq-flower-") as home:
        folder, log = Path(home, "app"), Path(home, "log.txt")
        folder.mkdir()
        lines = "\n".join(f"{key} = {_toml(value)}" for key, value in run_config.items())
        (folder / "pyproject.toml").write_text(APP.format(config=lines))
        (folder / "fedfq_run.py").write_text(MODULE.format(package=package, module=module))
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = os.environ | OFFLINE | {"FLWR_HOME": home, "PATH": path}
        size = f"num-supernodes={nodes} client-resources-num-cpus={max(1, (os.cpu_count() or 1) // workers)}"
        command = [_tool("flwr"), "run", str(folder), "here", "--stream", "--federation-config", size]
        with _superlink(home, environment, log), _process(command, environment, log) as process:
            while not finished():
                if process.poll() is not None and not finished():
                    raise FedFQError(f"the run on Flower ended early: {_tail(log)}")
                time.sleep(POLL)


@contextmanager
def _superlink(home: str, environment: dict[str, str], log: Path) -> Iterator[None]:
    """A SuperLink for simulations, and the connection to it in FLWR_HOME."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    Path(home, "config.toml").write_text(CONNECTION.format(address=f"127.0.0.1:{port}"))
    command = [_tool("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    with _process(command, environment, log) as process:
        end = time.monotonic() + PATIENCE
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > end:
                raise FedFQError(f"Flower's SuperLink did not start: {_tail(log)}")
            time.sleep(POLL)
        yield


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def _process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with all that it starts, ended when we leave."""
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        family = _family(process.pid)  # Flower gives some of them a session of their own, so that signals miss them
        _signal(family, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        _signal(family, signal.SIGKILL)
        process.wait()


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(child): int(parent) for child, parent in (line.split() for line in listed.splitlines())}
    found = [pid]
    for member in found:  # grows as we go
        found += [child for child, parent in parents.items() if parent == member]
    return found


def _signal(pids: list[int], kind: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, kind)


def _tool(name: str) -> str:
    """A command of Flower's, from the environment that we run in."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ValueError(f"{name} is not installed: pip install 'fedfq[flower]'")
    return str(path)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-lines:])
