"""The simulation of a round: what can be computed by hand, what must grow and shrink, and what is refused."""

import math
from dataclasses import replace

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from fedfq.codec.ratio import DOWN_RATIO, LEAST_BYTES
from fedfq.network.plan import (
    ACKNOWLEDGEMENT,
    HEADERS,
    LEAST_PER_ROUND,
    NEAR_FASTEST,
    SLOWEST_UPLINK,
    Link,
    Setting,
    at_scale,
    codec_seconds,
    plan,
    simulate,
)

MILLION = Setting(parameters=1_000_000, clients=1, uplink_mbps=10, downlink_mbps=100)
MEGABITS = 8 * 4 * HEADERS  # of a million parameters


def test_one_client_is_a_sum() -> None:
    setting = replace(MILLION, latency_ms=50, steps=5, step_seconds=0.2, fixed_seconds=3)
    expected = 3 + 0.1 + MEGABITS / 100 + 5 * 0.2 + 0.1 + MEGABITS / 10
    assert simulate(setting, 1).seconds == pytest.approx(expected)


def test_the_codec_takes_its_time_where_it_is_used() -> None:
    setting = replace(MILLION, encode_seconds=0.3, decode_seconds=0.1)
    assert simulate(setting, 64).seconds == pytest.approx(MEGABITS / DOWN_RATIO / 100 + 0.3 + MEGABITS / 640 + 0.1)
    assert simulate(setting, 1).seconds == pytest.approx(MEGABITS / 100 + MEGABITS / 10)


@pytest.mark.parametrize("clients", [2, 16, 300])
def test_clients_that_share_a_link_take_turns_in_effect(clients: int) -> None:
    setting = replace(MILLION, clients=clients)
    assert simulate(setting, 1).seconds == pytest.approx(clients * (MEGABITS / 100 + MEGABITS / 10))


@pytest.mark.parametrize("clients", [1, 16])
def test_clients_with_lines_of_their_own_do_not_wait_for_each_other(clients: int) -> None:
    lines = {"own_uplinks": (10.0,) * clients, "own_downlinks": (100.0,) * clients}
    setting = Setting(parameters=1_000_000, clients=clients, **lines)
    assert simulate(setting, 1).seconds == pytest.approx(MEGABITS / 100 + MEGABITS / 10)


def test_payloads_are_decoded_one_after_the_other() -> None:
    setting = replace(MILLION, clients=8, decode_seconds=2, uplink_mbps=1e6, downlink_mbps=1e6)
    assert simulate(setting, 2).seconds == pytest.approx(16, rel=0.01)


def test_clients_that_start_at_different_moments_share_a_link_less() -> None:
    """Pauses and transfers overlap: together they take less than one after the other, and more than each alone."""
    crowd = replace(MILLION, clients=16, uplink_mbps=1000, downlink_mbps=1000)
    alone, transfers = replace(crowd, parameters=1, pauses=(2.0, 1.0, 0.5)), simulate(crowd, 1).seconds
    pauses = simulate(alone, 1).seconds
    both = simulate(replace(crowd, pauses=(2.0, 1.0, 0.5)), 1).seconds
    assert 2.5 < pauses < 3.5
    assert max(pauses, transfers) < both < pauses + transfers


def test_bytes_are_those_of_all_clients_with_acknowledgements() -> None:
    found = simulate(replace(MILLION, clients=3, down_ratio=50), 100)
    up, down = 4e4 * HEADERS, 8e4 * HEADERS
    assert found.uplink_bytes == pytest.approx(3 * (up + ACKNOWLEDGEMENT * down))
    assert found.downlink_bytes == pytest.approx(3 * (down + ACKNOWLEDGEMENT * up))


@pytest.mark.parametrize("clients", [3, 7, 49])
def test_lines_that_are_just_as_fast_as_their_share(clients: int) -> None:
    """The link is full, and every line too: rounding errors must not make them change places for ever."""
    lines = simulate(replace(MILLION, clients=clients, uplink_mbps=10, own_uplinks=(10 / clients,) * clients), 64)
    assert lines.seconds == pytest.approx(simulate(replace(MILLION, clients=clients, uplink_mbps=10), 64).seconds)


def test_a_small_model_is_measured_too() -> None:
    encode, decode = codec_seconds(100)
    assert 0 < encode < 1 and 0 < decode < 1


def test_a_slow_line_leaves_its_share_to_others() -> None:
    """10 Mbit/s for two: the one whose line has 2 gets 2, the other 8, and 10 when it is alone."""
    world = simpy.Environment()
    link = Link(world, 10)
    ends = {}
    for name, megabytes, line in (("slow", 1.0, 2.0), ("fast", 2.0, math.inf)):
        link.transfer(megabytes * 1e6, line).callbacks.append(lambda _, name=name: ends.setdefault(name, world.now))
    world.run()
    assert ends == pytest.approx({"fast": 2.0, "slow": 4.0})


def test_a_transfer_that_comes_later_slows_the_one_that_is_there() -> None:
    world = simpy.Environment()
    link = Link(world, 8)  # a megabyte per second
    ends = []

    def sender(start: float):
        yield world.timeout(start)
        yield link.transfer(2e6)
        ends.append(world.now)

    for start in (0.0, 1.0):
        world.process(sender(start))
    world.run()
    assert ends == pytest.approx([3.0, 4.0])  # 1 alone, 2 together, 1 alone


transfers = st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 3), st.floats(0.1, 50)), min_size=1, max_size=30)


@given(transfers, st.floats(0.5, 100))
def test_a_link_is_never_faster_than_it_is_and_never_idles(
    given_: list[tuple[float, float, float]], mbps: float
) -> None:
    world = simpy.Environment()
    link = Link(world, mbps)
    took = []

    def sender(start: float, megabytes: float, line: float):
        yield world.timeout(start)
        yield link.transfer(megabytes * 1e6, line)
        took.append((world.now - start, megabytes, line))

    for each in given_:
        world.process(sender(*each))
    world.run()
    assert len(took) == len(given_)
    for seconds, megabytes, line in took:
        assert seconds >= 8 * megabytes / min(line, mbps) * (1 - 1e-6)
    total = 8 * sum(megabytes for _, megabytes, _ in given_)
    assert world.now >= total / mbps * (1 - 1e-6)
    slowest = min(mbps, *(line for *_, line in given_))
    assert world.now <= max(start for start, *_ in given_) + total / slowest + 1e-6


@given(st.integers(1, 40), st.floats(1, 1e4), st.floats(1, 1000), st.floats(1.0, 2.0))
def test_more_bandwidth_and_fewer_clients_never_take_longer(
    clients: int, ratio: float, mbps: float, more: float
) -> None:
    setting = replace(MILLION, clients=clients, uplink_mbps=mbps, decode_seconds=0.01)
    seconds = simulate(setting, ratio).seconds
    slack = 1 + 1e-9
    assert simulate(replace(setting, uplink_mbps=more * mbps), ratio).seconds <= seconds * slack
    assert simulate(replace(setting, clients=clients + 1), ratio).seconds >= seconds / slack
    assert simulate(setting, ratio * more).uplink_bytes <= simulate(setting, ratio).uplink_bytes


def test_the_recommended_ratio_is_the_smallest_that_is_nearly_the_fastest() -> None:
    found = plan(replace(MILLION, clients=16, encode_seconds=0.1, decode_seconds=0.01))
    assert found.fastest.seconds == min(each.seconds for each in found.rounds)
    assert found.recommended.seconds <= (1 + NEAR_FASTEST) * found.fastest.seconds
    smaller = [each for each in found.rounds if each.ratio < found.recommended.ratio]
    assert smaller and all(each.seconds > (1 + NEAR_FASTEST) * found.fastest.seconds for each in smaller)


def test_where_the_codec_costs_more_than_it_saves_nothing_is_recommended() -> None:
    fast = replace(MILLION, uplink_mbps=10_000, downlink_mbps=10_000, encode_seconds=1)
    assert plan(fast).recommended.ratio == 1


def test_a_thousandth_of_the_bytes_does_not_make_a_symmetric_link_faster_than_its_downlink() -> None:
    """Compression of the uplink alone wins at most half there; that of both ways is worth more."""
    setting = replace(MILLION, clients=16, downlink_mbps=10)
    whole = simulate(setting, 1).seconds
    assert whole / simulate(replace(setting, down_ratio=1), 1024).seconds < 2
    assert whole / simulate(setting, 1024).seconds > 100


def test_small_models_go_down_in_four_kilobytes_or_as_they_are() -> None:
    for parameters, expected in ((100, 400), (20_000, LEAST_BYTES), (10**6, 4e6 / DOWN_RATIO)):
        assert replace(MILLION, parameters=parameters).sizes(64)[1] == pytest.approx(HEADERS * expected)


def test_clients_of_a_large_federation() -> None:
    assert at_scale(MILLION, 100).clients == LEAST_PER_ROUND
    large = at_scale(MILLION, 100_000)
    assert large.clients == len(large.own_uplinks) == 1000
    assert min(large.own_uplinks) >= SLOWEST_UPLINK
    assert sorted(large.own_uplinks)[500] == pytest.approx(10, rel=0.1)
    assert large == at_scale(MILLION, 100_000)
    assert simulate(large, 64).seconds < simulate(large, 1).seconds


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parameters": 0}, "parameters must be at least 1"),
        ({"clients": 0}, "clients must be at least 1"),
        ({"uplink_mbps": 0}, "a bandwidth must be positive"),
        ({"downlink_mbps": math.nan}, "a bandwidth must be positive"),
        ({"latency_ms": -1}, "latency_ms must be 0 or more"),
        ({"step_seconds": math.inf}, "step_seconds must be 0 or more"),
        ({"own_uplinks": (1.0, 2.0)}, "2 lines for 1 clients"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MILLION, **wrong)
