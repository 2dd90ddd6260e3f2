"""What the codec costs and gives beside its peers: rate and distortion, speed, memory, start-up.

Speed is compared in one run, the best of several, and as a ratio to copying the same vector: seconds depend on the
machine. Nothing else may run beside it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import fedfq
from fedfq.bench.peers import OURS, PEERS, QSGD_LEVELS, SHARED, PeerResult, best, nncodec, ours, peer, zstd_half
from fedfq.bench.updates import Fresh, Update, fresh, from_folder, gaussian, make_up_updates
from fedfq.codec.encoder.quantize import deadzone
from fedfq.codec.tensors import read
from fedfq.metrics import nmse

RATIOS = (32, 64, 128, 256, 512, 1024)
Row = dict[str, Any]
Say = Callable[[str], None]


def run(updates: Path | None, python: Path | None, data_dir: Path | None, quick: bool, say: Say) -> Row:
    """The whole benchmark. `python` is that of an environment with NNCodec; `updates` a folder of real updates."""
    trained = fresh(data_dir)
    basis = fedfq.SharedBasis(trained.model, trained.initial)
    real = trained.updates | (from_folder(updates) if updates else {})
    tensors = (4,) if quick else (4, 53)
    result = machine()
    say("speed")
    result["speed"] = [row for count in tensors for row in speed(count, python if count == 4 else None)]
    result["scaling"] = scaling((1, 4) if quick else (1, 4, 16, 53))
    say("memory")
    result["memory"] = memory(tensors)
    result["start_up"] = start_up()
    say("rate and distortion")
    ratios = RATIOS[1::2] if quick else RATIOS
    result["rate_distortion"] = [
        row
        for name, update in real.items()
        for row in rate_distortion(name, update, ratios, python, basis if name in trained.updates else None)
    ]
    result["against_nncodec"] = against_nncodec(result["rate_distortion"])
    result["order_0"] = [row for name, update in real.items() for row in order_0(name, update, ratios)]
    result["never_worse"] = [
        row for name, update in (real | make_up_updates()).items() for row in never_worse(name, update, ratios)
    ]
    result["beside_training"] = beside_training(trained)
    return result


def machine() -> Row:
    """When and on what it was measured."""
    return {
        "date": date.today().isoformat(),
        "version": fedfq.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.python_implementation()} "
        f"{platform.python_version()}, numpy {np.__version__}",
    }


# Rate and distortion


def rate_distortion(
    name: str,
    update: Update,
    ratios: tuple[int, ...],
    python: Path | None,
    basis: fedfq.SharedBasis | None = None,
) -> list[Row]:
    """Bytes, error and speed of every codec at every ratio (where it takes one and the budget can be met)."""
    raw = sum(array.nbytes for array in update.values())
    results: list[PeerResult] = []
    for ratio in ratios:
        for codec in (*([SHARED] if basis else []), *OURS, *PEERS):
            try:
                if codec in PEERS:
                    results.append(peer(codec, update, ratio=ratio))
                else:
                    results.append(ours(codec, update, ratio, basis if codec == SHARED else None))
            except fedfq.BudgetError:
                continue
    results += [peer("QSGD", update, levels=levels) for levels in QSGD_LEVELS]
    results += [row for row in [zstd_half(update)] if row]
    results += nncodec(python, update) if python else []
    return [_row(name, raw, result) for result in results]


def _row(name: str, raw: int, result: PeerResult) -> Row:
    speeds = {"encode_MB_s": raw / result.encode_s / 1e6, "decode_MB_s": raw / result.decode_s / 1e6}
    return {"update": name, "ratio": raw / result.bytes, **result._asdict(), **speeds}


def against_nncodec(rows: list[Row]) -> list[Row]:
    """NNCodec's bytes over ours at its error, ours between two ratios taken from the line through both, in logs."""
    compared = []
    for row in rows:
        if row["codec"] != "NNCodec":
            continue
        own = sorted(
            (math.log(max(r["nmse"], 1e-12)), math.log(r["bytes"]))
            for r in rows
            if r["update"] == row["update"] and r["codec"] == "fedfq"
        )
        error = math.log(row["nmse"])
        if own and own[0][0] <= error <= own[-1][0]:
            bytes_ = math.exp(np.interp(error, [point[0] for point in own], [point[1] for point in own]))
            compared.append(
                {
                    "update": row["update"],
                    "nmse": row["nmse"],
                    "nncodec_ratio": row["ratio"],
                    "nncodec_bytes": row["bytes"],
                    "fedfq_bytes": bytes_,
                    "times_fewer": row["bytes"] / bytes_,
                }
            )
    return compared


def order_0(name: str, update: Update, ratios: tuple[int, ...]) -> list[Row]:
    """Bytes of plain coefficients over the empirical entropy of their levels, which knows no contexts."""
    rows = []
    for ratio in ratios:
        try:
            payload = fedfq.encode(update, ratio=ratio, basis="identity")
        except fedfq.BudgetError:
            continue
        levels = _entropy_bytes(update, fedfq.inspect(payload).step or 1.0)
        rows.append({"update": name, "ratio": ratio, "bytes_over_order_0": len(payload) / levels})
    return rows


def _entropy_bytes(update: Update, step: float) -> float:
    counts: dict[int, int] = {}
    for tensor in read(update):
        for tile in tensor.tiles:
            levels = deadzone(tensor.matrix(tile), step).levels
            counts[0] = counts.get(0, 0) + tile.height * tile.width - levels.size
            for level, count in zip(*np.unique(levels, return_counts=True)):
                counts[int(level)] = counts.get(int(level), 0) + int(count)
    n = np.array([count for count in counts.values() if count], np.float64)
    return float(-(n * np.log2(n / n.sum())).sum() / 8)


def never_worse(name: str, update: Update, ratios: tuple[int, ...]) -> list[Row]:
    """The error of the adaptive basis in 1% more bytes than plain coefficients take, over theirs: at most 1."""
    rows = []
    for ratio in ratios:
        try:
            plain = fedfq.encode(update, ratio=ratio, basis="identity")
        except fedfq.BudgetError:
            continue
        adaptive = fedfq.encode(update, max_bytes=int(1.01 * len(plain)))
        errors = nmse(update, fedfq.decode(adaptive)), nmse(update, fedfq.decode(plain))
        rows.append({"update": name, "ratio": ratio, "nmse_over_identity": errors[0] / errors[1] if errors[1] else 1.0})
    return rows


# Speed


def speed(tensors: int, python: Path | None, ratio: int = 64) -> list[Row]:
    """Encoding, and decoding into an accumulator, beside copying and sorting the same vector."""
    update = gaussian(tensors)
    flat = np.concatenate([array.reshape(-1) for array in update.values()])
    room = np.empty_like(flat)
    repeats = 15
    copy = best(lambda: np.copyto(room, flat), 3 * repeats)[0]
    rows = [("copy", 1, copy), ("argsort(-|h|)", 1, best(lambda: np.argsort(-np.abs(flat)), 1)[0])]
    for (name, options), threads in product(OURS.items(), (1, 2)):
        if "allocator" in options and (threads == 2 or tensors > 4):
            continue  # the paper's widths are chosen in one thread; its search sorts everything again and again
        codec = fedfq.Codec(ratio=ratio, threads=threads, **options)
        seconds, payload = best(partial(codec.encode, update), repeats, 5.0)
        total = fedfq.Accumulator(update, threads=threads)
        added = best(partial(total.add, payload), repeats, 5.0)[0]
        rows += [(f"encode, {name}", threads, seconds), (f"decode and accumulate, {name}", threads, added)]
    others = [peer(name, update, ratio=ratio) for name in PEERS] + [peer("QSGD", update, levels=16)]
    others += [row for row in [zstd_half(update)] if row]
    others += nncodec(python, update, (-20,)) if python else []
    for other in others:
        rows += [(f"encode, {other.codec}", 1, other.encode_s), (f"decode, {other.codec}", 1, other.decode_s)]
    return [
        {
            "parameters": flat.size,
            "what": what,
            "threads": threads,
            "seconds": seconds,
            "of_copy": seconds / copy,
            "MB_per_s": flat.nbytes / seconds / 1e6,
        }
        for what, threads, seconds in rows
    ]


def scaling(sizes: tuple[int, ...]) -> list[Row]:
    """Seconds of encoding over the number of parameters: linear."""
    rows = []
    for tensors, basis in product(sizes, ("identity", "adaptive")):
        update = gaussian(tensors)
        parameters = sum(array.size for array in update.values())
        seconds = best(partial(fedfq.encode, update, ratio=64, basis=basis), 3, 10.0)[0]
        rows.append({"basis": basis, "parameters": parameters, "ns_per_parameter": seconds / parameters * 1e9})
    return rows


def beside_training(trained: Fresh) -> list[Row]:
    """Encoding an update, and deriving the shared basis, over the ten local steps it comes from, all in one thread."""
    update = next(iter(trained.updates.values()))
    derive_s, basis = best(lambda: fedfq.SharedBasis(trained.model, trained.initial), 10)
    measured = [("derive the shared basis", 0, derive_s)]
    for ratio, codec in product(RATIOS, ("fedfq", SHARED)):
        try:
            seconds = ours(codec, update, ratio, basis if codec == SHARED else None).encode_s
        except fedfq.BudgetError:
            continue
        measured.append((f"encode, {codec}", ratio, seconds))
    return [
        {
            "task": trained.task,
            "what": what,
            "ratio": ratio,
            "seconds": seconds,
            "ten_steps_s": trained.ten_steps_s,
            "share": seconds / trained.ten_steps_s,
        }
        for what, ratio, seconds in measured
    ]


# Memory and start-up: in new processes

PEAK = """
import sys
import numpy as np, fedfq
from fedfq.bench.peers import OURS
from fedfq.bench.updates import gaussian
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
codec = fedfq.Codec(ratio=64, **OURS[sys.argv[2]])
codec.encode({"w": np.random.default_rng(0).standard_normal((64, 64), np.float32)})  # kernels are loaded
update = gaussian(int(sys.argv[1]))
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = status("VmRSS")
codec.encode(update)
print(status("VmHWM") - before)
"""

START = """
import time; start = time.perf_counter()
import numpy as np, fedfq
fedfq.encode({"w": np.random.default_rng(0).standard_normal((1024, 1024), np.float32)}, ratio=64)
print(time.perf_counter() - start)
"""


def in_new_process(code: str, *arguments: str, **environment: str) -> float:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def memory(sizes: tuple[int, ...]) -> list[Row]:
    """Peak memory of encoding above the update itself, and the bar: 40% of it and twice the largest tensor."""
    rows = []
    for tensors, name in product(sizes, OURS):
        if "allocator" in OURS[name] and tensors > 4:
            continue  # as in `speed`
        layer = gaussian(1)["layer0"].nbytes
        extra = in_new_process(PEAK, str(tensors), name)
        raw = tensors * layer
        rows.append(
            {"codec": name, "raw_MB": raw / 1e6, "extra_MB": extra / 1e6, "bar_MB": (0.4 * raw + 2 * layer) / 1e6}
        )
    return rows


def start_up() -> list[Row]:
    """Import and first encode of a million parameters, with and without compiled code on disk."""
    with tempfile.TemporaryDirectory() as cold:
        first = in_new_process(START, NUMBA_CACHE_DIR=cold)
        warm = min(in_new_process(START, NUMBA_CACHE_DIR=cold) for _ in range(3))
    return [{"first_ever_s": first, "warm_s": warm}]


# What it looks like

TITLES = {
    "speed": "Speed at 64x, Gaussian entries",
    "scaling": "Encoding time over size, one thread, 64x",
    "memory": "Peak memory of encoding above the update",
    "start_up": "Import and first encode of 1 M parameters",
    "rate_distortion": "Bytes and error",
    "against_nncodec": "Bytes at NNCodec's error",
    "order_0": "Bytes of plain coefficients over the order-0 entropy of their levels",
    "never_worse": "NMSE of the adaptive basis in 1% more bytes, over that of plain coefficients",
    "beside_training": "Encoding and deriving the basis beside ten local steps, one thread each",
}


def write(result: Row, path: Path) -> None:
    """`path`.json and the rate-distortion figure `path`.svg."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result["rate_distortion"], result["order_0"], path.with_suffix(".svg"))


def draw(rows: list[Row], entropies: list[Row], path: Path) -> None:
    """NMSE over the true ratio, from 12 on: one panel per update, one line per codec.

    Dashed: plain levels without context.
    """
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["ratio"] >= 12]
    names = list(dict.fromkeys(row["update"] for row in rows))
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.6 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flat
    codecs = list(dict.fromkeys(row["codec"] for row in rows))
    for axes, name in zip(grid, names):
        for number, codec in enumerate(codecs):
            own = sorted((r["ratio"], r["nmse"]) for r in rows if r["update"] == name and r["codec"] == codec)
            if own:
                width = 2.2 if codec in ("fedfq", SHARED) else 1.0
                x, y = zip(*own)
                axes.plot(x, y, marker="o", markersize=3, linewidth=width, color=f"C{number % 10}", label=codec)
        plain = {r["ratio"]: r["bytes_over_order_0"] for r in entropies if r["update"] == name}
        sent = [r for r in rows if r["update"] == name and r["codec"] == "fedfq, identity"]
        ideal = [(asked * plain[asked], r["nmse"]) for asked, r in zip(sorted(plain), sorted(sent, key=_ratio))]
        if ideal:
            axes.plot(*zip(*ideal), "k--", linewidth=1.0, label="identity, order-0 entropy (not a codec)")
        axes.set(xscale="log", yscale="log", ylim=(None, 2), title=name, xlabel="float32 bytes / payload bytes")
        axes.set_xticks(RATIOS, [f"{ratio}x" for ratio in RATIOS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    for axes in list(grid)[len(names) :]:
        axes.set_visible(False)
    figure.axes[0].set_ylabel("NMSE")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path)


def _ratio(row: Row) -> float:
    return float(row["ratio"])
