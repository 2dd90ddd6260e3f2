"""Random numbers that both sides draw alike: a hash of (seed, stream, index).

A number does not depend on threads, on chunks or on the version of a library's generator.
"""

from __future__ import annotations

import operator

import numpy as np

from ..kernels import kernel

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@kernel
def _mix(x: np.uint64) -> np.uint64:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): a bijection that scatters 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


@kernel
def _derive_key(seed: np.uint64, stream: np.uint64) -> np.uint64:
    return _mix(_mix(seed + _GOLDEN) ^ (stream * _GOLDEN))


@kernel
def uniform(key: np.uint64, index: int) -> float:
    """Number `index` of the sequence of `key` (see `stream_key`), in [0, 1), a multiple of 2^-53.

    This is splitmix64 started at `key`, read at any position. 24 bits would not do: an entry of which 1e-9 of
    a level must be sent would be rounded up with probability 2^-24, sixty times too often.
    """
    return float(_mix(key + np.uint64(index) * _GOLDEN) >> np.uint64(11)) * 2.0**-53


def stream_key(seed: int, stream: int) -> np.uint64:
    """The key of one random sequence. Both numbers are taken modulo 2^64."""
    mask = 2**64 - 1
    return np.uint64(_derive_key(np.uint64(operator.index(seed) & mask), np.uint64(operator.index(stream) & mask)))
