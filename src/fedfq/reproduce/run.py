"""Run cells, one folder each, and read what there is of them.

    OUT/<column>/<method>-<seed>/     the folder of a run, or `failed.txt` with the reason why there is none

A finished cell is not run again, one that was interrupted goes on, one that failed is tried again. Both tables use the
same folders, so that what is in both is run once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from fedfq.federation.folder import Folder
from fedfq.federation.loop import Watch
from fedfq.federation.loop import run as run_federation
from fedfq.files import write_bytes
from fedfq.report.runs import RunData, read_run
from fedfq.reproduce.cells import Cell, Column

FAILED = "failed.txt"


@dataclass(frozen=True)
class Outcome:
    """What there is of a method in a column, by seed."""

    finished: dict[int, RunData]
    unfinished: dict[int, RunData]
    failed: dict[int, str]


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    watching: Callable[[Cell], AbstractContextManager[Watch]] = lambda cell: nullcontext(lambda line, times: None),
    done: Callable[[Cell], object] = lambda cell: None,
    workers: int = 1,
    data_dir: Path | None = None,
) -> list[Cell]:
    """Run what is not finished; returns the cells that failed. `done` is told of every cell that was run."""
    refuse_others(cells, out)  # all of them, before the first one runs
    failed = []
    for cell in cells:
        folder = cell.folder(out)
        again = Folder(folder).holds_run
        if again and read_run(folder).finished:
            continue
        (folder / FAILED).unlink(missing_ok=True)
        try:
            with watching(cell) as watch:
                run_federation(cell.config, folder, resume=again, workers=workers, data_dir=data_dir, watch=watch)
        except Exception as error:  # of whatever kind: the others can still be run
            reason = " ".join(str(error).split()) or type(error).__name__
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / FAILED, f"{reason}\n".encode())
            failed.append(cell)
        done(cell)
    return failed


def refuse_others(cells: Iterable[Cell], out: Path) -> None:
    """A run with another configuration, say of the other profile, is neither gone on with nor shown."""
    for cell in cells:
        folder = Folder(cell.folder(out))
        if folder.holds_run and folder.config() != cell.config:
            raise ValueError(f"{folder.path}: holds a run with another configuration; give another folder with --out")


def outcome(out: Path, column: Column, method: str) -> Outcome:
    """All seeds that were ever run."""
    found = Outcome({}, {}, {})
    for seed in _seeds(out, column, method):
        cell = Cell(column, method, seed)
        folder = cell.folder(out)
        if (folder / FAILED).is_file():
            found.failed[seed] = (folder / FAILED).read_text("utf-8").strip()
        elif Folder(folder).holds_run:
            refuse_others([cell], out)
            run = read_run(folder)
            (found.finished if run.finished else found.unfinished)[seed] = run
    return found


def _seeds(out: Path, column: Column, method: str) -> list[int]:
    name = re.compile(re.escape(method.replace(":", "-")) + r"-(\d+)")
    folder = out / column.name
    matches = [name.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in matches if match)
