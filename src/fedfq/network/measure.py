"""Measure rounds of Flower's deployment behind shaped links, one cell of Tables 3 and 4 at a time.

    OUT/<downlink>/<clients>-<variant>.json    conditions, environment, and one line per round
    OUT/<downlink>-slow<K>/...                 in slow motion

A cell that is there is not measured again.

Slow motion: bandwidths are divided by K, emulated steps and the time of the codec are multiplied, and `tables` divides
all seconds again. What remains is a machine whose cores do Flower's own work K times as fast, sixteen clients' on two
cores, which clients with cores of their own would not wait for.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fedfq
from fedfq.codec.ratio import DEFAULT_RATIO
from fedfq.files import write_bytes

# The paper's setting, and what its tables say: seconds per epoch, by clients.
EXAMPLES, BATCH, STEPS = 50_000, 64, 5
PAPER = {
    "table3": {2: 45.1, 4: 28.4, 8: 22.3, 16: 18.6},
    "table4": {2: 47.8, 4: 26.8, 8: 14.6, 16: 9.42},
}
CLIENTS = tuple(PAPER["table3"])
STEP_SECONDS = PAPER["table3"][2] / (EXAMPLES / (2 * BATCH))  # if communication took no time at all: the most it can be
UPLINK_MBPS = 33.0
DOWNLINKS = {"access": 10.0, "symmetric": 1.0}  # times the uplink
RATIO = float(DEFAULT_RATIO)
PARAMETERS = 269_722 + 1_376 + 19  # of ResNet-20, with batch norm's running statistics and counters
WARM_UP = 1  # rounds that do not count: connections are opened, the app is unpacked, polling falls into step
ROUNDS = 10

VARIANTS = {"table3": ("one-parameter", "fedavg"), "table4": ("one-parameter", "fedfq")}
BY_TENSOR = "fedavg-tensors"


@dataclass(frozen=True)
class NetworkCell:
    """Under what conditions rounds are measured."""

    downlink: str
    clients: int
    variant: str
    rounds: int = ROUNDS
    step_seconds: float = STEP_SECONDS
    slow_motion: float = 1.0

    def __post_init__(self) -> None:
        if self.downlink not in DOWNLINKS:
            raise ValueError(f"unknown downlink {self.downlink!r}; there are {', '.join(DOWNLINKS)}")
        if self.clients < 1 or self.rounds < 1 or not 0 <= self.step_seconds < 3600:
            raise ValueError("clients and rounds must be at least 1, and a step takes from 0 to 3600 s")
        if not 1 <= self.slow_motion <= 100:
            raise ValueError(f"slow motion is from 1 to 100 times slower, got {self.slow_motion:g}")

    @property
    def downlink_mbps(self) -> float:
        return UPLINK_MBPS * DOWNLINKS[self.downlink]

    @property
    def compute_s(self) -> float:
        return STEPS * self.step_seconds

    @property
    def folder(self) -> str:
        return self.downlink if self.slow_motion == 1 else f"{self.downlink}-slow{self.slow_motion:g}"

    def file(self, out: Path) -> Path:
        return out / self.folder / f"{self.clients}-{self.variant}.json"


def rounds_per_epoch(clients: int) -> float:
    return EXAMPLES / (BATCH * STEPS * clients)


def measure_cells(cells: Sequence[NetworkCell], out: Path, say: Callable[[str], object]) -> None:
    """Measure what is not there yet. What cannot be, or was under other conditions, is refused before anything."""
    from fedfq.network.links import Network, own_prefix, refuse_if_impossible

    missing = [cell for cell in cells if read(cell, out) is None]
    if missing:
        refuse_if_impossible(Network(own_prefix(), max(cell.clients for cell in missing)))
    for cell in missing:
        say(f"{cell.clients} clients, {cell.variant}, {cell.folder} downlink")
        rounds = measure(cell)
        path = cell.file(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        found = {"conditions": asdict(cell), "environment": environment(), "rounds": rounds}
        write_bytes(path, (json.dumps(found, indent=1) + "\n").encode())


def read(cell: NetworkCell, out: Path) -> list[dict[str, Any]] | None:
    """The rounds of a cell, or None if it was not measured yet."""
    path = cell.file(out)
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())
        conditions, rounds = found["conditions"], found["rounds"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no measurement ({error})") from None
    if conditions != asdict(cell):
        raise ValueError(f"{path}: measured under other conditions; give another folder with --out")
    return list(rounds)


def measure(cell: NetworkCell) -> list[dict[str, Any]]:
    """Build the network, run Flower in it, take it away again; returns a line for each round that counts."""
    from fedfq.network.deployment import deployed
    from fedfq.network.links import network

    config = {
        "variant": cell.variant,
        "rounds": WARM_UP + cell.rounds,
        "steps": STEPS,
        "step-seconds": cell.step_seconds,
        "ratio": RATIO,
        "model": "resnet20",
        "slow-motion": cell.slow_motion,
    }
    bandwidths = UPLINK_MBPS / cell.slow_motion, cell.downlink_mbps / cell.slow_motion
    with network(cell.clients, *bandwidths) as machines, deployed(machines) as deployment:
        return deployment.run(config)[WARM_UP:]


def environment() -> dict[str, str]:
    """Date, versions and hardware."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "fedfq": fedfq.__version__,
        "flwr": version("flwr"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
