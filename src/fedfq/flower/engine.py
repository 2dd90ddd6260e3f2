"""`fedfq run --engine flower`: the app in `fedfq.flower.app`, run by Flower's own simulation.

A SuperLink of our own is started on a free port of this machine with a folder of its own, and ended with the run:
`flwr run` by itself would leave one behind.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedfq.codec.errors import FedFQError
from fedfq.federation.config import Config
from fedfq.federation.folder import Folder
from fedfq.federation.loop import Watch
from fedfq.flower.processes import (
    CONNECTION,
    START_TIMEOUT_S,
    environment,
    running,
    tail,
    tool,
    write_app,
)
from fedfq.signals import ending_by_signal

POLL_S = 0.2  # between two looks at what a run has done


def run(
    config: Config,
    out: Path,
    *,
    overwrite: bool = False,
    workers: int = 1,
    data_dir: Path | None = None,
    device: str = "cpu",
    watch: Watch,
) -> None:
    """Train a federation in Flower's simulation, with so many clients at a time. `watch` is told of every round."""
    if device != "cpu":
        raise ValueError("--device goes with the inline engine: on Flower, clients train on the processor here")
    from fedfq.flower.app import configuration, run_config

    folder = Folder(out)
    folder.refuse_if_taken(overwrite)
    settings = run_config(config)
    configuration(settings)  # what cannot be run is refused here
    folder.clear()
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
    if find_spec("ray") is None:
        raise ValueError("Flower's simulation needs Ray: pip install 'flwr[simulation]'")
    with tempfile.TemporaryDirectory(prefix="fedfq-flower-", ignore_cleanup_errors=True) as folder, ending_by_signal():
        home, log = Path(folder), Path(folder, "log.txt")
        write_app(home / "app", "fedfq-run", app, run_config)
        variables = environment(home)
        size = f"num-supernodes={nodes} client-resources-num-cpus={max(1, (os.cpu_count() or 1) // workers)}"
        command = [tool("flwr"), "run", str(home / "app"), "here", "--stream", "--federation-config", size]
        with _superlink(home, variables, log), running(command, variables, log) as process:
            while not finished():
                if process.poll() is not None and not finished():
                    raise FedFQError(f"the run on Flower ended early: {tail(log)}")
                time.sleep(POLL_S)


@contextmanager
def _superlink(home: Path, variables: Mapping[str, str], log: Path) -> Iterator[None]:
    """A SuperLink for simulations, and the connection to it in FLWR_HOME."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (home / "config.toml").write_text(CONNECTION.format(address=f"127.0.0.1:{port}"))
    command = [tool("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    with running(command, variables, log) as process:
        end = time.monotonic() + START_TIMEOUT_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > end:
                raise FedFQError(f"Flower's SuperLink did not start: {tail(log)}")
            time.sleep(POLL_S)
        yield


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
