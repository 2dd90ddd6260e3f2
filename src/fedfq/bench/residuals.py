"""What updates lose on the way, and how much of it all clients lose alike: for `fedfq bench residuals`.

Noise averages out over clients and rounds, bias adds up. So of what payloads leave out, h - q, the part that counts is
what the clients of a round have in common; and where nothing is left out in the mean, the noise. All updates are those
of FedAvg: what would be left out of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedfq import Codec, SharedBasis, decode, methods
from fedfq.bench.codec import Say, machine
from fedfq.codec.format.fold import fold
from fedfq.federation.clients import Clients, Job
from fedfq.federation.config import Config
from fedfq.federation.loop import Federation, sample
from fedfq.methods import Order, RoundContext
from fedfq.methods.method import Update
from fedfq.types import Array

Row = dict[str, Any]

SETTINGS: dict[str, dict[str, Any]] = {
    "10 steps": {"local_steps": 10, "lr": 0.1},
    "5 epochs": {"local_epochs": 5, "lr": 0.15},
    "10 steps, two shards": {"local_steps": 10, "lr": 0.05, "split": "shards:2"},
}
LOOKED_AT = (2, 10, 20, 25, 30)  # rounds
RATIOS = (32, 64, 128, 256, 512, 1024)
NOISE_RATIOS = (64, 128, 256, 512, 1024, 2048, 4096)
RANKS = (1, 4, 16, 64)
PARTICIPATION = 0.1
LATER = (1, 5, 10)  # rounds after which what was left out might come


def run(data_dir: Path | None, task: str, workers: int, precision: str, say: Say) -> Row:
    """Rows for every setting, of the rounds that are looked at."""
    result: Row = {**machine(), "task": task, "precision": precision, "lost": [], "noise": []}
    result |= {"spectrum": [], "late": []}
    for setting, options in SETTINGS.items():
        say(setting)
        common = {"split": "iid", "method": "fedavg", "precision": precision, "eval_every": 1000, "rounds": 1000}
        config = Config.make(task=task, **(common | options))
        with tempfile.TemporaryDirectory() as folder, Clients(config, data_dir, Path(folder), workers) as clients:
            found = _follow(config, clients, setting)
        for part, rows in found.items():
            result[part] += rows
    result["returns"] = returns()
    return result


def _follow(config: Config, clients: Clients, setting: str) -> dict[str, list[Row]]:
    """A run of FedAvg, looked into."""
    federation = Federation(config, clients)
    lost: list[Row] = []
    noise: list[Row] = []
    spectra: list[Row] = []
    late: list[Row] = []
    left_out: dict[int, Array] = {}  # by round: the mean over clients at 256x, flat
    for number in range(1, max(LOOKED_AT) + 1):
        wanted = number in LOOKED_AT or any(number - later in left_out for later in LATER)
        updates = _train(federation, clients, number) if wanted else []
        for earlier, residual in left_out.items():
            if number - earlier in LATER:
                now = _mean(updates)
                cosine = float(residual @ now / np.sqrt((residual @ residual) * (now @ now)))
                late.append({"setting": setting, "round": earlier, "rounds_later": number - earlier, "cosine": cosine})
        if number in LOOKED_AT:
            basis = SharedBasis(federation.theta, clients.initial)
            for ratio in RATIOS:
                row, residual = _compress(updates, ratio, basis)
                lost.append({"setting": setting, "round": number, "ratio": ratio, **row})
                if ratio == 256:
                    left_out[number] = residual
            noise += [
                {"setting": setting, "round": number, "ratio": ratio, **_find_noise(updates, ratio, basis)}
                for ratio in NOISE_RATIOS
            ]
            spectra.append({"setting": setting, "round": number, **_spectrum(updates)})
        federation.step()
    return {"lost": lost, "noise": noise, "spectrum": spectra, "late": late}


def _train(federation: Federation, clients: Clients, number: int) -> list[Update]:
    """The updates of the clients of this round, which `Federation.step` then makes again."""
    clients.publish(federation.theta)
    jobs = [Job(number, client, b"", None) for client in sample(federation.config, number)]
    payloads = [answer.payload for answer in clients.train(jobs)]
    return [federation.method.decode(payload, clients.initial) for payload in payloads if payload is not None]


def _compress(updates: Sequence[Update], ratio: float, basis: SharedBasis) -> tuple[Row, Array]:
    """What payloads at this ratio leave out, and its mean.

    nmse               of a client: energy left out over the update's
    common_share       of a client's energy, what the clients have in common
    common_lost        of the energy that the clients have in common, what is left out by all of them; with each gain
    """
    whole = [_flatten(update) for update in updates]
    in_common = common_energy(whole)
    energy = np.mean([h @ h for h in whole])
    row: Row = {}
    mean = np.zeros(0)
    for gain, name in (("none", "common_lost"), ("norm", "common_lost_norm_gain"), ("full", "common_lost_full_gain")):
        residuals = [h - _flatten(_send(update, ratio, basis, gain)) for h, update in zip(whole, updates)]
        if gain == "none":
            row = {
                "nmse": float(np.mean([r @ r for r in residuals]) / energy),
                "common_share": float(in_common / energy),
            }
            mean = np.mean(residuals, axis=0)
        row[name] = float(common_energy(residuals) / in_common)
    return row, mean


def common_energy(vectors: Sequence[Array]) -> float:
    """The energy of what vectors have in common: the mean inner product of two of them, which noise does not raise."""
    total = np.sum(vectors, axis=0)
    pairs = len(vectors) * (len(vectors) - 1)
    return float((total @ total - sum(v @ v for v in vectors)) / pairs)


def _send(update: Update, ratio: float, basis: SharedBasis, gain: Any) -> Update:
    payload = Codec(ratio=ratio, gain=gain, layout="digest").encode(update, shared_basis=basis)
    return decode(payload, like=update, shared_basis=basis)


def _find_noise(updates: Sequence[Update], ratio: float, basis: SharedBasis) -> Row:
    """The error of unbiased payloads over the energy of what they stand for, mean of the clients: ours, and EDEN's."""
    context = RoundContext(1, basis)
    row: Row = {}
    for name in ("fedfq", "eden"):
        method = methods.make(name, ratio=ratio, **({"unbiased": True} if name == "fedfq" else {}))
        error = energy = 0.0
        for seed, update in enumerate(updates):
            payload = method.encode(update, {}, Order(context, client=seed, seed=seed)).payload
            assert payload is not None
            h = _flatten(update)
            left = h - _flatten(method.decode(payload, update, context))
            error += float(left @ left)
            energy += float(h @ h)
        row[f"{name}_noise"] = error / energy
    return row


def _flatten(update: Update) -> Array:
    return np.concatenate([value.reshape(-1) for value in update.values()]).astype(np.float64)


def _mean(updates: Sequence[Update]) -> Array:
    return np.asarray(np.mean([_flatten(update) for update in updates], axis=0))


def _spectrum(updates: Sequence[Update]) -> Row:
    """The share of energy in the leading ranks of the largest matrix: of a client's update, and of the mean."""
    name = max(updates[0], key=lambda each: updates[0][each].size)
    view = fold(updates[0][name].shape)
    assert view is not None
    row: Row = {"tensor": name}
    mean = np.mean([update[name] for update in updates], axis=0)
    for what, array in (("client", updates[0][name]), ("mean", mean)):
        energies = np.linalg.svd(view.matrix(array).astype(np.float64), compute_uv=False) ** 2
        row |= {f"{what}_rank_{rank}": float(energies[:rank].sum() / energies.sum()) for rank in RANKS}
    return row


def returns() -> list[Row]:
    """How late a client's memory comes back, where each takes part in a round with the same chance."""
    missing = 1 - PARTICIPATION
    return [{"after_rounds": count, "not_yet_back": missing**count} for count in (1, 5, 10, 20, 30)]


TITLES = {
    "lost": "What payloads leave out, in the shared basis, without a memory",
    "noise": "Noise of one unbiased payload, in the shared basis, over the update's energy; beside EDEN's",
    "spectrum": "Energy in the leading ranks of the largest matrix",
    "late": "What was left out at 256x (mean of the clients), beside the mean update some rounds later",
    "returns": "Clients of which a tenth takes part per round: share that has not been back yet",
}


def write(result: Row, path: Path) -> None:
    """`path`.json and the figure `path`.svg."""
    import json

    from fedfq.files import write_bytes

    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path.with_suffix(".json"), (json.dumps(result, indent=1) + "\n").encode())
    draw(result, path.with_suffix(".svg"))


def draw(result: Row, path: Path) -> None:
    """What is lost over the ratio, how much of it is common, and what of an update the leading ranks hold."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    from fedfq.report.figures import PANEL, RC, UNDATED

    last = max(LOOKED_AT)
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(3 * PANEL[0], PANEL[1]), layout="constrained")
        lost, common, spectrum = figure.subplots(1, 3)
        for place, setting in enumerate(SETTINGS):
            rows = [row for row in result["lost"] if row["setting"] == setting and row["round"] == last]
            ratios = [row["ratio"] for row in rows]
            lost.plot(ratios, [row["nmse"] for row in rows], f"C{place}-o", markersize=3, label=setting)
            common.plot(ratios, [row["common_lost"] for row in rows], f"C{place}-o", markersize=3, label=setting)
            (row,) = (row for row in result["spectrum"] if row["setting"] == setting and row["round"] == last)
            for what, line in (("client", "-o"), ("mean", "--s")):
                shares = [row[f"{what}_rank_{rank}"] for rank in RANKS]
                spectrum.plot(RANKS, shares, f"C{place}{line}", markersize=3, label=f"{setting}: {what}")
        for axes in (lost, common):
            axes.set_xscale("log")
            axes.set_xticks(RATIOS, [f"{ratio}x" for ratio in RATIOS])
            axes.minorticks_off()
            axes.set_xlabel("float32 bytes / payload bytes")
        for axes in (lost, common):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
            axes.minorticks_off()
        lost.set_ylabel(f"lost of a client's energy, round {last}")
        common.set_ylabel("lost of what clients have in common")
        spectrum.set_ylabel("energy in the leading ranks")
        spectrum.set_xscale("log")
        spectrum.set_xticks(RANKS, map(str, RANKS))
        spectrum.minorticks_off()
        spectrum.set_xlabel("rank")
        for axes in (lost, common, spectrum):
            axes.grid(alpha=0.3, linewidth=0.5)
            axes.legend(loc="lower right", fontsize=7)
        figure.savefig(path, metadata=UNDATED["svg"])
