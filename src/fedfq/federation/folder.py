"""A run's folder: configuration, the ledger, timings, the model, and the checkpoint to go on from.

    run.json            configuration, versions, hardware
    rounds.jsonl        one line per round; depends on the configuration alone
    timings.jsonl       one line per round: seconds
    model.safetensors   the final model
    sample.fedfq        the last payload that was accepted, for a look at its tensors
    checkpoint/         the state after some round

Lines that were written after the checkpoint (`checkpoint.py`) are cut off before a run goes on.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

import fedfq
from fedfq import tasks
from fedfq.codec.format.layout import raw_bytes
from fedfq.codec.tensors import specs
from fedfq.federation.checkpoint import LEDGERS, Checkpoint, Checkpoints, naming
from fedfq.federation.config import Config, from_json
from fedfq.files import write_bytes, write_tensors
from fedfq.types import Array

# All that a run, or `fedfq report` on it, leaves behind: what `--overwrite` may delete.
OURS = re.compile(
    r"run\.json|rounds\.jsonl|timings\.jsonl|model\.safetensors|sample\.fedfq|report\.html"
    r"|checkpoint(/state\.json|/(model|server|downlink)-\d+\.safetensors|/memory(/\d+-\d+\.safetensors)?)?"
    r"|(.*/)?\.fedfq-[0-9a-f]+\.part"
)


class HeldError(ValueError):
    """Another process is at work in the folder."""


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path)

    # Beginning

    def refuse_if_taken(self, overwrite: bool = False) -> None:
        """A folder that holds anything already is not for a new run, unless that is a run which may be overwritten."""
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        if not self.holds_run:
            kept = ", so nothing is overwritten" if overwrite else ""
            raise ValueError(f"{self.path}: is not empty and holds no run{kept}")
        if not overwrite:
            raise ValueError(f"{self.path}: already holds a run (--resume continues it, --overwrite replaces it)")
        if not {"config", "fedfq"} <= self._read_description().keys():
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

    def begin(self, config: Config, model: Mapping[str, Array], **engine: str) -> None:
        """`engine` names what the run depends on besides the inline engine's libraries."""
        self.path.mkdir(parents=True, exist_ok=True)
        described = {"config": asdict(config), "raw_bytes": raw_bytes(specs(model)), **environment(), **engine}
        write_bytes(self.path / "run.json", json.dumps(described, indent=1).encode())

    @property
    def holds_run(self) -> bool:
        return (self.path / "run.json").is_file()

    def config(self) -> Config:
        """The configuration of the run that is here."""
        described = self._read_description()
        with naming(self.path / "run.json", "the description of a run"):
            config = from_json(described["config"])
            tasks.get(config.task)
        return config

    @property
    def raw_bytes(self) -> int:
        """What one update of the run's model takes as float32."""
        return int(self._read_description()["raw_bytes"])

    def _read_description(self) -> dict[str, Any]:
        if not self.holds_run:
            raise ValueError(f"{self.path}: no run there to resume (no run.json)")
        path = self.path / "run.json"
        with naming(path, "the description of a run"):
            return dict(json.loads(path.read_bytes()))

    # The ledger

    def append(self, round_: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        for name, line in zip(LEDGERS, (round_, timing)):
            with open(self.path / name, "a") as file:
                file.write(json.dumps(line) + "\n")

    def rounds(self) -> list[dict[str, Any]]:
        """The ledger, as far as its lines are whole: another process may be writing one, or a full disk have cut it."""
        path = self.path / "rounds.jsonl"
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []

    # Checkpoints

    def save(self, checkpoint: Checkpoint, config: Config) -> None:
        """Write a checkpoint of the run with this configuration."""
        if checkpoint.sample is not None:
            write_bytes(self.path / "sample.fedfq", checkpoint.sample)
        self.checkpoints.save(checkpoint, config.digest)

    def restore(self) -> Checkpoint | None:
        """The last checkpoint, with everything that was written later cut off; None if there was none yet.

        A run that has lost its checkpoint, or never had one, as on Flower, cannot go on, and is left as it is.
        """
        self._refuse_foreign()
        if (engine := self._read_description().get("engine")) is not None:
            raise ValueError(f"{self.path}: was run on {engine}, and such a run cannot be continued")
        config = self.config()
        if self.checkpoints.state.exists():
            return self.checkpoints.restore(config.digest, config.rounds)
        if len(self.rounds()) > config.checkpoint_every or (self.path / "model.safetensors").exists():
            raise ValueError(f"{self.path}: this run has no checkpoint (any more), so it cannot be continued")
        for name in LEDGERS:
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.checkpoints.folder, ignore_errors=True)
        return None

    def _refuse_foreign(self) -> None:
        """A run writes and deletes files by their names: they must be its own, and lie here.

        The folder may be a stranger's: behind a link, or among the checkpoint's files, could be anything of the user's.
        """
        for path in (*self.path.iterdir(), *self.checkpoints.folder.rglob("*")):
            name = path.relative_to(self.path).as_posix()
            if OURS.fullmatch(name):
                if not stat.S_ISREG(path.lstat().st_mode) and not stat.S_ISDIR(path.lstat().st_mode):
                    raise ValueError(f"{path}: is neither a file nor a folder, so the run cannot be continued")
            elif path.parent != self.path:
                raise ValueError(f"{path}: is not of this run, which deletes what is no longer needed there")

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
