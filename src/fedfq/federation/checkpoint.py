"""The state after some round, on disk, from which a run goes on.

    state.json                  the round; checksums and sizes of all that belongs to it; a digest of the configuration
    model-ROUND.safetensors     the global model
    server-ROUND.safetensors    what the method's server keeps
    downlink-ROUND.safetensors  what the way down keeps
    memory/                     what its clients keep

The files have the round in their names and `state.json` is replaced last: at any moment there is one whole checkpoint,
or none. What it says is checked before anything is touched, and no name of a file is taken from it: the folder may be a
stranger's, or a disk's that fails.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedfq.federation.memory import Memories, Written
from fedfq.files import checksum, read_tensors, secure, write_bytes, write_tensors
from fedfq.methods import State
from fedfq.types import Array

LEDGERS = ("rounds.jsonl", "timings.jsonl")
TENSORS = ("model", "server", "downlink")
BROKEN = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # what JSON of another form raises


class Checkpoint(NamedTuple):
    """The state after a round."""

    round: int
    theta: Mapping[str, Array]
    server: State
    downlink: State
    memories: Mapping[int, Written]  # by client
    held: Mapping[int, int]  # the version of the model that a client holds
    sample: bytes | None = None  # the last payload that was accepted since the run began or went on


class Described(NamedTuple):
    """What `state.json` says."""

    round: int
    config: str
    sizes: dict[str, int]  # of the ledgers, in bytes
    checksums: dict[str, int]  # of the ledgers, up to there, and of the files of tensors
    memories: dict[int, Written]
    held: dict[int, int]  # by client


class Checkpoints:
    """The checkpoint of the run in a folder."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.folder = run / "checkpoint"
        self.state = self.folder / "state.json"
        self.memories = Memories(self.folder / "memory")

    def save(self, checkpoint: Checkpoint, config: str) -> None:
        """Write a checkpoint; the one before is deleted once this one counts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.memories.secure(checkpoint.memories)
        for name in LEDGERS:
            secure(self.run / name)
        files = {what: self._file(what, checkpoint.round) for what in TENSORS}
        write_tensors(files["model"], checkpoint.theta)
        write_tensors(files["server"], checkpoint.server)
        write_tensors(files["downlink"], checkpoint.downlink)
        covered = {name: self.run / name for name in LEDGERS} | files
        described = {
            "round": checkpoint.round,
            "config": config,
            "sizes": {name: (self.run / name).stat().st_size for name in LEDGERS},
            "checksums": {name: checksum(path) for name, path in covered.items()},
            "memories": {str(client): list(written) for client, written in checkpoint.memories.items()},
            "held": {str(client): version for client, version in checkpoint.held.items()},
        }
        write_bytes(self.state, json.dumps(described).encode())
        for path in self.folder.glob("*.safetensors"):
            if path not in files.values():
                path.unlink()
        self.memories.keep_only(checkpoint.memories)

    def restore(self, config: str, rounds: int) -> Checkpoint:
        """The checkpoint of a run of so many rounds, with everything that was written later cut off.

        What is damaged, or of another configuration, is refused, and then nothing is changed.
        """
        with naming(self.state, "the state of a run"):
            found = _check_description(json.loads(self.state.read_bytes()))
        if found.config != config:
            raise ValueError(f"{self.run / 'run.json'}: its configuration is not the one that the checkpoint is of")
        self._refuse_damaged(found, rounds)
        for name in LEDGERS:
            os.truncate(self.run / name, found.sizes[name])
        self.memories.keep_only(found.memories)
        for part in self.folder.rglob(".fedfq-*.part"):  # of files that a kill left unfinished
            part.unlink()
        theta, server, downlink = (read_tensors(self._file(what, found.round)) for what in TENSORS)
        return Checkpoint(found.round, theta, server, downlink, found.memories, found.held)

    def _refuse_damaged(self, found: Described, rounds: int) -> None:
        for path in (self.run / name for name in LEDGERS):
            if _present(path).stat().st_size < found.sizes[path.name]:
                raise ValueError(f"{path}: has lost rounds that the checkpoint knows of")
            _compare(path, found.checksums[path.name], found.sizes[path.name])
        for what in TENSORS:
            _compare(self._file(what, found.round), found.checksums[what])
        for client, written in found.memories.items():
            _compare(self.memories.path(client, written.round), written.checksum)
        final = self.run / "model.safetensors"
        if found.round == rounds and final.exists():
            _compare(final, found.checksums["model"])  # the same tensors, so the same bytes

    def _file(self, what: str, round_: int) -> Path:
        return self.folder / f"{what}-{round_:06d}.safetensors"


def _compare(path: Path, expected: int, size: int | None = None) -> None:
    if checksum(_present(path), size) != expected:
        raise ValueError(f"{path}: is damaged: its checksum is not the one in the checkpoint's state.json")


def _present(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path}: is missing, and belongs to the checkpoint")
    return path


@contextmanager
def naming(path: Path, what: str) -> Iterator[None]:
    """JSON of another form is a ValueError that names its file."""
    try:
        yield
    except BROKEN as error:
        why = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: not {what} ({why})") from None


def _check_description(found: Any) -> Described:
    if set(found["sizes"]) != set(LEDGERS):
        raise ValueError(f"the ledgers are {' and '.join(LEDGERS)}, not {', '.join(map(repr, found['sizes']))}")
    if not isinstance(found["config"], str):
        raise ValueError("'config' must be a digest")
    return Described(
        round=_whole(found["round"]),
        config=found["config"],
        sizes={name: _whole(found["sizes"][name]) for name in LEDGERS},
        checksums={name: _whole(found["checksums"][name]) for name in (*LEDGERS, *TENSORS)},
        memories={
            _whole(int(client)): Written(_whole(round_), _whole(value))
            for client, (round_, value) in found["memories"].items()
        },
        held={_whole(int(client)): _whole(version) for client, version in found["held"].items()},
    )


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a whole number, got {str(value)[:50]!r}")
    return value
