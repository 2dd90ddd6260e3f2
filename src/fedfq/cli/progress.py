"""What is said of a run: while it runs, when it is interrupted, and at its end if it came to nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedfq.cli.output import escape

if TYPE_CHECKING:
    from fedfq.federation.loop import Watch
    from fedfq.report.runs import RunData

MOST_NAMED = 10  # refused updates of a run that are named; its ledger has them all
LONGEST_REASON = 200  # characters; a client may have chosen them
LAST_SHARE = 0.1  # of a run's rounds: they count as its last ones


@contextmanager
def showing_progress(rounds: int) -> Iterator[Callable[[str, Path], Watch]]:
    """A bar on a terminal, else ten lines. Yields what makes a watcher, given the run's name and folder."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        *(BarColumn(), TextColumn("{task.completed}/{task.total}"), TextColumn("{task.fields[status]}")),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )

    def watcher(label: str, folder: Path) -> Watch:
        number = bar.add_task(label, total=rounds, status="")
        totals = _Totals(folder)
        named = 0

        def watch(line: dict[str, Any], times: dict[str, float]) -> None:
            nonlocal named
            totals.add(line)
            for text in describe_refusals(label, folder, line, named):
                console.print(text, soft_wrap=True)
            named += len(line["rejected"])
            bar.update(number, completed=line["round"], status=totals.status)
            tenth = line["round"] * 10 // rounds > (line["round"] - 1) * 10 // rounds
            if not console.is_terminal and tenth:
                console.print(f"{label}: round {line['round']}/{rounds}  {totals.status}", soft_wrap=True)

        return watch

    with bar:
        yield watcher


class _Totals:
    """What a run has sent until now, counted as its table does, with the rounds before it was resumed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._uplink = self._downlink = 0
        self._accepted = self._asked = 0
        self._raw = 0  # bytes of one update as float32
        self._accuracy = ""

    def add(self, line: dict[str, Any]) -> None:
        from fedfq.federation.folder import Folder

        if not self._raw:
            folder = Folder(self._folder)
            self._raw = folder.raw_bytes
            for each in folder.rounds()[: line["round"] - 1]:
                self._add(each)
        self._add(line)

    def _add(self, line: dict[str, Any]) -> None:
        self._uplink += line["uplink_bytes"]
        self._downlink += line["downlink_bytes"]
        self._asked += len(line["clients"])
        self._accepted += len(line["clients"]) - len(line["rejected"])
        if line["accuracy"] is not None:
            self._accuracy = f"{line['accuracy']:.1%}"

    @property
    def status(self) -> str:
        up = self._raw * self._accepted / max(self._uplink, 1)
        down = self._raw * self._asked / max(self._downlink, 1)
        sizes = f"{self._uplink / 1e6:,.2f} MB up ({up:,.0f}x), {self._downlink / 1e6:,.2f} MB down ({down:,.0f}x)"
        return f"{self._accuracy}  {sizes}"


# Updates that are refused


def describe_refusals(label: str, folder: Path, line: dict[str, Any], named: int) -> list[str]:
    """One line per update that was refused in a round, if so many were `named` before; not without end."""
    head = f"{label}: round {line['round']}: the update of client"
    shown = line["rejected"][: max(0, MOST_NAMED - named)]
    texts = [f"{head} {each['client']} is refused: {_shorten(each['reason'])}" for each in shown]
    if named <= MOST_NAMED < named + len(line["rejected"]):
        texts.append(f"{label}: further refusals are not shown, but are in {folder / 'rounds.jsonl'}")
    return texts


def came_to_nothing(run: RunData) -> bool:
    """Say in how many rounds no update was accepted, if in any. True if in all of the last tenth (at least one)."""
    idle = [line for line in run.rounds if line.clients == len(line.rejected)]
    if not idle:
        return False
    count = max(1, math.ceil(LAST_SHARE * run.config.rounds))
    failed = idle[-count:] == list(run.rounds[-count:])
    text = f"fedfq: {run.label}: no update was accepted in {len(idle)} of {len(run.rounds)} rounds"
    if failed:
        text += f", among them all of the last {count}: the run has failed"
    last = idle[-1].rejected[-1]
    typer.echo(f"{text} (round {idle[-1].number}, client {last.client}: {_shorten(last.reason)})", err=True)
    return failed


def _shorten(reason: str) -> str:
    """Shorten a reason, of which some may be a client's own words."""
    return escape(reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}...")


# Interruptions


@contextmanager
def saying_how_to_go_on(how: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C and SIGTERM are answered by one line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        typer.echo(f"fedfq: interrupted; {how()}", err=True)
        raise
