"""The command as a whole: its help, its version, and extras that are missing."""

import re
import subprocess
import sys

import fedfq
from fedfq.tasks import TASKS
from tests.cli.runner import ok, refused, shell


def test_help_does_not_wait_for_numba():
    code = "import sys; from fedfq.cli import main\ntry: main()\nfinally: print('numba' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.endswith("False\n")
    commands = ("demo", "run", "compare", "report", "data", "bench", "encode", "decode", "inspect")
    for command in (*commands, "methods", "plan", "reproduce"):
        assert command in result.stdout


def test_help_names_what_arguments_may_be():
    for command in (("run",), ("compare",), ("data", "show")):
        shown = shell(*command, "--help", COLUMNS="60").stdout
        assert all(re.search(rf"{task}[,.]", shown) for task in TASKS)  # whole, also where there is little room
    assert "folder of a run" in " ".join(ok("report", "--help").split())


def test_version():
    assert shell("--version").stdout == f"fedfq {fedfq.__version__}\n"


# What an extra brings


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fedfq.tasks.task", None)
    monkeypatch.delitem(sys.modules, "fedfq.tasks.task")
    monkeypatch.setitem(sys.modules, "torch", None)
    for module in [name for name in sys.modules if name.startswith(("fedfq.federation.", "fedfq.tasks."))]:
        monkeypatch.delitem(sys.modules, module)
    assert refused("run") == "fedfq: this needs torch, which is not installed: pip install 'fedfq[sim]'"
