"""FedFQ: our default (water-filling in the shared basis), and the paper's widths, exact or by its search (CGSA).

With `ratio` the payload is that many times smaller than float32, in bytes, and bytes are what is claimed. With
`claimed_ratio`, for the paper's widths only, B = 32 d / claimed_ratio is counted as the paper counts: the widths' bits,
neither scales nor the map that says which parameter has which width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from fedfq.codec.codec import Codec, Gain
from fedfq.codec.decode import Accumulator, decode
from fedfq.codec.ratio import DEFAULT_RATIO, LEAST_BYTES
from fedfq.session import Basis, ClientSession, derive_basis

from .method import (
    ANY_ROUND,
    CLAIMED_RATIO,
    ERROR_FEEDBACK,
    RATIO,
    Method,
    Order,
    RoundContext,
    Server,
    State,
    Update,
    Upload,
)
from .wire import lengths

PAPERS_RATIO = 32  # as the paper counts


@dataclass(frozen=True)
class FedFQ(Method):
    ratio: Annotated[
        float | None, f"{RATIO}; if none is given {DEFAULT_RATIO}, but payloads of {LEAST_BYTES} bytes"
    ] = None
    basis: Annotated[
        Basis,
        "directions in which the model has moved; low-rank factors where they pay; or entries as they are",
    ] = "shared"
    error_feedback: Annotated[bool | None, f"{ERROR_FEEDBACK}; true unless unbiased"] = None
    unbiased: Annotated[
        bool | None,
        "sketch what is left out: noise instead of bias, without memory and gain; true unless one of these is given",
    ] = None
    gain: Annotated[
        Gain | bool | None,
        "scale up what shrank on the way: not at all, to the update's norm, or fully; norm unless unbiased",
    ] = None

    summary: ClassVar[str] = "our default: one step for all that is sent, in directions in which the model has moved"
    paper: ClassVar[str] = "this project (FedFQ with real-valued widths)"
    claims: ClassVar[str] = "what the payload takes"
    client_memory: ClassVar[str] = "none; one model, with error feedback"
    down_ratio: ClassVar[float | Literal["auto", "own"]] = "auto"

    def __post_init__(self) -> None:
        session = self._session  # refuses options that do not fit
        object.__setattr__(self, "unbiased", session.is_unbiased)
        object.__setattr__(self, "error_feedback", session.has_memory)
        object.__setattr__(self, "gain", session.codec_gain)

    @property
    def is_unbiased(self) -> bool:
        return bool(self.unbiased)

    @property
    def _session(self) -> ClientSession:
        return ClientSession(self.ratio, self.basis, self.unbiased, self.error_feedback, self.gain)

    @property
    def uses_initial(self) -> bool:
        return self._session.uses_initial

    def open_round(self, number: int, model: Update, initial: Update) -> RoundContext:
        return RoundContext(number, derive_basis(model, initial) if self.uses_initial else None)

    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        sent = self._session.encode(update, memory, order.seed, order.context.shared_basis)
        return Upload(sent.payload, 8 * len(sent.payload), sent.residual)

    def decode(self, payload: bytes, like: Update, context: RoundContext = ANY_ROUND) -> Update:
        return decode(payload, like=like, shared_basis=context.shared_basis)

    def server(self, like: Update) -> Server:
        return Averaging(self, like)


@dataclass(frozen=True)
class FedFQWidths(Method):
    """Widths {0, 2, 4, 8}. Width 0 drops a parameter: not unbiased there (Theorem 2 needs b > 0)."""

    allocator: Literal["exact", "cgsa"] = "cgsa"
    ratio: Annotated[float | None, RATIO] = None
    claimed_ratio: Annotated[float | None, f"{CLAIMED_RATIO}; {PAPERS_RATIO} if no ratio is given"] = None

    summary: ClassVar[str] = "the paper's own: one of the widths 0, 2, 4 and 8 bits for every parameter"
    paper: ClassVar[str] = "FedFQ, Algorithm 1"
    claims: ClassVar[str] = "the widths' bits (side information is free)"

    def __post_init__(self) -> None:
        if self.ratio is not None and self.claimed_ratio is not None:
            raise ValueError("give ratio or claimed_ratio, not both")
        self._codec()

    def _codec(self) -> Codec:
        if self.ratio is not None:
            return Codec(ratio=self.ratio, allocator=self.allocator, layout="digest")
        return Codec(claimed_ratio=self._claimed_ratio, allocator=self.allocator, layout="digest")

    @property
    def _claimed_ratio(self) -> float:
        return PAPERS_RATIO if self.claimed_ratio is None else self.claimed_ratio

    def encode(self, update: Update, memory: State, order: Order) -> Upload:
        payload = self._codec().encode(update, order.seed)
        claimed = 8 * len(payload)
        if self.ratio is None:
            size = sum(lengths(update).values())
            claimed = int(min(32 / self._claimed_ratio, 8) * size)  # wider than 8 bits no parameter can be
        return Upload(payload, claimed)

    def decode(self, payload: bytes, like: Update, context: RoundContext = ANY_ROUND) -> Update:
        return decode(payload, like=like)

    def server(self, like: Update) -> Server:
        return Averaging(self, like)


class Averaging(Server):
    """The mean, added up without unpacking each update."""

    def _clear(self) -> None:
        self._total = Accumulator(like=self.like)

    def receive(self, client: int, payload: bytes | None, weight: float) -> None:
        if payload is not None:
            self._total.add(payload, weight, shared_basis=self.context.shared_basis)

    def finish(self, loss: float) -> Update:
        if self._total.weight == 0.0:
            return Server(self.method, self.like).finish(loss)  # no answers, no change
        mean = self._total.mean()
        self._clear()
        return mean
