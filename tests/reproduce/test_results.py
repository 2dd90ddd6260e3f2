"""A reproduction's folder says what it is and what there is in it."""

import json
from pathlib import Path

import pytest

from fedfq.reproduce.cells import FEDAVG
from fedfq.reproduce.results import MARK, claim, is_reproduction, outcome, outcomes, profile_of
from tests.reproduce.small import COLUMNS, IID, write_cell


def test_a_folder_is_of_one_profile(tmp_path: Path) -> None:
    out = tmp_path / "new"
    assert not is_reproduction(out)
    claim(out, "quick")
    claim(out, "quick")
    assert is_reproduction(out) and profile_of(out) == "quick"
    with pytest.raises(ValueError, match="holds the profile quick, not paper; give another folder with --out"):
        claim(out, "paper")
    assert json.loads((out / MARK).read_text()) == {"profile": "quick"}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"profile": "slow"}', '{"profile": []}'])
def test_a_damaged_mark_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / MARK).write_text(content)
    with pytest.raises(ValueError, match=MARK):
        profile_of(tmp_path)


def test_seeds_of_one_method_are_not_those_of_another(tmp_path: Path) -> None:
    for seed in (0, 11):
        write_cell(tmp_path, IID, "fedavg-2bit", [0.1, 0.2], seed=seed)
    assert outcome(tmp_path, IID, "fedavg-2bit").finished.keys() == {0, 11}
    assert outcome(tmp_path, IID, "fedavg").finished == {}


def test_a_finished_seed_comes_first(tmp_path: Path) -> None:
    assert outcome(tmp_path, IID, FEDAVG).first is None
    write_cell(tmp_path, IID, FEDAVG, [0.1], seed=0)  # of two rounds
    for seed in (3, 2):
        write_cell(tmp_path, IID, FEDAVG, [0.1, 0.2], seed=seed)
    first = outcomes(tmp_path, COLUMNS)[IID.name, FEDAVG].first
    assert first is not None and first.config.seed == 2
