"""Decode mutated payloads and check what a decoder promises: `python -W error -m tests.attacks.fuzz --count 200000`.

Each mutant goes through `decode` (without a model, with the model, with a small limit), `inspect` and
`Accumulator.add`. Each must end in finite arrays of the stated layout or in a `PayloadError`, soon, and in memory that
follows from the payload's size and the model or the limit; a refused payload must leave an accumulator as it was. Those
of a payload made with a shared basis are given that basis, and decoded without it once more, which must be refused.

    NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=/tmp/checked python -W error -m tests.attacks.fuzz

checks every index in the compiled code too.
"""

from __future__ import annotations

import argparse
import faulthandler
import resource
import sys
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numba
import numpy as np

import fedfq
from fedfq.codec.format.container import HAS_BASIS, LAYOUT_IS_DIGEST, parse
from fedfq.codec.format.layout import MAX_TABLE_BYTES, TABLE_BYTES_PER_BYTE, TABLE_SLACK_BYTES
from tests.attacks.mutate import Array, Entry, corpus, mutations, small_tiles

LIMIT = 1 << 22  # of decoding without a model
SMALL_LIMIT = 1 << 10
HANG_SECONDS = 120

# What a call may take. A payload is copied and listed as sections; a layout inflates to 2^16 bytes and 64 for each byte
# of the payload (times two while zlib enlarges its buffer), and to an object per tensor. Decoded entries take 16 bytes
# (index, value, and the result), 20 with 8-byte dtypes, and temporary arrays of one tile; small integers 8 more than
# their dtype, twice; factors of a small matrix are up to twice its size.
BYTES_PER_ENTRY = 120
BYTES_PER_PAYLOAD_BYTE = 1200
BASE_BYTES = 1 << 19
SLOWEST_SECONDS = 2.0


@dataclass
class Tally:
    """What happened so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)  # decoded with or without the model, by mutation
    slowest: float = 0.0
    slowest_what: str = ""
    peak: int = 0
    peak_what: str = ""


class Broken(AssertionError):
    """A promise was broken; the message has the payload."""


class Fuzzer:
    """Runs payloads and keeps the tally. `memory=False` leaves out tracemalloc, which takes most of the time."""

    def __init__(self, entries: list[Entry], *, memory: bool = True) -> None:
        self.tally = Tally()
        self.memory = memory
        self.servers = {entry.name: _server(entry) for entry in entries}

    def run(self, what: str, entry: Entry, data: bytes) -> None:
        """All calls with one payload."""
        entries = sum(array.size for array in entry.model.values())
        layout = 3 * min(MAX_TABLE_BYTES, TABLE_SLACK_BYTES + TABLE_BYTES_PER_BYTE * len(data))

        def decode(**options: Any) -> Callable[[], Any]:
            return lambda: fedfq.decode(data, shared_basis=entry.basis, **options)

        decoded = [
            self._call(what, "decode", data, decode(max_bytes=LIMIT), LIMIT // 4, layout),
            self._call(what, "small", data, decode(max_bytes=SMALL_LIMIT), 256, layout),
            self._call(what, "like", data, decode(like=entry.model), entries, 0),
        ]
        for result, limit in zip(decoded, (LIMIT, SMALL_LIMIT, None)):
            if result is not None:
                _check(result, entry.model if limit is None else None, limit, data)
        self.tally.accepted[what] += any(result is not None for result in decoded)
        like = entry.model if data[3:4] and data[3] & LAYOUT_IS_DIGEST else None
        report = self._call(what, "inspect", data, lambda: fedfq.inspect(data, like=like), 0, layout)
        if report is None and any(result is not None for result in decoded[:2]):
            raise Broken(f"decodes, but inspect refuses: {data.hex()}")
        self._accumulate(what, entry, data, entries, decoded[2])
        if entry.basis is not None:
            self._without_basis(what, entry, data, entries, decoded[2])

    def _without_basis(self, what: str, entry: Entry, data: bytes, entries: int, decoded: Any) -> None:
        refused = self.tally.outcomes["bare basis"]
        bare = self._call(what, "bare", data, lambda: fedfq.decode(data, like=entry.model), entries, 0)
        if bare is not None and data[3] & HAS_BASIS:
            raise Broken(f"decodes without its shared basis: {data.hex()}")
        if (bare is None) != (decoded is None) and self.tally.outcomes["bare basis"] == refused:
            raise Broken(f"decode disagrees with itself without the shared basis: {data.hex()}")

    def _accumulate(self, what: str, entry: Entry, data: bytes, entries: int, decoded: Any) -> None:
        server = self.servers[entry.name]
        sums, weight = {name: total.tobytes() for name, total in server._sums.items()}, server.weight
        self._call(what, "accumulate", data, lambda: server.add(data, 2.0, shared_basis=entry.basis), entries, 0)
        if (server.weight != weight) != (decoded is not None):
            raise Broken(f"decode and Accumulator.add disagree: {data.hex()}")
        if decoded is not None:
            self.servers[entry.name] = _server(entry)
        elif any(total.tobytes() != sums[name] for name, total in server._sums.items()):
            raise Broken(f"a refused payload left a trace in the accumulator: {data.hex()}")

    def _call(
        self, what: str, how: str, data: bytes, function: Callable[[], Any], entries: int, layout: int
    ) -> Any | None:
        """The result, or None for a PayloadError; anything else is a broken promise."""
        if self.memory:
            tracemalloc.reset_peak()
            held = tracemalloc.get_traced_memory()[0]
        began = time.process_time()  # not by the clock: others may have the processor
        result, outcome = None, "accepted"
        try:
            result = function()
        except fedfq.PayloadError as error:
            outcome = error.reason
        except BaseException as error:
            raise Broken(f"{how}: {type(error).__name__}: {error}: after {what}: {data.hex()}") from error
        seconds = time.process_time() - began
        tally = self.tally
        tally.outcomes[f"{how} {outcome}"] += 1
        if seconds > tally.slowest:
            tally.slowest, tally.slowest_what = seconds, f"{how} after {what}, {len(data)} bytes, {outcome}"
        if seconds > SLOWEST_SECONDS:
            raise Broken(f"{how}: {seconds:.1f} s: after {what}: {data.hex()}")
        if self.memory:
            grown = tracemalloc.get_traced_memory()[1] - held
            if grown > tally.peak:
                tally.peak, tally.peak_what = grown, f"{how} after {what}, {len(data)} bytes, {outcome}"
            if grown > BASE_BYTES + layout + BYTES_PER_ENTRY * entries + BYTES_PER_PAYLOAD_BYTE * len(data):
                raise Broken(f"{how}: {grown} bytes allocated: after {what}: {data.hex()}")
        return result


def _server(entry: Entry) -> fedfq.Accumulator:
    server = fedfq.Accumulator(entry.model)
    server.add(entry.payload, 0.5, shared_basis=entry.basis)
    return server


def _check(result: dict[str, Array], model: dict[str, Array] | None, limit: int | None, data: bytes) -> None:
    """Finite, of the stated layout: the model's, or that in the payload."""
    if model is not None:
        layout = {name: (array.shape, array.dtype) for name, array in model.items()}
    else:
        parsed = parse(data, None, 1 << 62)
        assert parsed.layout is not None
        layout = {spec.name: (spec.shape, spec.dtype) for spec in parsed.layout}
    if {name: (array.shape, array.dtype) for name, array in result.items()} != layout:
        raise Broken(f"not the stated layout: {data.hex()}")
    if not all(np.isfinite(array).all() for array in result.values()):
        raise Broken(f"not finite: {data.hex()}")
    if limit is not None and sum(array.nbytes for array in result.values()) > limit:
        raise Broken(f"more than {limit} bytes: {data.hex()}")


def fuzz(count: int, seed: int = 0, *, memory: bool = True, progress: bool = False) -> Tally:
    """Run `count` mutants; raises `Broken` at the first broken promise."""
    with small_tiles(), warnings.catch_warnings():
        warnings.simplefilter("error")
        entries = corpus()
        fuzzer = Fuzzer(entries, memory=memory)
        for entry in entries:  # every kernel is compiled and every valid payload passes before anything is measured
            fedfq.decode(entry.payload, like=entry.model, shared_basis=entry.basis)
        if memory:
            tracemalloc.start()
        try:
            for number, mutant in enumerate(islice(mutations(entries, seed), count)):
                if number % 500 == 0:
                    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
                    if progress and number % 20_000 == 0:
                        print(f"{number:,} ...", file=sys.stderr, flush=True)
                fuzzer.run(*mutant)
        finally:
            faulthandler.cancel_dump_traceback_later()
            if memory:
                tracemalloc.stop()
    return fuzzer.tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-memory", action="store_true", help="do not trace memory, which is several times faster")
    options = parser.parse_args()
    began = time.perf_counter()
    tally = fuzz(options.count, options.seed, memory=not options.no_memory, progress=True)
    seconds = time.perf_counter() - began
    by_call: dict[str, list[str]] = {}
    for key, number in tally.outcomes.most_common():
        call, outcome = key.split()
        by_call.setdefault(call, []).append(f"{outcome} {number:,}")
    for call, outcomes in by_call.items():
        print(f"{call}: {', '.join(outcomes)}")
    print("mutants that decode: " + ", ".join(f"{name} {n:,}" for name, n in tally.accepted.most_common()))
    print(f"slowest: {1e3 * tally.slowest:.1f} ms ({tally.slowest_what})")
    print(f"most memory: {tally.peak / 2**20:.1f} MiB ({tally.peak_what})")
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    checked = ", indices checked" if numba.config.BOUNDSCHECK else ""
    print(
        f"{options.count:,} mutants, seed {options.seed}{checked}: no broken promise. "
        f"Slowest call {1e3 * tally.slowest:.1f} ms, peak {tally.peak / 2**20:.1f} MiB traced, "
        f"{resident:.0f} MiB resident, {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
