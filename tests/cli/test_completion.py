"""What shells offer after TAB, asked as bash asks."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedfq.cli import completion
from fedfq.methods import METHODS
from fedfq.tasks import TASKS, splits
from tests.cli.runner import shell


def offered(*words: str) -> list[str]:
    variables = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    result = shell(**variables, _FEDFQ_COMPLETE="complete_bash")
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("run", "--task", "cif"), [task for task in TASKS if task.startswith("cifar10")]),
        (("run", "--task", "shakes"), ["shakespeare-lstm"]),
        (("run", "--method", "fedfq-"), ["fedfq-exact", "fedfq-cgsa"]),
        (("run", "--split", ""), ["iid", "one-class", "shards:2", "dirichlet:0.3", "natural"]),
        (("compare", "--methods", "fedavg,st"), ["fedavg,stc"]),
        (("compare", "--split", "sh"), ["shards:2"]),
        (("data", "show", "dig"), ["digits"]),
        (("data", "show", "digits", "--split", "nat"), ["natural"]),
        (("methods", "e"), ["eden"]),
        (("enc",), ["encode"]),
        (("run", "--over"), ["--overwrite"]),
    ],
)
def test_names_are_completed(words: tuple[str, ...], expected: list[str]) -> None:
    assert offered("fedfq", *words) == expected


def test_all_names_are_offered() -> None:
    assert completion.complete_method("") == list(METHODS)
    assert completion.complete_task("") == TASKS
    for split, form in zip(completion.complete_split(""), splits.FORMS, strict=True):
        assert splits.parse(split)[0] == form.partition(":")[0]


def test_a_script_for_bash(tmp_path: Path) -> None:
    """`--show-completion` prints what bash needs; --install-completion is offered beside it."""
    script = shell("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1").stdout
    command = tmp_path / "fedfq"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m fedfq "$@"\n')
    command.chmod(0o755)
    ask = f"COMP_WORDS=(fedfq run --task dig); COMP_CWORD=3; _fedfq_completion {command}; echo ${{COMPREPLY[@]}}"
    result = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    assert result.stdout == "digits\n"
    assert "--install-completion" in shell("--help").stdout


def test_nothing_heavy_is_loaded_for_it() -> None:
    code = "import sys, fedfq.cli; assert not {'numpy', 'numba', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
