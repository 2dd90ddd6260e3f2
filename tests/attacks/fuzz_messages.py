"""Mutated messages for a `Replica`: `python -W error -m tests.attacks.fuzz_messages --count 200000`.

Each must be refused with a `PayloadError`, soon, and leave the replica as it was, or lead to a finite model with the
digest that it states. Checksums are made right again after most mutations, those of payloads in messages as well, and
the digest of the outcome in some: so what is behind them is reached.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedfq import Broadcast, PayloadError, Replica
from fedfq.codec.format.message import EXACT, HELD, NOTHING, Message, Step, hash_model
from tests.attacks.mutate import BLIND, seal
from tests.updates import Array, low_rank

HANG_SECONDS = 120
SLOWEST_SECONDS = 2.0
NUMBERS = (0, 1, 2, 3, 5, 7, 8, 9, 100, 2**31, 2**62)


def a_model() -> dict[str, Array]:
    return {
        "w": low_rank(24, 40, 4, 0.1),
        "b": np.linspace(-1, 1, 24, dtype=np.float32),
        "n.running_var": np.ones(6, np.float32),
        "n.running_mean": np.zeros(6, np.float32),
        "n.num_batches_tracked": np.array(0),
        "mask": np.arange(7) % 2 == 0,
    }


@dataclass(frozen=True)
class Situation:
    """Replicas at some version, and messages that are for them."""

    state: dict[str, Array]
    messages: list[bytes]


def situations() -> list[Situation]:
    found = []
    for options in ({}, {"initial_ratio": 6.0}, {"ratio": 8.0}):
        server = Broadcast(a_model(), **options)
        replica = Replica(a_model())
        replica.receive(server.message(None))
        rng = np.random.default_rng(1)
        model = server.model
        for round_ in range(9):
            model = {
                name: array + rng.standard_normal(array.shape).astype(np.float32) * np.float32(0.05)
                if array.dtype == np.float32 and "var" not in name
                else ~array
                if array.dtype == np.bool_
                else array + array.dtype.type(1)
                for name, array in model.items()
            }
            server.advance(model)
            server.message(max(0, server.version - 3))
            if round_ in (2, 5):
                replica.receive(server.message(replica.version))
        messages = [server.message(held) for held in (None, 0, 3, replica.version, server.version)]
        found.append(Situation(replica.state_dict(), messages))
    return found


def mutations(known: list[Situation], seed: int) -> Iterator[tuple[Situation, bytes]]:
    noise = random.Random(seed)
    everything = [message for situation in known for message in situation.messages]
    while True:
        situation = noise.choice(known)
        data, other = noise.choice(situation.messages), noise.choice(everything)
        if noise.random() < 0.5:
            data = noise.choice(BLIND)(data, other, noise)
            yield situation, seal(data) if noise.random() < 0.8 and len(data) >= 8 else data
        else:
            yield situation, _change_parts(Message.parse(data), Message.parse(other), noise).to_bytes()


def _change_parts(message: Message, other: Message, noise: random.Random) -> Message:
    """With one part that lies."""

    def payload(good: bytes) -> bytes:
        bad = noise.choice(BLIND)(good or b"FQ", other.last or b"FQ", noise)
        return seal(bad) if len(bad) >= 8 and noise.random() < 0.9 else bad

    steps = list(message.steps)
    if steps and noise.random() < 0.5:
        at = noise.randrange(len(steps))
        change: dict[str, Any] = {
            "steps": noise.choice(
                (
                    [*steps[:at], Step(steps[at].version, payload(steps[at].payload)), *steps[at + 1 :]],
                    steps[:at] + steps[at + 1 :],
                    [*steps, Step(steps[-1].version + noise.choice(NUMBERS), steps[at].payload)],
                    steps[:1] * noise.choice((2, 64, 65)),
                )
            )
        }
        newest = max([message.base, *(step.version for step in change["steps"])])
        return message._replace(**change, version=max(newest, message.version))
    ways: list[dict[str, Any]] = [
        {"last": payload(message.last)},
        {"last": payload(message.last)},
        {"last": other.last},
        {"start": NOTHING, "base": 0, "held": 0},
        {"start": EXACT, "base": message.held},
        {
            "exact": noise.choice(BLIND)(message.exact or b"\3\0", other.exact, noise),
            "start": EXACT,
            "base": message.held,
        },
        {"digest": other.digest},
        {"held_digest": other.digest if message.start == HELD else b""},
        {"held": message.held + noise.choice(NUMBERS)},
        {"version": max([message.version, *(step.version for step in steps)]) + noise.choice(NUMBERS)},
        {"base": 0, "steps": [Step(0, b"")]},
    ]
    return message._replace(**noise.choice(ways))


def fuzz(count: int, seed: int = 0) -> Counter[str]:
    """Run so many mutants; what came of them."""
    outcomes: Counter[str] = Counter()
    like = a_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known = situations()
        replica = Replica(like)
        for number, (situation, data) in enumerate(mutations(known, seed)):
            if number == count:
                break
            if number % 500 == 0:
                faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            replica.load_state_dict(situation.state)
            before = _marks(replica)
            began = time.process_time()
            try:
                model = replica.receive(data)
            except PayloadError as error:
                outcomes[error.reason] += 1
                assert _marks(replica) == before, f"a refused message left a trace: {data.hex()}"
            except BaseException as error:
                raise AssertionError(f"{type(error).__name__}: {error}: {data.hex()}") from error
            else:
                outcomes["accepted"] += 1
                assert {name: (a.shape, a.dtype) for name, a in model.items()} == {
                    name: (a.shape, a.dtype) for name, a in like.items()
                }, data.hex()
                assert all(np.isfinite(array).all() for array in model.values()), data.hex()
                assert hash_model(model) == Message.parse(data).digest, data.hex()
            assert time.process_time() - began < SLOWEST_SECONDS, f"slow: {data.hex()}"
    faulthandler.cancel_dump_traceback_later()
    return outcomes


def _marks(replica: Replica) -> tuple[Any, ...]:
    return replica.version, {name: array.tobytes() for name, array in replica.state_dict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for outcome, number in sorted(fuzz(options.count, options.seed).items()):
        print(f"{number:>8,} {outcome}")


if __name__ == "__main__":
    main()
