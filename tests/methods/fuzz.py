"""Decode mutated payloads of every method: `python -W error -m tests.methods.fuzz --count 20000`.

A mutant must decode to finite arrays with the names, shapes and dtypes of the model, or raise `PayloadError`: nothing
else, no warning, soon, and in memory that follows from the model's size. A server that refuses one must be as before,
and what it makes of the others must be finite. `NUMBA_BOUNDSCHECK=1` with a cache of its own (`NUMBA_CACHE_DIR`) checks
the indices of compiled code too.
"""

from __future__ import annotations

import argparse
import random
import struct
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from fedfq.codec.errors import PayloadError
from fedfq.methods import Method, Server, State
from tests.methods.cases import CASES, encode, fitting, mixed, payload_of
from tests.updates import Array

COUNT = 2000  # mutants per method in the normal tests, of which
TRACED = 100  # with their memory, which takes most of the time
SLOWEST_SECONDS = 1.0
MOST_BYTES = 1 << 20  # the model has 3,432 bytes, a plan of 16 bits per entry and a few tables more

EXTREMES = (
    *(bytes(n) for n in (1, 2, 4, 8)),
    *(b"\xff" * n for n in (1, 2, 4, 8)),
    *(struct.pack("<I", n) for n in (1, 0x7FFFFFFF, 0x80000000, 848, 849, 1 << 16)),
    *(struct.pack("<f", x) for x in (-1.0, -0.0, 1e-45, 3.4028235e38, float("inf"), float("nan"))),
    *(struct.pack("<e", x) for x in (65504.0, -1.0, 1.001, float("inf"), float("nan"))),
    *(bytes([n]) for n in (1, 2, 3, 8, 24, 25, 32, 63, 64, 127, 128)),
)


class Outcome(NamedTuple):
    accepted: int
    reasons: Counter[str]
    slowest: float


def corpus(method: Method) -> list[bytes]:
    """Valid payloads of this method for the model."""
    zeros = {name: np.zeros_like(array) for name, array in mixed().items()}
    return [payload_of(encode(method, update)) for update in (mixed(0), mixed(1), zeros)]


@cache
def _all_payloads() -> list[bytes]:
    return [payload for case in CASES for payload in corpus(fitting(case, mixed()))]


def mutants(own: list[bytes], others: list[bytes], seed: int) -> Iterator[bytes]:
    """An endless stream of what valid payloads may be turned into."""
    noise = random.Random(seed)

    def flip(data: bytearray) -> None:
        for _ in range(noise.choice((1, 1, 2, 8))):
            data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)

    def cut(data: bytearray) -> None:
        del data[noise.randrange(len(data)) :]

    def extend(data: bytearray) -> None:
        data += noise.randbytes(noise.choice((1, 2, 9, 300)))

    def delete(data: bytearray) -> None:
        start = noise.randrange(len(data))
        del data[start : start + noise.choice((1, 2, 4, 16))]

    def insert(data: bytearray) -> None:
        start = noise.randrange(len(data))
        data[start:start] = noise.randbytes(noise.choice((1, 2, 4, 16)))

    def head(data: bytearray) -> None:
        extreme = noise.choice(EXTREMES)
        start = min(noise.randrange(40), len(data))
        data[start : start + len(extreme)] = extreme

    def anywhere(data: bytearray) -> None:
        extreme = noise.choice(EXTREMES)
        start = noise.randrange(len(data))
        data[start : start + len(extreme)] = extreme

    def level(data: bytearray) -> None:
        start = noise.randrange(len(data))
        data[start:] = bytes([noise.choice((0, 255, 0x55))]) * (len(data) - start)

    def scramble(data: bytearray) -> None:
        start = noise.randrange(len(data))
        data[start:] = noise.randbytes(len(data) - start)

    def splice(data: bytearray) -> None:
        other = noise.choice(own)
        start = noise.randrange(len(data))
        data[start:] = other[start:]

    changes: tuple[Callable[[bytearray], None], ...] = (
        *(flip, flip, flip, cut, extend, delete, insert),
        *(head, head, head, anywhere, level, scramble, splice),
    )
    yield b""
    yield from others
    while True:
        if noise.random() < 0.02:
            yield noise.randbytes(noise.choice((1, 4, 13, 100, 1000, 5000)))
            continue
        data = bytearray(noise.choice(own if noise.random() < 0.98 else others))
        for _ in range(noise.choice((1, 1, 1, 2, 3))):
            if data:
                noise.choice(changes)(data)
        yield bytes(data)


def fuzz(case: str, count: int, seed: int = 0, traced: int | None = None) -> Outcome:
    """Run mutants, the first so many (or all) with their memory traced.

    Raises `AssertionError` with the payload at the first broken promise.
    """
    model = {name: np.zeros_like(array) for name, array in mixed().items()}
    method = fitting(case, mixed())
    own = corpus(method)
    others = [payload for payload in _all_payloads() if payload not in own]
    server = method.server(model)
    for payload in own:  # everything is compiled before anything is measured
        _check(method.decode(payload, model), model)
    accepted, reasons, slowest = 0, Counter[str](), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracemalloc.start()
        try:
            for number, data in enumerate(islice(mutants(own, others, seed), count)):
                if number == traced:
                    tracemalloc.stop()
                reason, seconds = _run(method, server, data, model)
                accepted += not reason
                reasons.update([reason] if reason else [])
                slowest = max(slowest, seconds)
        finally:
            tracemalloc.stop()
        _check_finite(server.finish(1.0), "the mean")
    return Outcome(accepted, reasons, slowest)


def _run(method: Method, server: Server, data: bytes, model: dict[str, Array]) -> tuple[str, float]:
    """Why a payload was refused, or nothing; and the seconds that it took."""
    tracing = tracemalloc.is_tracing()
    if tracing:
        tracemalloc.reset_peak()
        held = tracemalloc.get_traced_memory()[0]
    began = time.perf_counter()
    reason = ""
    try:
        try:
            _check(method.decode(data, model), model)
        except PayloadError as error:
            reason = error.reason
        seconds = time.perf_counter() - began
        assert seconds < SLOWEST_SECONDS, f"{seconds:.1f} s"
        if tracing:
            assert tracemalloc.get_traced_memory()[1] - held < MOST_BYTES + 100 * len(data), "too much memory"
        _receive(server, data, bool(reason))
    except BaseException as error:
        raise AssertionError(f"{method}: {type(error).__name__}: {error}: {data.hex()}") from error
    return reason, seconds


def _receive(server: Server, data: bytes, refused: bool) -> None:
    before = _bytes(server.state_dict()) if refused else {}
    try:
        server.receive(0, data, 0.5)
    except PayloadError:
        assert refused, "decodes, but the server refuses it"
        assert _bytes(server.state_dict()) == before, "a refused payload left a trace"
    else:
        assert not refused, "does not decode, but the server takes it"


def _bytes(state: State) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state.items()}


def _check(result: dict[str, Array], model: dict[str, Array]) -> None:
    found = {name: (array.shape, array.dtype) for name, array in result.items()}
    assert found == {name: (array.shape, array.dtype) for name, array in model.items()}, "another layout"
    _check_finite(result, "the result")


def _check_finite(result: dict[str, Array], what: str) -> None:
    assert all(np.isfinite(array).all() for array in result.values()), f"{what} is not finite"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    options = parser.parse_args()
    for case in options.cases or CASES:
        began = time.perf_counter()
        accepted, reasons, slowest = fuzz(case, options.count, options.seed, traced=COUNT)
        refused = ", ".join(f"{reason} {number:,}" for reason, number in reasons.most_common())
        print(
            f"{case}: {options.count:,} mutants, no broken promise; {accepted:,} decode, {refused}; "
            f"slowest {1e3 * slowest:.1f} ms; {time.perf_counter() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
