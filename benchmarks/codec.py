"""What the codec costs and gives: rate and distortion, speed, memory, start-up. Figures for docs/benchmarks.md.

    python benchmarks/codec.py [--updates FOLDER] [--out results/codec] [--quick]

Distortion is measured on the update of the demo's small network and on every `.npz` of FOLDER (tensors by name). Speed
is measured on synthetic updates beside copying and sorting the same vector, in the same run, each the best of several:
compare ratios, as seconds depend on the machine. Do not run anything beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import fedfq
from fedfq.codec.layout import read
from fedfq.codec.quantize import deadzone
from fedfq.demo import train
from fedfq.metrics import nmse

RATIOS = (32, 64, 128, 256, 512)
LABELS = {
    "adaptive": "fedfq",
    "identity": "fedfq, identity",
    "exact": "widths 0-8, exact",
    "cgsa": "widths 0-8, CGSA (paper)",
}
Update = dict[str, np.ndarray]


def best_seconds(function: Callable[[], Any], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def order_0_bytes(update: Update, step: float) -> float:
    """The empirical entropy of the levels that the codec sends at this step, without any context."""
    counts: dict[int, int] = {}
    zeros = 0
    for tensor in read(update):
        for tile in tensor.tiles:
            levels = deadzone(tensor.matrix(tile), step).levels
            zeros += tile.height * tile.width - levels.size
            for level, count in zip(*np.unique(levels, return_counts=True)):
                counts[int(level)] = counts.get(int(level), 0) + int(count)
    n = np.array([zeros, *counts.values()], np.float64)
    n = n[n > 0]
    return float(-(n * np.log2(n / n.sum())).sum() / 8)


def distortion(name: str, update: Update) -> list[dict[str, Any]]:
    """NMSE of every basis and allocator in as many bytes as the default one takes."""
    rows = []
    for ratio in RATIOS:
        try:
            payload = fedfq.encode(update, ratio=ratio)
        except fedfq.BudgetError:
            continue
        row: dict[str, Any] = {"update": name, "ratio": ratio, "bytes": len(payload)}
        row["adaptive"] = nmse(update, fedfq.decode(payload))
        plain = fedfq.encode(update, ratio=ratio, basis="identity")
        row["identity"] = nmse(update, fedfq.decode(plain))
        row["identity/order-0"] = len(plain) / order_0_bytes(update, fedfq.inspect(plain).step or 1.0)
        for allocator in ("exact", "cgsa"):
            paper = fedfq.Codec(max_bytes=len(payload), allocator=allocator).encode(update, seed=0)
            row[allocator] = nmse(update, fedfq.decode(paper))
        rows.append(row)
    return rows


def synthetic(tensors: int, height: int = 512, width: int = 4608) -> Update:
    """Gaussian, the hardest case: no row, column or tail tells where the large entries are."""
    rng = np.random.default_rng(0)
    return {f"layer{k}": rng.standard_normal((height, width), np.float32) for k in range(tensors)}


def speed(ratio: int, repeats: int) -> list[dict[str, Any]]:
    update = synthetic(4)
    flat = np.concatenate([array.reshape(-1) for array in update.values()])
    room = np.empty_like(flat)
    copy = best_seconds(lambda: np.copyto(room, flat), 3 * repeats)
    rows = [{"what": "copy", "threads": 1, "seconds": copy}]
    rows.append({"what": "argsort(-|h|)", "threads": 1, "seconds": best_seconds(lambda: np.argsort(-np.abs(flat)), 1)})
    for basis, threads in product(("identity", "adaptive"), (1, 2)):
        codec = fedfq.Codec(ratio=ratio, threads=threads, basis=basis)
        payload = codec.encode(update)
        total = fedfq.Accumulator(update, threads=threads)
        total.add(payload)
        for what, function in (
            ("encode", lambda codec=codec: codec.encode(update)),
            ("decode and accumulate", lambda total=total, payload=payload: total.add(payload)),
        ):
            seconds = best_seconds(function, repeats)
            rows.append({"what": f"{what}, {basis}", "threads": threads, "seconds": seconds})
    for row in rows:
        row["of_copy"] = row["seconds"] / copy
        row["GB_per_s"] = flat.nbytes / row["seconds"] / 1e9
    return rows


def scaling(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = []
    codec = fedfq.Codec(ratio=64, basis="identity")
    for tensors in sizes:
        update = synthetic(tensors)
        parameters = sum(array.size for array in update.values())
        seconds = best_seconds(lambda update=update: codec.encode(update), 3)
        rows.append({"parameters": parameters, "seconds": seconds, "ns_per_parameter": seconds / parameters * 1e9})
    return rows


PEAK = """
import sys
import numpy as np, fedfq
from benchmarks.codec import synthetic
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
codec = fedfq.Codec(ratio=64, basis=sys.argv[2])
codec.encode({"w": np.random.default_rng(0).standard_normal((64, 64), np.float32)})  # kernels are loaded
update = synthetic(int(sys.argv[1]))
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = status("VmRSS")
codec.encode(update)
print(status("VmHWM") - before, sum(array.nbytes for array in update.values()))
"""

START = """
import time; start = time.perf_counter()
import numpy as np, fedfq
fedfq.encode({"w": np.random.default_rng(0).standard_normal((1024, 1024), np.float32)}, ratio=64)
print(time.perf_counter() - start)
"""


def in_new_process(code: str, *arguments: str, **environment: str) -> list[float]:
    command = [sys.executable, "-c", code, *arguments]
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run(command, env=os.environ | environment, cwd=root, capture_output=True, text=True, check=True)
    return [float(word) for word in result.stdout.split()]


def memory(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = []
    for tensors, basis in product(sizes, ("identity", "adaptive")):
        extra, raw = in_new_process(PEAK, str(tensors), basis)
        rows.append(
            {"basis": basis, "raw_MB": raw / 1e6, "extra_peak_MB": extra / 1e6, "allowed_MB": 0.4 * raw / 1e6 + 64}
        )
    return rows


def start_up(cold: Path) -> dict[str, float]:
    first = in_new_process(START, NUMBA_CACHE_DIR=str(cold))[0]
    warm = min(in_new_process(START, NUMBA_CACHE_DIR=str(cold))[0] for _ in range(3))
    return {"first_ever_s": first, "warm_s": warm}


def show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=120).print(table)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """NMSE over the true ratio: one panel an update, ours and the paper's scheme."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["update"] for row in rows))
    figure = Figure(figsize=(3.2 * len(names), 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names):
        own = [row for row in rows if row["update"] == name]
        for key, label in LABELS.items():
            axes.plot([row["ratio"] for row in own], [row[key] for row in own], marker="o", markersize=3, label=label)
        axes.set(xscale="log", yscale="log", title=name, xlabel="float32 bytes / payload bytes")
        axes.set_xticks(RATIOS, [f"{ratio}x" for ratio in RATIOS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("NMSE")
    figure.axes[0].legend(fontsize=7)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--updates", type=Path, help="folder of .npz files with real updates")
    parser.add_argument("--out", type=Path, help="write a .json and a .svg here")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats")
    options = parser.parse_args()
    updates = {"digits": train().update}
    for path in sorted(options.updates.glob("*.npz")) if options.updates else ():
        updates[path.stem] = dict(np.load(path, allow_pickle=False))

    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "version": fedfq.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.python_implementation()} "
        f"{platform.python_version()}, numpy {np.__version__}",
    }
    result["speed"] = speed(64, 3 if options.quick else 15)
    result["scaling"] = scaling((1, 4) if options.quick else (1, 4, 16, 53))
    result["memory"] = memory((4,) if options.quick else (4, 53))
    cold = Path(os.environ.get("TMPDIR", "/tmp")) / f"fedfq-bench-{os.getpid()}"
    result["start_up"] = start_up(cold)
    result["distortion"] = [row for name, update in updates.items() for row in distortion(name, update)]
    show("Speed, 9.4 M parameters at 64x", result["speed"])
    show("Encoding time over size, one thread", result["scaling"])
    show("Peak memory of encoding above the update", result["memory"])
    show("Import and first encode of 1 M parameters in a new process", [result["start_up"]])
    show("NMSE at the same number of bytes, and bytes over the order-0 entropy of the levels", result["distortion"])
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        draw(result["distortion"], options.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
