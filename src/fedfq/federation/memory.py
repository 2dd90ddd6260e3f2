"""What clients remember between rounds, on disk: a hundred memories of a large model do not fit into RAM.

A memory is written once, under the client and the round in which it was made, and never changed. Which round counts for
a client is the checkpoint's to say, so an upload that is refused, or a run that is killed, leaves the older one valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedfq.files import read_tensors, secure, write_tensors
from fedfq.methods import State


class Memories:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, client: int, round_: int) -> Path:
        return self.folder / f"{client:06d}-{round_:06d}.safetensors"

    def read(self, client: int, round_: int | None) -> State:
        """What the client remembered after that round; nothing if it has never sent anything."""
        return {} if round_ is None else dict(read_tensors(self._path(client, round_)))

    def write(self, client: int, round_: int, memory: State) -> None:
        if memory:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_tensors(self._path(client, round_), memory, durable=False)

    def secure(self, rounds: Mapping[int, int]) -> None:
        """See to it that the memory of each client's round is on the disk."""
        for client, round_ in rounds.items():
            secure(self._path(client, round_))

    def keep_only(self, rounds: Mapping[int, int]) -> None:
        """Delete all but the memory of each client's round."""
        kept = {self._path(client, round_) for client, round_ in rounds.items()}
        for path in self.folder.glob("*.safetensors"):
            if path not in kept:
                path.unlink()
