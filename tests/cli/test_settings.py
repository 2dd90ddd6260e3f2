"""Settings of a run from a file and from the command line: what the result depends on, and the rest."""

from pathlib import Path

import pytest

from fedfq.cli.settings import Execution, merge_settings

NOTHING = dict.fromkeys(["task", "method", "ratio", "rounds", "engine", "workers", "out", "data_dir", "config"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.toml"


def test_what_is_not_given_is_left_to_the_defaults() -> None:
    assert merge_settings(NOTHING) == ({}, Execution())


def test_the_result_is_told_from_the_rest_and_the_command_line_wins(file: Path) -> None:
    file.write_text('task = "digits"\nrounds = 5\nratio = 32\nworkers = 3\nout = "there"')
    settings, execution = merge_settings(NOTHING | {"config": file, "rounds": 7, "workers": 1})
    assert settings == {"task": "digits", "rounds": 7, "options": {"ratio": 32}}
    assert execution == Execution(workers=1, out=Path("there"))


@pytest.mark.parametrize("name", ["out", "data-dir"])
@pytest.mark.parametrize("value", ["3", "[1]", '"a\\u0000b"'])
def test_a_path_in_a_file_is_one(file: Path, name: str, value: str) -> None:
    file.write_text(f"{name} = {value}")
    with pytest.raises(ValueError, match=f"mine.toml: {name.replace('-', '_')} must be a path, got"):
        merge_settings(NOTHING | {"config": file})


@pytest.mark.parametrize("name", ["resume", "overwrite", "config"])
def test_some_options_are_only_for_the_command_line(file: Path, name: str) -> None:
    file.write_text(f"{name} = true")
    with pytest.raises(ValueError, match=f"mine.toml: unknown key '{name}'"):
        merge_settings(NOTHING | {"config": file, "resume": False, "overwrite": False})
