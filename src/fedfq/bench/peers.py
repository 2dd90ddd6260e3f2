"""One interface to every codec of the benchmark: it takes an update and returns bytes, error and time."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedfq
from fedfq import methods
from fedfq.files import write_tensors
from fedfq.metrics import nmse

Update = dict[str, np.ndarray]

OURS: dict[str, dict[str, Any]] = {
    "fedfq": {},
    "fedfq, identity": {"basis": "identity"},
    "widths 0-8, exact": {"allocator": "exact"},
    "widths 0-8, CGSA (paper)": {"allocator": "cgsa"},
}
SHARED = "fedfq, shared basis"
PEERS = {"EDEN": "eden", "STC": "stc", "top-k": "topk"}  # those that take a ratio; without memory here
QSGD_LEVELS = (1, 4, 16, 64)
NNCODEC_QPS = (-52, -48, -46, -44, -42, -40, -38, -36, -34, -32)


class PeerResult(NamedTuple):
    codec: str
    bytes: int
    nmse: float
    encode_s: float
    decode_s: float


def best(function: Callable[[], Any], repeats: int = 5, enough: float = 1.0) -> tuple[float, Any]:
    """The shortest of some calls, and the outcome; no more calls than take about `enough` seconds."""
    shortest, total = np.inf, 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        outcome = function()
        seconds = time.perf_counter() - start
        shortest, total = min(shortest, seconds), total + seconds
        if total > enough:
            break
    return float(shortest), outcome


def ours(name: str, update: Update, ratio: float, basis: fedfq.SharedBasis | None = None) -> PeerResult:
    """One of ours at a true ratio. (`BudgetError` where that cannot be.)"""
    codec = fedfq.Codec(ratio=ratio, **OURS.get(name, {}))
    encode_s, payload = best(lambda: codec.encode(update, seed=0, shared_basis=basis))
    decode_s, decoded = best(lambda: fedfq.decode(payload, shared_basis=basis))
    return PeerResult(name, len(payload), nmse(update, decoded), encode_s, decode_s)


def peer(name: str, update: Update, **options: Any) -> PeerResult:
    """One of the methods that others use, as this project implements it, with a memory that is empty."""
    method = methods.make(PEERS.get(name, name.lower()), **options)
    order = methods.Order(methods.RoundContext(), client=0, seed=0)
    encode_s, upload = best(lambda: method.encode(update, {}, order))
    decode_s, decoded = best(lambda: method.decode(upload.payload, update))
    return PeerResult(name, len(upload.payload), nmse(update, decoded), encode_s, decode_s)


def zstd_half(update: Update) -> PeerResult | None:
    """float16 and zstd at its default level; None where zstandard is not installed."""
    try:
        import zstandard
    except ModuleNotFoundError:
        return None
    flat = np.concatenate([array.reshape(-1) for array in update.values()])

    def decode() -> np.ndarray:
        return np.frombuffer(zstandard.decompress(payload), np.float16).astype(np.float32)

    encode_s, payload = best(lambda: zstandard.compress(flat.astype(np.float16).tobytes()))
    decode_s, decoded = best(decode)
    return PeerResult("float16 + zstd", len(payload), nmse({"": flat}, {"": decoded}), encode_s, decode_s)


def nncodec(python: Path, update: Update, qps: tuple[int, ...] = NNCODEC_QPS) -> list[PeerResult]:
    """NNCodec in its own environment, at several quantisation parameters."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "update.npz"
        write_tensors(path, update)
        command = [str(python), str(Path(__file__).with_name("nncodec_peer.py")), str(path), *map(str, qps)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(f"NNCodec failed under {python}: {reason}")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [PeerResult("NNCodec", row["bytes"], row["nmse"], row["encode_s"], row["decode_s"]) for row in rows]
