"""A run's folder: configuration, the ledger, timings, the model, and the checkpoint to go on from.

    run.json            configuration, versions, hardware
    rounds.jsonl        a line a round; depends on the configuration alone
    timings.jsonl       a line a round: seconds
    model.safetensors   the final model
    sample.fedfq        the last payload that was accepted, for a look at its tensors
    checkpoint/         the state after some round: state.json names the files that belong to it

A checkpoint's files have the round in their names and `state.json` is replaced last: at any moment there is one whole
checkpoint, or none. Lines that were written after it are cut off before a run goes on.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

import fedfq
from fedfq.federation.config import Config, from_json
from fedfq.federation.memory import Memories
from fedfq.files import read_tensors, secure, write_bytes, write_tensors
from fedfq.methods import State
from fedfq.methods.method import Array

LEDGERS = ("rounds.jsonl", "timings.jsonl")
# All that a run, or `fedfq report` on it, leaves behind: what `--overwrite` may delete.
OURS = re.compile(
    r"run\.json|rounds\.jsonl|timings\.jsonl|model\.safetensors|sample\.fedfq|report\.html"
    r"|checkpoint(/state\.json|/(model|server)-\d+\.safetensors|/memory(/\d+-\d+\.safetensors)?)?"
    r"|(.*/)?\.fedfq-[0-9a-f]+\.part"
)


class HeldError(ValueError):
    """Another process is at work in the folder."""


class Checkpoint(NamedTuple):
    """The state after a round."""

    round: int
    theta: dict[str, Array]
    server: State
    memories: dict[int, int]  # the round of each client's memory
    sample: bytes | None = None  # the last payload that was accepted since the run began or went on


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint"
        self.memories = Memories(self.checkpoint / "memory")

    # Beginning

    def refuse_if_taken(self, overwrite: bool = False) -> None:
        """A folder that holds anything already is not for a new run, unless that is a run which may be overwritten."""
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        if not self.holds_run:
            raise ValueError(f"{self.path}: is not empty")
        if not overwrite:
            raise ValueError(f"{self.path}: already holds a run (--resume continues it, --overwrite replaces it)")
        if not {"config", "fedfq"} <= self._described().keys():
            raise ValueError(f"{self.path}: its run.json is not of a run of fedfq, so nothing is overwritten")
        for path in self.path.rglob("*"):
            if path.is_symlink() or not OURS.fullmatch(path.relative_to(self.path).as_posix()):
                raise ValueError(f"{self.path}: holds more than a run ({path.name}), so nothing is overwritten")

    def clear(self) -> None:
        """Delete the run that is here, if any; `run.json` last, so that until then it can be seen to be one."""
        found = sorted(self.path.rglob("*"), key=lambda path: (path.name != "run.json", len(path.parts)), reverse=True)
        for path in found:
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep others out. The folder itself is locked, so that nothing is left of the lock, not even after a kill.

        Folders that it made and that stay empty are taken away again. Without locks (Windows, some file systems),
        nobody is kept out.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path}: is not a folder")
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        with _locked(self.path):
            try:
                yield
            finally:
                with suppress(OSError):  # not empty
                    for folder in made:
                        folder.rmdir()

    def begin(self, config: Config, **engine: str) -> None:
        """`engine` names what the run depends on besides the inline engine's libraries."""
        self.path.mkdir(parents=True, exist_ok=True)
        described = {"config": asdict(config), **environment(), **engine}
        write_bytes(self.path / "run.json", json.dumps(described, indent=1).encode())

    @property
    def holds_run(self) -> bool:
        return (self.path / "run.json").is_file()

    def config(self) -> Config:
        """The configuration of the run that is here."""
        described = self._described()
        try:
            return from_json(described["config"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path / 'run.json'}: {error}") from None

    def _described(self) -> dict[str, Any]:
        if not self.holds_run:
            raise ValueError(f"{self.path}: no run there to resume (no run.json)")
        try:
            return dict(json.loads((self.path / "run.json").read_bytes()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path / 'run.json'}: {error}") from None

    # The ledger

    def append(self, round_: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        for name, line in zip(LEDGERS, (round_, timing)):
            with open(self.path / name, "a") as file:
                file.write(json.dumps(line) + "\n")

    def rounds(self) -> list[dict[str, Any]]:
        path = self.path / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _lines(self) -> int:
        """Whole lines of the ledger: a full disk may have left half of one behind them."""
        path = self.path / "rounds.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    # Checkpoints

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint; the one before is deleted once this one counts."""
        self.checkpoint.mkdir(parents=True, exist_ok=True)
        self.memories.secure(checkpoint.memories)
        for name in LEDGERS:
            secure(self.path / name)
        write_tensors(self._file("model", checkpoint.round), checkpoint.theta)
        write_tensors(self._file("server", checkpoint.round), checkpoint.server)
        if checkpoint.sample is not None:
            write_bytes(self.path / "sample.fedfq", checkpoint.sample)
        described = {
            "round": checkpoint.round,
            "memories": {str(client): round_ for client, round_ in checkpoint.memories.items()},
            "sizes": {name: (self.path / name).stat().st_size for name in LEDGERS},
        }
        write_bytes(self.checkpoint / "state.json", json.dumps(described).encode())
        for path in self.checkpoint.glob("*.safetensors"):
            if path not in (self._file("model", checkpoint.round), self._file("server", checkpoint.round)):
                path.unlink()
        self.memories.keep_only(checkpoint.memories)

    def restore(self) -> Checkpoint | None:
        """The last checkpoint, with everything that was written later cut off; None if there was none yet.

        A run that has lost its checkpoint, or never had one, as on Flower, cannot go on, and is left as it is.
        """
        if (engine := self._described().get("engine")) is not None:
            raise ValueError(f"{self.path}: was run on {engine}, and such a run cannot be continued")
        path = self.checkpoint / "state.json"
        if not path.exists():
            first = self.config().checkpoint_every
            if self._lines() > first or (self.path / "model.safetensors").exists():
                raise ValueError(f"{self.path}: this run has no checkpoint (any more), so it cannot be continued")
            for name in LEDGERS:
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.checkpoint, ignore_errors=True)
            return None
        described = json.loads(path.read_bytes())
        for name, size in described["sizes"].items():
            if (self.path / name).stat().st_size < size:
                raise ValueError(f"{self.path / name}: has lost rounds that the checkpoint knows of")
            os.truncate(self.path / name, size)
        memories = {int(client): round_ for client, round_ in described["memories"].items()}
        self.memories.keep_only(memories)
        theta = read_tensors(self._file("model", described["round"]))
        server = read_tensors(self._file("server", described["round"]))
        return Checkpoint(described["round"], dict(theta), dict(server), memories)

    def _file(self, what: str, round_: int) -> Path:
        return self.checkpoint / f"{what}-{round_:06d}.safetensors"

    # The end

    def finish(self, theta: Mapping[str, Array]) -> None:
        write_tensors(self.path / "model.safetensors", theta)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            os.close(descriptor)
            raise HeldError(f"{folder}: another process is at work there") from None
    try:
        yield
    finally:
        os.close(descriptor)


def environment() -> dict[str, str]:
    """Date, versions and hardware."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "fedfq": fedfq.__version__,
        **_commit(Path(fedfq.__file__).parent),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores{_processor()}",
    }


def _commit(source: Path) -> dict[str, str]:
    """Which source it is, where that is a checkout of git; with a + if it was changed since."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(source), *words], capture_output=True, text=True, timeout=10)

    try:
        if git("ls-files", "--error-unmatch", "__init__.py").returncode:  # no repository, or another project's
            return {}
        changed = "+" if git("diff", "--quiet", "HEAD", "--", ".").returncode else ""
        return {"commit": git("rev-parse", "--short=12", "HEAD").stdout.strip() + changed}
    except (OSError, subprocess.TimeoutExpired):  # no git
        return {}


def _processor() -> str:
    """Its name, which only Linux tells."""
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return ""
    return f", {found[1].strip()}" if found else ""
