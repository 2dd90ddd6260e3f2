"""What is said of a run agrees with its table, and has an end."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedfq.cli.progress import MOST_NAMED, came_to_nothing, describe_refusals, showing_progress
from fedfq.report.runs import read_run
from tests.report.folders import CLIENTS, RAW, a_line, write_run

EVERY = [(client, "not finite") for client in range(CLIENTS)]


def lines_with_first_contacts() -> list[dict[str, Any]]:
    """In the first round all clients are new and are sent the model, later a part of it; in the third, two are refused.

    In the second, some are new: no line's downlink says how large the model is.
    """
    return [
        a_line(1, 0.1, 100, downlink_bytes=CLIENTS * RAW // 4),
        a_line(2, 0.2, 100, downlink_bytes=CLIENTS * RAW // 16),
        a_line(3, 0.3, 100, [(1, "checksum"), (2, "checksum")], downlink_bytes=CLIENTS * RAW // 64),
    ]


@pytest.mark.parametrize("resumed_after", [0, 1, 2])
def test_the_bar_shows_the_ratio_of_the_table_also_after_a_run_was_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], resumed_after: int
) -> None:
    lines = lines_with_first_contacts()
    folder = write_run(tmp_path / "run", lines[:resumed_after], finished=False, rounds=3)
    with showing_progress(3) as bar:
        watch = bar("fedfq", folder)
        for line in lines[resumed_after:]:
            with open(folder / "rounds.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
            watch(line, {})
    shown = capsys.readouterr().err.splitlines()[-1]
    run = read_run(folder)
    assert run.wire_ratio is not None
    assert f"{run.uplink_bytes / 1e6:.2f} MB up ({run.wire_ratio:,.0f}x)" in shown
    assert f"{run.downlink_bytes / 1e6:.2f} MB down ({3 * CLIENTS * RAW / run.downlink_bytes:.0f}x)" in shown


def test_refused_updates_are_named_but_not_by_the_thousand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = [(4, "checksum: \x1b[2J[bold]" + "x" * 1000)]
    lines = [a_line(1, 0.1, rejected=hostile), *(a_line(number, 0.1, rejected=EVERY) for number in range(2, 1001))]
    with showing_progress(1000) as bar:
        watch = bar("fedfq", write_run(tmp_path / "run", lines[:1], rounds=1000))
        for line in lines:
            watch(line, {})
    shown = [line for line in capsys.readouterr().err.splitlines() if "round 100/" not in line]
    named = [line for line in shown if "is refused" in line]
    assert named[0].startswith("fedfq: round 1: the update of client 4 is refused: 'checksum: \\x1b[2J[bold]x")
    assert len(named) == MOST_NAMED and "\x1b" not in named[0] and len(named[0]) < 300
    assert named[1] == "fedfq: round 2: the update of client 0 is refused: not finite"
    further = [line for line in shown if "further refusals" in line]
    assert len(further) == 1 and str(tmp_path / "run" / "rounds.jsonl") in further[0]


def test_exactly_so_many_refusals_leave_nothing_out(tmp_path: Path) -> None:
    line = a_line(1, 0.1, rejected=EVERY)
    assert len(describe_refusals("fedfq", tmp_path, line, MOST_NAMED - CLIENTS)) == CLIENTS
    assert "further" in describe_refusals("fedfq", tmp_path, line, MOST_NAMED)[0]
    assert describe_refusals("fedfq", tmp_path, line, MOST_NAMED + 1) == []


@pytest.mark.parametrize(
    ("rounds", "idle", "failed"),
    [
        (20, [], False),
        (20, [3, 7], False),
        (20, [20], False),  # the last tenth are two rounds
        (20, [3, 19, 20], True),
        (4, [4], True),
        (1, [1], True),
    ],
)
def test_a_run_has_failed_if_no_update_was_accepted_in_its_last_tenth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rounds: int, idle: list[int], failed: bool
) -> None:
    lines = [a_line(number, 0.1, rejected=EVERY if number in idle else EVERY[:1]) for number in range(1, rounds + 1)]
    assert came_to_nothing(read_run(write_run(tmp_path / "run", lines))) == failed
    said = capsys.readouterr().err
    assert (f"no update was accepted in {len(idle)} of {rounds} rounds" in said) == bool(idle)
    assert ("has failed" in said) == failed and (not idle or "client 4: not finite" in said)
