"""Machines and links: they are there, as fast as they should be, and gone afterwards, whatever happens."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedfq.network import links
from fedfq.network.links import SERVER_ADDRESS, inside, network, port_in_use

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="needs root, ip and tc"
)

RECEIVE = """
import socket, time
from fedfq.network.links import counters
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    size, began = len(connection.recv(1)), time.perf_counter()
    while data := connection.recv(65536):
        size += len(data)
    print(size, time.perf_counter() - began, counters()[0])
"""
LISTEN = """
import socket, time
with socket.create_server(("0.0.0.0", {port})):
    print("ready", flush=True)
    time.sleep(60)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


def heed_signals() -> None:
    """For a process that is to be interrupted, even if we ourselves are in the background, where that is ignored."""
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, signal.SIG_DFL)


def shown(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def interfaces() -> set[str]:
    """Those of the machine itself."""
    return set(os.listdir("/sys/class/net"))


def transfer(sender: str, receiver: str, address: str, size: int) -> tuple[float, int]:
    """Seconds, and the bytes that the receiver's interface saw."""
    with subprocess.Popen(inside(receiver, [sys.executable, "-c", RECEIVE]), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        subprocess.run(inside(sender, [sys.executable, "-c", SEND, address, str(size)]), check=True)
        received, seconds, counted = process.stdout.read().split()
    assert int(received) == size
    return float(seconds), int(counted)


@needs_root
def test_the_links_are_as_fast_as_asked_for_and_counters_count_headers() -> None:
    before = interfaces()
    with network(2, uplink_mbps=20, downlink_mbps=80) as net:
        assert interfaces() == before  # nothing is in the host's namespace, not even for a moment
        assert "rate 20Mbit" in shown("tc", "-n", net.switch, "qdisc", "show", "dev", "server")
        assert "rate 80Mbit" in shown("tc", "-n", net.server, "qdisc", "show", "dev", "eth0")
        for sender, receiver, address, mbps in (
            (net.client(1), net.server, SERVER_ADDRESS, 20),
            (net.server, net.client(0), "10.0.0.10", 80),
        ):
            size = mbps * 200_000  # 1.6 s
            seconds, counted = transfer(sender, receiver, address, size)
            assert size * 1.03 < counted < size * 1.08
            assert 0.3 < 8 * counted / seconds / (mbps * 1e6) < 1.15  # a busy machine is slower than its links
    assert not any(name in shown("ip", "netns", "list") for name in net.namespaces)


@needs_root
def test_namespaces_do_not_reach_the_outside() -> None:
    with network(1, 10, 10) as net:
        assert shown("ip", "-n", net.client(0), "route").splitlines() == [
            "10.0.0.0/24 dev eth0 proto kernel scope link src 10.0.0.10 "
        ]


@needs_root
def test_an_exception_leaves_nothing_behind() -> None:
    with pytest.raises(RuntimeError, match="on purpose"), network(2, 10, 10) as net:
        sleeper = subprocess.Popen(inside(net.client(0), ["sleep", "1000"]), start_new_session=True)
        raise RuntimeError("on purpose")
    assert sleeper.wait(10) == -signal.SIGKILL
    assert net.prefix not in shown("ip", "netns", "list")


@needs_root
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(kind: signal.Signals, tmp_path: Path) -> None:
    code = """
import subprocess, sys, time
from fedfq.network.links import inside, network
with network(2, 10, 10) as net:
    subprocess.Popen(inside(net.client(1), ["sleep", "1000"]), start_new_session=True)
    print(net.prefix, flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=heed_signals,
    )
    assert process.stdout is not None
    prefix = process.stdout.readline().decode().strip()
    assert f"{prefix}-client1" in shown("ip", "netns", "list")
    pids = shown("ip", "netns", "pids", f"{prefix}-client1").split()
    process.send_signal(kind)
    assert process.wait(30) != 0
    assert prefix not in shown("ip", "netns", "list")
    assert not any(Path("/proc", pid).exists() and alive(pid) for pid in pids)


def alive(pid: str) -> bool:
    return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"


@needs_root
def test_a_namespace_that_exists_already_is_refused_and_left_alone() -> None:
    name = "fqtest-server"
    shown("ip", "netns", "add", name)
    try:
        with pytest.raises(ValueError, match="fqtest-server exists already"), network(1, 10, 10, prefix="fqtest"):
            pass
        assert shown("ip", "netns", "list").split().count(name) == 1
    finally:
        shown("ip", "netns", "delete", name)


@needs_root
def test_a_failure_halfway_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_shape", lambda *_: links._run("tc", "qdisc", "add", "dev", "nowhere", "root", "tbf"))
    with pytest.raises(ValueError, match="tc qdisc add"), network(1, 10, 10, prefix="fqhalf"):
        pass
    assert "fqhalf" not in shown("ip", "netns", "list")


@needs_root
def test_ports_in_use_are_seen_in_their_namespace_only() -> None:
    with network(1, 10, 10) as net:
        listen = LISTEN.format(port=8000)
        process = subprocess.Popen(inside(net.server, [sys.executable, "-c", listen]), stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert port_in_use(net.server, 8000)
        assert not port_in_use(net.server, 8001) and not port_in_use(net.client(0), 8000)
    assert process.wait(10) == -signal.SIGKILL


def test_without_root_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match="need root"), network(1, 10, 10):
        pass


def test_without_tc_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")
    with pytest.raises(ValueError, match="the command tc is not there: install iproute2"), network(1, 10, 10):
        pass


@pytest.mark.parametrize(
    ("clients", "up", "down"), [(0, 1, 1), (201, 1, 1), (1, 0, 1), (1, 1, -1), (1, float("nan"), 1)]
)
def test_impossible_networks_are_refused(clients: int, up: float, down: float) -> None:
    with pytest.raises(ValueError, match="must be"), network(clients, up, down):
        pass
