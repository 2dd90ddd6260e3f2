"""How long a round takes, and what ratio to choose: a discrete-event simulation of one round.

    client   download -> local steps -> encode -> upload        all clients at once
    server                                          decode      one payload after the other

Links are fluids: everybody who sends gets an equal share of the server's link, unless their own line is slower (max-min
fairness, which TCP comes near to). Events are starts and ends of transfers, so that a round of 10^4 clients takes less
than a second to simulate.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import simpy

from fedfq.codec.ratio import DEFAULT_RATIO, check_ratio, down_bytes
from fedfq.types import Array as NDArray

HEADERS = 1514 / 1448  # of Ethernet, IP and TCP: what a full packet takes over what it carries
ACKNOWLEDGEMENT = 66 / (2 * 1514)  # bytes that go the other way meanwhile for every byte: a small packet for two full
RATIOS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
ROUNDED = 1 + 1e-9  # a line that is as fast as its share may seem faster by a rounding error, and would not rest
NEAR_FASTEST = 0.05  # share of its seconds: a round that takes so much longer than the best is as good
TRIAL_PARAMETERS = 1_000_000  # of the update that is timed


@dataclass(frozen=True)
class Setting:
    """What a round depends on. Bandwidths are in Mbit/s; those of the clients' own lines have an entry for each."""

    parameters: int
    clients: int  # of a round
    uplink_mbps: float = math.inf  # into the server, for all clients together
    downlink_mbps: float = math.inf
    own_uplinks: tuple[float, ...] = ()
    own_downlinks: tuple[float, ...] = ()
    latency_ms: float = 0.0  # one way
    steps: int = 5
    step_seconds: float = 0.0
    fixed_seconds: float = 0.0  # of a round, whatever is sent
    encode_seconds: float = 0.0  # of a client's whole update; nothing is encoded at a ratio of 1
    decode_seconds: float = 0.0
    down_ratio: float | None = None  # of the model's way down, where a codec is; None: what `Broadcast` does by itself
    # Clients that look for work from time to time start at different moments, which spreads the load of a link: the
    # longest pause before download, steps and upload. With pauses, all begin their steps together (`app.keep_pace`).
    pauses: tuple[float, float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("parameters", "clients", "steps"):
            if not (isinstance(value := getattr(self, name), int) and value >= 1):
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        for value in (self.uplink_mbps, self.downlink_mbps, *self.own_uplinks, *self.own_downlinks):
            if not value > 0:
                raise ValueError(f"a bandwidth must be positive, got {value!r} Mbit/s")
        for name in ("latency_ms", "step_seconds", "fixed_seconds", "encode_seconds", "decode_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)!r}")
        if self.down_ratio is not None:
            check_ratio(self.down_ratio, "down_ratio")
        for lines in (self.own_uplinks, self.own_downlinks):
            if lines and len(lines) != self.clients:
                raise ValueError(f"{len(lines)} lines for {self.clients} clients")

    def sizes(self, ratio: float) -> tuple[float, float]:
        """What a client has to send and to receive, with headers; a ratio of 1 is float32 both ways."""
        raw = 4 * self.parameters
        down = raw if ratio == 1 else min(raw, down_bytes(raw, self.down_ratio))
        return HEADERS * raw / ratio, HEADERS * down


class PlannedRound(NamedTuple):
    ratio: float
    seconds: float
    uplink_bytes: float  # of all clients
    downlink_bytes: float


def simulate(setting: Setting, ratio: float) -> PlannedRound:
    """One round at a ratio; a ratio of 1 is float32 without a codec."""
    check_ratio(ratio)
    world = simpy.Environment()
    up, down = setting.sizes(ratio)
    uplink, downlink = Link(world, setting.uplink_mbps), Link(world, setting.downlink_mbps)
    server = simpy.Resource(world)
    encode, decode = (0.0, 0.0) if ratio == 1 else (setting.encode_seconds, setting.decode_seconds)
    round_trip = 2 * setting.latency_ms / 1000
    pauses = _pauses(setting)
    all_there, missing = world.event(), [setting.clients]

    def client(number: int) -> Generator[simpy.Event, Any, None]:
        before_download, before_steps, before_upload = pauses[number]
        yield world.timeout(before_download + round_trip)
        yield downlink.transfer(down, _of(setting.own_downlinks, number))
        if setting.pauses is not None:
            yield world.timeout(before_steps)
            missing[0] -= 1
            if not missing[0]:
                all_there.succeed()
            yield all_there
        yield world.timeout(setting.steps * setting.step_seconds + encode + before_upload + round_trip)
        yield uplink.transfer(up, _of(setting.own_uplinks, number))
        with server.request() as turn:
            yield turn
            yield world.timeout(decode)

    for number in range(setting.clients):
        world.process(client(number))
    world.run()
    uplink_bytes = setting.clients * (up + ACKNOWLEDGEMENT * down)
    downlink_bytes = setting.clients * (down + ACKNOWLEDGEMENT * up)
    return PlannedRound(ratio, setting.fixed_seconds + world.now, uplink_bytes, downlink_bytes)


def _pauses(setting: Setting) -> NDArray:
    """Three pauses for each client: evenly spread over what they may be, in an order that chance decides."""
    even = (np.arange(setting.clients) + 0.5) / setting.clients
    rng = np.random.default_rng(0)
    return np.stack([longest * rng.permutation(even) for longest in setting.pauses or (0.0, 0.0, 0.0)], axis=1)


def _of(lines: Sequence[float], number: int) -> float:
    return lines[number] if lines else math.inf


class Link:
    """A link whose bandwidth is divided among transfers, each of which has a line of its own that may be slower.

    The share r is such that sum of min(line, r) is the bandwidth. Transfers with a slower line ("held back") end at a
    time that is known as long as they stay so. All others advance alike: `_served` bits each so far, so that one ends
    when `_served` has grown by its size. When a transfer comes or goes, r changes, and some change sides.
    """

    def __init__(self, world: simpy.Environment, mbps: float) -> None:
        self._world = world
        self._bandwidth = mbps * 1e6
        self._then = 0.0
        self._served = 0.0
        self._share = math.inf
        self._held_bandwidth = 0.0
        self._free: dict[int, tuple[float, float]] = {}  # transfer -> line, the value of `_served` at its end
        self._held: dict[int, tuple[float, float]] = {}  # transfer -> line, the time of its end
        self._free_ends: list[tuple[float, int]] = []
        self._free_lines: list[tuple[float, int]] = []
        self._held_ends: list[tuple[float, int]] = []
        self._held_lines: list[tuple[float, int]] = []  # negative: the fastest first
        self._done: dict[int, simpy.Event] = {}
        self._names = count()
        self._plan = 0  # number of the latest alarm; older ones are void

    def transfer(self, size: float, line_mbps: float = math.inf) -> simpy.Event:
        """Start a transfer; returns an event that happens when `size` bytes have passed the link."""
        done = self._world.event()
        line = line_mbps * 1e6
        if math.isinf(self._bandwidth) and math.isinf(line):
            return done.succeed()
        self._advance()
        name = next(self._names)
        self._done[name] = done
        self._set_free(name, line, 8 * size)
        self._rebalance()
        return done

    def _advance(self) -> None:
        """Count what was transferred until now."""
        now = self._world.now
        if self._free:
            self._served += self._share * (now - self._then)
        self._then = now

    def _set_free(self, name: int, line: float, bits: float) -> None:
        end = self._served + bits
        self._free[name] = line, end
        heapq.heappush(self._free_ends, (end, name))
        heapq.heappush(self._free_lines, (line, name))

    def _hold_back(self, name: int) -> None:
        line, end = self._free.pop(name)
        until = self._world.now + (end - self._served) / line
        self._held[name] = line, until
        self._held_bandwidth += line
        heapq.heappush(self._held_ends, (until, name))
        heapq.heappush(self._held_lines, (-line, name))

    def _release(self, name: int) -> None:
        line, until = self._held.pop(name)
        self._held_bandwidth -= line
        self._set_free(name, line, (until - self._world.now) * line)

    def _rebalance(self) -> None:
        """Find the share, and set an alarm for the next end."""
        while True:
            self._share = max(self._bandwidth - self._held_bandwidth, 0.0) / len(self._free) if self._free else math.inf
            slowest, fastest = _first(self._free_lines, self._free), _first(self._held_lines, self._held)
            if slowest is not None and self._free[slowest][0] <= self._share:
                self._hold_back(slowest)
            elif fastest is not None and self._held[fastest][0] > self._share * ROUNDED:
                self._release(fastest)
            else:
                break
        self._set_alarm()

    def _set_alarm(self) -> None:
        ends = []
        if (name := _first(self._free_ends, self._free, by_end=True)) is not None:
            ends.append(((self._free[name][1] - self._served) / self._share, name))
        if (name := _first(self._held_ends, self._held, by_end=True)) is not None:
            ends.append((self._held[name][1] - self._world.now, name))
        self._plan += 1
        if ends:
            delay, name = min(ends)
            alarm = self._world.timeout(max(delay, 0.0), (self._plan, name))
            alarm.callbacks.append(self._alarm)

    def _alarm(self, event: Any) -> None:
        plan, name = event.value
        if plan != self._plan:  # something came or went since
            return
        self._advance()
        if name in self._held:
            self._held_bandwidth -= self._held.pop(name)[0]
        else:
            del self._free[name]
        if not self._held:
            self._held_bandwidth = 0.0  # no rounding errors add up
        self._rebalance()
        self._done.pop(name).succeed()


def _first(heap: list[tuple[float, int]], there: dict[int, tuple[float, float]], by_end: bool = False) -> int | None:
    """The first of a heap that is still there (with that end), after those before it were thrown away."""
    while heap:
        key, name = heap[0]
        if name in there and (not by_end or there[name][1] == key):
            return name
        heapq.heappop(heap)
    return None


# Choosing a ratio


class Plan(NamedTuple):
    rounds: list[PlannedRound]
    fastest: PlannedRound
    recommended: PlannedRound  # the smallest ratio that is nearly as fast: what is compressed less is more exact


def plan(setting: Setting, ratios: Sequence[float] = RATIOS) -> Plan:
    rounds = [simulate(setting, ratio) for ratio in sorted(set(ratios))]
    if not rounds:
        raise ValueError("no ratio to choose from")
    fastest = min(rounds, key=lambda each: each.seconds)
    recommended = next(each for each in rounds if each.seconds <= (1 + NEAR_FASTEST) * fastest.seconds)
    return Plan(rounds, fastest, recommended)


def codec_seconds(parameters: int, ratio: float = DEFAULT_RATIO) -> tuple[float, float]:
    """What encoding and decoding an update of that size takes on this machine: a smaller one is tried, at most 1 M."""
    from fedfq.codec.codec import Codec
    from fedfq.codec.decode import Accumulator

    size = min(parameters, TRIAL_PARAMETERS)
    rng = np.random.default_rng(0)
    side = max(64, math.isqrt(size // 4))  # smaller ones do not fit the ratio
    update = {str(n): (rng.standard_normal((side, 4)) @ rng.standard_normal((4, side))).astype("f4") for n in range(4)}
    codec, total = Codec(ratio=ratio), Accumulator(like=update)
    times = []
    for _ in range(2):  # the first one compiles
        began = time.perf_counter()
        payload = codec.encode(update)
        encoded = time.perf_counter()
        total.add(payload)
        times.append((encoded - began, time.perf_counter() - encoded))
    scale = parameters / (4 * side**2)
    return scale * times[-1][0], scale * times[-1][1]


# Many clients

SIZES = (10**2, 10**3, 10**4, 10**5, 10**6)
FRACTION = 0.01  # of all clients take part in a round, ten at least
LEAST_PER_ROUND = 10
MEDIAN_UPLINK, SPREAD, SLOWEST_UPLINK = 10.0, 0.8, 1.0  # Mbit/s: log-normal, with sigma of the logarithm; cut off below
DOWNLINK_TIMES = 10.0  # a client's downlink over its uplink
SERVER_MBPS = 1000.0  # both ways


def at_scale(setting: Setting, clients: int, seed: int = 0) -> Setting:
    """The setting with clients drawn from so many, whose own lines are as different as the constants above say."""
    per_round = min(clients, max(LEAST_PER_ROUND, int(FRACTION * clients)))
    drawn = np.random.default_rng([seed, clients]).lognormal(math.log(MEDIAN_UPLINK), SPREAD, per_round)
    lines = np.maximum(drawn, SLOWEST_UPLINK)
    return replace(
        setting,
        clients=per_round,
        uplink_mbps=SERVER_MBPS,
        downlink_mbps=SERVER_MBPS,
        own_uplinks=tuple(lines.tolist()),
        own_downlinks=tuple((DOWNLINK_TIMES * lines).tolist()),
    )
