"""Random numbers: splitmix64, uniform, and another sequence for every seed and stream."""

import math

import numpy as np
import pytest

from fedfq.codec.format.random_numbers import stream_key, uniform


def test_uniform_is_splitmix64_and_uniform() -> None:
    # The first outputs of the reference splitmix64 from state 0.
    reference = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    for index, bits in enumerate(reference, start=1):
        assert uniform(np.uint64(0), index) == (bits >> 11) * 2.0**-53
    for seed, stream in ((0, 0), (0, 1), (1, 0), (-1, 2**64 + 5)):
        u = np.array([uniform(stream_key(seed, stream), index) for index in range(20_000)])
        assert u.min() >= 0.0 and u.max() < 1.0
        assert abs(u.mean() - 0.5) < 5 / math.sqrt(12 * u.size)
        cells = np.bincount((u * 100).astype(int), minlength=100)
        assert np.sum((cells - 200.0) ** 2 / 200.0) < 99 + 5 * math.sqrt(2 * 99)
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / math.sqrt(u.size)


def test_keys_of_neighbouring_seeds_and_streams_differ() -> None:
    keys = {int(stream_key(seed, stream)) for seed in range(100) for stream in range(100)}
    assert len(keys) == 10_000


def test_seeds_are_any_integers() -> None:
    assert stream_key(np.int64(-3), 1) == stream_key(-3, 1) == stream_key(2**64 - 3, np.uint8(1))
    with pytest.raises(TypeError):
        stream_key(0.5, 0)  # type: ignore[arg-type]
