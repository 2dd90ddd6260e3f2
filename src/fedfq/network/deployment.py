"""Flower's deployment on the machines of `links`: the SuperLink on the server, a SuperNode on each client, one run.

All that is started here belongs to a process group that ends with the context manager; what has left its group is
still in one of the namespaces, whose processes all end with them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedfq.flower.processes import (
    CONNECTION,
    START_TIMEOUT_S,
    end,
    environment,
    running,
    start,
    tail,
    tool,
    write_app,
)
from fedfq.network.links import SERVER_ADDRESS, Network, inside, port_in_use
from fedfq.network.warm import NAMESPACE, SOCKET, write_stand_in

PORT = 8000  # of the SuperLink
NODE_PORT = 9094  # of each SuperNode, for its own app
LIMIT_S = 3600.0  # for a run
# There are more processes than cores: one thread each.
SETTINGS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Deployment:
    """A SuperLink and its SuperNodes, up and running."""

    network: Network
    home: Path

    def run(self, config: dict[str, Any]) -> list[dict[str, Any]]:
        """Run the app of this experiment; returns the lines that its server wrote, one per round."""
        out, app, log = self.home / "rounds.jsonl", self.home / "app", self.home / "run.txt"
        meeting = self.home / "meeting"
        meeting.mkdir()
        paths = {"out": str(out), "meeting": str(meeting)}
        write_app(app, "fedfq-network", "fedfq.network.app", {**config, "clients": self.network.clients, **paths})
        command = inside(self.network.server, [tool("flwr"), "run", str(app), "here", "--stream"])
        deadline = time.monotonic() + LIMIT_S
        with running(command, _environment(self.home), log) as process:
            while len(lines := _lines(out)) < config["rounds"]:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the run on Flower ended early:\n{tail(log, 40)}")
                time.sleep(0.5)
        return lines


@contextmanager
def deployed(network: Network) -> Iterator[Deployment]:
    """Start the SuperLink and its SuperNodes, and end them on leaving."""
    if port_in_use(network.server, PORT):
        raise ValueError(f"port {PORT} is in use in the network namespace {network.server}")
    processes: list[subprocess.Popen[bytes]] = []
    with TemporaryDirectory(prefix="fedfq-network-", ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        stack.callback(end, processes)
        home = Path(folder)
        address = f"{SERVER_ADDRESS}:{PORT}"
        (home / "config.toml").write_text(CONNECTION.format(address=address))
        link = [tool("flower-superlink"), "--insecure", "--host", SERVER_ADDRESS, "--port", str(PORT)]
        superlink = start(inside(network.server, link), _environment(home), home / "superlink.txt")
        processes.append(superlink)
        warm_start = [sys.executable, "-m", "fedfq.network.warm", str(home / "warm")]
        zygote = start(inside(network.switch, warm_start), _environment(home), home / "warm.txt")
        processes.append(zygote)
        write_stand_in(home / "bin")
        _wait(lambda: port_in_use(network.server, PORT), superlink, home / "superlink.txt")
        _wait((home / "warm").exists, zygote, home / "warm.txt")
        for number in range(network.clients):
            own = home / f"client{number}"  # a folder each: they unpack the app there
            own.mkdir()
            command, log = _supernode(network, number, address), own / "log.txt"
            processes.append(start(command, _client_environment(network, home, number), log))
        yield Deployment(network, home)


def _supernode(network: Network, number: int, address: str) -> list[str]:
    node = f"partition-id={number} num-partitions={network.clients}"
    command = [tool("flower-supernode"), "--insecure", "--superlink", address, "--port", str(NODE_PORT)]
    return inside(network.client(number), [*command, "--node-config", node])


def _environment(home: Path) -> dict[str, str]:
    return environment(home) | SETTINGS


def _client_environment(network: Network, home: Path, number: int) -> dict[str, str]:
    """With the stand-in of `warm` before Flower's command of that name."""
    variables = _environment(home / f"client{number}")
    path = os.pathsep.join([str(home / "bin"), variables["PATH"]])
    return variables | {"PATH": path, SOCKET: str(home / "warm"), NAMESPACE: network.client(number)}


def _wait(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{log.stem} did not start:\n{tail(log)}")
        time.sleep(0.1)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that are complete."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
