"""A run's folder is one process's, and says which code ran where."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fedfq
from fedfq.federation.folder import Folder, HeldError, _commit, environment

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
