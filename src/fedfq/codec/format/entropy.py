"""The entropy coder: adaptive frequency tables in front of a range asymmetric numeral system (rANS).

A *table* holds symbol counts and their cumulative frequencies out of `TOTAL`. It adapts, but not after every
symbol: it is rebuilt when its context has seen a quarter more symbols than at the last rebuild. That costs next
to nothing per symbol and needs no side information.

rANS undoes symbols in the reverse order of coding them. The encoder therefore walks the data forwards, as the
decoder will, writes down one *operation* (start, frequency) per symbol, and then codes the operations backwards.

The coder's state starts at 1 rather than at its lower bound, and what is written of it in the end is just as many
bytes as it needs. So a stream has no fixed overhead, which matters for a bias vector of ten entries, and a decoder
that does not end at 1 with all words used has read a damaged stream.
"""

from __future__ import annotations

import numpy as np

from fedfq.types import Array

from ..kernels import Int, U, high_product, kernel

TOTAL_BITS = 16
TOTAL = 1 << TOTAL_BITS
LOWER_BOUND = 1 << 31  # a state below this takes in another 32-bit word
INCREMENT = 16  # what one symbol adds to its count: priors can be as small as 1/16 of a symbol


@kernel
def rebuild(counts: Array, floors: Array, cumulative: Array, total: Int) -> None:
    """Frequencies in proportion to the counts, each at least its floor, that sum to `total` exactly.

    What rounding leaves over goes to symbol 0, in nearly every use here the most frequent one.
    """
    everything = 0
    available = total
    for k in range(counts.size):
        everything += counts[k]
        available -= floors[k]
    scale = (available << 32) // everything
    upper = total
    for k in range(counts.size - 1, 0, -1):
        cumulative[k + 1] = upper
        upper -= floors[k] + ((counts[k] * scale) >> 32)
    cumulative[1] = upper
    cumulative[0] = 0


@kernel
def relearn(
    counts: Array, floors: Array, cumulative: Array, due: Array, pause: Array, context: Int, total: Int
) -> None:
    """Rebuild the table of `context`, and say in how many symbols the next rebuild is `due`.

    Callers count a symbol as `counts[context, symbol] += INCREMENT; due[context] -= 1` and call this when `due` is
    below zero. (In line, as numba counts references to arrays around a call: that costs more than the symbol.)
    """
    rebuild(counts[context], floors, cumulative[context], total)
    pause[context] += 1 + (pause[context] >> 2)
    due[context] = pause[context]


@kernel
def _reciprocals() -> Array:
    """ceil(2^(63 + s) / f) with s = ceil(log2 f), for every frequency f: to divide by multiplying (Alverson, 1991).

    floor(x / f) is then the upper half of x times this, shifted by s - 1, for x < 2^63 and f >= 2.
    """
    result = np.zeros(TOTAL, np.uint64)
    for f in range(2, TOTAL):
        shift = 0
        while (1 << shift) < f:
            shift += 1
        quotient, rest = np.uint64(1 << 63) // np.uint64(f), np.uint64(1 << 63) % np.uint64(f)
        low = ((rest << np.uint64(shift)) + np.uint64(f - 1)) // np.uint64(f)
        result[f] = (quotient << np.uint64(shift)) + low
    return result


_RECIPROCALS = _reciprocals()
_SHIFTS = np.array([0, *((f - 1).bit_length() - 1 for f in range(1, TOTAL))], np.int8)


def rans_encode(operations: Array) -> bytes:
    """Code operations (start << 16 | frequency) so that a decoder meets them in the given order.

    Returns the stream: the final state in as few bytes as it needs, then 32-bit words, all little-endian. Streams
    of up to 8 bytes are state only; in longer ones the state has 5 to 8 bytes, whichever makes the rest whole words.
    """
    return bytes(_rans_encode(operations, _RECIPROCALS, _SHIFTS).data)


@kernel
def _rans_encode(operations: Array, reciprocals: Array, shifts: Array) -> Array:
    words = np.empty(operations.size // 2 + 2, np.uint32)  # an operation has at most 16 bits
    n = 0
    state = np.uint64(1)
    for i in range(operations.size - 1, -1, -1):
        operation = operations[U(i)]
        start = np.uint64(operation >> np.uint32(16))
        frequency = np.uint64(operation & np.uint32(0xFFFF))
        if state >= frequency << np.uint64(47):
            words[U(n)] = np.uint32(state & np.uint64(0xFFFFFFFF))
            n += 1
            state >>= np.uint64(32)
        quotient = state
        if frequency > np.uint64(1):
            quotient = high_product(state, reciprocals[frequency]) >> np.uint64(shifts[frequency])
        state += quotient * (np.uint64(TOTAL) - frequency) + start
    x = np.int64(state)
    state_bytes = 1
    while state_bytes < 8 and (x >> (8 * state_bytes)) > 0:
        state_bytes += 1
    if n > 0 and state_bytes < 5:
        state_bytes = 8
    stream = np.empty(state_bytes + 4 * n, np.uint8)
    for i in range(state_bytes):
        stream[i] = (x >> (8 * i)) & 0xFF
    for i in range(n):
        word = words[n - 1 - i]
        for k in range(4):
            stream[state_bytes + 4 * i + k] = (word >> np.uint32(8 * k)) & np.uint32(0xFF)
    return stream


def rans_open(stream: bytes | memoryview) -> tuple[int, Array]:
    """The initial state and the words of a stream that `rans_encode` wrote; the inverse of its last lines."""
    size = len(stream)
    state_bytes = size if size <= 8 else 5 + (size - 5) % 4
    state = int.from_bytes(stream[:state_bytes], "little") & (2**63 - 1)
    words = np.frombuffer(stream, "<u4", offset=state_bytes) if size > state_bytes else np.empty(0, "<u4")
    return state, words.astype(np.uint32)


@kernel
def rans_undo(x: Int, start: Int, frequency: Int) -> Int:
    """Take the symbol [start, start + frequency) off the state.

    After it, callers let a low state take in a word; a used-up stream goes on with the state alone:
    `if x < LOWER_BOUND and at < words.size: x = x << 32 | words[at]; at += 1`.
    """
    return frequency * (x >> 16) + (x & 0xFFFF) - start
