"""What an encoder is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..format.container import Container
from ..format.directions import KnownDirections
from ..parallel import Spread
from ..tensors import SMALL, Tensor


@dataclass(frozen=True)
class Request:
    """The tensors of one update, and how they are to be coded."""

    tensors: Sequence[Tensor]  # the quantised ones; not all of them are zero
    peak: float  # their largest magnitude
    container: Container  # tells what an encoding will take
    rounding: str  # "deadzone" or "stochastic"
    adaptive: bool  # may tensors be sent as factors?
    known: Mapping[str, KnownDirections]  # directions that both sides hold, by tensor
    seed: int
    spread: Spread  # runs work in threads
    sketch_bytes: int = 0  # of a budget, at least, that are for a sketch of what is left out; 0 if there is none

    def directions_of(self, tensor: Tensor) -> KnownDirections | None:
        """The directions of a tensor that both sides hold."""
        return None if tensor.kind == SMALL else self.known.get(tensor.spec.name)

    @property
    def cells(self) -> int:
        """Entries of all tensors."""
        return sum(tensor.spec.size for tensor in self.tensors)
