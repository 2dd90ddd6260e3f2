"""What a client keeps between two rounds: the initial model, a replica of the server's, its error-feedback memory.

A small model's memory is in the `state` of Flower's context, which lasts as long as the run and the SuperNode do, and
is passed to and fro with every message; beyond about 100 MB it is lost without a word. A large model's is on the
client's disk, in `$FLWR_HOME/fedfq/<run>/` (`~/.flwr/fedfq/<run>/`), where it also survives a SuperNode that restarts
under the same node id. Nobody tells a client that a run is over: a run's folder is removed by the first client of a
later run on this machine that finds it untouched for a week.

Models are kept under digests that were found here, of which the server's are asked for. A replica belongs to an initial
model. A residual is named after the round that it was left over from. The server says which of the node's replies it
accepted last; the residual of that round is the one to go on with, whatever came after it.
"""

from __future__ import annotations

import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from logging import WARNING
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.common.logger import log

from fedfq.files import read_tensors, write_bytes, write_tensors

from .arrays import NDArray, blob, digest, packed_views, views
from .protocol import MODEL

MAX_STATE_BYTES = 50_000_000  # what a Flower context keeps; larger memories go to disk
MODELS_KEPT = 4  # the initial model, the replica's anchor, residuals of two rounds
_NONE = np.zeros(0, np.uint8)
ABANDONED_S = 3600.0  # a file that nobody has written to for so long will not be finished
FORGOTTEN_S = 7 * 24 * 3600.0  # a run whose folder nobody has written to for so long is over


def memory_of(context: Context, model: Mapping[str, NDArray]) -> Memory:
    """Where a client of this model keeps what it remembers. Of float16, that is float32."""
    size = sum(max(array.nbytes, 4 * array.size) for array in model.values())
    return InState(context) if MODELS_KEPT * size < MAX_STATE_BYTES else OnDisk(context)


class Memory(ABC):
    """One node's memory in one run. What was lost or cannot be read is simply not there."""

    @abstractmethod
    def initial(self, name: str) -> dict[str, NDArray] | None:
        """The initial model of that digest."""

    @abstractmethod
    def keep_initial(self, name: str, packed: Array) -> None:
        """Remember an initial model under its digest, which was found here, and forget any other one."""

    @abstractmethod
    def replica(self, initial: str) -> dict[str, NDArray] | None:
        """The state of the replica that began with this initial model."""

    @abstractmethod
    def keep_replica(self, initial: str, state: Mapping[str, NDArray]) -> None:
        """Remember a replica's state, and forget any other one."""

    @abstractmethod
    def residual(self, round_: int) -> dict[str, NDArray]:
        """What the payload of that round left out."""

    @abstractmethod
    def keep_residual(self, round_: int, residual: Mapping[str, NDArray], accepted: int) -> None:
        """Remember a residual beside the one of the round that was accepted last; forget all others."""


class InState(Memory):
    INITIAL, REPLICA, RESIDUAL = "fedfq-initial-", "fedfq-replica-", "fedfq-residual-"

    def __init__(self, context: Context) -> None:
        self._state = context.state

    def initial(self, name: str) -> dict[str, NDArray] | None:
        record = self._state.array_records.get(f"{self.INITIAL}{name}")
        return None if record is None else packed_views(record["model"])

    def keep_initial(self, name: str, packed: Array) -> None:
        self._forget(self.INITIAL, ())
        self._state[f"{self.INITIAL}{name}"] = ArrayRecord({"model": packed})

    def replica(self, initial: str) -> dict[str, NDArray] | None:
        record = self._state.array_records.get(f"{self.REPLICA}{initial}")
        return None if record is None else views(record)

    def keep_replica(self, initial: str, state: Mapping[str, NDArray]) -> None:
        self._forget(self.REPLICA, ())
        self._state[f"{self.REPLICA}{initial}"] = ArrayRecord({name: Array(a) for name, a in state.items()})

    def residual(self, round_: int) -> dict[str, NDArray]:
        return views(self._state.array_records.get(f"{self.RESIDUAL}{round_}", {}))

    def keep_residual(self, round_: int, residual: Mapping[str, NDArray], accepted: int) -> None:
        self._forget(self.RESIDUAL, (accepted,))
        self._state[f"{self.RESIDUAL}{round_}"] = ArrayRecord({name: Array(a) for name, a in residual.items()})

    def _forget(self, prefix: str, but: tuple[int, ...]) -> None:
        kept = {f"{prefix}{round_}" for round_ in but}
        for key in [key for key in self._state if key.startswith(prefix) and key not in kept]:
            del self._state[key]


class OnDisk(Memory):
    """Files appear whole or not at all. The initial model is one file for all the run's nodes on this machine.

    The server is not to choose a file: names are made of whole numbers and of digests that were found here, and the
    digest that a message asks for is looked for among them.
    """

    INITIAL, REPLICA = "initial-", "replica-"

    def __init__(self, context: Context) -> None:
        home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
        self._folder = home / "fedfq" / f"{context.run_id:d}"
        self._node = f"{context.node_id:d}"

    def _make_folder(self) -> None:
        """The run's folder. Who makes it clears away those of runs that are over; what a killed process left half
        written goes, too."""
        if self._folder.exists():
            for path in self._folder.glob("*.part"):
                with suppress(OSError):
                    if time.time() - path.stat().st_mtime > ABANDONED_S:
                        path.unlink()
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for other in self._folder.parent.iterdir():
            with suppress(OSError):  # another client may be at it
                if other.is_dir() and time.time() - other.stat().st_mtime > FORGOTTEN_S:
                    shutil.rmtree(other)

    def initial(self, name: str) -> dict[str, NDArray] | None:
        path = self._initials().get(name)
        if path is None:
            return None
        try:
            model = packed_views(blob(path.read_bytes(), MODEL))
        except ValueError:
            model = {}
        if digest(model) != name:
            path.unlink(missing_ok=True)  # damaged: it will be sent again
            return None
        return model

    def keep_initial(self, name: str, packed: Array) -> None:
        self._make_folder()
        write_bytes(self._folder / f"{self.INITIAL}{name}", packed.data)
        for other, path in self._initials().items():
            if other != name:
                path.unlink(missing_ok=True)

    def replica(self, initial: str) -> dict[str, NDArray] | None:
        state = self._read(self._replica)
        return None if state.pop(self.REPLICA, _NONE).tobytes() != initial.encode() else state

    def keep_replica(self, initial: str, state: Mapping[str, NDArray]) -> None:
        self._make_folder()
        whose = np.frombuffer(initial.encode(), np.uint8)
        write_tensors(self._replica, {**state, self.REPLICA: whose}, durable=False)  # what is lost is sent again

    def residual(self, round_: int) -> dict[str, NDArray]:
        return self._read(self._residual(round_))

    def keep_residual(self, round_: int, residual: Mapping[str, NDArray], accepted: int) -> None:
        self._make_folder()
        write_tensors(self._residual(round_), residual, durable=False)  # losing it costs an update's rest, no more
        kept = {self._residual(round_), self._residual(accepted), self._replica}
        for path in self._folder.glob(f"{self._node}-*.safetensors"):
            if path not in kept:
                path.unlink(missing_ok=True)

    def _read(self, path: Path) -> dict[str, NDArray]:
        try:
            return dict(read_tensors(path)) if path.exists() else {}
        except ValueError as error:
            log(WARNING, "fedfq_mod on node %s: goes on without what it kept: %s", self._node, error)
            return {}

    def _initials(self) -> dict[str, Path]:
        """By their digests."""
        return {path.name.removeprefix(self.INITIAL): path for path in self._folder.glob(f"{self.INITIAL}*")}

    @property
    def _replica(self) -> Path:
        return self._folder / f"{self._node}-replica.safetensors"

    def _residual(self, round_: int) -> Path:
        return self._folder / f"{self._node}-{round_:d}.safetensors"
