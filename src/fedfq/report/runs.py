"""Runs as their folders tell them, and the numbers that compare them.

A run that was killed is shown as far as it came. A folder that holds no run, or a file in it that makes no sense, is a
`ValueError` that names it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import fedfq
from fedfq.federation.config import Config, from_json
from fedfq.files import read_tensors

LAST_EVALUATIONS = 5  # whose mean is shown: one alone depends on chance

T = TypeVar("T")


class Rejected(NamedTuple):
    """An upload that the server refused. The reason may hold text that the client chose."""

    client: int
    reason: str


class RecordedRound(NamedTuple):
    """A line of the ledger. Bytes are sums over the round's clients, those of refused uploads included."""

    number: int
    accuracy: float | None  # None: not evaluated
    loss: float | None
    clients: int
    uplink_bytes: int
    downlink_bytes: int
    claimed_bits: float
    held_accuracy: float | None  # of the model that clients hold, where it is not the server's
    left_out: float | None  # of the server's model, in what clients hold: energy over that of a round's change
    rejected: tuple[Rejected, ...]


class Point(NamedTuple):
    """An evaluation, and all that was sent until then."""

    round: int
    accuracy: float
    loss: float | None
    uplink_bytes: int
    total_bytes: int  # up and down


@dataclass(frozen=True)
class RunData:
    """One run. `raw_bytes` is one client's update as float32: 4 bytes per parameter, whole numbers as they are."""

    label: str
    path: Path
    config: Config
    environment: dict[str, Any]
    rounds: tuple[RecordedRound, ...]
    timings: tuple[dict[str, float], ...]
    raw_bytes: int
    sample: fedfq.Report | None  # of the last payload that was accepted, where it is one of fedfq

    @property
    def finished(self) -> bool:
        return len(self.rounds) >= self.config.rounds

    @property
    def setting(self) -> str:
        """Only accuracies of the same setting can be compared."""
        return f"{self.config.task}, {self.config.split}"

    @cached_property
    def points(self) -> tuple[Point, ...]:
        points, uplink, total = [], 0, 0
        for line in self.rounds:
            uplink += line.uplink_bytes
            total += line.uplink_bytes + line.downlink_bytes
            if line.accuracy is not None:
                points.append(Point(line.number, line.accuracy, line.loss, uplink, total))
        return tuple(points)

    @property
    def final_accuracy(self) -> float | None:
        return self.points[-1].accuracy if self.points else None

    @property
    def best_accuracy(self) -> float | None:
        return max((point.accuracy for point in self.points), default=None)

    @property
    def last_accuracy(self) -> float | None:
        """The mean of the last evaluations."""
        last = [point.accuracy for point in self.points[-LAST_EVALUATIONS:]]
        return math.fsum(last) / len(last) if last else None

    @property
    def uplink_bytes(self) -> int:
        return sum(line.uplink_bytes for line in self.rounds)

    @property
    def downlink_bytes(self) -> int:
        return sum(line.downlink_bytes for line in self.rounds)

    @property
    def total_bytes(self) -> int:
        return self.uplink_bytes + self.downlink_bytes

    @property
    def total_ratio(self) -> float | None:
        """What both ways would take as float32, without first contacts, over what they took."""
        whole = self.taken_bytes + self.raw_bytes * sum(line.clients for line in self.rounds)
        return whole / self.total_bytes if self.total_bytes else None

    @property
    def last_held_accuracy(self) -> float | None:
        """The mean of the last evaluations, of the model that clients hold."""
        last = [line.held_accuracy for line in self.rounds if line.held_accuracy is not None][-LAST_EVALUATIONS:]
        return math.fsum(last) / len(last) if last else None

    @property
    def rejected(self) -> int:
        return sum(len(line.rejected) for line in self.rounds)

    @property
    def taken_bytes(self) -> int:
        """What the answers that the server took would be as float32.

        A client that answers "nothing new" counts as one that sent an update: not having to send it is the method's
        merit. One that was refused does not count, so the bytes of refused uploads make the ratios worse.
        """
        return self.raw_bytes * sum(line.clients - len(line.rejected) for line in self.rounds)

    @property
    def wire_ratio(self) -> float | None:
        """`taken_bytes` over all bytes that were uploaded."""
        return self.taken_bytes / self.uplink_bytes if self.uplink_bytes else None

    @property
    def claimed_ratio(self) -> float | None:
        """The same, with the bits that the method's own paper would count."""
        bits = math.fsum(line.claimed_bits for line in self.rounds)
        return 8 * self.taken_bytes / bits if bits else None

    def first_at(self, target: float) -> Point | None:
        """The first evaluation that reaches this accuracy; None if none does."""
        return next((point for point in self.points if point.accuracy >= target), None)

    def bytes_to(self, target: float) -> int | None:
        """All uploads until then."""
        point = self.first_at(target)
        return None if point is None else point.uplink_bytes

    @property
    def seconds(self) -> float:
        return math.fsum(times.get("round_s", 0.0) for times in self.timings)


def summary_rows(runs: Iterable[RunData], target: float | None = None) -> list[dict[str, Any]]:
    """One row per run. None is what there is not: no evaluation, no upload, a target that was never reached."""
    rows = []
    for run in runs:
        row = {
            "run": run.label,
            "rounds": len(run.rounds),
            "accuracy": run.final_accuracy,
            f"accuracy_last_{LAST_EVALUATIONS}": run.last_accuracy,
            "best_accuracy": run.best_accuracy,
            "uplink_bytes": run.uplink_bytes,
            "wire_ratio": run.wire_ratio,
            "claimed_ratio": run.claimed_ratio,
            "downlink_bytes": run.downlink_bytes,
            "total_bytes": run.total_bytes,
            "total_ratio": run.total_ratio,
            "held_accuracy": run.last_held_accuracy,
        }
        if target is not None:
            point = run.first_at(target)
            row["bytes_to_target"] = run.bytes_to(target)
            row["total_bytes_to_target"] = None if point is None else point.total_bytes
        rows.append(row | {"rejected": run.rejected})
    return rows


def settings(runs: Iterable[RunData]) -> dict[str, list[RunData]]:
    """Runs by their setting."""
    found: dict[str, list[RunData]] = {}
    for run in runs:
        found.setdefault(run.setting, []).append(run)
    return found


# Reading


def read_runs(paths: Sequence[Path]) -> list[RunData]:
    """The runs at these paths: each is a run's folder, or a folder of such folders."""
    folders = {folder.resolve(): folder for path in paths for folder in _folders(path)}
    return _distinct([read_run(folder) for folder in folders.values()])


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder")
    if holds_run(path):
        return [path]
    found = sorted(filter(holds_run, path.iterdir()), key=_natural)
    if not found:
        raise ValueError(f"{path}: neither a run nor a folder of runs (no run.json)")
    return found


def holds_run(path: Path) -> bool:
    return (path / "run.json").is_file()


def _natural(path: Path) -> list[str | int]:
    """A key to sort names by the numbers in them: 32 comes before 128.

    Text and numbers take turns in the key, so they are never compared with each other.
    """
    parts = re.split(r"(\d+)", path.name)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def read_run(path: Path) -> RunData:
    """The run in this folder."""
    config, environment = _read_description(path / "run.json")
    raw = _read_raw_bytes(path / "run.json", environment)
    rounds = _read_lines(path / "rounds.jsonl", _round)
    if [line.number for line in rounds] != list(range(1, len(rounds) + 1)):
        raise ValueError(f"{path / 'rounds.jsonl'}: the rounds are not 1, 2, 3, ...")
    model = read_tensors(path / "model.safetensors") if (path / "model.safetensors").exists() else None
    timings = _read_lines(path / "timings.jsonl", _timing)
    return RunData(config.label, path, config, environment, rounds, timings, raw, _read_sample(path, model))


def _read_raw_bytes(path: Path, environment: dict[str, Any]) -> int:
    raw = environment.pop("raw_bytes", None)
    if isinstance(raw, bool) or not isinstance(raw, int) or raw < 0:
        raise ValueError(f"{path}: not the description of a run (raw_bytes is {raw!r:.50})")
    return raw


def read_config(path: Path) -> Config:
    """The configuration of the run in this folder."""
    return _read_description(path / "run.json")[0]


def _read_description(path: Path) -> tuple[Config, dict[str, Any]]:
    try:
        found = json.loads(path.read_bytes())
        return from_json(found.pop("config")), found
    except KeyError as error:
        raise ValueError(f"{path}: not the description of a run (no {error})") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not the description of a run ({error})") from None


def _read_lines(path: Path, parse: Callable[[Any], T]) -> tuple[T, ...]:
    """A ledger's lines. The last one is left out if a kill cut it in half."""
    if not path.exists():
        return ()
    lines = path.read_bytes().split(b"\n")  # what follows the last line's end: nothing, or half a line
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(parse(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            if number < len(lines):
                raise ValueError(f"{path}: line {number} is damaged") from None
    return tuple(found)


def _round(line: dict[str, Any]) -> RecordedRound:
    return RecordedRound(
        number=int(line["round"]),
        accuracy=_finite_or_none(line["accuracy"]),
        loss=_finite_or_none(line["loss"]),
        clients=len(line["clients"]),
        uplink_bytes=int(line["uplink_bytes"]),
        downlink_bytes=int(line["downlink_bytes"]),
        claimed_bits=_finite(line["claimed_bits"]),
        held_accuracy=_finite_or_none(line.get("held_accuracy")),
        left_out=_finite_or_none(line.get("left_out")),
        rejected=tuple(Rejected(int(one["client"]), str(one["reason"])) for one in line["rejected"]),
    )


def _timing(line: dict[str, Any]) -> dict[str, float]:
    return {name: _finite(value) for name, value in line.items()}


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not finite")
    return number


def _finite_or_none(value: Any) -> float | None:
    return None if value is None else _finite(value)


def _read_sample(path: Path, model: Any) -> fedfq.Report | None:
    """Sizes per tensor, if the method sends payloads of fedfq: those of other methods are not recognised."""
    if model is None or not (path / "sample.fedfq").exists():
        return None
    try:
        return fedfq.inspect((path / "sample.fedfq").read_bytes(), like=model)
    except fedfq.PayloadError:
        return None


# Labels


def _distinct(runs: list[RunData]) -> list[RunData]:
    """Runs of one setting and method get what else differs into their labels, at worst the folder."""
    result = []
    for run in runs:
        same = [other for other in runs if _key(other) == _key(run)]
        differing = [name for name in asdict(run.config) if len({str(getattr(r.config, name)) for r in same}) > 1]
        label = ", ".join([run.label, *(f"{name}={getattr(run.config, name)}" for name in differing)])
        result.append(replace(run, label=label))
    taken = [_key(run) for run in result]
    return [replace(run, label=f"{run.label} ({run.path})") if taken.count(_key(run)) > 1 else run for run in result]


def _key(run: RunData) -> tuple[str, str]:
    return run.setting, run.label
