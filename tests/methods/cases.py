"""The methods that every check runs on: all names, and options that change the payload; and updates for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedfq.codec.errors import BudgetError
from fedfq.methods import METHODS, Method, Order, RoundContext, Upload, make, options_of
from tests.updates import Array, raw_size

VARIANTS = {
    "eden, two bits and a half": ("eden", {"ratio": 12.8}),
    "eden, half a bit": ("eden", {"ratio": 64}),
    "stc, ratio": ("stc", {"ratio": 32}),
    "stc, no memory": ("stc", {"error_feedback": False}),
    "topk, no memory": ("topk", {"error_feedback": False}),
    "signsgd, memory": ("signsgd", {"error_feedback": True}),
    "acsgd-topk, no memory": ("acsgd-topk", {"error_feedback": False}),
    "qsgd, one level": ("qsgd", {"levels": 1, "bucket": 64}),
    "fedpaq, max": ("fedpaq", {"norm": "max", "levels": 2}),
    "dadaquant, 50 levels": ("dadaquant", {"levels": 50}),
    "fedfq, full gain": ("fedfq", {"gain": True}),
    "fedfq, memory": ("fedfq", {"error_feedback": True}),
    "fedfq, no gain": ("fedfq", {"error_feedback": True, "gain": False}),
    "fedfq, no memory": ("fedfq", {"unbiased": False, "error_feedback": False}),
    "fedfq, unbiased": ("fedfq", {"unbiased": True, "ratio": 4}),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {**{name: (name, {}) for name in METHODS}, **VARIANTS}


def order(seed: int = 7, round: int = 1, client: int = 0, announcement: bytes = b"") -> Order:
    return Order(RoundContext(round), client, seed, announcement)


def method(case: str, **options: Any) -> Method:
    name, fixed = CASES[case]
    return make(name, **{**fixed, **options})


def fitting(case: str, update: Mapping[str, Array]) -> Method:
    """The method, at the highest ratio up to its own at which this update can be sent at all."""
    made = method(case)
    try:
        made.encode(update, {}, order())
    except BudgetError as error:
        return method(case, ratio=max(1.0, raw_size(update) / (error.minimum + 0.5)))
    return made


def has_ratio(case: str) -> bool:
    return "ratio" in options_of(CASES[case][0])


def encode(case: Method, update: Mapping[str, Array], seed: int = 7) -> Upload:
    return case.encode(update, {}, order(seed))


def payload_of(upload: Upload) -> bytes:
    assert upload.payload is not None
    return upload.payload


def plain(seed: int = 0) -> dict[str, Array]:
    """Large enough for every ratio: 20,700 entries, some tensors small."""
    rng = np.random.default_rng(seed)
    return {
        "layer.weight": (0.01 * rng.laplace(size=(100, 200))).astype(np.float32),
        "layer.bias": (0.002 * rng.normal(size=200)).astype(np.float32),
        "head.weight": (0.03 * rng.normal(size=(10, 50))).astype(np.float32),
    }


def mixed(seed: int = 0) -> dict[str, Array]:
    """All dtypes, shapes and kinds of tensors."""
    rng = np.random.default_rng(seed)
    return {
        "conv.weight": (0.1 * rng.laplace(size=(6, 3, 3, 3))).astype(np.float32),
        "half": rng.normal(size=(9, 5)).astype(np.float16),
        "bn.running_mean": rng.normal(size=6).astype(np.float32),
        "bn.running_var": rng.random(6),
        "bn.num_batches_tracked": np.array(-3, np.int64),
        "scalar": np.array(0.25, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "double": rng.normal(size=40),
        "mask": rng.random(7) < 0.5,
        "fc.weight": rng.laplace(size=(20, 30)).astype(np.float32),
    }


def flat(update: Mapping[str, Array]) -> Array:
    """The floating-point entries as one vector, tensors in the order of their names."""
    arrays = [update[name] for name in sorted(update)]
    return np.concatenate([array.reshape(-1).astype(np.float64) for array in arrays if array.dtype.kind == "f"])


def read_only(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Copies that cannot be written to."""
    copies = {name: array.copy() for name, array in arrays.items()}
    for copy in copies.values():
        copy.flags.writeable = False
    return copies
