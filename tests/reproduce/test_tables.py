"""The tables say what was measured, and of every other cell why it was not."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fedfq.reproduce import tables
from fedfq.reproduce.cells import PAPER, QUICK, Cell, Column
from fedfq.reproduce.results import FAILED, WHOLE_TEST, outcomes
from fedfq.reproduce.tables import Table
from tests.report.folders import CLIENTS, RAW
from tests.reproduce.small import COLUMNS, IID, SHARDS, write_cell


def table_1(out: Path, columns: Sequence[Column] = COLUMNS) -> Table:
    return tables.table_1(columns, outcomes(out, columns))


def table_2(out: Path, columns: Sequence[Column] = COLUMNS) -> Table:
    return tables.table_2(columns, outcomes(out, columns))


def row(table: Table, method: str, column: int = 0) -> list[str]:
    """What a method's cells of a column say."""
    return next([entry.text for entry in row.entries] for row in table.parts[column].rows if row.method == method)


def fail(out: Path, method: str, reason: str, seed: int = 0) -> None:
    folder = Cell(IID, method, seed).folder(out)
    folder.mkdir(parents=True)
    (folder / FAILED).write_text(reason + "\n")


def test_table_1_has_our_number_the_papers_and_all_ratios(tmp_path: Path) -> None:
    write_cell(tmp_path, IID, "fedavg", [0.70, 0.80], uplink=CLIENTS * RAW)  # as float32; claims are half of it
    assert row(table_1(tmp_path), "fedavg") == ["75.00", "–", "77.78", "1.0×", "2.0×", "1.0×"]
    write_cell(tmp_path, IID, "fedfq@128", [0.70, 0.80], uplink=CLIENTS * RAW // 100)  # and as much down as ever
    assert row(table_1(tmp_path), "fedfq@128")[3:] == ["100×", "200×", "2.0×"]


def test_several_seeds_are_a_mean_and_its_spread(tmp_path: Path) -> None:
    for seed, accuracy in ((0, 0.70), (1, 0.74)):
        write_cell(tmp_path, IID, "fedavg", [accuracy, accuracy], seed=seed)
    assert row(table_1(tmp_path), "fedavg")[0] == "72.00 (70.00 to 74.00)"


def test_the_whole_test_set_stands_beside_the_part_of_it_that_is_evaluated_between_rounds(tmp_path: Path) -> None:
    write_cell(tmp_path, IID, "fedavg", [0.70, 0.80])
    (Cell(IID, "fedavg", 0).folder(tmp_path) / WHOLE_TEST).write_text('{"accuracy": 0.7512, "loss": 1, "examples": 9}')
    assert row(table_1(tmp_path), "fedavg")[0] == "75.00; at the end, on the whole test set: 75.12"


def test_a_column_that_is_not_in_the_paper_is_in_table_2_alone(tmp_path: Path) -> None:
    ours = replace(SHARDS, name="ours", paper_accuracy={})
    assert [part.column for part in table_1(tmp_path, [IID, ours]).parts] == [IID]
    found = table_2(tmp_path, [IID, ours]).parts
    assert [part.column for part in found] == [IID, ours] and found[1].above[0].endswith("Not in the paper.")


def test_lossless_is_at_most_half_a_point_below_fedavg_with_the_same_seed(tmp_path: Path) -> None:
    """On the mean of the seeds, and by the digits that are shown."""
    for seed, accuracy in ((0, 0.70), (1, 0.74)):
        write_cell(tmp_path, IID, "fedavg", [accuracy, accuracy], seed=seed)
    for seed, accuracy in ((0, 0.692), (1, 0.738)):
        write_cell(tmp_path, IID, "fedfq@128", [accuracy, accuracy], seed=seed)
    write_cell(tmp_path, IID, "fedfq@256", [0.69496, 0.69496])
    write_cell(tmp_path, IID, "fedfq@512", [0.6949, 0.6949])
    table = table_1(tmp_path)
    assert row(table, "fedfq@128")[1] == "−0.50† (−0.80 to −0.20)"
    assert row(table, "fedfq@256")[1] == "−0.50†"
    assert row(table, "fedfq@512")[1] == "−0.51"
    assert not any("†" in entry for entry in row(table, "fedavg"))
    assert any(note.startswith("†: lossless") for note in table.notes)


def test_differences_are_from_fedavg_with_the_same_seed(tmp_path: Path) -> None:
    for seed, accuracy in ((0, 0.70), (1, 0.80)):
        write_cell(tmp_path, IID, "fedavg", [accuracy, accuracy], seed=seed)
    for seed, accuracy in ((0, 0.69), (1, 0.80001), (2, 0.90)):
        write_cell(tmp_path, IID, "fedfq@128", [accuracy, accuracy], seed=seed)
    write_cell(tmp_path, IID, "fedfq@512", [0.69999, 0.69999])
    table = table_1(tmp_path)
    assert row(table, "fedavg")[1] == "–"
    assert row(table, "fedfq@128")[1] == "−0.50† (−1.00 to +0.00); seed 2 –"
    assert row(table, "fedfq@512")[1] == "+0.00†"


def test_a_cell_without_a_number_says_why(tmp_path: Path) -> None:
    fail(tmp_path, "fedavg", "no data here")
    write_cell(tmp_path, IID, "fedavg-2bit", [0.5])
    for make in (table_1, table_2):
        table = make(tmp_path)
        assert row(table, "fedavg")[0] == "failed: no data here"
        assert row(table, "fedfq@512")[0] == "not run yet"
        assert table.parts[1].rows[-1].entries[0].text == "left out"
    assert row(table_1(tmp_path), "fedavg-2bit")[0] == "unfinished: 1 of 2 rounds"


def test_no_reason_hides_another(tmp_path: Path) -> None:
    for seed in (0, 1):
        fail(tmp_path, "fedpaq", f"reason {seed}", seed)
    write_cell(tmp_path, IID, "fedpaq", [0.5], seed=2)
    why = "seed 0 failed: reason 0; seed 1 failed: reason 1; seed 2 unfinished: 1 of 2 rounds"
    assert row(table_2(tmp_path), "fedpaq")[0] == why


def test_a_seed_that_failed_is_not_hidden_by_one_that_did_not(tmp_path: Path) -> None:
    write_cell(tmp_path, IID, "fedavg", [0.5, 0.5])
    fail(tmp_path, "fedavg", "no data here", seed=1)
    assert row(table_1(tmp_path), "fedavg")[0] == "50.00; seed 1 failed: no data here"
    assert row(table_2(tmp_path), "fedavg")[0].endswith("seed 1 failed: no data here")


def test_the_setting_in_words(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_cell(tmp_path, IID, "fedavg", [0.5, 0.5], seed=seed)
    for method in ("fedpaq", "fedfq@128"):
        write_cell(tmp_path, IID, method, [0.5, 0.5])
    how, seeds, where = table_1(tmp_path).parts[0].how
    assert how.startswith("digits, iid, 6 clients, 2 per round, 1 local step, batches of ")
    assert how.endswith(", 2 rounds.")
    assert seeds == "Seed 0 of all but fedavg (seeds 0, 1)."
    assert where == "Run on toaster, 2 cores; fedfq 0.1.0. Their times add up to 0.0 hours."
    (papers,) = tables.table_1(PAPER[:1], outcomes(tmp_path, PAPER[:1])).parts[0].how
    assert "100 clients, 10 per round, 5 local epochs, batches of 50, learning rate 0.15 × 0.99 per round, " in papers
    (quick,) = tables.table_1(QUICK[:1], outcomes(tmp_path, QUICK[:1])).parts[0].how
    assert quick.endswith("batches of 50, learning rate 0.1 × 0.99 per round, 100 rounds, evaluated every 5.")


# --- Table 2 -----------------------------------------------------------------------------------------------


def test_table_2_counts_one_client_as_the_paper_does_and_all_of_them(tmp_path: Path) -> None:
    """Two clients per round. FedAvg's best is 0.8, so the target is 0.72: reached in its second round."""
    write_cell(tmp_path, IID, "fedavg", [0.70, 0.80], uplink=40 * 2**20)
    write_cell(tmp_path, IID, "fedfq@512", [0.73, 0.75], uplink=2**20)
    table = table_2(tmp_path)
    assert row(table, "fedavg")[:5] == ["2", "40.00", "80.00", "416.34", "1.0×"]
    assert row(table, "fedfq@512")[:5] == ["1", "0.5", "1.00", "–", "80.0×"]
    down = CLIENTS * RAW / 2**20  # in a round
    assert row(table, "fedavg")[7:] == [f"{80 + 2 * down:.2f}", "1.0×"]
    assert row(table, "fedfq@512")[7:] == [f"{1 + down:.2f}", f"{(80 + 2 * down) / (1 + down):.1f}×"]
    target, choice = table.parts[0].above
    assert target == "Target: 0.9 times fedavg's best with the same seed: 72.00%. The paper's: 75%."
    assert choice == "Ours is fedfq@512 here, chosen on validation runs with seed 7."
    assert table.parts[0].target == pytest.approx(0.72)


def test_a_target_that_was_not_reached(tmp_path: Path) -> None:
    write_cell(tmp_path, IID, "fedavg", [0.70, 0.80])
    write_cell(tmp_path, IID, "fedpaq", [0.1, 0.2])
    assert row(table_2(tmp_path), "fedpaq")[:3] == ["not reached", "–", "–"]
    write_cell(tmp_path, IID, "fedavg", [0.70, 0.80], seed=1)
    write_cell(tmp_path, IID, "fedpaq", [0.1, 0.9], seed=1)
    assert row(table_2(tmp_path), "fedpaq")[:2] == ["2; seed 0 not reached", "1.00; seed 0 –"]


def test_without_fedavg_there_is_no_target(tmp_path: Path) -> None:
    write_cell(tmp_path, IID, "fedpaq", [0.1, 0.2])
    assert row(table_2(tmp_path), "fedpaq")[0] == "no target: fedavg not run yet"
    write_cell(tmp_path, IID, "fedavg", [0.5])
    table = table_2(tmp_path)
    assert row(table, "fedpaq")[0] == "no target: fedavg unfinished"
    assert table.parts[0].above[0].startswith("Target: 0.9 times fedavg's best with the same seed: unfinished.")
    assert table.parts[0].target is None  # nor is one drawn
    shutil.rmtree(Cell(IID, "fedavg", 0).folder(tmp_path))
    fail(tmp_path, "fedavg", "no data here")
    assert row(table_2(tmp_path), "fedpaq")[0] == "no target: fedavg failed"


def test_a_profile_may_fix_the_target(tmp_path: Path) -> None:
    write_cell(tmp_path, IID, "fedpaq", [0.1, 0.2], uplink=2**20)
    table = table_2(tmp_path, [replace(IID, target=0.15)])
    assert row(table, "fedpaq")[:3] == ["2", "1.00", "2.00"]
    assert table.parts[0].above[0] == "Target: 15%. The paper's: 75%."


def test_the_papers_unreachable_target_is_noted(tmp_path: Path) -> None:
    above = {part.column.name: part.above[0] for part in table_2(tmp_path, PAPER).parts}
    beyond = "50%, which lies above every accuracy of its own Table 1, where the best is 48.12%."
    assert [name for name, said in above.items() if beyond in said] == ["lstm-natural"]


def verdict(out: Path, column: Column) -> str:
    (part,) = table_2(out, [column]).parts
    (said,) = part.below
    return said


def test_the_verdict_names_every_other_method(tmp_path: Path) -> None:
    """Who needs more bytes than our row, who needs fewer, who did not get there and who was not run."""
    column = replace(IID, rows=("fedavg", "fedpaq", "aqg", "stc", "eden@1024", "fedfq"))
    assert verdict(tmp_path, column) == "Not compared yet: fedfq@512 and fedavg are not both finished."
    write_cell(tmp_path, column, "fedavg", [0.80, 0.80], uplink=300 * 2**20)
    write_cell(tmp_path, column, "fedfq@512", [0.80, 0.80])
    both = "fedfq@512 needs 300 times fewer bytes than fedavg (aim: 250)"
    rest = "Not finished: fedpaq, aqg, stc, eden@1024."
    assert verdict(tmp_path, column) == f"{both}; no other method has reached the target. {rest}"
    write_cell(tmp_path, column, "fedpaq", [0.80, 0.80], uplink=2**21)
    write_cell(tmp_path, column, "stc", [0.10, 0.10])
    others = "and fewer than every other method that reached the target: fedpaq"
    rest = "Not reached by stc. Not finished: aqg, eden@1024."
    assert verdict(tmp_path, column) == f"{both}, {others}. {rest}"
    write_cell(tmp_path, column, "eden@1024", [0.80, 0.80], uplink=2**20)
    fail(tmp_path, "aqg", "no data here")
    rest = "Not reached by stc. Failed: aqg."
    assert verdict(tmp_path, column) == f"{both}, but not fewer than eden@1024; fewer than fedpaq. {rest}"


def test_the_verdict_says_when_the_aim_is_missed(tmp_path: Path) -> None:
    """250 times fewer bytes than FedAvg where clients have alike data, 500 times where they do not."""
    shards = replace(SHARDS, rows=("fedavg", "fedfq"))
    for column, uplink in ((IID, 200 * 2**20), (shards, 499 * 2**20)):
        write_cell(tmp_path, column, "fedavg", [0.80, 0.80], uplink=uplink)
        write_cell(tmp_path, column, column.fedfq, [0.80, 0.80])
    assert "200 times fewer bytes than fedavg (aim: 250, which is missed)" in verdict(tmp_path, IID)
    assert "499 times fewer bytes than fedavg (aim: 500, which is missed)" in verdict(tmp_path, shards)


def test_the_verdict_compares_seeds_that_both_have(tmp_path: Path) -> None:
    for seed, uplink in ((0, 2**20), (1, 2**30)):
        write_cell(tmp_path, IID, "fedavg", [0.80, 0.80], uplink=2**31, seed=seed)
        write_cell(tmp_path, IID, "fedfq@512", [0.80, 0.80], uplink=uplink, seed=seed)
    write_cell(tmp_path, IID, "fedpaq", [0.80, 0.80], uplink=2**21)
    assert "fewer than every other method that reached the target: fedpaq" in verdict(tmp_path, IID)


def test_the_verdict_when_we_are_not_there(tmp_path: Path) -> None:
    write_cell(tmp_path, IID, "fedavg", [0.80, 0.80], seed=1)
    write_cell(tmp_path, IID, "fedfq@512", [0.10, 0.20], seed=1)
    assert verdict(tmp_path, IID) == "fedfq@512 did not reach the target with seed 1."
