"""`fedfq run`, `compare` and `demo` as their users meet them."""

import errno
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from click.testing import Result

from fedfq.cli import federation
from fedfq.codec.ratio import DEFAULT_RATIO
from fedfq.federation.config import Config
from fedfq.federation.folder import Folder
from fedfq.federation.loop import Federation
from tests.cli.runner import ok, refused, run
from tests.federation.test_loop import heeding
from tests.network.test_links import heed_signals

SMALL = ("--rounds", "2", "--clients", "6", "--per-round", "2", "--local-steps", "1", "--workers", "1")
KILLS = 1  # python -m tests.cli.test_federation 20 does it twenty times


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- run ---------------------------------------------------------------------------------------------------


def test_a_run_has_a_folder_of_its_own(working_directory: Path) -> None:
    shown = ok("run", "--method", "fedfq", "--ratio", "32", *SMALL)
    folder = working_directory / "runs" / "digits-fedfq@32-0"
    assert str(folder.relative_to(working_directory)) in shown
    described = json.loads((folder / "run.json").read_text())
    assert described["config"]["options"]["ratio"] == 32.0 and described["torch"]
    assert len(Folder(folder).rounds()) == 2 and (folder / "model.safetensors").is_file()


def test_options_may_come_from_a_file_and_the_command_line_wins(working_directory: Path) -> None:
    Path("mine.toml").write_text(
        'task = "digits"\nmethod = "fedfq"\nratio = 32\ngain = true\nrounds = 5\nclients = 6\n'
        'per-round = 2\nlocal-steps = 1\nsplit = "shards:2"\nworkers = 1\nout = "there"\n'
    )
    ok("run", "--config", "mine.toml", "--rounds", "2")
    config = Folder(Path("there")).config()
    assert config == Config.make(
        *(), method="fedfq@32:gain=true", rounds=2, clients=6, per_round=2, local_steps=1, split="shards:2"
    )


@pytest.mark.parametrize(
    ("file", "arguments", "label"),
    [
        ('method = "fedfq@32:gain=true"', ("--ratio", "64"), "fedfq@64:gain=true"),
        ('method = "fedfq"\nratio = 32\ngain = true', ("--method", "fedfq@64"), "fedfq@64:gain=true"),
        ('method = "stc:sparsity=0.1"', ("--method", "fedfq@64"), "fedfq@64"),
        ("ratio = 32", (), "fedfq@32"),
    ],
)
def test_the_command_line_wins_over_the_methods_options_in_a_file(
    file: str, arguments: tuple[str, ...], label: str
) -> None:
    Path("mine.toml").write_text(file)
    ok("run", "--config", "mine.toml", *arguments, *SMALL, "--rounds", "1", "--out", "run")
    assert Folder(Path("run")).config().label == label


def test_the_way_down_is_as_the_method_has_it_unless_it_is_said_otherwise() -> None:
    """A number may come as text, as on the command line, or not, as in a file."""
    Path("mine.toml").write_text('method = "fedavg"\ndown-ratio = 16\ninitial-ratio = 4')
    for arguments, expected in (
        (("--method", "fedavg"), (1, None)),
        (("--method", "fedfq@32"), ("auto", None)),
        (("--method", "fedavg", "--down-ratio", "auto"), ("auto", None)),
        (("--method", "fedfq@32", "--down-ratio", "16", "--initial-ratio", "4"), (16, 4)),
        (("--config", "mine.toml"), (16, 4)),
    ):
        ok("run", *arguments, *SMALL, "--rounds", "1", "--out", "run", "--overwrite")
        config = Folder(Path("run")).config()
        assert (config.down_ratio, config.initial_ratio) == expected


# --- --overwrite -------------------------------------------------------------------------------------------


def test_overwrite_replaces_a_run() -> None:
    ok("run", "--method", "fedfq@32", *SMALL, "--out", "run")
    ok("report", "run")
    ok("run", "--method", "fedavg", *SMALL, "--out", "run", "--overwrite")
    ok("run", "--method", "fedavg", *SMALL, "--out", "new", "--overwrite")  # where there is none, it is as without
    for folder in ("run", "new"):
        assert Folder(Path(folder)).config().method == "fedavg" and len(Folder(Path(folder)).rounds()) == 2
    assert {path.name for path in Path("run").rglob("*")} == {path.name for path in Path("new").rglob("*")}
    assert Path("run/rounds.jsonl").read_bytes() == Path("new/rounds.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data-dir", "empty", "--task", "cifar10-simplecnn"), "fedfq data fetch"),
        (("--ratio", "0.5"), "ratio must be at least 1"),
        (("--device", "tpu9"), "device"),
    ],
)
def test_what_cannot_begin_overwrites_nothing(arguments: tuple[str, ...], message: str) -> None:
    ok("run", "--method", "fedfq@32", *SMALL, "--out", "run")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert message in refused("run", *SMALL, "--out", "run", "--overwrite", *arguments)
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def test_resume_needs_no_other_option_than_the_folder() -> None:
    ok("run", "--method", "fedavg", *SMALL, "--out", "run")
    before = Path("run/rounds.jsonl").read_bytes()
    ok("run", "--out", "run", "--resume", "--workers", "1")
    assert Path("run/rounds.jsonl").read_bytes() == before
    assert "another configuration" in refused("run", "--out", "run", "--resume", "--rounds", "3")
    taken = "already holds a run (--resume continues it, --overwrite replaces it)"
    assert taken in refused("run", "--method", "fedavg", *SMALL, "--out", "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "digit"), "unknown task 'digit' (did you mean 'digits'?)"),
        (("--method", "fedfg"), "unknown method 'fedfg' (did you mean 'fedfq'?)"),
        (("--method", "fedavg", "--ratio", "32"), "method fedavg has no option 'ratio'"),
        (("--method", "topk:error_feedback=no"), "method topk: error_feedback must be true or false, got 'no'"),
        (("--method", "fedpaq:levels=7.5"), "method fedpaq: levels must be a whole number, got 7.5"),
        (("--basis", "share"), "basis must be 'shared' or 'adaptive' or 'identity', got 'share'"),
        (("--split", "shards:x", "--task", "cifar10-simplecnn"), "split 'shards:x'"),
        (("--config", "number.toml"), "method must be a name, got 3"),
        (("--split", "idd"), "did you mean 'iid'?"),
        (("--per-round", "30"), "per_round = 30 is more than there are clients (20)"),
        (("--ratio", "0.5"), "ratio must be at least 1 and finite, got 0.5"),
        (("--method", "fedfq@64", "--ratio", "128"), "ratio is given twice: in 'fedfq@64', and as 128.0 beside it"),
        (("--method", "fedfq:gain=true", "--no-gain"), "gain is given twice: in 'fedfq:gain=true', and as none"),
        (
            (
                "--method",
                "fedfq@64:ratio=64",
            ),
            "'fedfq@64:ratio=64': ratio is given twice",
        ),
        (("--config", "twice.toml"), "ratio is given twice"),
        (("--config", "dashes.toml"), "dashes.toml: per_round is given twice"),
        (("--resume", "--overwrite", "--out", "thesis"), "give --resume or --overwrite, not both"),
        (("--overwrite", "--out", "thesis"), "thesis: is not empty and holds no run, so nothing is overwritten"),
        (("--ratio", "1e9", "--rounds", "1"), "a budget of 0 bytes is too small"),
        (("--lr", "-1"), "lr must be a positive number"),
        (("--lr", "1e300"), "lr must be a positive number, at most 3e+38"),
        (("--seed", str(2**64)), "seed must be at most 9223372036854775807"),
        (("--rounds", "0"), "rounds must be an integer of at least 1"),
        (("--workers", "0"), "--workers must be at least 1"),
        (("--config", "workers.toml"), "--workers must be at least 1, got '2'"),
        (("--device", "tpu9"), "device 'tpu9' cannot be used here"),
        (("--engine", "flower", "--device", "cuda"), "--device goes with the inline engine"),
        (("--weighting", "size"), "weighting must be 'samples' or 'mean'"),
        (("--precision", "float8"), "precision must be 'float32' or 'bfloat16'"),
        (("--down-ratio", "fast"), "down_ratio must be a number"),
        (("--down-ratio", "0.5"), "down_ratio must be at least 1 and finite, got 0.5"),
        (("--down-ratio", "1e9"), "a budget of "),
        (("--down-ratio", "auto", "--initial-ratio", "0"), "initial_ratio must be at least 1 and finite, got 0"),
        (("--down-ratio", "1", "--initial-ratio", "4"), "initial_ratio "),
        (("--config", "down.toml"), "down_ratio must be a number, got True"),
        (("--local-steps", "2", "--local-epochs", "2"), "give local_steps or local_epochs, not both"),
        (("--resume",), "--resume needs --out"),
        (("--resume", "--out", "nowhere"), "nowhere: no run there to resume"),
        (("--config", "missing.toml"), "missing.toml: No such file"),
        (("--config", "typo.toml"), "typo.toml: unknown key 'ratoi' (did you mean 'ratio'?)"),
        (("--config", "broken.toml"), "broken.toml: "),
        (("--task", "cifar10-simplecnn", "--data-dir", "empty"), "fedfq data fetch cifar10"),
        (("--out", "thesis"), "thesis: is not empty"),
        (("--out", "typo.toml"), "typo.toml: is not a folder"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    working_directory: Path, arguments: tuple[str, ...], message: str
) -> None:
    Path("typo.toml").write_text("ratoi = 3")
    Path("workers.toml").write_text('workers = "2"')
    Path("number.toml").write_text("method = 3")
    Path("down.toml").write_text("down_ratio = true")
    Path("broken.toml").write_text("ratio = = 3")
    Path("twice.toml").write_text('method = "fedfq@64"\nratio = 128')
    Path("dashes.toml").write_text("per-round = 2\nper_round = 3")
    Path("thesis").mkdir()
    Path("thesis/thesis.tex").write_text("important")
    before = sorted(working_directory.rglob("*"))
    own = [] if "--workers" in arguments or "workers.toml" in arguments else ["--workers", "1"]
    assert message in refused("run", *own, *arguments)
    assert sorted(working_directory.rglob("*")) == before


@pytest.mark.parametrize("written", [2, 5, 8])
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """After so many files have come onto the disk, none does."""
    options = ("--method", "fedfq@32:error_feedback=true", *SMALL, "--checkpoint-every", "1")
    ok("run", *options, "--out", "whole")
    fsync, count = os.fsync, iter(range(written))

    def full(file: int) -> None:
        if next(count, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert "No space left on device" in refused("run", *options, "--out", "run")
    assert not list(Path("run").rglob("*.part"))
    ok("run", "--out", "run", "--resume", "--workers", "1")
    for name in ("rounds.jsonl", "model.safetensors"):
        assert Path("run", name).read_bytes() == Path("whole", name).read_bytes()


def test_a_run_in_which_no_update_is_accepted_says_so_and_fails() -> None:
    result = run("run", "--lr", "1e9", *SMALL, "--local-steps", "5", "--out", "run")
    assert result.exit_code == 1 and "run" in result.stdout
    assert "fedfq: round 1: the update of client" in result.stderr and "not finite" in result.stderr
    assert "no update was accepted in 2 of 2 rounds, among them all of the last 1: the run has failed" in result.stderr
    assert (Path("run") / "model.safetensors").is_file()


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, kind: int, code: int) -> None:
    options = ("--method", "fedfq@32", *SMALL, "--rounds", "4")
    ok("run", *options, "--out", "whole")
    result = interrupted(monkeypatch, kind, "run", *options, "--out", "the run")
    assert result.exit_code == code
    said = result.stderr.splitlines()[-1]
    words = "fedfq run --out 'the run' --resume --workers 1"
    assert said == f"fedfq: interrupted; 2 of 4 rounds are done; to go on: {words}"
    ok(*shlex.split(words)[1:])
    for name in ("rounds.jsonl", "model.safetensors"):
        assert Path("the run", name).read_bytes() == Path("whole", name).read_bytes()


def interrupted(monkeypatch: pytest.MonkeyPatch, kind: int, *arguments: str) -> Result:
    """A command that gets a signal in the third round that it trains."""
    step, rounds = Federation.step, iter(range(2))

    def stop(federation: Federation) -> Any:
        if next(rounds, None) is None:
            signal.raise_signal(kind)
        return step(federation)

    with monkeypatch.context() as patched, heeding(kind):
        patched.setattr(Federation, "step", stop)
        return run(*arguments)


@pytest.mark.slow
def test_ctrl_c_while_the_workers_start_is_one_line() -> None:
    """A terminal sends it to all of them."""
    options = ("--method", "fedfq@32", "--workers", "2", "--out", "run")
    command = [sys.executable, "-c", "from fedfq.cli import main; main()", "run", *options]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed_signals
    )
    while not Path("run/run.json").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == ("fedfq: interrupted; 0 of 30 rounds are done; to go on: fedfq run --out run --resume --workers 2\n")


# --- help --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [federation.run, federation.compare])
def test_help_shows_every_default(command: Callable[..., None]) -> None:
    """In words where it depends on the task or the method, and the true one where it does not."""
    hints = get_type_hints(command, include_extras=True)
    shown = {
        name: hints[name].__metadata__[0].show_default
        for name, parameter in signature(command).parameters.items()
        if parameter.default is None
    }
    assert all(isinstance(text, str) for text in shown.values()), shown
    default = Config.make()
    for name in {"task", "method", "weighting", "seed", "eval_every", "checkpoint_every"} & shown.keys():
        assert shown[name] == str(getattr(default, name))
    said = default.options | {"ratio": f"{DEFAULT_RATIO}, but 4 KB at least"}
    for name in {"ratio", "basis"} & shown.keys():
        assert shown[name] == f"the method's; fedfq: {said[name]}"
    printed = " ".join(ok(command.__name__, "--help").replace("│", " ").split())
    assert printed.count("[default: ") == len(shown)


# --- compare and demo --------------------------------------------------------------------------------------


def test_compare_runs_every_method_on_the_same_clients(working_directory: Path) -> None:
    shown = ok("compare", "--methods", "fedavg,fedfq@32,fedfq@64:gain=true", *SMALL, "--out", "all", "--target", "0.01")
    for name in ("fedavg", "fedfq@32", "fedfq@64:gain=true"):
        assert name in shown
    heading = re.split(r"\s{2,}", shown.splitlines()[0])
    assert heading == [
        *("method", "accuracy", "up MB", "ratio", "claimed", "down MB", "total MB", "ratio"),
        *("up to 1%", "total to 1%"),
    ]
    runs = [Folder(Path("all") / name) for name in ("fedavg", "fedfq@32", "fedfq@64-gain=true")]
    clients = [[line["clients"] for line in run.rounds()] for run in runs]
    assert clients[0] == clients[1] == clients[2]
    assert "<html" in (working_directory / "all" / "report.html").read_text()
    assert "already holds a run" in refused("compare", "--methods", "fedavg", *SMALL, "--out", "all")
    again = ok("compare", "--methods", "fedavg,fedfq@32", *SMALL, "--out", "all", "--resume")
    assert "fedfq@32" in again
    other = ("compare", "--methods", "fedavg,fedfq@32", *SMALL, "--out", "all", "--seed", "1")
    assert "another configuration" in refused(*other, "--resume")
    Path("all/fedfq@32/notes.txt").write_text("mine")
    assert "holds more than a run (notes.txt)" in refused(*other, "--overwrite")
    assert Folder(Path("all/fedavg")).config().seed == 0  # none is touched if one of them may not be
    Path("all/fedfq@32/notes.txt").unlink()
    ok(*other, "--overwrite")
    assert [Folder(Path("all") / name).config().seed for name in ("fedavg", "fedfq@32")] == [1, 1]
    assert runs[2].config().seed == 0


def test_a_comparison_with_a_method_that_came_to_nothing_fails_once_all_have_run() -> None:
    result = run("compare", "--methods", "fedfq@32,fedavg", "--lr", "1e9", *SMALL, "--local-steps", "5", "--out", "all")
    assert result.exit_code == 1 and "all/report.html" in result.stdout
    for name in ("fedfq@32", "fedavg"):
        assert f"{name}: no update was accepted in 2 of 2 rounds" in result.stderr


def test_an_interrupted_comparison_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("compare", "--methods", "fedavg,fedfq@32", *SMALL, "--out")
    ok(*options, "whole")
    result = interrupted(monkeypatch, signal.SIGINT, *options, "cut")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "fedfq: interrupted; the same command with --resume goes on there"
    ok(*options, "cut", "--resume")
    for name in ("fedavg/rounds.jsonl", "fedfq@32/rounds.jsonl"):
        assert Path("cut", name).read_bytes() == Path("whole", name).read_bytes()


@pytest.mark.parametrize(
    ("methods", "message"),
    [("fedavg,fedavg", "listed twice"), ("fedavg,", "unknown method ''"), ("fedfq@a", "ratio must be a number")],
)
def test_compare_refuses(methods: str, message: str) -> None:
    assert message in refused("compare", "--methods", methods, *SMALL, "--out", "all")
    assert not Path("all").exists()


def test_demo(monkeypatch: pytest.MonkeyPatch, working_directory: Path) -> None:
    monkeypatch.setattr(federation, "DEMO", federation.DEMO | {"rounds": 2, "local_steps": 1})
    shown = ok("demo")
    assert "fedavg" in shown and "fedfq@128" in shown and "open report.html" in shown
    assert [path.name for path in working_directory.iterdir()] == ["report.html"]
    ok("demo")  # and again
    monkeypatch.setattr(federation, "compare_methods", None)  # what is wrong is said before anything is trained
    assert "no such folder" in refused("demo", "--report", "missing/report.html")


def test_the_name_of_a_page_is_looked_at_first(working_directory: Path) -> None:
    assert "a report is named .html" in refused("demo", "--report", "report.txt")
    assert list(working_directory.iterdir()) == []


def test_a_device_is_named_in_the_runs_description(working_directory: Path) -> None:
    """`cpu:0` is the processor by another name."""
    for device in ("cpu", "cpu:0"):
        ok("run", "--method", "fedfq@32", *SMALL, "--device", device, "--out", device)
    assert Path("cpu/rounds.jsonl").read_bytes() == Path("cpu:0/rounds.jsonl").read_bytes()
    first, second = (json.loads(Path(name, "run.json").read_text()) for name in ("cpu", "cpu:0"))
    assert "device" not in first and second["device"] == "cpu:0"


# --- kill -9 -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_ends_as_if_it_had_not_been(working_directory: Path) -> None:
    killed_and_resumed(working_directory, KILLS)


def killed_and_resumed(folder: Path, kills: int) -> None:
    """kill -9 at random moments, of a run in two processes with memories; then the same bytes as without."""
    rng = random.Random(7)
    options = ("--method", "fedfq@32:error_feedback=true", "--rounds", "15", "--checkpoint-every", "3")
    command = [sys.executable, "-c", "from fedfq.cli import main; main()", "run", *options, "--workers", "2", "--out"]
    subprocess.run([*command, str(folder / "whole")], check=True, capture_output=True)
    happened = 0
    while happened < kills:
        resume = ["--resume"] if (folder / "killed" / "run.json").exists() else []
        process = subprocess.Popen(
            [*command, str(folder / "killed"), *resume], stderr=subprocess.DEVNULL, start_new_session=True
        )
        _wait_for_a_round(process, folder / "killed" / "rounds.jsonl")
        time.sleep(rng.uniform(0.0, 0.8))
        process.send_signal(signal.SIGKILL)
        happened += process.wait() == -signal.SIGKILL
        _wait_for_the_workers(process.pid)
        if process.returncode == 0:  # it was faster: begin anew
            subprocess.run(["rm", "-r", str(folder / "killed")], check=True)
    resume = ["--resume"] if (folder / "killed" / "run.json").exists() else []
    subprocess.run([*command, str(folder / "killed"), *resume], check=True, capture_output=True)
    for name in ("rounds.jsonl", "model.safetensors"):
        assert (folder / "killed" / name).read_bytes() == (folder / "whole" / name).read_bytes()


def _wait_for_a_round(process: "subprocess.Popen[bytes]", ledger: Path) -> None:
    size = ledger.stat().st_size if ledger.exists() else 0
    while process.poll() is None and (not ledger.exists() or ledger.stat().st_size == size):
        time.sleep(0.02)


def _wait_for_the_workers(group: int) -> None:
    """A killed run leaves no process behind."""
    with suppress(ProcessLookupError):
        for _ in range(300):
            os.killpg(group, 0)
            time.sleep(0.1)
        pytest.fail("workers outlive the run that was killed")


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as scratch:
        killed_and_resumed(Path(scratch), int(sys.argv[1]))
        print(f"killed and resumed {sys.argv[1]} times: the same rounds.jsonl and model")
