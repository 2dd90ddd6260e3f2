"""`decode` and `Accumulator`: names, shapes and dtypes as they were, limits before work, and means to the last bit."""

import copy
import pickle
import struct
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfq import Accumulator, Codec, ErrorFeedback, PayloadError, SharedBasis, decode, encode, inspect
from fedfq.codec import decode as decoding
from fedfq.codec.decode import decode_each
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


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4", ">f8"], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1300,), (30, 40), (5, 3, 2, 7)], ids=str)
def test_names_shapes_and_dtypes_are_kept(dtype: Any, shape: tuple[int, ...]) -> None:
    value = np.asarray(draw("normal", shape)).astype(dtype)
    update = {"b": value, "a": value, "": value, "ein Gewicht · 重み": value}
    decoded = decode(encode(update, step=0.01))
    assert list(decoded) == list(update)
    for array in decoded.values():
        assert (array.shape, array.dtype) == (value.shape, value.dtype.newbyteorder("="))
        assert np.abs(array.astype(np.float64) - value).max(initial=0) < 0.02


def test_long_doubles_come_back_as_float64() -> None:
    """They are something else on every platform."""
    value = draw("normal", (30, 40)).astype(np.longdouble)
    assert decode(encode({"w": value}, step=0.01))["w"].dtype == np.float64


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


@pytest.mark.parametrize("layout", ["full", "digest"])
def test_the_order_is_that_of_like(layout: Any) -> None:
    update = network()
    payload = encode(update, ratio=20, layout=layout)
    for names in (list(update), list(reversed(update)), sorted(update), sorted(update, key=len)):
        like = {name: update[name] for name in names}
        accumulator = Accumulator(like)
        accumulator.add(payload)
        assert list(decode(payload, like=like)) == list(accumulator.mean()) == names
        assert [tensor.name for tensor in inspect(payload, like=like).tensors] == names


# --- Torch -------------------------------------------------------------------------------------------------


def module(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20)).to(dtype)


def mean_of(payload: bytes, like: Any) -> dict[str, Any]:
    accumulator = Accumulator(like)
    accumulator.add(payload, 3.0)
    return accumulator.mean()


def numbers(state: dict[str, Any]) -> dict[str, Array]:
    return {name: value.double().numpy() for name, value in state.items()}


@pytest.mark.parametrize("layout", ["full", "digest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_module_loads_what_is_decoded_with_it(dtype: torch.dtype, layout: Any) -> None:
    model, other = module(dtype), module(dtype)
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    payload = encode(model, ratio=4, layout=layout)
    for decoded in (decode(payload, like=model), mean_of(payload, model)):
        assert {name: value.dtype for name, value in decoded.items()} == {
            name: value.dtype for name, value in model.state_dict().items()
        }
        assert not any(value.requires_grad for value in decoded.values())
        other.load_state_dict(decoded)
        assert nmse(numbers(model.state_dict()), numbers(other.state_dict())) < 0.05


def test_torch_tensors_have_the_numbers_that_numpy_arrays_have() -> None:
    """As near as their dtypes allow: those of the payload do not count."""
    update = network()
    payload = encode(update, ratio=20)
    like = {name: torch.from_numpy(value) for name, value in update.items()}
    for name, value in decode(payload, like=like).items():
        np.testing.assert_array_equal(value.numpy(), decode(payload)[name])
    half = {name: value.bfloat16() if value.is_floating_point() else value for name, value in like.items()}
    for name, value in decode(payload, like=half).items():
        assert value.dtype == half[name].dtype
        assert torch.equal(value, torch.from_numpy(decode(payload)[name]).to(value.dtype))


def test_every_tensor_is_what_that_of_the_model_is() -> None:
    update = network()
    like = {**update, "fc.bias": torch.zeros(40, dtype=torch.bfloat16), "bn.weight": torch.zeros(16, device="meta")}
    payload = encode(update, ratio=20)
    for decoded in (decode(payload, like=like), mean_of(payload, like)):
        assert decoded["fc.bias"].dtype == torch.bfloat16
        assert decoded["bn.weight"].device.type == "cpu"
        assert all(isinstance(decoded[name], type(value)) for name, value in like.items())
    assert all(isinstance(value, np.ndarray) for value in decode(payload).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_torch_dtypes_never_overflow_to_infinity(dtype: torch.dtype) -> None:
    largest = np.finfo(np.float32).max
    payload = encode({"w": np.array([largest, -largest, 1.0], np.float32)}, step=float(largest) * 0.7)
    for decoded in (decode(payload, like={"w": torch.zeros(3, dtype=dtype)}), mean_of(payload, {"w": torch.zeros(3)})):
        assert decoded["w"].float().isfinite().all()


def test_a_module_is_taken_wherever_a_mapping_is() -> None:
    model, initial = module(), module()
    for parameter in initial.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    state = dict(model.state_dict())
    basis = SharedBasis(model, initial)
    assert basis.digest == SharedBasis(state, initial.state_dict()).digest
    payload = Codec(ratio=4, layout="digest").encode(model, shared_basis=basis)
    assert payload == Codec(ratio=4, layout="digest").encode(state, shared_basis=basis)
    assert inspect(payload, like=model) == inspect(payload, like=state)
    memory, other = ErrorFeedback(Codec(ratio=4)), ErrorFeedback(Codec(ratio=4))
    assert memory.encode(model) == other.encode(state)
    assert all(isinstance(value, np.ndarray) for value in memory.state_dict().values())
    assert_identical(memory.state_dict(), other.state_dict())


# --- Other models ------------------------------------------------------------------------------------------


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
    payload = encode({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)}, step=0.1)
    a, b = np.zeros((2, 3), np.float32), np.zeros(4, np.float32)
    for model, message in (
        ({"a": a}, "the payload has a tensor 'b' that the model lacks"),
        ({"a": a, "b": b, "c": b}, "the payload lacks the model's tensor 'c'"),
        ({"a": a.T, "b": b}, r"tensor 'a' has shape \(2, 3\), the model's is \(3, 2\)"),
    ):
        with pytest.raises(PayloadError, match=message):
            decode(payload, like=model)


def test_a_digest_needs_like() -> None:
    update = dict(sorted(network().items()))  # a digest's order, in which small tensors are neighbours
    payload = encode(update, step=0.01, layout="digest")
    with pytest.raises(PayloadError, match="pass like=model") as caught:
        decode(payload)
    assert caught.value.reason == "layout"
    assert_identical(decode(payload, like=update), decode(encode(update, step=0.01)))


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


def test_by_default_the_limit_follows_the_payload_up_to_a_gigabyte() -> None:
    """A few bytes may claim 32 MiB, others 65,536 times their own size; whoever passes a limit may have more."""
    single = np.dtype(np.float32)
    short = write([Spec("w", (2**23 + 1,), single)], [(ZERO, b"")])
    incompressible = np.random.default_rng(0).bytes(1 << 15)
    long = write(
        [Spec("w", (2**28 + 1,), single), Spec("n", (1 << 15,), np.dtype(np.uint8))],
        [(ZERO, b""), (4, b"\x09" + incompressible)],
    )
    for payload in (short, long):
        with pytest.raises(PayloadError, match="max_bytes") as caught:
            decode(payload)
        assert caught.value.reason == "limit"
    assert decode(short, max_bytes=1 << 26)["w"].size == 2**23 + 1
    decode(write([Spec("w", (2**23,), single)], [(ZERO, b"")]))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64, np.bool_], ids=str)
@pytest.mark.parametrize("nonzeros", [0, 1])
def test_what_is_zero_takes_no_more_memory_than_the_limit(dtype: Any, nonzeros: int) -> None:
    update = {"w": np.zeros((1000, 1000), dtype), "v": np.zeros(1000, dtype)}
    for value in update.values():
        value.reshape(-1)[:nonzeros] = 1
    payload = encode(update, max_bytes=20_000)
    limit = 1_001_000 * max(4, np.dtype(dtype).itemsize)
    decode(payload, max_bytes=limit)  # kernels are compiled
    tracemalloc.start()
    decoded = decode(payload, max_bytes=limit)
    size, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    room = decoding.PIECE_ENTRIES * 2 * np.dtype(dtype).itemsize + (1 << 19)
    if nonzeros == 0 or np.dtype(dtype).kind == "f":  # integers are carried whole
        assert peak < limit + room
    assert size < sum(value.nbytes for value in decoded.values()) + room
    for name, value in update.items():
        np.testing.assert_array_equal(decoded[name], value, strict=True)


def test_a_limit_is_a_number() -> None:
    payload = encode(network(), ratio=20)
    assert_identical(decode(payload, max_bytes=10**400), decode(payload))
    for limit in (-1, float("nan")):
        with pytest.raises(ValueError, match="max_bytes must not be negative"):
            decode(payload, max_bytes=limit)  # type: ignore[arg-type]


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


def test_a_tensor_that_is_scaled_counts_by_the_whole_weight() -> None:
    update = {"w": np.full((20, 30), 2.0, np.float32), "b": np.arange(500, dtype=np.float32), "n": np.array([8, 8])}
    payload = encode(update, ratio=2)
    decoded = decode(payload)
    accumulator = Accumulator(like=update)
    accumulator.add(payload, 3.0, scales={"w": 0.25, "n": 0.0})
    accumulator.add(payload, 1.0)
    assert accumulator.weight == 4.0
    mean = accumulator.mean()
    np.testing.assert_allclose(mean["w"], decoded["w"] * (3 * 0.25 + 1) / 4, rtol=1e-6)
    np.testing.assert_allclose(mean["b"], decoded["b"], rtol=1e-6)
    np.testing.assert_array_equal(mean["n"], [2, 2])


def test_decoding_one_tensor_at_a_time_gives_the_same() -> None:
    payload = encode(network(), ratio=12, layout="digest")
    each = decode_each(payload, lambda array: array, like=network())
    together = decode(payload, like=network())
    assert_identical({name: whole for name, (_, whole) in zip(together, each)}, together)
    looked: list[Any] = []
    with pytest.raises(PayloadError, match="checksum"):
        decode_each(payload[:-1], looked.append, like=network())
    assert looked == []


def test_a_tensor_is_seen_without_its_sketch_and_with_it() -> None:
    payload = encode(network(), ratio=12, layout="digest", unbiased=True)
    each = decode_each(payload, lambda array: np.square(array).sum(), like=network())
    energies = dict(zip(network(), each))
    without, whole = energies["fc.weight"]
    assert 0 < without < whole
    assert energies["bn.running_var"][0] == energies["bn.running_var"][1]


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
    for weight_ in (0.0, -1.0, np.nan, np.inf, 1e39, 1e-60, 10**400):
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


def test_threads_share_an_accumulator() -> None:
    """No addition is lost: sums of ones are exact in any order."""
    update = {"w": np.ones(300_000, np.float32), "n": np.array(1)}
    payload = encode(update, step=1.0)
    accumulator = Accumulator(update)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: accumulator.add(payload), range(60)))
    assert accumulator.weight == 60
    np.testing.assert_array_equal(accumulator._sums["w"], 60 * decode(payload)["w"])
    assert accumulator._sums["n"] == 60


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_an_accumulator_has_sums_of_its_own(duplicate: Any) -> None:
    like = network() | {"fc.bias": torch.zeros(40, dtype=torch.bfloat16)}
    original = Accumulator(like)
    original.add(encode(network(1), ratio=20))
    before = original.mean()
    other = duplicate(original)
    other.add(encode(network(2), ratio=20), weight=5.0)
    other.add(encode(network(3), ratio=20))
    assert (original.weight, other.weight) == (1.0, 7.0)
    for name, value in original.mean().items():
        assert type(value) is type(before[name]) and bool((value == before[name]).all())


def test_an_addition_that_is_interrupted_halfway_is_not_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = encode(network(), ratio=20)
    accumulator = Accumulator(network())
    accumulator.add(payload)
    before = accumulator.mean()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "_decode_parts", interrupt)  # before anything was added
        with pytest.raises(KeyboardInterrupt):
            accumulator.add(payload)
    assert_identical(accumulator.mean(), before)
    add_to = decoding.Part.add_to

    def interrupt_sum(part: decoding.Part, total: Any, *rest: Any) -> None:
        if any(total is own for own in accumulator._sums.values()):
            raise KeyboardInterrupt
        add_to(part, total, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(decoding.Part, "add_to", interrupt_sum)
        with pytest.raises(KeyboardInterrupt):
            accumulator.add(payload)
    for use in (accumulator.mean, lambda: accumulator.add(payload)):
        with pytest.raises(ValueError, match="an addition was interrupted halfway, so the sums are of no use"):
            use()


@pytest.mark.parametrize("threads", [0, -1, True, 1.5, "2", None])
def test_a_number_of_threads_that_is_none_is_refused(threads: Any) -> None:
    with pytest.raises(ValueError, match="threads must be a positive integer"):
        decode(b"", threads=threads)
    with pytest.raises(ValueError, match="threads must be a positive integer"):
        Accumulator(like=network(), threads=threads)


@pytest.mark.parametrize("weight", ["3", True, None, 10**400, float("nan")])
def test_a_weight_that_is_no_number_is_refused_in_a_short_line(weight: Any) -> None:
    with pytest.raises(ValueError, match="weight must be positive and finite as float32, got .{1,60}$"):
        Accumulator(like=network()).add(encode(network(), ratio=20), weight)
