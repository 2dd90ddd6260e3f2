"""The coder: tables that always add up, and a stream that is undone exactly and has the size theory says."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedfq.codec.format.entropy import (
    _RECIPROCALS,
    _SHIFTS,
    LOWER_BOUND,
    TOTAL,
    rans_encode,
    rans_open,
    rans_undo,
    rebuild,
    relearn,
)

Operation = tuple[int, int]  # start and frequency, out of TOTAL


def encode(operations: list[Operation]) -> bytes:
    return rans_encode(np.array([start << 16 | frequency for start, frequency in operations], np.uint32))


def reference_encode(operations: list[Operation]) -> bytes:
    """rANS as in the textbook, dividing with //."""
    state, words = 1, []
    for start, frequency in reversed(operations):
        if state >= frequency << 47:
            words.append(state & 0xFFFFFFFF)
            state >>= 32
        state = (state // frequency << 16) + state % frequency + start
    size = (state.bit_length() + 7) // 8
    size = 8 if words and size < 5 else size
    return state.to_bytes(size, "little") + b"".join(word.to_bytes(4, "little") for word in reversed(words))


def assert_undone(stream: bytes, operations: list[Operation]) -> None:
    """A decoder meets the operations in their order, and ends at state 1 with all words used."""
    state, words = rans_open(stream)
    at = 0
    for start, frequency in operations:
        assert start <= state % TOTAL < start + frequency
        state = rans_undo(state, start, frequency)
        if state < LOWER_BOUND and at < words.size:
            state = state << 32 | int(words[at])
            at += 1
    assert state == 1 and at == words.size


@st.composite
def operation(draw: st.DrawFn) -> Operation:
    frequency = draw(st.one_of(st.integers(1, TOTAL - 1), st.sampled_from([1, 2, 32768, TOTAL - 1])))
    return draw(st.integers(0, TOTAL - frequency)), frequency


@settings(max_examples=300)
@given(st.lists(operation(), max_size=60))
@example([])
@example([(0, 1)])
@example([(TOTAL - 1, 1)])
@example([(0, TOTAL - 1)])
@example([(1, TOTAL - 1)] * 50)
@example([(TOTAL - 1, 1)] * 50)
@example([(0, 1)] * 50)
def test_round_trip_of_any_operations(operations: list[Operation]) -> None:
    stream = encode(operations)
    assert stream == reference_encode(operations)
    assert_undone(stream, operations)


def test_round_trip_of_many_operations() -> None:
    rng = np.random.default_rng(0)
    frequencies = np.concatenate([rng.integers(1, TOTAL, 10_000), 2 ** rng.integers(0, 16, 10_000)])
    starts = (rng.random(frequencies.size) * (TOTAL - frequencies + 1)).astype(np.int64)
    operations = list(zip(starts.tolist(), frequencies.tolist(), strict=True))
    stream = encode(operations)
    assert stream == reference_encode(operations)
    assert_undone(stream, operations)


def test_no_symbols_take_a_byte_and_likely_ones_next_to_nothing() -> None:
    assert encode([]) == b"\x01"
    assert len(encode([(0, TOTAL - 1)] * 1000)) == 1
    assert len(encode([(0, 1)])) == 3


def test_streams_are_as_long_as_the_entropy() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        cuts = np.sort(rng.choice(np.arange(1, TOTAL), int(rng.integers(1, 12)), replace=False))
        starts, ends = np.concatenate([[0], cuts]), np.concatenate([cuts, [TOTAL]])
        sizes = ends - starts
        drawn = rng.choice(sizes.size, int(rng.integers(1, 5000)), p=sizes / TOTAL)
        bits = float(np.sum(16 - np.log2(sizes[drawn])))
        stream = encode(list(zip(starts[drawn].tolist(), sizes[drawn].tolist(), strict=True)))
        assert bits - 1 <= 8 * len(stream) <= 1.0001 * bits + 48


def test_dividing_by_multiplication_is_exact() -> None:
    """For every frequency, at multiples of it and around them up to 2^63, and at the largest state it is used with."""
    rng = np.random.default_rng(2)
    for frequency in range(2, TOTAL):
        reciprocal, shift = int(_RECIPROCALS[frequency]), int(_SHIFTS[frequency])
        assert reciprocal < 2**64
        largest = (2**63 - 1) // frequency * frequency
        states = [
            1,
            frequency - 1,
            frequency,
            frequency << 47,
            largest - 1,
            largest,
            2**63 - 1,
            int(rng.integers(2**63)),
        ]
        for state in states:
            if state < 2**63:
                assert (state * reciprocal >> 64) >> shift == state // frequency


def rebuilt(counts: list[int], floors: list[int], total: int) -> npt.NDArray[np.int64]:
    cumulative = np.empty(len(counts) + 1, np.int64)
    rebuild(np.array(counts, np.int64), np.array(floors, np.int64), cumulative, total)
    return cumulative


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 2**28), st.integers(1, 70)), min_size=2, max_size=82),
    st.sampled_from([TOTAL, TOTAL // 2]),
)
def test_tables_add_up_and_leave_every_symbol_its_floor(entries: list[tuple[int, int]], total: int) -> None:
    counts, floors = [count for count, _ in entries], [floor for _, floor in entries]
    counts[-1] += 1
    cumulative = rebuilt(counts, floors, total)
    frequencies = np.diff(cumulative)
    assert cumulative[0] == 0 and cumulative[-1] == total
    assert (frequencies >= floors).all()
    share = np.array(floors) + (total - sum(floors)) * (np.array(counts, np.float64) / sum(counts))
    assert (np.abs(frequencies - share)[1:] <= 1.1).all()  # and symbol 0 has what rounding left over
    assert -0.1 <= frequencies[0] - share[0] <= 1.1 * len(counts)


def test_tables_follow_the_counts() -> None:
    assert np.diff(rebuilt([3, 1], [1, 1], TOTAL)).tolist() == [49152, 16384]
    assert np.diff(rebuilt([0, 1], [1, 1], TOTAL)).tolist() == [1, TOTAL - 1]


def test_rebuilds_become_rarer() -> None:
    counts, cumulative = np.full((2, 3), 16, np.int64), np.zeros((2, 4), np.int64)
    due, pause = np.zeros(2, np.int64), np.zeros(2, np.int64)
    rebuilds = []
    for symbol in range(1, 1001):
        counts[1, symbol % 3] += 16
        due[1] -= 1
        if due[1] < 0:
            relearn(counts, np.ones(3, np.int64), cumulative, due, pause, 1, TOTAL)
            rebuilds.append(symbol)
    assert rebuilds[:7] == [1, 3, 6, 10, 15, 22, 31]
    assert len(rebuilds) < 30
    assert cumulative[0].tolist() == [0] * 4  # another context's table is untouched
    assert np.diff(cumulative[1]).tolist() == pytest.approx([TOTAL / 3] * 3, abs=2 + TOTAL / 3 / rebuilds[-1])


def test_adaptive_tables_reach_the_entropy() -> None:
    """A table that learns a skewed source costs little more than one that knew it."""
    rng = np.random.default_rng(3)
    probabilities = np.array([0.9, 0.06, 0.03, 0.01])
    drawn = rng.choice(4, 5000, p=probabilities)
    counts, cumulative = np.full((1, 4), 4, np.int64), np.zeros((1, 5), np.int64)
    floors, due, pause = np.ones(4, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    rebuild(counts[0], floors, cumulative[0], TOTAL)
    operations = []
    for symbol in drawn:
        operations.append((int(cumulative[0, symbol]), int(cumulative[0, symbol + 1] - cumulative[0, symbol])))
        counts[0, symbol] += 16
        due[0] -= 1
        if due[0] < 0:
            relearn(counts, floors, cumulative, due, pause, 0, TOTAL)
    entropy = -sum(math.log2(probabilities[symbol]) for symbol in drawn)
    assert 8 * len(encode(operations)) < 1.02 * entropy
