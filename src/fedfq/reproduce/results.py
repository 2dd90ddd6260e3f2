"""What a reproduction left in its folder.

    OUT/reproduction.json             the profile, so that the folder is known for what it is
    OUT/<column>/<method>-<seed>/     the folder of a run, or `failed.txt` with the reason why there is none;
                                      `whole-test.json` where evaluations between rounds use a part of the test set
    OUT/table1.md, table1.tex, ...    the tables
    OUT/report.html, OUT/figures/     the page and the figures

A folder is of one profile, as the runs of both have the same names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedfq.files import write_bytes
from fedfq.report.runs import RunData, holds_run, read_config, read_run
from fedfq.reproduce.cells import PROFILES, Cell, Column

FAILED = "failed.txt"
WHOLE_TEST = "whole-test.json"  # in a run's folder: accuracy, loss and number of examples
MARK = "reproduction.json"


def is_reproduction(folder: Path) -> bool:
    return (folder / MARK).is_file()


def profile_of(out: Path) -> str:
    """The profile of the reproduction that is here."""
    try:
        profile = json.loads((out / MARK).read_bytes())["profile"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{out / MARK}: not the description of a reproduction ({error})") from None
    if not isinstance(profile, str) or profile not in PROFILES:
        raise ValueError(f"{out / MARK}: unknown profile {profile!r}")
    return profile


def claim(out: Path, profile: str, cells: Iterable[Cell] = ()) -> None:
    """Write down that the folder is of this profile, unless it is of another, or holds a run of another for a cell."""
    if is_reproduction(out) and (other := profile_of(out)) != profile:
        raise ValueError(f"{out}: holds the profile {other}, not {profile}; give another folder with --out")
    refuse_others(cells, out)
    if not is_reproduction(out):
        out.mkdir(parents=True, exist_ok=True)
        write_bytes(out / MARK, json.dumps({"profile": profile}).encode())


@dataclass(frozen=True)
class Outcome:
    """What there is of a method in a column, by seed."""

    finished: dict[int, RunData]
    unfinished: dict[int, RunData]
    failed: dict[int, str]
    whole_test: dict[int, float] = field(default_factory=dict)  # accuracy of the finished model on all test examples

    @property
    def runs(self) -> dict[int, RunData]:
        """Those that have something to show."""
        return self.finished | self.unfinished

    @property
    def seeds(self) -> list[int]:
        return sorted({*self.finished, *self.unfinished, *self.failed})

    @property
    def first(self) -> RunData | None:
        """The run with the least seed, finished if one is."""
        for runs in (self.finished, self.unfinished):
            if runs:
                return runs[min(runs)]
        return None


Outcomes = dict[tuple[str, str], Outcome]  # by the column's name and the method


def refuse_others(cells: Iterable[Cell], out: Path) -> None:
    """A run with another configuration, say of the other profile, is neither gone on with nor shown."""
    for cell in cells:
        folder = cell.folder(out)
        try:
            same = not holds_run(folder) or read_config(folder) == cell.config
        except ValueError:  # its description is damaged: it is shown as failed
            continue
        if not same:
            raise ValueError(f"{folder}: holds a run with another configuration; give another folder with --out")


def outcomes(out: Path, columns: Iterable[Column]) -> Outcomes:
    """What there is of either table, rows that the profile leaves out included."""
    wanted = {(column.name, column.method(row)): column for column in columns for row in column.rows_of()}
    return {(name, method): outcome(out, column, method) for (name, method), column in wanted.items()}


def outcome(out: Path, column: Column, method: str) -> Outcome:
    """All seeds that were ever run."""
    found = Outcome({}, {}, {})
    for seed in _seeds(out, column, method):
        cell = Cell(column, method, seed)
        folder = cell.folder(out)
        if (folder / FAILED).is_file():
            found.failed[seed] = (folder / FAILED).read_text("utf-8").strip()
        elif holds_run(folder):
            refuse_others([cell], out)
            try:
                run = replace(read_run(folder), label=method)  # which says more than the configuration's, as +down
            except ValueError as error:  # its files are damaged
                found.failed[seed] = str(error)
            else:
                (found.finished if run.finished else found.unfinished)[seed] = run
                if run.finished and (folder / WHOLE_TEST).is_file():
                    found.whole_test[seed] = float(json.loads((folder / WHOLE_TEST).read_bytes())["accuracy"])
    return found


def _seeds(out: Path, column: Column, method: str) -> list[int]:
    name = re.compile(re.escape(method.replace(":", "-")) + r"-(\d+)")
    folder = out / column.name
    matches = [name.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in matches if match)
