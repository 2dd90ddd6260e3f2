"""What clients remember between rounds, on disk: a hundred memories of a large model do not fit into RAM.

A memory is written once, under the client and the round in which it was made, and never changed. Which round counts for
a client is the checkpoint's to say, so an upload that is refused, or a run that is killed, leaves the older one valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fedfq.files import checksum, read_tensors, secure, write_tensors
from fedfq.methods import State


class Written(NamedTuple):
    """A memory on disk."""

    round: int  # in which it was made
    checksum: int


class Memories:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, client: int, round_: int) -> Path:
        return self.folder / f"{client:06d}-{round_:06d}.safetensors"

    def read(self, client: int, round_: int | None) -> State:
        """What the client remembered after that round; nothing if it has never sent anything."""
        return {} if round_ is None else dict(read_tensors(self.path(client, round_)))

    def write(self, client: int, round_: int, memory: State) -> Written | None:
        """Write a memory, unless there is nothing in it."""
        if not memory:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(client, round_)
        write_tensors(path, memory, durable=False)
        return Written(round_, checksum(path))

    def secure(self, memories: Mapping[int, Written]) -> None:
        """See to it that these memories, by client, are on the disk."""
        for client, written in memories.items():
            secure(self.path(client, written.round))

    def keep_only(self, memories: Mapping[int, Written]) -> None:
        """Delete all but these memories, by client."""
        kept = {self.path(client, written.round) for client, written in memories.items()}
        for path in self.folder.glob("*.safetensors"):
            if path not in kept:
                path.unlink()
