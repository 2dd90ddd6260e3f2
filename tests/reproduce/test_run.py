"""Cells are run once, go on where they were, and fail alone."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedfq.federation.folder import Folder
from fedfq.reproduce import run as module
from fedfq.reproduce.cells import TABLES, cells
from fedfq.reproduce.results import WHOLE_TEST, outcome
from fedfq.reproduce.run import run_cells
from tests.reproduce.small import IID, SMALL, write_cell

TWO = cells([IID], TABLES, [0], ["fedavg", "fedavg-2bit"])


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods of the runs that were begun or gone on with."""
    names: list[str] = []
    real: Callable[..., Any] = module.run_federation

    def noted(config: Any, *arguments: Any, **options: Any) -> Any:
        names.append(config.label)
        return real(config, *arguments, **options)

    monkeypatch.setattr(module, "run_federation", noted)
    return names


def test_a_cell_is_run_once(tmp_path: Path, trained: list[str]) -> None:
    told: list[str] = []
    assert run_cells(TWO, tmp_path, done=lambda cell: told.append(cell.method)) == []
    assert run_cells(TWO, tmp_path, done=lambda cell: told.append(cell.method)) == []
    assert trained == told == ["fedavg", "fedavg-2bit"]
    assert outcome(tmp_path, IID, "fedavg").finished[0].wire_ratio == pytest.approx(1.0, rel=0.02)


def test_a_finished_run_needs_only_its_ledger(tmp_path: Path, trained: list[str]) -> None:
    """As in the repository, which holds neither models nor checkpoints."""
    write_cell(tmp_path, IID, "fedavg", [0.1, 0.2])
    (TWO[0].folder(tmp_path) / "model.safetensors").unlink()
    run_cells(TWO[:1], tmp_path)
    assert trained == []


def test_an_interrupted_reproduction_goes_on_where_it_was(tmp_path: Path, trained: list[str]) -> None:
    run_cells(TWO, tmp_path / "whole")
    trained.clear()

    @contextmanager
    def interrupting(cell):
        def watch(line, times):
            if cell is TWO[1]:
                raise KeyboardInterrupt

        yield watch

    with pytest.raises(KeyboardInterrupt):
        run_cells(TWO, tmp_path / "cut", watching=interrupting)
    assert len(outcome(tmp_path / "cut", IID, "fedavg-2bit").unfinished[0].rounds) == 1
    run_cells(TWO, tmp_path / "cut")
    assert trained == ["fedavg", "fedavg-2bit", "fedavg-2bit"]
    for cell in TWO:
        ledgers = [(cell.folder(tmp_path / name) / "rounds.jsonl").read_bytes() for name in ("whole", "cut")]
        assert ledgers[0] == ledgers[1]


def test_a_cell_that_fails_leaves_the_others_alone_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.run_federation

    def failing(config, *arguments, **options):
        if config.label == "fedavg":
            raise RuntimeError("no data\nhere")
        return real(config, *arguments, **options)

    monkeypatch.setattr(module, "run_federation", failing)
    assert run_cells(TWO, tmp_path) == [TWO[0]]
    assert outcome(tmp_path, IID, "fedavg").failed == {0: "no data here"}
    assert outcome(tmp_path, IID, "fedavg-2bit").finished.keys() == {0}
    monkeypatch.setattr(module, "run_federation", real)
    assert run_cells(TWO, tmp_path) == []
    assert outcome(tmp_path, IID, "fedavg").finished.keys() == {0}
    assert outcome(tmp_path, IID, "fedavg").failed == {}


def test_a_cell_that_another_process_runs_is_left_alone(tmp_path: Path) -> None:
    told: list[str] = []
    with Folder(TWO[0].folder(tmp_path)).held():
        assert run_cells(TWO, tmp_path, held=lambda cell: told.append(cell.method)) == []
    assert told == ["fedavg"] and outcome(tmp_path, IID, "fedavg").seeds == []
    assert outcome(tmp_path, IID, "fedavg-2bit").finished.keys() == {0}


@pytest.mark.parametrize("last", [1, 2])
def test_a_run_that_fails_on_its_way_is_failed_too(tmp_path: Path, last: int) -> None:
    """Even after its last round. What was done is kept: the next call goes on with it."""

    @contextmanager
    def failing(cell):
        def watch(line, times):
            if line["round"] == last:
                raise RuntimeError("the disk is full")

        yield watch

    assert run_cells(TWO[:1], tmp_path, watching=failing) == TWO[:1]
    found = outcome(tmp_path, IID, "fedavg")
    assert found.failed == {0: "the disk is full"} and not found.unfinished and not found.finished
    assert run_cells(TWO[:1], tmp_path) == []
    found = outcome(tmp_path, IID, "fedavg")
    assert len(found.finished[0].rounds) == 2 and not found.failed
    assert (TWO[0].folder(tmp_path) / "model.safetensors").is_file()


@pytest.mark.parametrize("file", ["rounds.jsonl", "run.json"])
def test_a_damaged_run_fails_alone(tmp_path: Path, file: str) -> None:
    write_cell(tmp_path, IID, "fedavg", [0.1, 0.2])
    (TWO[0].folder(tmp_path) / file).write_text("damaged\n" * 2)
    assert file in outcome(tmp_path, IID, "fedavg").failed[0]
    assert run_cells(TWO, tmp_path) == TWO[:1]
    assert file in outcome(tmp_path, IID, "fedavg").failed[0]
    assert outcome(tmp_path, IID, "fedavg-2bit").finished.keys() == {0}


def test_a_run_with_another_configuration_is_refused_before_anything_runs(tmp_path: Path, trained: list[str]) -> None:
    run_cells(TWO[1:], tmp_path)
    trained.clear()
    other = replace(IID, settings=SMALL | {"split": "iid", "rounds": 3})
    with pytest.raises(ValueError, match="another configuration"):
        run_cells(cells([other], TABLES, [0], ["fedavg", "fedavg-2bit"]), tmp_path)
    with pytest.raises(ValueError, match="another configuration"):
        outcome(tmp_path, other, "fedavg-2bit")
    assert trained == []


def test_finished_models_are_evaluated_on_the_whole_test_set_where_the_column_says_so(tmp_path: Path) -> None:
    """Once: a cell whose model was not evaluated yet goes on there."""
    (cell,) = cells([replace(IID, whole_test=True)], TABLES, [0], ["fedavg"])
    assert run_cells([cell], tmp_path, workers=1) == []
    path = cell.folder(tmp_path) / WHOLE_TEST
    found = json.loads(path.read_bytes())
    last = Folder(cell.folder(tmp_path)).rounds()[-1]
    assert found == {"accuracy": last["accuracy"], "loss": pytest.approx(last["loss"]), "examples": 450}
    path.unlink()
    run_cells([cell], tmp_path, workers=1)
    assert json.loads(path.read_bytes()) == found
