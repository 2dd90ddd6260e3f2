"""What is in the tables."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedfq.reproduce import cells as module
from fedfq.reproduce.cells import (
    DOWN,
    FEDFQ,
    GB,
    PAPER,
    PROFILES,
    QUICK,
    TABLE_1,
    TABLE_2,
    TABLES,
    TARGETS,
    Cell,
    cells,
)
from tests.reproduce.small import COLUMNS, IID, METHODS, SHARDS

SECONDS = {  # a round, on two cores
    **{"simplecnn-iid": 3.5, "simplecnn-one-class": 1.1, "simplecnn-shards2": 3.5},
    **{"lstm-natural": 3.7, "vgg11-iid": 32.0, "vgg11-one-class": 6.8},
}


IN_ORDER = ("fedavg", "fedavg-2bit", "fedfq@128", "fedpaq", "fedfq@512")  # Table 1's rows, then what Table 2 adds


def by_name(columns):
    return {column.name: column for column in columns}


@pytest.mark.parametrize("profile", PROFILES)
def test_every_cell_can_be_run_and_is_named_as_its_configuration_is(profile: str) -> None:
    for cell in cells(PROFILES[profile], TABLES, [0]):
        assert cell.config.label == cell.method.partition(DOWN)[0]
        assert (cell.config.down_ratio != 1) == (DOWN in cell.method)
        assert (cell.config.clients, cell.config.per_round) == (100, 10)


def test_the_quick_profile_takes_a_night() -> None:
    seconds = sum(cell.config.rounds * SECONDS[cell.column.name] for cell in cells(QUICK, TABLES, [0]))
    assert seconds <= 12 * 3600
    assert f"{seconds:,.0f} s = {seconds / 3600:.1f} hours" in str(module.__doc__)


def test_the_paper_profile_is_the_papers_setting() -> None:
    for column in PAPER:
        config = Cell(column, "fedavg", 0).config
        assert (config.rounds, config.local_epochs, config.local_steps) == (1000, 5, None)
        assert column.target == column.paper_target


def test_the_targets_profile_trains_simplecnn_as_the_paper_does_to_its_target() -> None:
    iid, one_class, lstm = TARGETS
    config = Cell(iid, "fedavg", 0).config
    assert (config.local_epochs, config.batch_size, config.lr, config.lr_decay) == (5, 50, 0.15, 0.99)
    assert iid.target == iid.paper_target == 0.75
    assert one_class.target is None and lstm.target is None  # as far as FedAvg gets
    assert all(Cell(column, "fedavg", 0).config.precision == "bfloat16" for column in TARGETS)


def test_the_order_is_that_of_value_and_a_second_seed_comes_last() -> None:
    names = list(dict.fromkeys(cell.column.name for cell in cells(QUICK, ["table1"], [0])))
    assert names[:3] == ["simplecnn-iid", "lstm-natural", "simplecnn-one-class"]
    assert names[3:] == ["simplecnn-shards2", "vgg11-iid", "vgg11-one-class"]
    seeds = [cell.seed for cell in cells(QUICK, ["table1"], [0, 1])]
    assert seeds == sorted(seeds) and set(seeds) == {0, 1}


def test_the_papers_numbers() -> None:
    """A few of each table, as printed."""
    for columns in (QUICK, PAPER):
        found = by_name(columns)
        assert found["simplecnn-iid"].paper_accuracy["fedavg"] == 77.78
        assert found["simplecnn-one-class"].paper_accuracy["fedfq-cgsa:claimed_ratio=128"] == 45.30
        assert found["vgg11-iid"].paper_mb["fedpaq"] == 10.51 * GB
        assert found["vgg11-one-class"].paper_mb["fedfq-cgsa:claimed_ratio=32"] == 1.61 * GB
        assert found["lstm-natural"].paper_mb["acsgd-topk"] == 2.60
        targets = [found[name].paper_target for name in ("simplecnn-iid", "simplecnn-one-class", "vgg11-iid")]
        assert targets == [0.75, 0.45, 0.75]


def test_the_papers_lstm_never_reaches_the_papers_target() -> None:
    lstm = by_name(PAPER)["lstm-natural"]
    assert max(lstm.paper_accuracy.values()) < 100 * lstm.paper_target


def test_the_papers_megabytes_are_those_of_one_client() -> None:
    """FedAvg's 102 rounds of SimpleCNN's 1,068,298 parameters, to within the digits of its table."""
    assert by_name(PAPER)["simplecnn-iid"].paper_mb["fedavg"] == pytest.approx(102 * 4 * 1_068_298 / 2**20, rel=2e-3)


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (["digits-iid"], [("digits-iid", method) for method in IN_ORDER]),
        (["fedavg"], [("digits-iid", "fedavg"), ("digits-shards", "fedavg")]),
        (["digits-iid", "fedfq@*"], [("digits-iid", "fedfq@128"), ("digits-iid", "fedfq@512")]),
        (["fedfq"], [("digits-iid", "fedfq@512")]),
        (["*-shards"], [("digits-shards", "fedavg"), ("digits-shards", "fedavg-2bit")]),
    ],
)
def test_only_selects_columns_and_methods(only: list[str], expected: list[tuple[str, str]]) -> None:
    assert [(cell.column.name, cell.method) for cell in cells(COLUMNS, TABLES, [0], only)] == expected


def test_our_row_of_table_2_is_what_its_column_chose() -> None:
    """Its ratio is part of the method's name, of its folder and of what `--only` selects."""
    shards = replace(SHARDS, rows=("fedavg", FEDFQ))
    assert FEDFQ in TABLE_2 and FEDFQ not in TABLE_1
    assert shards.methods == ("fedavg", "fedfq@1024")
    found = cells([IID, shards], ["table2"], [0], ["fedfq@*"])
    assert [(cell.column.name, cell.method) for cell in found] == [
        ("digits-iid", "fedfq@512"),
        ("digits-shards", "fedfq@1024"),
    ]
    assert found[1].folder(Path("out")) == Path("out/digits-shards/fedfq@1024-0")
    assert [cell.column.name for cell in cells([IID, shards], ["table2"], [0], ["fedfq@1024"])] == ["digits-shards"]


def test_what_both_tables_ask_for_is_one_cell() -> None:
    iid = replace(IID, rows=(*METHODS, FEDFQ))
    assert [cell.method for cell in cells([iid], TABLES, [0], ["fedfq@512"])] == ["fedfq@512"]


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="'digits-idd' matches nothing \\(did you mean 'digits-iid'\\?\\)"):
        cells(COLUMNS, TABLES, [0], ["digits-idd"])
    with pytest.raises(ValueError, match="did you mean 'fedpaq'"):
        cells(COLUMNS, TABLES, [0], ["digits-iid", "fedpak"])


def test_a_cell_sends_all_bits_down_unless_its_name_says_otherwise() -> None:
    """Then it is as the method has it: our broadcast, or what the method's own paper does."""
    ratios = {"fedavg": 1, "fedfq@128": 1, "fedfq@128+down": "auto", "stc": 1, "stc+down": "own", "fedfq+down@64": 64}
    assert {name: Cell(IID, name, 0).config.down_ratio for name in ratios} == ratios
    assert Cell(IID, "fedfq@128+down", 0).config.label == "fedfq@128"
    assert Cell(IID, "fedfq@128+down", 0).folder(Path("out")) == Path("out/digits-iid/fedfq@128+down-0")


def test_a_label_does_not_depend_on_the_order_in_which_options_were_written() -> None:
    config = Cell(IID, "fedfq@128:error_feedback=true", 0).config
    backwards = replace(config, options=dict(reversed(config.options.items())))
    assert backwards.label == config.label == "fedfq@128:error_feedback=true"


def test_a_cell_has_a_folder_of_its_own() -> None:
    assert Cell(IID, "fedfq-cgsa:claimed_ratio=32", 1).folder(Path("out")) == Path(
        "out/digits-iid/fedfq-cgsa-claimed_ratio=32-1"
    )
