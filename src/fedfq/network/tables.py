"""Tables 3 and 4 from what was measured, beside the paper's, and what `plan` predicts beside what was measured.

Writes Markdown for docs/network.md, and all rows as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from fedfq.codec.ratio import DOWN_RATIO
from fedfq.files import write_bytes
from fedfq.network.measure import (
    BY_TENSOR,
    CLIENTS,
    DOWNLINKS,
    PAPER,
    PARAMETERS,
    RATIO,
    STEPS,
    UPLINK_MBPS,
    NetworkCell,
    rounds_per_epoch,
)

TITLES = {"access": "Downlink ten times the uplink", "symmetric": "Downlink as slow as the uplink"}
TABLE_OF = {"fedavg": "table3", BY_TENSOR: "table3", "fedfq": "table4"}
NAMES = {
    "fedavg": "float32, one Array",
    BY_TENSOR: "float32, tensor by tensor",
    "fedfq": f"fedfq, {RATIO:g}x up, {DOWN_RATIO}x down",
}


# Flower's pauses between two looks for work, at most: a SuperNode's for a message (those of all clients are nearly in
# step, because they uploaded together), its executor's for a task, and the SuperNode's for the reply.
PAUSES = (0.5, 1.0, 0.5)


class NetworkRow(NamedTuple):
    """Means over the rounds of a cell; seconds and bytes of a round, all clients together.

    Seconds are the emulated ones: those of the clock, divided by `slow_motion`.
    """

    downlink: str
    slow_motion: float
    clients: int
    variant: str
    rounds: int
    round_s: float
    spread_s: float  # standard deviation over the rounds
    fixed_s: float  # the one-parameter model's round, without emulated steps
    fixed_spread_s: float
    compute_s: float  # emulated
    stopped_s: float  # not part of the round: the cores did the clients' work one after the other
    delivery_s: float  # from the last client's reply to its arrival in the server's app; Flower's pauses included
    delivery_fixed_s: float  # the same for the one-parameter model
    encode_s: float  # of a client
    aggregate_s: float
    flower_s: float  # of all cores, for what Flower does and for passing packets on; the clock's seconds
    flower_fixed_s: float  # the same for the one-parameter model
    uplink_bytes: float  # at the server's interface
    downlink_bytes: float
    payload_bytes: float  # of Arrays
    down_payload_bytes: float

    @property
    def less_fixed_s(self) -> float:
        return self.round_s - self.fixed_s

    @property
    def less_fixed_error_s(self) -> float:
        """The standard error of that difference of two means."""
        return math.sqrt((self.spread_s**2 + self.fixed_spread_s**2) / self.rounds)

    @property
    def uplink_s(self) -> float:
        """How long the shared uplink is busy."""
        return 8 * self.uplink_bytes / (UPLINK_MBPS * 1e6)

    @property
    def codec_share(self) -> float:
        return (self.encode_s + self.aggregate_s) / self.round_s

    @property
    def predicted_s(self) -> float:
        return predict_seconds(self)

    @property
    def epoch_s(self) -> float:
        return rounds_per_epoch(self.clients) * self.round_s

    @property
    def epoch_less_fixed_s(self) -> float:
        return rounds_per_epoch(self.clients) * self.less_fixed_s


def write_tables(out: Path) -> list[Path]:
    """Tables of all that was measured so far, under whatever conditions; the paths that were written."""
    rows = all_rows(out)
    texts = {f"{table}.md": _table(table, rows, _where(out)) for table in PAPER}
    texts["prediction.md"] = _prediction(rows)
    texts["rows.json"] = json.dumps([row._asdict() | {"predicted_s": row.predicted_s} for row in rows], indent=1) + "\n"
    written = []
    for name, text in texts.items():
        if text:
            write_bytes(out / name, text.encode())
            written.append(out / name)
    return written


def all_rows(out: Path) -> list[NetworkRow]:
    """A row for each cell whose one-parameter cell was measured as well, under the same conditions."""
    rows = []
    for folder in sorted({path.parent for path in out.glob("*/*-*.json")}):
        cells = _cells(folder)
        for (clients, variant), (cell, rounds) in sorted(cells.items()):
            alone = cells.get((clients, "one-parameter"))
            if variant in TABLE_OF and alone is not None and alone[0].step_seconds == cell.step_seconds:
                rows.append(_row(cell, rounds, alone[1]))
    return rows


def _cells(folder: Path) -> dict[tuple[int, str], tuple[NetworkCell, list[dict[str, Any]]]]:
    found = {}
    for path in folder.glob("*-*.json"):
        try:
            data = json.loads(path.read_bytes())
            cell = NetworkCell(**data["conditions"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: no measurement ({error})") from None
        found[cell.clients, cell.variant] = cell, data["rounds"]
    return found


def _row(cell: NetworkCell, rounds: list[dict[str, Any]], alone: list[dict[str, Any]]) -> NetworkRow:
    def average(key: str, lines: list[dict[str, Any]] = rounds) -> float:
        return mean(line[key] for line in lines)

    seconds, seconds_alone = ([line["round_s"] / cell.slow_motion for line in lines] for lines in (rounds, alone))
    return NetworkRow(
        downlink=cell.downlink,
        slow_motion=cell.slow_motion,
        clients=cell.clients,
        variant=cell.variant,
        rounds=len(rounds),
        round_s=mean(seconds),
        spread_s=_spread(seconds),
        fixed_s=mean(seconds_alone) - cell.compute_s,
        fixed_spread_s=_spread(seconds_alone),
        compute_s=cell.compute_s,
        stopped_s=average("stopped_s"),
        delivery_s=average("delivery_s") / cell.slow_motion,
        delivery_fixed_s=average("delivery_s", alone) / cell.slow_motion,
        encode_s=average("encode_s"),
        aggregate_s=average("aggregate_s"),
        flower_s=average("flower_s"),
        flower_fixed_s=average("flower_s", alone),
        uplink_bytes=average("uplink_bytes"),
        downlink_bytes=average("downlink_bytes"),
        payload_bytes=average("payload_bytes"),
        down_payload_bytes=average("down_payload_bytes"),
    )


def _spread(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def predict_seconds(row: NetworkRow) -> float:
    """What `fedfq plan` says of a cell: the one-parameter model's round, and what this model takes beyond it.

    No link is faster than the cores of this machine pass its bytes on. The server's part is not in it: the clients'
    pause of 3 s after an upload hides it.
    """
    from fedfq.network.plan import Setting, simulate

    handling_s = max(row.flower_s - row.flower_fixed_s, 1e-9) / row.slow_motion
    cores_mbps = 8e-6 * (row.uplink_bytes + row.downlink_bytes) / handling_s
    before_download, before_steps, before_upload = (pause / row.slow_motion for pause in PAUSES)
    model = Setting(
        parameters=PARAMETERS,
        clients=row.clients,
        uplink_mbps=min(UPLINK_MBPS, cores_mbps),
        downlink_mbps=min(UPLINK_MBPS * DOWNLINKS[row.downlink], cores_mbps),
        steps=STEPS,
        step_seconds=row.compute_s / STEPS,
        encode_seconds=max(row.encode_s, 0.0),
        pauses=(before_download, before_steps, before_upload),
    )
    seconds = simulate(model, RATIO if row.variant == "fedfq" else 1).seconds
    alone_s = row.fixed_s + row.compute_s
    return alone_s + seconds - simulate(replace(model, parameters=1), 1).seconds


# Markdown


def _where(out: Path) -> str:
    """When and where it was measured; usually that is the same for all cells."""
    found = [json.loads(path.read_bytes())["environment"] for path in sorted(out.glob("*/*-*.json"))]
    return "; ".join(dict.fromkeys(", ".join(f"{key} {value}" for key, value in each.items()) for each in found))


def _table(table: str, rows: list[NetworkRow], where: str) -> str:
    parts = []
    for title in sorted(dict.fromkeys(map(_title, rows)), key=len):  # the slow ones last
        there = [row for row in rows if _title(row) == title and TABLE_OF[row.variant] == table]
        if there:
            parts += [f"**{title}**\n", _markdown(_cells_of(table, row) for row in there)]
            if table == "table4" and (gains := _markdown(_gains(rows, row) for row in there)):
                parts += ["Beside float32 in one Array:\n", gains]
    return "\n".join([*parts, f"Measured: {where}.\n"]) if parts else ""


def _title(row: NetworkRow) -> str:
    slow = "" if row.slow_motion == 1 else f", in {row.slow_motion:g} times slow motion"
    return TITLES[row.downlink] + slow


def _cells_of(table: str, row: NetworkRow) -> dict[str, str]:
    of_paper = row.clients in CLIENTS and row.variant != BY_TENSOR
    return {
        "clients": str(row.clients),
        "sent as": NAMES[row.variant],
        "rounds measured": str(row.rounds),
        "round s": f"{row.round_s:.2f} ± {row.spread_s:.2f}",
        "of it Flower's fixed cost": f"{row.fixed_s:.2f} ± {row.fixed_spread_s:.2f}",
        "less fixed cost": _less_fixed(row),
        "of it steps (emulated)": f"{row.compute_s:.2f}",
        "of it all else": f"{row.less_fixed_s - row.compute_s:.2f}",
        "clock stopped s": f"{row.stopped_s:.2f}",
        "last reply's way s": f"{row.delivery_s:.2f} (one parameter: {row.delivery_fixed_s:.2f})",
        "encode s": f"{row.encode_s:.3f}",
        "decode, aggregate s": f"{row.aggregate_s:.3f}",
        "uplink MB (its payloads)": f"{row.uplink_bytes / 1e6:.3f} ({row.payload_bytes / 1e6:.3f})",
        "uplink busy s": f"{row.uplink_s:.3f}",
        "downlink MB (its payloads)": f"{row.downlink_bytes / 1e6:.3f} ({row.down_payload_bytes / 1e6:.3f})",
        "epoch s, less fixed": f"{row.epoch_less_fixed_s:.1f}",
        "epoch s": f"{row.epoch_s:.1f}",
        "epoch s, paper": f"{PAPER[table][row.clients]:g}" if of_paper else "",
    }


def _gains(rows: list[NetworkRow], row: NetworkRow) -> dict[str, str]:
    found = {(_title(each), each.clients, each.variant): each for each in rows}
    without = found.get((_title(row), row.clients, "fedavg"))
    if without is None:
        return {}
    of_paper = row.clients in CLIENTS
    return {
        "clients": str(row.clients),
        "round s": f"{without.round_s:.2f} → {row.round_s:.2f}",
        "round": f"{without.round_s / row.round_s:.2f}x",
        "of it less fixed cost s": f"{_less_fixed(without)} → {_less_fixed(row)}",
        "less fixed": _times(without.less_fixed_s, row.less_fixed_s),
        "kB up per client": _per_client(without.uplink_bytes, row.uplink_bytes, row.clients),
        "kB down per client": _per_client(without.downlink_bytes, row.downlink_bytes, row.clients),
        "encode + decode": f"{row.codec_share:.1%} of the round",
        "paper, epoch": f"{PAPER['table3'][row.clients] / PAPER['table4'][row.clients]:.2f}x" if of_paper else "",
    }


def _less_fixed(row: NetworkRow) -> str:
    return f"{row.less_fixed_s:.2f} ± {row.less_fixed_error_s:.2f}"


def _per_client(without: float, with_: float, clients: int) -> str:
    """At the server's interface."""
    return f"{without / clients / 1e3:,.0f} → {with_ / clients / 1e3:,.0f}"


def _times(without: float, with_: float) -> str:
    """How many times faster; nothing where the spread of the fixed cost is larger than what is left without it."""
    return f"{without / with_:.2f}x" if min(without, with_) > 0 else "-"


def _prediction(rows: list[NetworkRow]) -> str:
    return _markdown(
        {
            "downlink": _title(row),
            "clients": str(row.clients),
            "sent as": NAMES[row.variant],
            "measured s": f"{row.round_s:.2f} ± {row.spread_s:.2f}",
            "predicted s": f"{row.predicted_s:.2f}",
            "deviation": f"{row.predicted_s / row.round_s - 1:+.0%}",
            "of it not fixed: measured s": f"{row.less_fixed_s:.2f}",
            "predicted": f"{row.predicted_s - row.fixed_s:.2f}",
        }
        for row in rows
        if row.variant != BY_TENSOR  # `plan` does not know what a request costs
    )


def _markdown(rows: Iterable[dict[str, str]]) -> str:
    rows = [row for row in rows if row]
    if not rows:
        return ""
    lines = [list(rows[0]), ["---:" for _ in rows[0]], *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
