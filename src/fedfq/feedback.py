"""Error feedback: what a payload left out is added to the next update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedfq.codec.codec import Codec
from fedfq.codec.shared_basis import SharedBasis
from fedfq.codec.tensors import QUANTIZED, Tensor, read
from fedfq.types import Array

RESIDUAL, PREVIOUS = "residual/", "previous/"


def _subtract(array: Array, sent: Array) -> Array:
    """array - sent, in the memory of the latter."""
    return np.subtract(array, sent, out=sent)


class ErrorFeedback:
    """A client's memory: p = update + e is encoded, and e becomes p - q, with q what the server will decode.

    `rollback()` undoes the last encode when its payload was lost or refused: its update is then lost as well, but e is
    again what the server does not have. Statistics of normalisation layers have no memory: the client's next update
    tells again what the server lacks of them, and what is late of a variance's fall could make it negative.

    The state is plain arrays (`state_dict`), for any file format. It is for one thread at a time; an `encode` that is
    interrupted leaves it as it was.

    >>> import fedfq, numpy as np
    >>> memory = fedfq.ErrorFeedback(fedfq.Codec(max_bytes=60))
    >>> update = {"w": np.random.default_rng(0).standard_normal((30, 30)).astype(np.float32)}
    >>> payload = memory.encode(update)
    >>> left_out = update["w"] - fedfq.decode(payload)["w"]
    >>> np.allclose(memory.residual["w"], left_out)
    True
    """

    def __init__(self, codec: Codec) -> None:
        if codec.unbiased:
            raise ValueError(
                "a memory goes with payloads that leave something out: unbiased=True leaves noise, no bias"
            )
        self.codec = codec
        self.residual: dict[str, Array] = {}
        self._previous: dict[str, Array] | None = None

    def encode(self, update: Any, seed: int = 0, *, shared_basis: SharedBasis | None = None) -> bytes:
        """The payload of update + memory. If it fails, the memory is as before."""
        tensors = [self._add_memory(tensor) for tensor in read(update, self.codec.keep)]
        # Decoded without the gain: the residual of a scaled update would no longer contract.
        payload, sent = self.codec.encode_and_decode(tensors, seed, shared_basis)
        left_out = {t.spec.name: _subtract(t.array, sent[t.spec.name]) for t in tensors if t.kind == QUANTIZED}
        self._previous, self.residual = self.residual, self.residual | left_out
        return payload

    def _add_memory(self, tensor: Tensor) -> Tensor:
        """The tensor plus its memory, in float32.

        Only quantised tensors have one: what is late of a variance's fall could make it negative.
        """
        if tensor.kind != QUANTIZED:
            return tensor
        name = tensor.spec.name
        memory = self.residual.get(name)
        with np.errstate(over="ignore"):  # encoding refuses what is not finite in float32
            if memory is None:
                value = tensor.array.astype(np.float32, copy=False)
            elif memory.shape == tensor.spec.shape:
                value = np.add(tensor.array, memory, dtype=np.float32)
            else:
                raise ValueError(f"tensor {name!r} has shape {tensor.spec.shape}, its memory has {memory.shape}")
        return Tensor(name, value, self.codec.keep, tensor.spec.dtype)

    def rollback(self) -> None:
        """Back to the memory before the last `encode`."""
        if self._previous is None:
            raise ValueError("nothing to roll back: no encode since the last rollback")
        self.residual, self._previous = self._previous, None

    def state_dict(self) -> dict[str, Array]:
        """All of the state: the memory, and the one before the last encode if that can be rolled back."""
        state = {RESIDUAL + name: array for name, array in self.residual.items()}
        if self._previous is not None:
            zeros = {name: np.zeros_like(array) for name, array in self.residual.items()}  # before the first encode
            for name, array in (zeros | self._previous).items():
                state[PREVIOUS + name] = array
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what `state_dict` gave. Nothing changes if it is not such a state."""
        loaded: dict[str, dict[str, Array]] = {RESIDUAL: {}, PREVIOUS: {}}
        for key, array in state.items():
            prefix = next((p for p in loaded if key.startswith(p)), None)
            if prefix is None:
                raise ValueError(f"not a state of ErrorFeedback: unexpected entry {key!r}")
            value = np.array(array, np.float32)
            if not np.isfinite(value).all():
                raise ValueError(f"the memory of {key.removeprefix(prefix)!r} is not finite")
            loaded[prefix][key.removeprefix(prefix)] = value
        self.residual = loaded[RESIDUAL]
        self._previous = loaded[PREVIOUS] or None
