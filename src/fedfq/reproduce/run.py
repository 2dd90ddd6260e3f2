"""Run cells, one folder each.

A finished cell is not run again, one that was interrupted goes on, one that failed is tried again. Both tables use the
same folders, so that what is in both is run once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedfq.federation.clients import Clients
from fedfq.federation.folder import HeldError
from fedfq.federation.loop import Watch
from fedfq.federation.loop import run as run_federation
from fedfq.files import write_bytes
from fedfq.report.runs import holds_run, read_run
from fedfq.reproduce.cells import Cell
from fedfq.reproduce.results import FAILED, WHOLE_TEST, refuse_others
from fedfq.types import Array


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    watching: Callable[[Cell], AbstractContextManager[Watch]] = lambda cell: nullcontext(lambda line, times: None),
    done: Callable[[Cell], object] = lambda cell: None,
    held: Callable[[Cell], object] = lambda cell: None,
    **where: Any,
) -> list[Cell]:
    """Run what is not finished; returns the cells that failed. `done` is told of every cell that was run, `held` of
    those that are left alone, as another process is at work on them.

    `where` are the workers, the data's folder and the device, as `loop.run` takes them.
    """
    refuse_others(cells, out)  # all of them, before the first one runs
    failed = []
    for cell in cells:
        folder = cell.folder(out)
        again = holds_run(folder)
        try:
            if again and read_run(folder).finished and not (folder / FAILED).exists() and not _cut_short(cell, folder):
                continue
            (folder / FAILED).unlink(missing_ok=True)
            with watching(cell) as watch:
                model = run_federation(cell.config, folder, resume=again, watch=watch, **where).theta
            if cell.column.whole_test:
                evaluate_whole_test(cell, model, folder, **where)
        except HeldError:
            held(cell)
            continue
        except Exception as error:  # of whatever kind: the others can still be run
            reason = " ".join(str(error).split()) or type(error).__name__
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / FAILED, f"{reason}\n".encode())
            failed.append(cell)
        done(cell)
    return failed


def evaluate_whole_test(
    cell: Cell,
    model: Mapping[str, Array],
    folder: Path,
    *,
    workers: int = 1,
    data_dir: Path | None = None,
    device: str = "cpu",
) -> None:
    """Write what the finished model does on the whole test set, where evaluations between rounds use a part of it."""
    with TemporaryDirectory() as memories, Clients(cell.config, data_dir, Path(memories), workers, device) as clients:
        clients.publish(model)
        accuracy, loss = clients.evaluate(whole=True)
        count = len(clients.worker.test_examples(whole=True))
    write_bytes(folder / WHOLE_TEST, json.dumps({"accuracy": accuracy, "loss": loss, "examples": count}).encode())


def _cut_short(cell: Cell, folder: Path) -> bool:
    """It ended after its last round, but before its model was written, or evaluated on the whole test set."""
    unwritten = (folder / "checkpoint").exists() and not (folder / "model.safetensors").exists()
    return unwritten or (cell.column.whole_test and not (folder / WHOLE_TEST).exists())
