"""Machines that exist only as network namespaces, and the slow link to the server that they share.

    client 0 --+
    client 1 --+-- switch ====== server
       ...     |      |              |
                      |              shaped here: the downlink, from the server to all clients
                      shaped here: the uplink, from all clients together into the server

Every end of every cable is in a namespace of our own; the machine's own interfaces, routes and rules are not touched,
and nothing in there can reach them. All is gone when the context manager is left, however that happens; a SIGKILL alone
leaves namespaces behind, and `ip netns delete` removes them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from fedfq.signals import ending_by_signal, undisturbed

TOOLS = {"ip": "iproute2", "tc": "iproute2"}  # and the package that brings them
SERVER_ADDRESS = "10.0.0.1"
MOST_CLIENTS = 200  # of one /24
BURST_BYTES = 16_000  # that may leave at once; ten packets, so that a short transfer is not faster than the link
QUEUE_MS = 200  # what may wait in front of the link, as in a usual router
INTERFACE = "eth0"  # in the namespaces of the server and the clients


@dataclass(frozen=True)
class Network:
    """The names of the namespaces, to run something in them."""

    prefix: str
    clients: int

    @property
    def server(self) -> str:
        return f"{self.prefix}-server"

    @property
    def switch(self) -> str:
        return f"{self.prefix}-switch"

    def client(self, number: int) -> str:
        return f"{self.prefix}-client{number}"

    @property
    def namespaces(self) -> list[str]:
        return [self.server, self.switch, *(self.client(number) for number in range(self.clients))]


@contextmanager
def network(
    clients: int, uplink_mbps: float, downlink_mbps: float, prefix: str | None = None, offload: bool = False
) -> Iterator[Network]:
    """Build the machines and their links, and take all of it away again, with every process that still runs there.

    With `offload` the kernel passes many packets on as one, as network cards do: there are fewer acknowledgements then,
    and counters miss headers. Without, every packet is by itself, as on the wire.
    """
    if not 1 <= clients <= MOST_CLIENTS:
        raise ValueError(f"the number of clients must be from 1 to {MOST_CLIENTS}, got {clients}")
    if not (uplink_mbps > 0 and downlink_mbps > 0):
        raise ValueError(f"bandwidths must be positive, got {uplink_mbps} and {downlink_mbps} Mbit/s")
    net = Network(prefix or own_prefix(), clients)
    refuse_if_impossible(net)
    with ending_by_signal():
        try:
            _build(net, uplink_mbps, downlink_mbps, offload)
            yield net
        finally:
            with undisturbed():
                _tear_down(net)


def inside(namespace: str, command: list[str]) -> list[str]:
    """The command, to be run in a namespace."""
    return ["ip", "netns", "exec", namespace, *command]


def counters(interface: str = INTERFACE) -> tuple[int, int]:
    """Bytes received and sent by an interface of the namespace that we are in, with all headers."""
    with open("/proc/self/net/dev") as file:
        for line in file:
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                fields = numbers.split()
                return int(fields[0]), int(fields[8])
    raise ValueError(f"there is no interface {interface} here")


def port_in_use(namespace: str, port: int) -> bool:
    found = _run("ip", "netns", "exec", namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6")
    listening = re.compile(rf":{port:04X} [0-9A-F]+:[0-9A-F]{{4}} 0A ", re.MULTILINE)
    return listening.search(found) is not None


def own_prefix() -> str:
    """Of the namespaces of this process."""
    return f"fq{os.getpid()}"


def refuse_if_impossible(net: Network) -> None:
    if os.geteuid() != 0:
        raise ValueError("network namespaces and tc need root: run this command as root (sudo)")
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise ValueError(f"the command {tool} is not there: install {package}")
    taken = set(_namespaces()) & set(net.namespaces)
    if taken:
        name = min(taken)
        raise ValueError(f"the network namespace {name} exists already: `ip netns delete {name}` removes it")


def _build(net: Network, uplink_mbps: float, downlink_mbps: float, offload: bool) -> None:
    for namespace in net.namespaces:
        _run("ip", "netns", "add", namespace)
        _in(namespace, "link set lo up")
    _in(net.switch, "link add bridge type bridge forward_delay 0 mcast_snooping 0")
    _in(net.switch, "link set bridge up")
    _plug_in(net, net.server, "server", SERVER_ADDRESS, offload)
    for number in range(net.clients):
        _plug_in(net, net.client(number), f"client{number}", f"10.0.0.{10 + number}", offload)
    _shape(net.switch, "server", uplink_mbps)
    _shape(net.server, INTERFACE, downlink_mbps)


def _plug_in(net: Network, namespace: str, port: str, address: str, offload: bool) -> None:
    """Connect a machine to the switch by a veth pair.

    It is made inside the switch, so that it never is in the host's namespace.
    """
    _in(net.switch, f"link add {port} type veth peer name {INTERFACE} netns {namespace}")
    for where, end in ((net.switch, port), (namespace, INTERFACE)):
        if not offload:
            _in(where, f"link set {end} gso_max_segs 1")
        _in(where, f"link set {end} up")
    _in(net.switch, f"link set {port} master bridge")
    _in(namespace, f"addr add {address}/24 dev {INTERFACE}")


def _shape(namespace: str, interface: str, mbps: float) -> None:
    rate = f"rate {int(mbps * 1e6)}bit burst {BURST_BYTES} latency {QUEUE_MS}ms"
    _run("tc", "-n", namespace, *f"qdisc add dev {interface} root tbf {rate}".split())


def _tear_down(net: Network) -> None:
    """End all processes in our namespaces, which we started there, and delete the namespaces."""
    there = [name for name in net.namespaces if name in _namespaces()]
    for name in there:
        for pid in _run("ip", "netns", "pids", name, check=False).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    for name in there:
        _run("ip", "netns", "delete", name, check=False)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _in(namespace: str, command: str) -> None:
    _run("ip", "-n", namespace, *command.split())


def _run(*command: str, check: bool = True) -> str:
    # A session of its own: Ctrl-C is for us, not for the command that tears down.
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if check and done.returncode:
        raise ValueError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
