"""A warm start for the clients' apps, run as `python -m fedfq.network.warm SOCKET`.

Flower starts a process for every message, `flwr-clientapp`, which loads Python, Flower and the app: more than a second
of a core. On a machine of its own that is a fixed cost; sixteen times on two cores, it would hide the network. So here
`flwr-clientapp` is a stand-in, first on a SuperNode's PATH, that asks this process to fork. The fork has everything
loaded, goes to the client's namespace and runs Flower's own `flwr-clientapp`. (Flower itself has warm executors, too,
but on Kubernetes alone.)
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

SOCKET, NAMESPACE = "FEDFQ_WARM_SOCKET", "FEDFQ_WARM_NAMESPACE"  # variables of a client's environment
STAND_IN = """\
#!{python} -IS
import json, os, socket, sys

folder, name = os.path.split(os.environ["{socket}"])
os.chdir(folder)  # a socket's path must be short
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(name)
    connection.sendall(json.dumps([sys.argv, dict(os.environ)]).encode())
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)  # until the fork has ended
"""
CLONE_NEWNET = 0x40000000  # of <sched.h>


def write_stand_in(folder: Path) -> None:
    folder.mkdir()
    path = folder / "flwr-clientapp"
    path.write_text(STAND_IN.format(python=sys.executable, socket=SOCKET))
    path.chmod(0o755)


def serve(path: str) -> None:
    """Fork a process for each request on the socket."""
    import httpx
    from flwr.supernode.cli import flwr_clientapp

    from fedfq.network.app import exercise

    exercise()
    httpx.Client().close()  # loads what Flower's connections need
    gc.freeze()  # forks would copy what the garbage collector touches
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    folder, name = os.path.split(path)
    os.chdir(folder)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(name)
        listening.listen(256)
        while True:
            connection, _ = listening.accept()
            with connection:
                if os.fork() == 0:
                    listening.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _run(flwr_clientapp, *json.loads(connection.makefile().read()))


def _run(main: Any, arguments: list[str], environment: dict[str, str]) -> None:
    try:
        sys.argv = arguments
        os.environ.update(environment)
        _enter(environment[NAMESPACE])
        main()
    finally:
        sys.stdout.flush()
        os._exit(0)


def _enter(namespace: str) -> None:
    """Move this process into a network namespace (os.setns is there from Python 3.12 on)."""
    with open(f"/var/run/netns/{namespace}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no way into the network namespace {namespace}")


if __name__ == "__main__":
    serve(sys.argv[1])
