"""A checkpoint that is damaged, foreign or of another run is refused by name, and nothing is touched."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedfq.federation.checkpoint import LEDGERS
from fedfq.federation.config import Config
from fedfq.federation.folder import Folder
from fedfq.federation.loop import run
from fedfq.files import checksum, read_tensors, write_tensors

CONFIG = Config.make(
    task="digits", method="fedfq@32:error_feedback=true", rounds=2, clients=4, per_round=2, local_steps=1
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run(CONFIG, folder)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder: Path) -> str:
    """What is said to a user who wants to go on."""
    before = contents(folder)
    with pytest.raises(ValueError) as raised:
        run(Folder(folder).config(), folder, resume=True)
    assert contents(folder) == before and "\n" not in str(raised.value)
    return str(raised.value)


def change_json(path: Path, change: Callable[[Any], Any]) -> None:
    """By what `change` returns, or does to it."""
    found = json.loads(path.read_bytes())
    changed = change(found)
    path.write_text(json.dumps(found if changed is None else changed))


def test_a_state_that_names_another_file_does_not_cut_it_off(folder: Path) -> None:
    (folder.parent / "thesis.tex").write_text("important")
    change_json(folder / "checkpoint" / "state.json", lambda state: state["sizes"].update({"../thesis.tex": 0}))
    said = refused(folder)
    assert "state.json: " in said and "'../thesis.tex'" in said
    assert (folder.parent / "thesis.tex").read_text() == "important"


@pytest.mark.parametrize("name", [*LEDGERS, "checkpoint", "checkpoint/memory", "model.safetensors", "sample.fedfq"])
def test_what_would_be_written_or_deleted_is_no_link_to_elsewhere(folder: Path, name: str) -> None:
    elsewhere = folder.parent / "elsewhere"
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    assert refused(folder).startswith(f"{folder / name}: is neither a file nor a folder")


def test_files_of_later_checkpoints_are_no_links_to_elsewhere(folder: Path) -> None:
    victim = folder.parent / "authorized_keys"
    victim.write_text("mine")
    (folder / "checkpoint" / "model-000099.safetensors").symlink_to(victim)
    assert "model-000099.safetensors: is neither a file nor a folder" in refused(folder)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("with_state", [True, False])
def test_nothing_of_others_in_the_checkpoint_is_deleted(folder: Path, with_state: bool) -> None:
    (folder / "checkpoint" / "thesis.txt").write_text("mine")
    if not with_state:
        for name in ("checkpoint/state.json", "model.safetensors", *LEDGERS):
            (folder / name).unlink()
    assert "thesis.txt: is not of this run" in refused(folder)


def test_a_state_that_is_a_pipe_is_not_waited_for(folder: Path) -> None:
    (folder / "checkpoint" / "state.json").unlink()
    os.mkfifo(folder / "checkpoint" / "state.json")
    assert "state.json: is neither a file nor a folder" in refused(folder)


@pytest.mark.parametrize("damage", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:-1]])
@pytest.mark.parametrize(
    "pattern",
    [
        *("checkpoint/model-*", "checkpoint/server-*", "checkpoint/downlink-*", "checkpoint/memory/*"),
        *("model.safetensors", *LEDGERS),
    ],
)
def test_a_damaged_file_is_named(folder: Path, pattern: str, damage: Callable[[bytes], bytes]) -> None:
    path = sorted(folder.glob(pattern))[0]
    path.write_bytes(damage(path.read_bytes()))
    assert refused(folder).startswith(f"{path}: ")


def test_a_ledger_may_go_on_behind_the_checkpoint_but_is_damaged_where_a_byte_before_it_changed(folder: Path) -> None:
    ledger = folder / "rounds.jsonl"
    whole = ledger.read_bytes()
    ledger.write_bytes(whole + b'{"round": 3')
    run(CONFIG, folder, resume=True)
    assert ledger.read_bytes() == whole
    ledger.write_bytes(whole.replace(b'"uplink_bytes": ', b'"uplink_bytes":1', 1))
    assert "rounds.jsonl: is damaged" in refused(folder)


@pytest.mark.parametrize("pattern", ["checkpoint/model-*", "checkpoint/downlink-*", "checkpoint/memory/*", *LEDGERS])
def test_a_missing_file_is_named(folder: Path, pattern: str) -> None:
    path = sorted(folder.glob(pattern))[0]
    path.unlink()
    assert refused(folder) == f"{path}: is missing, and belongs to the checkpoint"


@pytest.mark.parametrize(("key", "value"), [("seed", 1), ("rounds", 5), ("lr", 0.123), ("options", {"ratio": 64})])
def test_another_configuration_in_run_json_is_refused(folder: Path, key: str, value: Any) -> None:
    change_json(folder / "run.json", lambda described: described["config"].update({key: value}))
    assert "run.json: its configuration is not the one that the checkpoint is of" in refused(folder)


def test_numbers_may_be_written_as_whole_ones_or_not(folder: Path) -> None:
    """As by a tool that reads and writes JSON."""
    change_json(folder / "run.json", lambda described: described["config"]["options"].update(ratio=32.0))
    run(CONFIG, folder, resume=True)


def test_a_model_of_another_task_is_refused(folder: Path) -> None:
    path = next(folder.glob("checkpoint/model-*"))
    write_tensors(path, dict(list(read_tensors(path).items())[1:]))
    (folder / "model.safetensors").unlink()

    forged = {"model": checksum(path)}
    change_json(folder / "checkpoint" / "state.json", lambda state: state["checksums"].update(forged))
    assert refused(folder) == f"{folder / 'checkpoint'}: not a checkpoint of this run (its model has other tensors)"


BROKEN: list[Callable[[Any], Any]] = [
    lambda found: [],
    lambda found: 3,
    lambda found: {"round": 2},
    lambda found: found | {"round": "2"},
    lambda found: found | {"round": True},
    lambda found: found | {"round": -1},
    lambda found: found | {"sizes": None},
    lambda found: found | {"sizes": {"rounds.jsonl": 1}},
    lambda found: found | {"checksums": []},
    lambda found: found | {"memories": [1]},
    lambda found: found | {"memories": {"../x": [1, 1]}},
    lambda found: found | {"memories": {"1": [1]}},
    lambda found: found | {"held": 3},
    lambda found: found | {"held": {"1": -1}},
    lambda found: found | {"held": {"x": 1}},
    lambda found: {key: found[key] for key in found if key != "held"},
    lambda found: found | {"config": ["x"]},
]


@pytest.mark.parametrize("change", BROKEN)
def test_a_broken_state_is_named(folder: Path, change: Callable[[Any], Any]) -> None:
    change_json(folder / "checkpoint" / "state.json", change)
    assert refused(folder).startswith(f"{folder / 'checkpoint' / 'state.json'}: not the state of a run (")


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
@pytest.mark.parametrize("name", ["run.json", "checkpoint/state.json"])
def test_what_is_no_json_is_named(folder: Path, name: str, text: bytes) -> None:
    (folder / name).write_bytes(text)
    assert refused(folder).startswith(f"{folder / name}: not the ")


@pytest.mark.parametrize(
    "change",
    [
        lambda found: [1],
        lambda found: {"fedfq": "0.1.0"},
        lambda found: found | {"config": None},
        lambda found: found | {"config": {"task": "digits"}},
        lambda found: found | {"config": found["config"] | {"task": "digit"}},
        lambda found: found | {"config": found["config"] | {"task": ["digits"]}},
        lambda found: found | {"config": found["config"] | {"method": {}}},
        lambda found: found | {"config": found["config"] | {"options": 3}},
        lambda found: found | {"config": found["config"] | {"split": 3}},
        lambda found: found | {"config": found["config"] | {"rounds": "2"}},
    ],
)
def test_a_broken_description_is_named(folder: Path, change: Callable[[Any], Any]) -> None:
    change_json(folder / "run.json", change)
    assert refused(folder).startswith(f"{folder / 'run.json'}: not the description of a run (")


def test_what_a_kill_left_half_written_is_cleared_away(folder: Path) -> None:
    part = folder / "checkpoint" / "memory" / ".fedfq-0123456789abcdef.part"
    part.write_bytes(b"half")
    run(CONFIG, folder, resume=True)
    assert not part.exists()
