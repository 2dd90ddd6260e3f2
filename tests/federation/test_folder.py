"""A run's folder is one process's, and says which code ran where."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedfq
from fedfq.federation.config import Config
from fedfq.federation.folder import Folder, HeldError, _commit, environment

MODEL = {
    "weight": np.zeros((2, 3), np.float32),
    "half": np.zeros(3, np.float16),
    "steps": np.array(0, np.int64),
}

HOLD = """
import sys, time
from pathlib import Path
from fedfq.federation.folder import Folder
with Folder(Path(sys.argv[1])).held():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_held_until_its_process_ends_however_it_does(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", HOLD, out], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(HeldError, match="run: another process is at work there"), Folder(out).held():
            pass
        assert out.is_dir()
        process.send_signal(signal.SIGKILL)
    with Folder(out).held():
        assert list(out.iterdir()) == []  # the lock is not a file


def test_only_what_it_made_and_left_empty_is_taken_away(tmp_path: Path) -> None:
    with Folder(tmp_path / "runs" / "new").held():
        pass
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs").mkdir()
    with Folder(tmp_path / "runs").held():
        pass
    assert (tmp_path / "runs").exists()
    with Folder(tmp_path / "runs" / "written").held():
        (tmp_path / "runs" / "written" / "run.json").touch()
    assert (tmp_path / "runs" / "written" / "run.json").exists()


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ValueError, match="run: is not a folder"), Folder(tmp_path / "run").held():
        pass


def test_the_surroundings_name_versions_and_machine() -> None:
    found = environment()
    assert found["fedfq"] == fedfq.__version__ and f"{os.cpu_count()} cores" in found["machine"]


def test_a_run_that_has_begun_says_what_an_update_takes_as_float32(tmp_path: Path) -> None:
    """So ratios need neither the model nor its task."""
    folder = Folder(tmp_path / "run")
    folder.begin(Config.make(), MODEL, engine="a new one")
    assert folder.raw_bytes == 4 * 6 + 4 * 3 + 8
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert described["raw_bytes"] == folder.raw_bytes and described["engine"] == "a new one"


def test_the_commit_is_that_of_the_source_and_of_no_repository_around_it(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    source = tmp_path / "src"
    source.mkdir()
    (source / "__init__.py").write_text("")
    git("init")
    git("commit", "--allow-empty", "-m", "the user's own project, into which fedfq was installed")
    assert _commit(source) == {}
    git("add", ".")
    git("commit", "-m", "fedfq")
    clean = _commit(source)["commit"]
    assert len(clean) == 12
    (tmp_path / "results").write_text("not source")
    assert _commit(source)["commit"] == clean
    (source / "__init__.py").write_text("changed")
    assert _commit(source)["commit"] == f"{clean}+"


# --- Overwriting -------------------------------------------------------------------------------------------


def a_run(folder: Path) -> Folder:
    """All that a run that was killed while it wrote a checkpoint may have left, and its page."""
    for name in (
        *("rounds.jsonl", "timings.jsonl", "model.safetensors", "sample.fedfq", "report.html"),
        *("checkpoint/state.json", "checkpoint/model-000010.safetensors", "checkpoint/server-000010.safetensors"),
        "checkpoint/downlink-000010.safetensors",
        *("checkpoint/memory/000003-000009.safetensors", "checkpoint/memory/.fedfq-0123456789abcdef.part"),
        ".fedfq-fedcba9876543210.part",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    run = Folder(folder)
    run.begin(Config.make(), MODEL)
    return run


def test_a_run_is_deleted_whole(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    run.refuse_if_taken(overwrite=True)
    run.clear()
    assert list((tmp_path / "run").iterdir()) == []
    run.refuse_if_taken()
    run.clear()  # nothing is there


@pytest.mark.parametrize("stranger", ["notes.txt", "checkpoint/thesis.tex", "figures/curve.svg", "model-2.safetensors"])
def test_what_holds_more_than_a_run_is_not_overwritten(tmp_path: Path, stranger: str) -> None:
    run = a_run(tmp_path)
    (tmp_path / stranger).parent.mkdir(exist_ok=True)
    (tmp_path / stranger).write_text("important")
    with pytest.raises(ValueError, match=r"holds more than a run \(.*\), so nothing is overwritten"):
        run.refuse_if_taken(overwrite=True)


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "state.json").write_text("important")
    Folder(tmp_path / "run").begin(Config.make(), MODEL)
    (tmp_path / "run" / "checkpoint").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="holds more than a run"):
        Folder(tmp_path / "run").refuse_if_taken(overwrite=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"config": 1}', "is not of a run of fedfq"), ("[]", "is not of a run of fedfq"), ("text", "run.json: ")],
)
def test_another_programs_run_is_not_overwritten(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        Folder(tmp_path).refuse_if_taken(overwrite=True)
