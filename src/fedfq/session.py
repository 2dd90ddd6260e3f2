"""One client of any engine: its options, its codec, the basis that it derives, and what it sends.

The simulator's method `fedfq`, the Flower mod and every further engine use this. Where a client keeps its memory
between two rounds is the engine's business: a session holds no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from fedfq.codec.codec import Codec, Gain
from fedfq.codec.shared_basis import SharedBasis
from fedfq.codec.tensors import read
from fedfq.feedback import ErrorFeedback
from fedfq.metrics import energy
from fedfq.types import Array

Basis = Literal["shared", "adaptive", "identity"]
BASES = ("shared", "adaptive", "identity")


class Sent(NamedTuple):
    """What a client sends in one round, and what it keeps of it."""

    payload: bytes
    residual: dict[str, Array]  # what the payload leaves out, for the next round; empty without error feedback
    nmse: float | None  # share of the energy of update and memory that the payload leaves out, before the gain


@dataclass(frozen=True)
class ClientSession:
    """The options of a client, and what follows from them.

    ratio           float32 bytes / payload bytes, at least; None: as in `Codec`
    basis           "shared": factors in the directions in which the model has moved, which both sides derive from the
                    initial model; "adaptive" and "identity" as in `Codec`
    unbiased        as in `Codec`: there is neither memory nor gain then; the default, unless one of these is asked for
    error_feedback  add what one payload leaves out to the next one; the default of payloads that are not unbiased
    gain            as in `Codec`; "norm" is the default of payloads that are not unbiased
    """

    ratio: float | None = None
    basis: Basis = "shared"
    unbiased: bool | None = None
    error_feedback: bool | None = None
    gain: Gain | bool | None = None

    def __post_init__(self) -> None:
        if self.basis not in BASES:
            raise ValueError(f"basis must be one of {', '.join(map(repr, BASES))}; got {self.basis!r}")
        if self.is_unbiased and self.error_feedback:
            raise ValueError("unbiased=True goes without error feedback: payloads leave noise out, no bias")
        self.make_codec()

    @property
    def is_unbiased(self) -> bool:
        """Whether payloads have a sketch of what they leave out."""
        if self.unbiased is None:
            return not self.error_feedback and self.gain in (None, False, "none")
        return self.unbiased

    @property
    def has_memory(self) -> bool:
        """Whether what one payload leaves out is added to the next one."""
        return not self.is_unbiased if self.error_feedback is None else self.error_feedback

    @property
    def codec_gain(self) -> Gain | bool:
        """The gain of its payloads."""
        if self.gain is None:
            return "none" if self.is_unbiased else "norm"
        return self.gain

    @property
    def uses_initial(self) -> bool:
        """Whether the client needs the initial model, which it then has to be sent once."""
        return self.basis == "shared"

    def without_sketch(self) -> ClientSession:
        """For a server that does more than average: what unbiased payloads are without their sketch."""
        return replace(self, unbiased=False, error_feedback=False, gain="none") if self.is_unbiased else self

    def make_codec(self, **size: Any) -> Codec:
        """The codec, with a budget of this client's own (`ratio=` or `max_bytes=`) if there is one."""
        basis = "adaptive" if self.basis == "shared" else self.basis
        budget = size or ({} if self.ratio is None else {"ratio": self.ratio})
        return Codec(**budget, basis=basis, gain=self.codec_gain, unbiased=self.is_unbiased, layout="digest")

    def encode(
        self,
        update: Mapping[str, Array],
        residual: Mapping[str, Array],
        seed: int,
        shared_basis: SharedBasis | None = None,
        *,
        codec: Codec | None = None,
        measure: bool = False,
    ) -> Sent:
        """The payload of an update, and what it leaves out.

        `residual` is what the last payload that was accepted left out; it is not changed. `codec` is one of
        `make_codec`. `measure` asks for the NMSE, which takes a pass over the update. Raises what `Codec.encode` does.
        """
        codec = codec or self.make_codec()
        if self.has_memory:
            feedback = ErrorFeedback(codec)
            feedback.residual = dict(residual)
            payload = feedback.encode(update, seed, shared_basis=shared_basis)
            left = feedback.residual
            return Sent(payload, left, _share_left_out(left, update, residual) if measure else None)
        if not measure:
            return Sent(codec.encode(update, seed, shared_basis=shared_basis), {}, None)
        payload, decoded = codec.encode_and_decode(read(update, codec.keep), seed, shared_basis)
        left = {name: array - decoded[name] for name, array in update.items() if array.dtype.kind == "f"}
        return Sent(payload, {}, _share_left_out(left, update, {}))


def derive_basis(model: Any, initial: Any) -> SharedBasis | None:
    """The basis that server and client share in a round; None where the training diverged and no basis can be had."""
    try:
        return SharedBasis(model, initial)
    except ValueError:  # the model is no longer finite
        return None


def _share_left_out(left: Mapping[str, Array], update: Mapping[str, Array], residual: Mapping[str, Array]) -> float:
    """||left out||^2 / ||update + residual||^2, over the floating-point tensors; one tensor's copy at a time."""
    floats = [name for name, array in update.items() if array.dtype.kind == "f"]
    wanted = (update[name] + residual[name] if name in residual else update[name] for name in floats)
    whole = sum(energy(array) for array in wanted)
    return sum(energy(array) for array in left.values()) / whole if whole else 0.0
