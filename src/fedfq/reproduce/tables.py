"""Tables 1 and 2 from the runs there are, beside the paper's numbers, for `forms` (Markdown, LaTeX) and `page` (HTML).

A cell without a number says why: not run yet, unfinished, failed, target not reached. Several seeds are shown as their
mean and, in parentheses, the least and the most of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedfq.report import markup
from fedfq.report.runs import LAST_EVALUATIONS, Point, RunData
from fedfq.reproduce.cells import (
    DOWN,
    FEDAVG,
    FEDFQ,
    TARGET_FRACTION,
    Cell,
    Column,
)
from fedfq.reproduce.results import Outcome, Outcomes

MIB = 2**20  # bytes: the paper's MB
NOT_RUN = "not run yet"
LEFT_OUT = "left out"  # of this profile
NOTHING = markup.NOTHING
LOSSLESS = "†"
LOSSLESS_FROM = -0.5  # points above FedAvg, over the last evaluations
SEVERAL = "Several seeds: their mean and, in parentheses, the least and the most."

Form = Callable[[float], str]


@dataclass(frozen=True)
class Entry:
    """What a cell shows, and the number to sort by where there is one."""

    text: str
    number: float | None = None


EMPTY = Entry(NOTHING)


@dataclass(frozen=True)
class TableRow:
    name: str  # the same in every column
    method: str  # what it stands for in this one
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class TablePart:
    """A column of the paper, as a table of its own: one row per method."""

    column: Column
    how: tuple[str, ...]  # it was trained, where and when
    above: tuple[str, ...]
    rows: tuple[TableRow, ...]
    below: tuple[str, ...]
    target: float | None = None  # with the least seed
    brief: str = ""  # what of `above` has to stand in the narrowest form


@dataclass(frozen=True)
class Table:
    name: str
    caption: str
    titles: tuple[str, ...]  # of the numbers of a row
    parts: tuple[TablePart, ...]
    notes: tuple[str, ...]  # on all parts

    @property
    def title(self) -> str:
        return f"{self.name}: {self.caption}"


# Table 1


def table_1(columns: Sequence[Column], found: Outcomes) -> Table:
    """Accuracy, and the compression it was reached with."""
    titles = ("accuracy %", "Δ", "paper", "wire", "claimed", "both ways")
    notes = (
        f"Accuracy: % of the test examples, the mean of the last {LAST_EVALUATIONS} evaluations. {SEVERAL}",
        f"Δ: points above {FEDAVG} with the same seed, that is the same initial model, clients and batches.",
        f"{LOSSLESS}: lossless in this setting, which is to say that Δ is at least {_format_signed(LOSSLESS_FROM)}.",
        "Wire: float32 bytes over the bytes that were sent. Claimed: over what the method's own paper counts.",
        f"Both ways: over the bytes up and down, for as many models down as up. {DOWN_SAYS}",
    )
    parts = tuple(_accuracies(column, found) for column in columns if "table1" in column.tables)
    return Table("Table 1", "accuracy and compression", titles, parts, notes)


DOWN_SAYS = f"{DOWN}: the model's way down is compressed too."


def _accuracies(column: Column, found: Outcomes) -> TablePart:
    baseline = found[column.name, FEDAVG].finished

    def entries(method: str) -> list[Entry]:
        own = found[column.name, method]
        paper = _paper(column.paper_accuracy.get(method), "{:.2f}".format)
        if (missing := _missing(column, method, own)) is not None:
            return [missing, EMPTY, paper, *[EMPTY] * 3]

        def above(seed: int, run: RunData) -> float | None:
            reference = baseline[seed].last_accuracy if seed in baseline else None
            ours = run.last_accuracy
            return None if ours is None or reference is None else 100 * (ours - reference)

        accuracy = _summary(own, lambda seed, run: _percent(run.last_accuracy), "{:.2f}".format)
        difference = EMPTY if method == FEDAVG else _summary(own, above, _format_signed, mark_from=LOSSLESS_FROM)
        both = _summary(own, lambda seed, run: run.total_ratio, _times)
        return [_with_the_rest(_with_whole_test(accuracy, own), own), difference, paper, *_ratios(own), both]

    rows = [TableRow(row, column.method(row), tuple(entries(column.method(row)))) for row in column.rows_of("table1")]
    return TablePart(column, _how(column, found), (), tuple(rows), ())


# Table 2


def table_2(columns: Sequence[Column], found: Outcomes) -> Table:
    """Uplink until the target accuracy."""
    titles = ("rounds", "MiB per client", "MiB in all", "paper", "fewer", "wire", "claimed", "both ways", "fewer")
    notes = (
        "Rounds until the first evaluation that reached the target, known only to the distance of two evaluations, as "
        "is all that follows from it. MiB (2^20 bytes; the paper's MB are these) that were sent until then: of one "
        "client that takes part in every round, as the paper counts (a tenth of the sum, with ten clients per round), "
        f"and of all clients. {SEVERAL}",
        f"Fewer: {FEDAVG}'s bytes over the method's. Wire and claimed: as in Table 1, over the whole run.",
        "Both ways: MiB up and down to all clients until then, with the initial model once to each where it is needed. "
        f"{DOWN_SAYS}",
        "@N is a ratio of N. Methods without one have their defaults: stc sends one entry in 400. Of ours, one ratio "
        "per column is compared with the others, and it is named there. No other method was tuned.",
    )
    parts = tuple(_uplinks(column, found) for column in columns)
    return Table("Table 2", "uplink to the target accuracy", titles, parts, notes)


def _uplinks(column: Column, found: Outcomes) -> TablePart:
    reference = found[column.name, FEDAVG]
    baseline = reference.finished
    rows = column.rows_of("table2")
    reached = {column.method(row): _to_target(column, found[column.name, column.method(row)], baseline) for row in rows}
    sums = {
        method: {seed: None if point is None else point.uplink_bytes / MIB for seed, point in points.items()}
        for method, points in reached.items()
    }

    def entries(method: str) -> list[Entry]:
        own = found[column.name, method]
        paper = _paper(column.paper_mb.get(method), "{:,.2f}".format)
        if (missing := _missing(column, method, own)) is not None:
            return [missing, EMPTY, EMPTY, paper, *[EMPTY] * 5]

        def rounds(seed: int, run: RunData) -> float | None:
            point = reached[method].get(seed)
            return None if point is None else point.round

        def total(seed: int, run: RunData) -> float | None:
            return sums[method].get(seed)

        def client(seed: int, run: RunData) -> float | None:
            mib = total(seed, run)
            return None if mib is None else mib / run.config.per_round

        def fewer(seed: int, run: RunData) -> float | None:
            mib, of_fedavg = total(seed, run), sums[FEDAVG].get(seed)
            return of_fedavg / mib if mib and of_fedavg else None

        def both_ways(seed: int, run: RunData) -> float | None:
            point = reached[method].get(seed)
            return None if point is None else point.total_bytes / MIB

        def fewer_both(seed: int, run: RunData) -> float | None:
            point, of_fedavg = reached[method].get(seed), reached[FEDAVG].get(seed)
            return of_fedavg.total_bytes / point.total_bytes if point and of_fedavg else None

        def otherwise(seed: int) -> str:
            return "not reached" if seed in sums[method] else f"no target: {FEDAVG} {_state(reference, [seed])}"

        until = _summary(own, rounds, "{:,.0f}".format, otherwise)
        one, all_ = (_summary(own, value, _mib) for value in (client, total))
        both = [_summary(own, both_ways, _mib), _summary(own, fewer_both, _times)]
        return [_with_the_rest(until, own), one, all_, paper, _summary(own, fewer, _times), *_ratios(own), *both]

    shown_rows = tuple(TableRow(row, column.method(row), tuple(entries(column.method(row)))) for row in rows)
    choice = f"Ours is {column.fedfq} here, {column.chosen}."
    shown = _target_shown(column, baseline) or _state(reference, reference.seeds)
    least = target(column, baseline[min(baseline)] if baseline else None)
    return TablePart(
        *(
            column,
            _how(column, found),
            (_about_target(column, shown), choice),
            shown_rows,
            (_verdict(column, sums, found),),
        ),
        target=least,
        brief=f"target: {shown}; {FEDFQ}: {column.fedfq}",
    )


def target(column: Column, baseline: RunData | None) -> float | None:
    """The accuracy to reach. Where the profile fixes none, it is a fraction of what FedAvg reached."""
    if column.target is not None:
        return column.target
    best = None if baseline is None else baseline.best_accuracy
    return None if best is None else TARGET_FRACTION * best


def _to_target(column: Column, own: Outcome, baseline: Mapping[int, RunData]) -> dict[int, Point | None]:
    """The first evaluation at the target for every seed that has one; None if it was not reached."""
    targets = {seed: target(column, baseline.get(seed)) for seed in own.finished}
    return {seed: own.finished[seed].first_at(goal) for seed, goal in targets.items() if goal is not None}


def _target_shown(column: Column, baseline: Mapping[int, RunData]) -> str:
    if column.target is not None:
        return f"{column.target:.0%}"
    targets = {seed: found for seed, run in baseline.items() if (found := target(column, run)) is not None}
    return ", ".join(
        f"{found:.2%}" + (f" (seed {seed})" if len(targets) > 1 else "") for seed, found in targets.items()
    )


def _about_target(column: Column, shown: str) -> str:
    if column.target is None:
        shown = f"{TARGET_FRACTION:g} times {FEDAVG}'s best with the same seed: {shown}"
    if column.paper_target is None:
        return f"Target: {shown}. Not in the paper."
    best = max(column.paper_accuracy.values(), default=math.inf)
    beyond = ""
    if 100 * column.paper_target > best:
        beyond = f", which lies above every accuracy of its own Table 1, where the best is {best:.2f}%"
    return f"Target: {shown}. The paper's: {column.paper_target:.0%}{beyond}."


def _verdict(column: Column, sums: Mapping[str, Mapping[int, float | None]], found: Outcomes) -> str:
    """How our row compares with every other one, each over the seeds that both have."""
    own = column.fedfq
    ours = {seed: mib for seed, mib in sums[own].items() if mib is not None}
    if not sums[own]:
        return f"Not compared yet: {own} and {FEDAVG} are not both finished."
    if len(ours) < len(sums[own]):
        missed = [seed for seed in sums[own] if seed not in ours]
        return f"{own} did not reach the target with {_seeds(missed)}."
    ratios: dict[str, float] = {}  # their bytes over ours
    unreached: list[str] = []
    failed: list[str] = []
    unfinished: list[str] = []
    others = (row for row in column.rows_of("table2") if row in column.rows and column.method(row) != own)
    for method in others:
        theirs = {seed: mib for seed, mib in sums[method].items() if seed in ours}
        reached = [mib / ours[seed] for seed, mib in theirs.items() if mib is not None]
        if reached and len(reached) == len(theirs):
            ratios[method] = math.fsum(reached) / len(reached)
        elif theirs:
            unreached.append(method)
        else:
            (failed if found[column.name, method].failed else unfinished).append(method)
    more = [method for method, ratio in ratios.items() if ratio > 1 and method != FEDAVG]
    less = [method for method, ratio in ratios.items() if ratio <= 1 and method != FEDAVG]
    said = _against(column, ratios[FEDAVG]) if FEDAVG in ratios else f"{own} reached the target"
    if less:
        said += f", but not fewer than {', '.join(less)}" + (f"; fewer than {', '.join(more)}" if more else "")
    elif more:
        said += f", and fewer than every other method that reached the target: {', '.join(more)}"
    else:
        said += "; no other method has reached the target"
    rest = [("Not reached by", unreached), ("Failed:", failed), ("Not finished:", unfinished)]
    return " ".join([f"{said}.", *(f"{what} {', '.join(names)}." for what, names in rest if names)])


def _against(column: Column, ratio: float) -> str:
    times = f"{_number(ratio)} times fewer" if ratio >= 1 else f"{_number(1 / ratio)} times more"
    missed = "" if ratio >= column.aim else ", which is missed"
    return f"{column.fedfq} needs {times} bytes than {FEDAVG} (aim: {column.aim}{missed})"


# What both have


def _missing(column: Column, method: str, found: Outcome) -> Entry | None:
    """Why there is no number."""
    if found.finished:
        return None
    rest = _rest(found)
    if len(rest) == 1:
        return Entry(next(iter(rest.values())))
    if rest:
        return Entry("; ".join(f"seed {seed} {why}" for seed, why in rest.items()))
    return Entry(NOT_RUN if method in column.methods else LEFT_OUT)


def _rest(found: Outcome) -> dict[int, str]:
    """What became of seeds that are not finished."""
    failed = {seed: f"failed: {reason}" for seed, reason in found.failed.items()}
    return failed | {
        seed: f"unfinished: {len(run.rounds)} of {run.config.rounds} rounds" for seed, run in found.unfinished.items()
    }


def _state(found: Outcome, seeds: Iterable[int]) -> str:
    """In a word, why these seeds have no number."""
    rest = _rest(found)
    return next((rest[seed].split(":")[0] for seed in seeds if seed in rest), NOT_RUN)


def _summary(
    found: Outcome,
    value: Callable[[int, RunData], float | None],
    form: Form,
    otherwise: Callable[[int], str] = lambda seed: NOTHING,
    mark_from: float = math.inf,
) -> Entry:
    """All seeds in one cell, and which of them have no value."""
    values = {seed: value(seed, run) for seed, run in found.finished.items()}
    numbers = [number for number in values.values() if number is not None]
    if not numbers:
        return Entry("; ".join(dict.fromkeys(map(otherwise, values))))
    spread = _spread(numbers, form, mark_from)
    without = [f"seed {seed} {otherwise(seed)}" for seed, number in values.items() if number is None]
    return Entry("; ".join([spread.text, *without]), spread.number)


def _with_whole_test(entry: Entry, found: Outcome) -> Entry:
    """The finished model on all test examples, beside the mean of evaluations on a part of them."""
    if not found.whole_test:
        return entry
    spread = _spread([100 * accuracy for accuracy in found.whole_test.values()], "{:.2f}".format)
    return Entry(f"{entry.text}; at the end, on the whole test set: {spread.text}", entry.number)


def _with_the_rest(entry: Entry, found: Outcome) -> Entry:
    """Seeds that failed or are not finished, beside those that are."""
    rest = (f"seed {seed} {why}" for seed, why in _rest(found).items())
    return Entry("; ".join([entry.text, *rest]), entry.number)


def _spread(numbers: Sequence[float], form: Form, mark_from: float = math.inf) -> Entry:
    mean = math.fsum(numbers) / len(numbers)
    shown = form(mean) + (LOSSLESS if round(mean, 2) >= round(mark_from, 2) else "")  # as shown
    least, most = form(min(numbers)), form(max(numbers))
    return Entry(shown if least == most else f"{shown} ({least} to {most})", mean)


def _ratios(found: Outcome) -> list[Entry]:
    return [
        _summary(found, lambda seed, run: run.wire_ratio, _times),
        _summary(found, lambda seed, run: run.claimed_ratio, _times),
    ]


def _paper(number: float | None, form: Form) -> Entry:
    return EMPTY if number is None else Entry(form(number), number)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _format_signed(points: float) -> str:
    return f"{round(points, 2) + 0.0:+.2f}".replace("-", "−")  # no −0.00


def _times(ratio: float) -> str:
    return f"{_number(ratio)}×"


def _number(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}"


def _mib(count: float) -> str:
    return f"{count:,.2f}" if count >= 1 else f"{count:.3g}"


# In words


def _how(column: Column, found: Outcomes) -> tuple[str, ...]:
    """How the column was trained; where and when."""
    config = Cell(column, FEDAVG, 0).config
    steps, kind = (config.local_steps, "step") if config.local_epochs is None else (config.local_epochs, "epoch")
    decay = "" if config.lr_decay == 1 else f" × {config.lr_decay:g} per round"
    every = "" if config.eval_every == 1 else f", evaluated every {config.eval_every}"
    ran = [found[column.name, method] for method in dict.fromkeys(map(column.method, column.rows_of()))]
    parts = [
        f"{config.task}, {config.split}",
        f"{config.clients} clients, {config.per_round} per round",
        f"{steps} local {_plural(kind, steps)}, batches of {config.batch_size}",
        f"learning rate {config.lr:g}{decay}",
        f"{config.rounds} rounds{every}",
    ]
    runs = [run for one in ran for run in one.runs.values()]
    return (f"{', '.join(parts)}.", *([_which_seeds(column, found), _where(runs)] if runs else []))


def _which_seeds(column: Column, found: Outcomes) -> str:
    """Of every method there is; most have the same."""
    seeds: dict[str, tuple[int, ...]] = {}
    for method in dict.fromkeys(map(column.method, column.rows_of())):
        one = found[column.name, method]
        if one.runs:
            seeds[method] = tuple(sorted(one.runs))
    usual = Counter(seeds.values()).most_common(1)[0][0]
    others = [f"{method} ({_seeds(own)})" for method, own in seeds.items() if own != usual]
    said = _seeds(usual).capitalize() + (f" of all but {', '.join(others)}" if others else "")
    return f"{said}."


def _where(runs: Sequence[RunData]) -> str:
    dates = sorted({str(run.environment["date"]) for run in runs if "date" in run.environment})
    when = f" {dates[0]}" + (f" to {dates[-1]}" if len(dates) > 1 else "") if dates else ""
    machines = dict.fromkeys(str(run.environment.get("machine", "an unknown machine")) for run in runs)
    versions = dict.fromkeys(
        f"{name} {run.environment[name]}" for run in runs for name in ("fedfq", "torch") if name in run.environment
    )
    hours = math.fsum(run.seconds for run in runs) / 3600
    return f"Run{when} on {' and '.join(machines)}; {', '.join(versions)}. Their times add up to {hours:,.1f} hours."


def _seeds(seeds: Sequence[int]) -> str:
    return f"{_plural('seed', len(seeds))} {', '.join(map(str, seeds))}"


def _plural(what: str, count: int | None) -> str:
    return what if count == 1 else f"{what}s"
