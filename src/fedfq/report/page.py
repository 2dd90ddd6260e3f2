"""One HTML page about any number of runs, which needs no network and nothing installed.

Curves are drawn as SVG by `page.js` rather than by plotly, whose script alone is 4.5 MB; script and style of this page
are 19 kB. So labels keep their size on a narrow screen, colours follow the reader's light or dark scheme, and curves
can be walked along with the arrow keys.

What clients wrote (reasons, names) is escaped wherever it appears. Beyond that, the page's own policy allows one
script, named by its hash, and no request of any kind.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fedfq
from fedfq.files import write_bytes
from fedfq.report import markup
from fedfq.report.markup import TableCell, text
from fedfq.report.runs import LAST_EVALUATIONS, RunData, read_runs, settings, summary_rows
from fedfq.report.styles import MARKER_PATHS, Style, styles

CHARTS = (
    ("round", "Accuracy over rounds"),
    ("uplink", "Accuracy over uploaded bytes"),
    ("total", "Accuracy over bytes up and down"),
)
MOST_REJECTED = 200  # rows shown
VERSIONS = ("fedfq", "python", "numpy", "torch", "flwr")  # of what a run says of its surroundings

Groups = dict[str, list[RunData]]  # runs by setting


def write_report(paths: Sequence[Path], out: Path, target: float | None = None) -> Path:
    """Write the page about the runs at `paths`: each a run's folder, or a folder of such folders."""
    return write_page(read_runs(paths), out, target)


def write_page(runs: Sequence[RunData], out: Path, target: float | None = None) -> Path:
    return write_html(page(runs, target), out)


def write_html(html: str, out: Path) -> Path:
    """Write a page to `out`, which appears whole or not at all."""
    check_name(out)
    write_bytes(out, html.encode())
    return out


def check_name(out: Path) -> None:
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{out}: a report is named .html")


def page(runs: Sequence[RunData], target: float | None = None) -> str:
    """The whole page. `target` is the accuracy to which bytes are counted."""
    if target is not None and not 0 < target <= 1:
        raise ValueError(f"the target is an accuracy between 0 and 1, got {target}")
    groups = settings(runs)
    names = Names(styles([run.label for run in runs]), several=len(groups) > 1)
    drawn = [Curves(setting, group, names, target) for setting, group in groups.items()]
    parts = [
        _head(groups),
        *(_section(place, curves) for place, curves in enumerate(drawn)),
        _summary(runs, names, target),
        _show_rejected(runs, names),
        _payloads(runs, names),
        _seconds(runs, names),
        _configuration(runs, names),
        footer(runs),
    ]
    return document(_title(groups), "\n".join(filter(None, parts)), drawn)


def document(title: str, body: str, drawn: Sequence[Curves]) -> str:
    """A page in the style of this one, whose body has `charts` for each of these curves."""
    style, script = (Path(__file__).with_name(name).read_text("utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{_data(drawn)}</script>
<script>{script}</script>
</body>
</html>
"""


def _data(drawn: Sequence[Curves]) -> str:
    """What the script draws, as JSON that cannot end the element it stands in."""

    def curve(run: RunData, look: Style) -> dict[str, Any]:
        return {
            "label": run.label,
            "colour": look.css,
            "dashes": " ".join(map(str, look.dashes)),
            "marker": MARKER_PATHS[look.marker],
            "hollow": look.hollow,
            "points": [
                {
                    **{"round": point.round, "accuracy": point.accuracy, "loss": point.loss},
                    **{"uplink": point.uplink_bytes, "total": point.total_bytes},
                }
                for point in run.points
            ],
        }

    settings_ = [
        {"target": one.target, "runs": [curve(run, one.names.looks[run.label]) for run in one.runs]} for one in drawn
    ]
    return json.dumps(settings_, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


@dataclass(frozen=True)
class Names:
    """How runs are called and drawn, the same all over the page."""

    looks: dict[str, Style]
    several: bool  # settings: then a label alone does not say which

    def short(self, run: RunData) -> str:
        """Where the setting is clear."""
        badge = "" if run.finished else ' <span class="badge">unfinished</span>'
        return breakable(run.label) + badge

    def full(self, run: RunData) -> str:
        return self.short(run) + (f' <span class="setting">{text(run.setting)}</span>' if self.several else "")

    def swatch(self, label: str) -> str:
        """A piece of the run's curve."""
        look = self.looks[label]
        kind = "marker hollow" if look.hollow else "marker"
        return (
            f'<svg class="swatch" viewBox="0 0 34 12" aria-hidden="true" style="--c: {look.css}">'
            f'<path class="curve" d="M0,6H34" stroke-dasharray="{" ".join(map(str, look.dashes))}"/>'
            f'<path class="{kind}" d="{MARKER_PATHS[look.marker]}" transform="translate(17,6)"/></svg>'
        )

    def cell(self, run: RunData) -> TableCell:
        return TableCell(f'<span class="run">{self.swatch(run.label)}<span>{self.full(run)}</span></span>')


@dataclass(frozen=True)
class Curves:
    """Runs that are drawn in the same charts."""

    title: str
    runs: Sequence[RunData]
    names: Names
    target: float | None = None


def breakable(label: str) -> str:
    """A long name may be broken between its parts."""
    return text(label).replace(":", ":<wbr>").replace("_", "_<wbr>")


# Top and curves


def _title(groups: Groups) -> str:
    runs = sum(map(len, groups.values()))
    where = next(iter(groups)) if len(groups) == 1 else f"{len(groups)} settings"
    return f"{runs} {'run' if runs == 1 else 'runs'}: {text(where)}"


def _head(groups: Groups) -> str:
    return f"<h1>{_title(groups)}</h1>\n{introduction('Accuracy on the test examples, and the bytes it took.')}"


def introduction(words: str) -> str:
    """A page's first words, and how to use it."""
    help_ = "Point at a curve or tap it for exact values; a name hides its curve, and a column sorts by itself."
    return markup.note(f'{words} <span class="screen">{help_}</span>')


def _section(place: int, curves: Curves) -> str:
    heading = f"<h2>{text(curves.title)}</h2>" if curves.names.several else ""
    return f"<section>{heading}\n{charts(place, curves)}\n</section>"


def charts(place: int, curves: Curves) -> str:
    """Legend and charts of the curves that `document` is given at this place."""
    legend = "".join(
        f'<li><button type="button" aria-pressed="true">{curves.names.swatch(run.label)}'
        f"<span>{curves.names.short(run)}</span></button>"
        for run in curves.runs
    )
    figures = "".join(
        f'<figure data-x="{key}" data-label="{title}, {text(curves.title)}. Arrow keys walk along the curves.">'
        f"<figcaption>{title}</figcaption></figure>"
        for key, title in CHARTS
    )
    return "\n".join(
        [
            f'<div data-setting="{place}">',
            f'<ul class="legend" aria-label="Runs that are shown">{legend}</ul>',
            "" if curves.target is None else markup.note(f"The dotted line is the target, {100 * curves.target:.4g}%."),
            f'<div class="charts">{figures}</div>',
            "<noscript><p>Curves need JavaScript; tables do not.</p></noscript>",
            "</div>",
        ]
    )


# What it comes to


def _summary(runs: Sequence[RunData], names: Names, target: float | None) -> str:
    accuracies = (f"accuracy_last_{LAST_EVALUATIONS}", "accuracy", "best_accuracy", "held_accuracy")
    numbers = [f"Accuracy, last {LAST_EVALUATIONS}", "final", "best", "held"]
    numbers += ["Uplink", "Uplink per client", "Wire ratio", "Claimed ratio", "Downlink", "Total", "Total ratio"]
    if target is not None:
        goal = f"{100 * target:.4g}%"
        numbers += [f"Uplink to {goal}", f"per client to {goal}", f"Total to {goal}"]
    numbers += ["Rejected", "Rounds"]
    rows = []
    for run, row in zip(runs, summary_rows(runs, target)):
        rounds = f"{row['rounds']:,}" + ("" if run.finished else f" of {run.config.rounds:,}")
        rows.append(
            [
                names.cell(run),
                *(markup.percent(row[key]) for key in accuracies),
                *_all_and_one(run, row["uplink_bytes"]),
                markup.times(row["wire_ratio"]),
                markup.times(row["claimed_ratio"]),
                markup.in_bytes(row["downlink_bytes"]),
                markup.in_bytes(row["total_bytes"]),
                markup.times(row["total_ratio"]),
                *(_to_target(run, row) if target is not None else []),
                markup.count(row["rejected"]),
                TableCell(rounds, row["rounds"]),
            ]
        )
    columns = [("Run", False), *((name, True) for name in numbers)]
    shown = markup.table("Summary", columns, rows)
    return markup.section("Summary", shown, markup.fold("What the columns mean", MEANING))


MEANING = f"""<dl>
<dt>Accuracy</dt><dd>of the server's model on the test examples: the mean of the last {LAST_EVALUATIONS} evaluations,
the last one, the best one; held: of the model that clients hold, where that is another one, the mean</dd>
<dt>Uplink</dt><dd>the length of every payload that any client sent, refused ones included</dd>
<dt>per client</dt><dd>the uplink over the clients of a round: one client that takes part in every round, as Table 2 of
the paper counts</dd>
<dt>Wire ratio</dt><dd>what the answers that the server took would be as float32 (4 bytes per parameter), over the
uplink; a client that had nothing new to say counts as an answer, one that was refused does not</dd>
<dt>Claimed ratio</dt><dd>the same over what the method's own paper would count</dd>
<dt>Downlink</dt><dd>the model to every client of every round, with first contacts, and what the method announces</dd>
<dt>Total</dt><dd>uplink and downlink</dd>
<dt>Total ratio</dt><dd>what the answers that the server took and one model for every client of every round would be as
float32, over the total</dd>
<dt>to a target</dt><dd>until the first evaluation that reaches it, if one does</dd>
</dl>"""


def _all_and_one(run: RunData, uplink: int | None) -> list[TableCell]:
    """Of all clients, and of one that takes part in every round."""
    return [markup.in_bytes(uplink), markup.in_bytes(None if uplink is None else uplink / run.config.per_round)]


def _to_target(run: RunData, row: dict[str, Any]) -> list[TableCell]:
    return [*_all_and_one(run, row["bytes_to_target"]), markup.in_bytes(row["total_bytes_to_target"])]


def _show_rejected(runs: Sequence[RunData], names: Names) -> str:
    rows = [
        [names.cell(run), markup.count(line.number), markup.count(one.client), TableCell(text(one.reason), long=True)]
        for run in runs
        for line in run.rounds
        for one in line.rejected
    ]
    if not rows:
        return ""
    columns = [("Run", False), ("Round", True), ("Client", True), ("Reason", False)]
    shown = markup.table("Rejected uploads", columns, rows[:MOST_REJECTED])
    more = len(rows) - MOST_REJECTED
    return markup.section("Rejected uploads", shown, markup.note(f"And {more:,} more.") if more > 0 else "")


# Where bytes and seconds go


def _payloads(runs: Sequence[RunData], names: Names) -> str:
    shown = [run for run in runs if run.sample is not None]
    if not shown:
        return ""
    tables = [_payload(run, names, unfolded=run is shown[0]) for run in shown]
    return markup.section("Bytes of each tensor", markup.note("In the last payload that was accepted."), *tables)


def _payload(run: RunData, names: Names, unfolded: bool) -> str:
    report = run.sample
    assert report is not None
    rest = (report.header_bytes, report.small_bytes, report.sketch_bytes)
    largest = max([*rest, *(tensor.bytes for tensor in report.tensors)])

    def size(count: int) -> list[TableCell]:
        share = count / report.bytes
        return [TableCell(f"{count:,}", count, bar=count / largest), TableCell(f"{share:.1%}", share)]

    rows = [
        [
            TableCell(text(tensor.name)),
            *size(tensor.bytes),
            markup.number(tensor.bits_per_parameter, "{:.3f}".format),
            markup.count(tensor.nonzeros),
            TableCell("×".join(map(str, tensor.shape)) or "scalar"),
            TableCell(text(tensor.kind.replace("factors", f"factors of rank {tensor.rank}"))),
        ]
        for tensor in report.tensors
        if not tensor.is_small
    ]
    nothing = TableCell("")
    small = sum(tensor.is_small for tensor in report.tensors)
    if small:
        rows.append([TableCell(f"{small} small tensors"), *size(report.small_bytes), *[nothing] * 4])
    if report.sketch_bytes:
        rows.append([TableCell("sketch of the rest"), *size(report.sketch_bytes), *[nothing] * 4])
    rows.append([TableCell("header"), *size(report.header_bytes), *[nothing] * 4])
    sums = [f"{report.bytes:,}", "100%", f"{report.bits_per_parameter:.3f}", f"{report.nonzeros:,}"]
    foot = [TableCell("all"), *map(TableCell, sums), nothing, nothing]
    columns = [("Tensor", False), ("Bytes", True), ("Share", True), ("Bits per parameter", True), ("Non-zeros", True)]
    shown = markup.table(run.label, [*columns, ("Shape", False), ("Sent as", False)], rows, foot)
    title = f"{names.full(run)}: {report.bytes:,} bytes, {report.ratio:.1f}× smaller than float32"
    return markup.fold(title, shown, unfolded)


def _seconds(runs: Sequence[RunData], names: Names) -> str:
    kinds = list(dict.fromkeys(kind for run in runs for times in run.timings for kind in times if kind != "round"))
    if not kinds:
        return ""
    rows = []
    for run in runs:
        means = [_mean(times[kind] for times in run.timings if kind in times) for kind in kinds]
        total = markup.number(run.seconds, markup.duration, "{:.3f} s".format)
        rows.append([names.cell(run), *(markup.number(mean, "{:.4f}".format) for mean in means), total])
    titles = [text(kind.removesuffix("_s").replace("_", " ")) for kind in kinds]
    columns = [("Run", False), *((title, True) for title in titles), ("all rounds", True)]
    about = markup.note("Means; train and encode are summed over a round's clients, which may run side by side.")
    return markup.section("Seconds per round", about, markup.table("Seconds per round", columns, rows))


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


# What was run


def _configuration(runs: Sequence[RunData], names: Names) -> str:
    """What differs between runs in a table, the rest once."""
    described = [_describe(run) for run in runs]
    keys = list(dict.fromkeys(key for one in described for key in one))
    common = [key for key in keys if len({str(one.get(key)) for one in described}) == 1]
    differing = [key for key in keys if key not in common]
    parts = []
    if differing:
        numeric = {key: all(_is_number(one.get(key)) for one in described) for key in differing}
        rows = [
            [names.cell(run), *(_value(one.get(key), numeric[key]) for key in differing)]
            for run, one in zip(runs, described)
        ]
        columns = [("Run", False), *((text(key), numeric[key]) for key in differing)]
        parts.append(markup.table("What differs between the runs", columns, rows))
    shared = {key: described[0].get(key) for key in common}
    rest = markup.pairs((key, markup.NOTHING if value is None else value) for key, value in shared.items())
    title = "What all runs have in common" if len(runs) > 1 else "All of it"
    parts.append(markup.fold(title, rest, unfolded=not differing))
    parts.append(markup.fold("Folders", markup.pairs((run.label, run.path) for run in runs)))
    return markup.section("Configuration", *parts)


def _describe(run: RunData) -> dict[str, Any]:
    """Configuration, options of the method, versions and hardware."""
    config = asdict(run.config)
    options = {f"option {name}": value for name, value in config.pop("options").items()}
    versions = {f"{name} version" if name in VERSIONS else name: value for name, value in run.environment.items()}
    return {name.replace("_", " "): value for name, value in (config | options | versions).items()}


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _value(value: Any, is_number: bool) -> TableCell:
    if value is None:
        return TableCell(markup.NOTHING)
    return TableCell(text(value), value if is_number else None)


def footer(runs: Sequence[RunData]) -> str:
    made = f"Page made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by fedfq {fedfq.__version__}."
    shown = [{name: value for name, value in run.environment.items() if name != "commit"} for run in runs]
    places = dict.fromkeys(", ".join(f"{name} {value}" for name, value in one.items()) for one in shown)
    return f"<footer>{made} Runs: {'; '.join(map(text, places))}.</footer>"
