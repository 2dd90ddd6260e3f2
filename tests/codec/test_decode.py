"""`decode` and `Accumulator`: names, shapes and dtypes as they were, limits before work, and means to the last bit."""

import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfq import Accumulator, Codec, PayloadError, decode, encode, inspect
from fedfq.codec.format.layout import Spec
from fedfq.codec.format.sections import ZERO
from tests.payloads import write
from tests.updates import Array, assert_identical, draw, network, nmse, scaled


def model_of(update: dict[str, Array]) -> dict[str, Array]:
    return {name: np.zeros_like(value) for name, value in update.items()}


def resealed(payload: bytes) -> bytes:
    """With its checksum put right, so that the checks behind it are reached."""
    return payload[:4] + struct.pack("<I", zlib.crc32(payload[8:], zlib.crc32(payload[:4]))) + payload[8:]


# --- Names, shapes, dtypes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble, ">f4", ">f8"], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1300,), (30, 40), (5, 3, 2, 7)], ids=str)
def test_names_shapes_and_dtypes_are_kept(dtype: Any, shape: tuple[int, ...]) -> None:
    value = np.asarray(draw("normal", shape)).astype(dtype)
    update = {"b": value, "a": value, "": value, "ein Gewicht · 重み": value}
    decoded = decode(encode(update, step=0.01))
    assert list(decoded) == list(update)
    for array in decoded.values():
        assert (array.shape, array.dtype) == (value.shape, value.dtype.newbyteorder("="))
        assert np.abs(array.astype(np.float64) - value).max(initial=0) < 0.02


def test_bfloat16_comes_back_as_float32() -> None:
    value = torch.from_numpy(draw("normal", (30, 40))).bfloat16()
    decoded = decode(encode({"w": value}, step=0.01))["w"]
    assert decoded.dtype == np.float32
    assert np.abs(decoded - value.float().numpy()).max() < 0.01


@pytest.mark.parametrize("step", [10.0, 1000.0, 50_000.0])
def test_float16_never_overflows_to_infinity(step: float) -> None:
    limit = np.finfo(np.float16).max
    update = {"w": np.array([[limit, -limit, 60_000, -65_000, 100]] * 4, np.float16)}
    for options in (
        {"step": step},
        {"max_bytes": 80, "allocator": "exact"},
        {"max_bytes": 80, "rounding": "stochastic"},
    ):
        decoded = decode(encode(update, **options))["w"]
        assert decoded.dtype == np.float16 and np.isfinite(decoded).all()


def test_float32_never_overflows_to_infinity() -> None:
    largest = np.finfo(np.float32).max
    update = {"w": np.array([largest, -largest, largest * 0.62], np.float32)}
    for share in (0.3, 0.7, 0.99):
        assert np.isfinite(decode(encode(update, step=float(largest) * share))["w"]).all()


def test_payloads_are_bytes_bytearrays_or_memoryviews() -> None:
    payload = encode(network(), ratio=20)
    expected = decode(payload)
    for form in (bytearray(payload), memoryview(payload), memoryview(b"x" + payload)[1:]):
        assert_identical(decode(form), expected)
    for wrong in ("FQ", None, np.frombuffer(payload, np.uint8), [1, 2]):
        with pytest.raises(TypeError, match="a payload is bytes"):
            decode(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("allocator", ["waterfill", "exact"])
def test_threads_do_not_matter(allocator: Any) -> None:
    update = {**network(), "tall": scaled(2500, 2100, 3)}
    payload = encode(update, step=0.05) if allocator == "waterfill" else encode(network(), ratio=10, allocator="exact")
    assert_identical(decode(payload), decode(payload, threads=3))


def test_decoded_arrays_belong_to_the_caller() -> None:
    decoded = decode(encode(network(), ratio=4, keep=("bn.*",)))
    for value in decoded.values():
        assert value.flags.writeable and value.flags.c_contiguous
        value[...] = 0


# --- like= -------------------------------------------------------------------------------------------------


def test_like_is_a_model_in_any_order_and_its_dtypes_win() -> None:
    update = network()
    like = {name: value.astype(np.float64) if value.dtype.kind == "f" else value for name, value in update.items()}
    like = dict(reversed(like.items()))
    for layout in ("full", "digest"):
        payload = encode(update, ratio=20, layout=layout)
        decoded = decode(payload, like=like)
        plain = decode(payload, like=update)
        assert set(decoded) == set(update)
        for name, value in plain.items():
            np.testing.assert_array_equal(decoded[name], value)
            assert decoded[name].dtype == like[name].dtype


def test_like_may_be_a_module() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    payload = encode(module, ratio=4, layout="digest")
    decoded = decode(payload, like=module)
    for name, value in module.state_dict().items():
        assert decoded[name].shape == tuple(value.shape)


@pytest.mark.parametrize("layout", ["full", "digest"])
def test_another_model_is_refused(layout: Any) -> None:
    update = network()
    payload = encode(update, ratio=20, layout=layout)
    renamed = {name.replace("fc", "head"): value for name, value in update.items()}
    reshaped = {**update, "fc.weight": update["fc.weight"].T}
    smaller = {name: value for name, value in update.items() if name != "fc.bias"}
    larger = {**update, "extra": np.zeros(3, np.float32)}
    for model in (renamed, reshaped, smaller, larger, {}):
        with pytest.raises(PayloadError) as caught:
            decode(payload, like=model)
        assert caught.value.reason == "layout"


def test_refusals_name_the_difference() -> None:
    payload = encode({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)}, ratio=0.1)
    a, b = np.zeros((2, 3), np.float32), np.zeros(4, np.float32)
    for model, message in (
        ({"a": a}, "the payload has a tensor 'b' that the model lacks"),
        ({"a": a, "b": b, "c": b}, "the payload lacks the model's tensor 'c'"),
        ({"a": a.T, "b": b}, r"tensor 'a' has shape \(2, 3\), the model's is \(3, 2\)"),
    ):
        with pytest.raises(PayloadError, match=message):
            decode(payload, like=model)


def test_a_digest_needs_like() -> None:
    payload = encode(network(), ratio=20, layout="digest")
    with pytest.raises(PayloadError, match="pass like=model") as caught:
        decode(payload)
    assert caught.value.reason == "layout"
    assert_identical(
        decode(payload, like=network()),
        dict(sorted(decode(encode(network(), step=_step_of(payload))).items())),
    )


def _step_of(payload: bytes) -> float:
    return float(struct.unpack("<f", payload[16:20])[0])  # behind head and digest


def test_integers_are_not_squeezed_into_a_narrower_dtype() -> None:
    update = {"n": np.array([1, 300], np.int64)}
    payload = encode(update, max_bytes=100)
    assert decode(payload, like={"n": np.zeros(2, np.int16)})["n"].tolist() == [1, 300]
    with pytest.raises(PayloadError, match="'n' holds int16, which is not safely int8"):
        decode(payload, like={"n": np.zeros(2, np.int8)})


# --- Limits ------------------------------------------------------------------------------------------------


def test_the_decoded_size_is_limited() -> None:
    update = {"w": np.zeros((1000, 1000), np.float32), "half": np.zeros(1000, np.float16), "n": np.zeros(10, np.int64)}
    payload = encode(update, max_bytes=100)
    needed = 4_000_000 + 4_000 + 80  # float16 is decoded by way of float32
    assert_identical(decode(payload, max_bytes=needed), update)
    with pytest.raises(PayloadError, match="4004080 bytes decoded, more than the limit of 4004079") as caught:
        decode(payload, max_bytes=needed - 1)
    assert caught.value.reason == "limit"
    assert_identical(decode(payload, like=update, max_bytes=1), update)  # the model is the limit then


def test_factors_of_any_shape_take_little_more_than_what_they_make() -> None:
    """And nothing stays: a server meets whatever shapes a stranger likes."""
    one = np.ones((1, 1), np.float32)
    decode(encode({"w": np.broadcast_to(one, (64, 8, 8)).copy()}, ratio=8))  # what is compiled stays, of course
    tracemalloc.start()
    try:
        for side in (1024, 1023, 1022):
            shape = (1, side, side)
            payload = encode({"w": np.broadcast_to(one, shape).copy()}, ratio=1000)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            update = decode(payload)
            peak = tracemalloc.get_traced_memory()[1]
            assert inspect(payload).tensors[0].rank == 1 and peak - before < 2.5 * update["w"].nbytes
            del update
            assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()


def test_by_default_the_limit_is_a_gigabyte() -> None:
    payload = write([Spec("w", (2**28 + 1,), np.dtype(np.float32))], [(ZERO, b"")])
    with pytest.raises(PayloadError) as caught:
        decode(payload)
    assert caught.value.reason == "limit"


# --- Accumulator -------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.floats(0.01, 1000)), min_size=1, max_size=6),
    st.sampled_from(["waterfill", "exact"]),
    st.sampled_from(["full", "digest"]),
)
def test_the_mean_is_the_weighted_mean_of_what_is_decoded(
    clients: list[tuple[int, float]], allocator: Any, layout: Any
) -> None:
    codec = Codec(ratio=12, allocator=allocator, layout=layout)
    accumulator = Accumulator(like=model_of(network()))
    decoded = []
    for seed, weight in clients:
        payload = codec.encode(network(seed), seed)
        accumulator.add(payload, weight=weight)
        decoded.append(decode(payload, like=network()))
    weights = np.array([weight for _, weight in clients])
    assert accumulator.weight == pytest.approx(weights.sum())
    mean = accumulator.mean()
    assert list(mean) == list(network())
    for name, value in mean.items():
        stack = np.stack([update[name].astype(np.float64) for update in decoded])
        expected = np.tensordot(weights, stack, axes=1) / weights.sum()
        largest = np.abs(stack).max(initial=0)
        assert value.dtype == network()[name].dtype and value.shape == network()[name].shape
        if value.dtype.kind == "f":
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-6 * largest)
        else:
            np.testing.assert_array_equal(value, np.rint(expected))


def test_a_weight_may_be_any_positive_integer() -> None:
    """Flower carries 64 bits without a sign."""
    payload = encode({"w": np.ones(3, np.float32)}, step=0.1)
    mean = Accumulator(like={"w": np.ones(3, np.float32)})
    for weight in (5, 2**63, 2**64 - 1, 10**30):
        mean.add(payload, weight)
    np.testing.assert_allclose(mean.mean()["w"], decode(payload)["w"], rtol=1e-6)


def test_one_client_is_its_own_mean() -> None:
    update = network()
    payload = encode(update, ratio=12)
    accumulator = Accumulator(like=update)
    accumulator.add(payload)
    assert_identical(accumulator.mean(), decode(payload))


def test_counters_are_averaged_and_rounded() -> None:
    like = {"n": np.array(0, np.int64), "mask": np.zeros(3, bool), "small": np.zeros(2, np.uint8)}
    accumulator = Accumulator(like=like)
    for n, mask, small in ((10, [1, 1, 0], [255, 0]), (11, [1, 0, 0], [255, 1]), (13, [1, 0, 0], [255, 2])):
        update = {"n": np.array(n), "mask": np.array(mask, bool), "small": np.array(small, np.uint8)}
        accumulator.add(encode(update, max_bytes=200))
    mean = accumulator.mean()
    assert mean["n"] == 11 and mean["mask"].tolist() == [True, False, False] and mean["small"].tolist() == [255, 1]
    assert mean["n"].dtype == np.int64 and mean["mask"].dtype == bool


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_the_largest_counters_do_not_wrap_round(dtype: type) -> None:
    value = np.array([np.iinfo(dtype).max, 5], dtype)
    accumulator = Accumulator(like={"n": value})
    accumulator.add(encode({"n": value}, max_bytes=100))
    mean = accumulator.mean()["n"]
    assert float(mean[0]) == pytest.approx(float(value[0])) and mean[1] == 5


def bits_of(accumulator: Accumulator) -> list[bytes]:
    return [value.tobytes() for value in accumulator.mean().values()]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_refused_payload_leaves_no_trace(threads: int) -> None:
    update = network()
    accumulator = Accumulator(like=update, threads=threads)
    accumulator.add(encode(update, ratio=12), weight=3.0)
    before, weight = bits_of(accumulator), accumulator.weight
    good = encode(network(5), ratio=12)
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(good)
        damaged[rng.integers(100, len(good))] ^= 1 << rng.integers(8)  # behind the layout: only decoding can tell
        try:
            accumulator.add(resealed(bytes(damaged)))
        except PayloadError:
            assert (bits_of(accumulator), accumulator.weight) == (before, weight)
            refused += 1
        else:
            accumulator = Accumulator(like=update, threads=threads)
            accumulator.add(encode(update, ratio=12), weight=3.0)
    assert refused > 150
    for bad in (good[:-1], b"", encode({"w": np.ones(3, np.float32)}, max_bytes=100)):
        with pytest.raises(PayloadError):
            accumulator.add(bad)
    for weight_ in (0.0, -1.0, np.nan, np.inf, 1e39, 1e-60):
        with pytest.raises(ValueError, match="weight must be positive and finite"):
            accumulator.add(good, weight=weight_)
    assert (bits_of(accumulator), accumulator.weight) == (before, weight)


def test_threads_give_the_same_mean() -> None:
    update = {**network(), "tall": scaled(2500, 2100, 3)}
    accumulators = [Accumulator(like=update, threads=threads) for threads in (1, 3)]
    for seed in range(2):
        payload = encode({**network(seed), "tall": scaled(2500, 2100, seed)}, step=0.05)
        for accumulator in accumulators:
            accumulator.add(payload, weight=1.5 + seed)
    assert_identical(accumulators[0].mean(), accumulators[1].mean())


def test_nothing_added_has_no_mean() -> None:
    with pytest.raises(ValueError, match="nothing was added yet"):
        Accumulator(like=network()).mean()


def test_an_accumulator_goes_on_after_a_mean() -> None:
    accumulator = Accumulator(like=network())
    accumulator.add(encode(network(1), ratio=12))
    first = accumulator.mean()
    first["fc.weight"][...] = 99  # the caller's
    accumulator.add(encode(network(2), ratio=12))
    truth = {"fc.weight": (network(1)["fc.weight"] + network(2)["fc.weight"]) / 2}
    assert nmse(truth, accumulator.mean()) < 0.1


def test_huge_updates_do_not_make_the_mean_infinite() -> None:
    update = {"w": np.full((4, 8), 3e38, np.float32), "running_mean": np.full(3, 3e38, np.float32)}
    payload = encode(update, ratio=1)
    total = Accumulator(update)
    for _ in range(3):
        total.add(payload, weight=10.0)
    assert all(np.isfinite(array).all() for array in total.mean().values())
