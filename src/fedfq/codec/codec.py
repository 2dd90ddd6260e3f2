"""`Codec`: an update in, the best payload that fits the budget out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from fedfq.types import Array

from .decode import PIECE_ENTRIES, decode_parsed, parse
from .encoder.frame import Frame
from .encoder.own_steps import DEFAULT_FINENESS, Statistics, finest_step
from .encoder.quantize import LAMBDA
from .encoder.request import Request
from .encoder.sketch import Sketcher
from .encoder.waterfill import Waterfill
from .encoder.widths import Widths
from .errors import BudgetError
from .format.container import Container, Encoding, add_sketch
from .format.layout import Spec, raw_bytes
from .kernels import U, kernel
from .parallel import Spread, check_threads, with_workers
from .ratio import DEFAULT_RATIO, LEAST_BYTES, check_ratio
from .shared_basis import SharedBasis
from .tensors import EXACT, KEPT, QUANTIZED, Tensor, read

Gain = Literal["none", "norm", "full"]
GAINS = ("none", "norm", "full")
KEEP = (  # statistics of normalisation layers, as PyTorch, Keras, Flax and Haiku name them
    *("*running_mean", "*running_var", "*moving_mean*", "*moving_var*"),
    *("*batch_stats*mean*", "*batch_stats*var*", "*mean_ema*", "*var_ema*"),
)
MUST_FILL = 0.9  # of the budget: where the common step cannot, tensors of the largest range get one of their own
WIDEST_RANGE = 256.0  # between the largest entries of tensors that are given a step of their own together
TOO_LARGE = 1 << 63  # no budget or ratio is so large
LEAST_SKETCH_BYTES = 24  # and one for each tensor: about what the smallest sketch takes
FEW_ENTRIES = 1 << 16  # with which a sketch alone is always looked at, too
MOST_WORTH = 4.0  # bytes that a sketch is worth over those it has: beyond, nothing but a sketch may be better


class Encoded(NamedTuple):
    """An update encoded: the payload's frame, what is in it, the tensors that have the common step, and the steps of
    all others; and the frame without these."""

    container: Container
    encoding: Encoding
    common: list[Tensor]
    steps: dict[str, float]
    bare: Container


class Codec:
    """Turns model updates into payloads of a given size.

    Stateless: one codec serves any number of updates, also in several threads at a time.

    One of these says how large a payload may be (if none does, `ratio=256`, but 4 KB at least):

    ratio               raw size / payload size, at least, from 1 on; raw is 4 bytes per floating-point entry, native
                        bytes else
    bits_per_parameter  of the payload, per floating-point entry, at most
    max_bytes           of the payload
    step                no budget: this quantisation step, whatever it takes (waterfill only)
    claimed_ratio       B = 32 d / claimed_ratio bits of widths as the paper counts, whatever the payload takes
                        (exact and cgsa only)

    allocator  "waterfill" (one step for all that is sent: Eq. 23 with real-valued widths), or the paper's problem with
               widths {0, 2, 4, 8}: "exact" (its optimum) or "cgsa" (Algorithm 1)
    basis      "adaptive": for every tensor, coefficients as they are, low-rank factors, or factors and the coefficients
               of the rest, whichever is best; "identity": always the first. Only waterfill with a dead zone is adaptive
    rounding   "deadzone" or "stochastic" (unbiased, at many times the error below 2 bits per parameter). The default is
               "deadzone" for waterfill and "stochastic", as in the paper, for exact and cgsa
    gain       "none" (or False); "full" (or True): scale what is decoded so that <h, decoded> = <h, h>, which undoes
               the shrinking of a dead zone, for a larger error; "norm": so that ||decoded|| = ||h||, about half of that
    unbiased   what the payload would leave out is sketched: a noisy estimate, so that the mean of what is decoded over
               many seeds is the update itself. The error of one payload may then be several times the update's energy,
               and averages out over clients and rounds. Statistics (see keep) are not sketched
    layout     "full" puts names and shapes into the payload, "digest" 8 bytes that stand for them: decoding then needs
               `like=`
    keep       name patterns (as of `fnmatch`) of statistics; they replace the default ones, which are the names of
               normalisation layers in PyTorch, Keras, Flax and Haiku. Each such tensor is quantised relative to its own
               root mean square, as finely as a share of the budget allows (a fifth, or up to half where they would be
               coarse; more if the weights leave some). Where a name has "var", a fall is never overstated, so that
               variances stay above zero
    threads    tiles are coded in so many threads; the bytes do not depend on it

    Raises `ValueError` or `TypeError` for options that do not fit together.

    >>> import fedfq, numpy as np
    >>> codec = fedfq.Codec(max_bytes=500)
    >>> update = {"w": np.random.default_rng(0).standard_normal((100, 100)).astype(np.float32)}
    >>> len(codec.encode(update)) <= 500
    True
    >>> codec.encode(update, seed=7) == codec.encode(update, seed=7)
    True
    >>> try:
    ...     fedfq.Codec(max_bytes=10).encode(update)
    ... except fedfq.BudgetError as error:
    ...     print(error.minimum)
    18
    """

    def __init__(
        self,
        *,
        ratio: float | None = None,
        bits_per_parameter: float | None = None,
        max_bytes: int | None = None,
        step: float | None = None,
        claimed_ratio: float | None = None,
        allocator: Literal["waterfill", "exact", "cgsa"] = "waterfill",
        basis: Literal["adaptive", "identity"] | None = None,
        rounding: Literal["deadzone", "stochastic"] | None = None,
        gain: Gain | bool = False,
        unbiased: bool = False,
        layout: Literal["full", "digest"] = "full",
        keep: Sequence[str] = KEEP,
        threads: int = 1,
    ) -> None:
        sizes = _check_sizes(
            ratio=ratio,
            bits_per_parameter=bits_per_parameter,
            max_bytes=max_bytes,
            step=step,
            claimed_ratio=claimed_ratio,
        )
        self.ratio = sizes["ratio"]
        self.bits_per_parameter = sizes["bits_per_parameter"]
        self.max_bytes = sizes["max_bytes"]
        self.step = sizes["step"]
        self.claimed_ratio = sizes["claimed_ratio"]
        given = (ratio, bits_per_parameter, max_bytes, step, claimed_ratio)
        self.least_bytes = 0 if any(size is not None for size in given) else LEAST_BYTES
        if isinstance(gain, bool):
            gain = "full" if gain else "none"
        if rounding is None:
            rounding = "deadzone" if allocator == "waterfill" else "stochastic"
        if basis is None:
            basis = "adaptive" if allocator == "waterfill" and rounding == "deadzone" else "identity"
        if isinstance(keep, str):
            raise TypeError("keep must be a sequence of name patterns, not one string")
        self.allocator = allocator
        self.basis = basis
        self.rounding = rounding
        self.gain = gain
        self.unbiased = bool(unbiased)
        self.layout = layout
        self.keep = tuple(keep)
        self.threads = threads
        self._check_options()

    def _check_options(self) -> None:
        """Refuse options that there are not, or that do not go together."""
        _one_of("allocator", self.allocator, ("waterfill", "exact", "cgsa"))
        _one_of("layout", self.layout, ("full", "digest"))
        _one_of("gain", self.gain, GAINS)
        _one_of("rounding", self.rounding, ("deadzone", "stochastic"))
        _one_of("basis", self.basis, ("adaptive", "identity"))
        if self.basis == "adaptive" and not (self.allocator == "waterfill" and self.rounding == "deadzone"):
            raise ValueError('basis="adaptive" goes with allocator="waterfill" and rounding="deadzone"')
        if self.unbiased and not (self.allocator == "waterfill" and self.rounding == "deadzone"):
            raise ValueError('unbiased=True goes with allocator="waterfill" and rounding="deadzone"')
        if self.unbiased and self.gain != "none":
            raise ValueError("unbiased=True goes without a gain: what is decoded is right in the mean already")
        if self.step is not None and self.allocator != "waterfill":
            raise ValueError(f'step= goes with allocator="waterfill", not with {self.allocator!r}')
        if self.claimed_ratio is not None and self.allocator == "waterfill":
            raise ValueError('claimed_ratio= goes with allocator="exact" or "cgsa", not with "waterfill"')
        check_threads(self.threads)

    def encode(self, update: Any, seed: int = 0, *, shared_basis: SharedBasis | None = None) -> bytes:
        """The payload of `update`: a module, or a mapping from names to arrays of numpy, torch or another library.

        Same update and seed: same bytes, on the same machine. Random numbers are drawn for factors (as starting points
        of the search for them), for stochastic rounding, for cgsa and for sketches, whose numbers depend on the update
        as well: give rounds and clients seeds of their own where updates may be equal.
        With a `shared_basis`, factors may be sent in its directions; decoding then needs it too.
        Raises `ValueError` for entries that are not finite and `BudgetError` for a budget that no payload fits.
        """
        tensors = read(update, self.keep)
        encoded = self._encode(tensors, seed, shared_basis)
        container, encoding = encoded.container, encoded.encoding
        if self.unbiased:
            return self._add_sketch(encoded, tensors, seed, shared_basis)
        payload = container.to_bytes(encoding)
        if self.gain == "none":
            return payload
        decoded = self._decode(payload, tensors, shared_basis)
        return container.to_bytes(encoding, self._find_gain(encoded.common, decoded))

    def encode_and_decode(
        self, tensors: list[Tensor], seed: int, shared_basis: SharedBasis | None
    ) -> tuple[bytes, dict[str, Array]]:
        """The payload of tensors that were read already, and what it decodes to, without its gain."""
        encoded = self._encode(tensors, seed, shared_basis)
        container, encoding = encoded.container, encoded.encoding
        if self.unbiased:
            payload = self._add_sketch(encoded, tensors, seed, shared_basis)
            return payload, self._decode(payload, tensors, shared_basis)
        payload = container.to_bytes(encoding)
        decoded = self._decode(payload, tensors, shared_basis)
        if self.gain != "none":
            payload = container.to_bytes(encoding, self._find_gain(encoded.common, decoded))
        return payload, decoded

    def _add_sketch(
        self, encoded: Encoded, tensors: list[Tensor], seed: int, shared_basis: SharedBasis | None
    ) -> bytes:
        """The payload with a sketch of what its sections leave out, or of everything where that is better."""
        layout = [tensor.spec for tensor in tensors]
        budget = self._budget(layout)
        ways: list[tuple[float, bytes, Sketcher, float]] = []  # with the expected error and the room for the sketch
        smallest = 0
        for container, encoding in (
            (encoded.container, encoded.encoding),
            (encoded.container, Encoding()),
            (encoded.bare, Encoding()),
        ):
            payload = container.to_bytes(encoding)
            sketcher = self._make_sketcher(payload, tensors, seed, shared_basis)
            step = encoding.step or self.step
            worth = sketcher.energy / (8 * LAMBDA * step**2) if step else 0.0  # bytes, in theory
            room = sketcher.smallest + worth if budget is None else budget - len(payload)
            smallest = len(payload) + sketcher.smallest
            if not sketcher.entries and room >= 0:
                return payload
            if room >= sketcher.smallest:
                ways.append((sketcher.expected_error(room), payload, sketcher, room))
                if budget is None or (worth <= MOST_WORTH * room and sketcher.entries > FEW_ENTRIES):
                    break
        for _, payload, sketcher, room in sorted(ways, key=lambda way: way[0]):
            if (sketch := sketcher.sketch(room)) is not None:
                return add_sketch(payload, sketch)
        assert budget is not None
        raise BudgetError(budget, smallest, raw_bytes(layout))

    def _make_sketcher(
        self, payload: bytes, tensors: list[Tensor], seed: int, shared_basis: SharedBasis | None
    ) -> Sketcher:
        ordered = sorted(tensors, key=lambda tensor: tensor.spec.name) if self.layout == "digest" else tensors
        decoded = self._decode(payload, tensors, shared_basis)
        known = None if shared_basis is None or not shared_basis.used else shared_basis.used
        return Sketcher(ordered, decoded, known, seed, self.threads)

    def _decode(self, payload: bytes, tensors: list[Tensor], shared_basis: SharedBasis | None) -> dict[str, Array]:
        """What the payload makes of the tensors, in float32 where they are floats."""
        single = np.dtype(np.float32)
        layout = [replace(t.spec, dtype=single) if t.spec.is_float else t.spec for t in tensors]
        return decode_parsed(parse(payload, layout), shared_basis, self.threads)

    def _find_gain(self, common: list[Tensor], decoded: dict[str, Array]) -> float:
        """The gain over the tensors with the common step, given what they decode to; 1 if that is 0."""
        energy = product = 0.0
        for tensor in common:
            h, q = tensor.array.reshape(-1), decoded[tensor.spec.name].reshape(-1)
            energy += _inner_product(h, h)
            product += _inner_product(q, q) if self.gain == "norm" else _inner_product(h, q)
        gain = energy / product if product > 0 else 1.0
        gain = math.sqrt(gain) if self.gain == "norm" else gain
        return gain if np.float32(0) < np.float32(gain) < np.float32(np.inf) else 1.0

    def _encode(self, tensors: list[Tensor], seed: int, shared_basis: SharedBasis | None) -> Encoded:
        if shared_basis is not None:
            self._check(shared_basis, [tensor.spec for tensor in tensors])
            shared_basis = shared_basis if shared_basis.used else None  # the model has not moved yet
        return with_workers(self.threads, lambda spread: self._encode_with(spread, tensors, seed, shared_basis))

    def _encode_with(
        self, spread: Spread, tensors: list[Tensor], seed: int, shared_basis: SharedBasis | None
    ) -> Encoded:
        """Statistics and integers first; then what is left of the budget is for the tensors with the common step."""
        floats = [tensor for tensor in tensors if tensor.kind != EXACT]
        peaks = dict(zip((tensor.spec.name for tensor in floats), spread(Tensor.peak, floats)))
        budget = self._budget([tensor.spec for tensor in tensors])
        frame = Frame(
            tensors,
            as_digest=self.layout == "digest",
            with_gain=self.gain != "none",
            basis=None if shared_basis is None else shared_basis.digest,
            may_share=self.allocator == "waterfill",
        )
        if budget is not None and budget < frame.bare.minimum:
            if self.unbiased:  # `_add_sketch` says what is needed
                return Encoded(frame.bare, Encoding(), [], {}, frame.bare)
            raise BudgetError(budget, frame.bare.minimum, raw_bytes(frame.layout))
        kept = [tensor for tensor in floats if tensor.kind == KEPT and peaks[tensor.spec.name] > 0.0]
        statistics = Statistics(kept) if kept else None

        def encode(steps: dict[str, float], container: Container) -> Encoded:
            return self._encode_common(frame, container, steps, floats, peaks, budget, seed, shared_basis, spread)

        if statistics is None:
            return encode({}, frame.bare)
        if budget is None:
            steps = statistics.choose(DEFAULT_FINENESS, math.inf if self.step is None else self.step)
            return encode(steps, frame.make_container(steps))
        room = budget - frame.bare.minimum
        steps, container = frame.fit_statistics(statistics, room, shared=True)
        encoded = encode(steps, container)
        size = encoded.container.size(encoded.encoding)
        if size > MUST_FILL * budget or self.unbiased:
            return encoded
        # what the weights did not need is for the statistics
        room = container.minimum - frame.bare.minimum + budget - size
        finer, _ = frame.fit_statistics(statistics, room, shared=False)
        finer = {name: step for name, step in encoded.steps.items() if name not in steps} | finer
        return encode(finer, frame.make_container(finer))

    def _encode_common(
        self,
        frame: Frame,
        container: Container,
        steps: dict[str, float],
        floats: list[Tensor],
        peaks: Mapping[str, float],
        budget: int | None,
        seed: int,
        shared_basis: SharedBasis | None,
        spread: Spread,
    ) -> Encoded:
        """The tensors without a step of their own, with the common one; those of the largest range get their own where
        they hold it back."""
        while True:
            common = [tensor for tensor in floats if tensor.kind == QUANTIZED and tensor.spec.name not in steps]
            peak = max((peaks[tensor.spec.name] for tensor in common), default=0.0)
            if peak == 0.0:
                return Encoded(container, Encoding(), common, steps, frame.bare)
            request = Request(
                tensors=frame.join_common(steps),
                peak=peak,
                container=container,
                rounding=self.rounding,
                adaptive=self.basis == "adaptive",
                known={} if shared_basis is None else shared_basis.used,
                sketch_bytes=LEAST_SKETCH_BYTES + len(floats) if self.unbiased else 0,
                seed=seed,
                spread=spread,
            )
            encoded = Encoded(container, self._search(request, budget), common, steps, frame.bare)
            if budget is None or not self._is_held_back(encoded, peak, budget):
                return encoded
            apart = {t.spec.name: finest_step(peak) for t in common if peaks[t.spec.name] >= peak / WIDEST_RANGE}
            steps = steps | apart
            container = frame.make_container(steps)
            rest = any(0.0 < peaks[tensor.spec.name] < peak / WIDEST_RANGE for tensor in common)
            if not rest or container.minimum > budget:
                return encoded

    def _is_held_back(self, encoded: Encoded, peak: float, budget: int) -> bool:
        """Is much of the budget free, while the step cannot become any finer because of the largest entries?"""
        step, size = encoded.encoding.step, encoded.container.size(encoded.encoding)
        return step is not None and step <= finest_step(peak) and size <= MUST_FILL * budget

    def _search(self, request: Request, budget: int | None) -> Encoding:
        """What is sent of the quantised tensors, in so many bytes; None: as `step` or `claimed_ratio` say."""
        if self.allocator == "waterfill":
            waterfill = Waterfill(request)
            if budget is not None:
                return waterfill.encode_in_budget(budget)
            assert self.step is not None
            return waterfill.encode_at_step(float(np.float32(self.step)))
        widths = Widths(request, self.allocator)
        if budget is not None:
            return widths.encode_in_budget(budget)
        assert self.claimed_ratio is not None
        return widths.encode_with_bits(int(32 * widths.h.size / self.claimed_ratio))

    def _check(self, shared_basis: SharedBasis, layout: Sequence[Spec]) -> None:
        if self.basis != "adaptive":
            raise ValueError(f'a shared basis goes with basis="adaptive", not with {self.basis!r}')
        if (other := shared_basis.other_than(layout)) is not None:
            raise ValueError(f"the shared basis is of another model: {other}")

    def _budget(self, layout: Sequence[Spec]) -> int | None:
        if self.ratio is not None:
            return max(int(raw_bytes(layout) / self.ratio), self.least_bytes)
        if self.bits_per_parameter is not None:
            return int(self.bits_per_parameter * sum(spec.size for spec in layout if spec.is_float) / 8)
        return None if self.max_bytes is None else int(self.max_bytes)


def _check_sizes(**sizes: float | None) -> dict[str, Any]:
    """The one number that says how large a payload may be, checked; `DEFAULT_RATIO` if none was given."""
    given = [name for name, value in sizes.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"give one of {', '.join(sizes)}; got {', '.join(given)}")
    name = given[0] if given else "ratio"
    return sizes | {name: _check_size(name, sizes[name] if given else DEFAULT_RATIO)}


def _check_size(name: str, value: Any) -> float:
    """One of the numbers that say how large a payload may be, as Python's: those of numpy overflow when multiplied."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError as error:  # an integer of hundreds of digits
        raise ValueError(f"{name} must be below 2^63") from error
    if name in ("ratio", "claimed_ratio"):
        check_ratio(number, name)
    elif not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
    if name != "step" and number >= TOO_LARGE:
        raise ValueError(f"{name} must be below 2^63, got {value!r}")
    if name == "step":
        with np.errstate(over="ignore"):
            rounded = np.float32(number)
        if not np.float32(0) < rounded < np.float32(np.inf):
            raise ValueError(f"step must be positive and finite as float32, got {value!r}")
    return int(value) if isinstance(value, (int, np.integer)) else number


def _inner_product(a: Array, b: Array) -> float:
    """<a, b> in float64, of flat arrays. Not by BLAS, whose threads wait for each other where cores are busy."""
    pieces = (slice(start, start + PIECE_ENTRIES) for start in range(0, a.size, PIECE_ENTRIES))
    return math.fsum(_dot(*(np.ascontiguousarray(one[piece], np.float32) for one in (a, b))) for piece in pieces)


@kernel
def _dot(a: Array, b: Array) -> float:
    s, t, u, v = 0.0, 0.0, 0.0, 0.0
    whole = a.size - a.size % 4
    for j in range(0, whole, 4):
        s += np.float64(a[U(j)]) * np.float64(b[U(j)])
        t += np.float64(a[U(j + 1)]) * np.float64(b[U(j + 1)])
        u += np.float64(a[U(j + 2)]) * np.float64(b[U(j + 2)])
        v += np.float64(a[U(j + 3)]) * np.float64(b[U(j + 3)])
    for j in range(whole, a.size):
        s += np.float64(a[U(j)]) * np.float64(b[U(j)])
    return (s + t) + (u + v)


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
