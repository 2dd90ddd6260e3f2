"""`inspect`: sizes that add up to the payload, without decoding it."""

from typing import Any

import numpy as np
import pytest

from fedfq import PayloadError, decode, encode, inspect
from fedfq.codec.format.layout import Spec
from fedfq.codec.format.sections import ZERO
from tests.payloads import write
from tests.updates import draw, network, raw_size, scaled

OPTIONS: list[dict[str, Any]] = [
    {"ratio": 12, "basis": "identity"},
    {"step": 0.003, "basis": "identity"},
    {"ratio": 12, "rounding": "stochastic"},
    {"ratio": 12, "allocator": "exact"},
    {"ratio": 12, "allocator": "cgsa"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["full", "digest"])
def test_sizes_and_non_zeros_are_those_of_the_payload(options: dict[str, Any], layout: Any) -> None:
    update = {**network(), "zero.weight": np.zeros((20, 30), np.float32), "empty": np.zeros((0, 3), np.float32)}
    payload = encode(update, layout=layout, **options)
    report = inspect(payload, like=update)
    decoded = decode(payload, like=update)
    parts = [report.header_bytes, report.small_bytes, *(tensor.bytes for tensor in report.tensors)]
    assert report.bytes == len(payload) == sum(parts)
    assert report.raw_bytes == raw_size(update)
    assert report.ratio == raw_size(update) / len(payload)
    assert report.layout == layout
    assert [tensor.name for tensor in report.tensors] == list(decoded)
    for tensor in report.tensors:
        assert (tensor.shape, tensor.dtype) == (update[tensor.name].shape, str(update[tensor.name].dtype))
        if tensor.kind in ("plain", "widths", "zero"):
            assert tensor.nonzeros == np.count_nonzero(decoded[tensor.name])
        assert tensor.bits_per_parameter == 8 * tensor.bytes / max(1, update[tensor.name].size)
    small = {tensor.name: decoded[tensor.name] for tensor in report.tensors if tensor.kind.startswith("small")}
    counts = {name: np.count_nonzero(array) for name, array in small.items() if array.dtype.kind == "f"}
    weights = sum(count for name, count in counts.items() if "running" not in name)  # which have no offsets
    rest = report.nonzeros - sum(tensor.nonzeros for tensor in report.tensors)
    assert weights <= rest <= sum(counts.values())
    kinds = {tensor.name: tensor.kind for tensor in report.tensors}
    if options.get("allocator") is None:
        assert kinds["fc.weight"] == "plain" and len(small) == len(update) - 1 and report.small_bytes > 0
    else:
        assert kinds["fc.weight"] == "widths"
        assert kinds["bn.running_var"] == "own step" and kinds["bn.num_batches_tracked"] == "integer"
        assert kinds["zero.weight"] == kinds["empty"] == "zero"
    assert (report.step is not None) == (options.get("allocator") is None)


def test_factors_show_their_rank() -> None:
    update = {"w": np.outer(draw("normal", (60,)), draw("normal", (90,))), "b": draw("normal", (60,))}
    matrix, vector = inspect(encode(update, step=0.2)).tensors
    assert (matrix.kind, matrix.rank, vector.kind, vector.rank) == ("factors", 1, "plain", 0)
    assert 0 < matrix.nonzeros <= 60 + 90


def test_the_step_is_the_payloads() -> None:
    assert inspect(encode(network(), step=0.25)).step == 0.25
    assert inspect(encode(network(), ratio=8, allocator="exact")).step is None
    assert inspect(encode({"w": np.zeros(3, np.float32)}, step=0.25)).step is None  # nothing needed one


def test_a_tensor_of_several_tiles() -> None:
    update = {"w": scaled(2500, 2100)}
    payload = encode(update, step=0.2)
    assert inspect(payload).nonzeros == np.count_nonzero(decode(payload)["w"]) > 0


def test_no_layout_is_too_large_to_inspect() -> None:
    payload = write([Spec("w", (2**40,), np.dtype(np.float32))], [(ZERO, b"")])
    assert inspect(payload).raw_bytes == 2**42


def test_a_digest_needs_like() -> None:
    payload = encode(network(), ratio=12, layout="digest")
    with pytest.raises(PayloadError, match="pass like=model") as caught:
        inspect(payload)
    assert caught.value.reason == "layout"
    with pytest.raises(PayloadError):
        inspect(payload, like={"w": np.zeros(3, np.float32)})


def test_what_is_no_payload() -> None:
    with pytest.raises(PayloadError):
        inspect(b"PK\x03\x04")
    with pytest.raises(TypeError, match="a payload is bytes"):
        inspect("FQ")  # type: ignore[arg-type]


def test_an_empty_update() -> None:
    report = inspect(encode({}, max_bytes=100))
    assert (report.tensors, report.nonzeros, report.raw_bytes, report.ratio) == ((), 0, 0, 0.0)
