"""What the README says is so."""

import re
from pathlib import Path

from typer.main import get_command

from fedfq.cli import app
from tests.updates import network

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def test_its_python_runs_from_top_to_bottom() -> None:
    """With a model, the initial one, and an update."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    names = {"model": network(1), "initial": network(2), "update": network(3)}
    for block in blocks:
        exec(block, names)


def test_its_commands_and_options_exist() -> None:
    lines = re.findall(r"^    fedfq (.*)$", README, re.MULTILINE)
    assert len(lines) > 10
    for line in lines:
        words = line.partition("#")[0].split()
        command = get_command(app)
        while words and hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_its_table_of_bytes_is_that_of_the_results() -> None:
    table = (ROOT / "results" / "reproduce" / "table2.md").read_text("utf-8")
    column = table.partition("## SimpleCNN, IID")[2].partition("\n## ")[0]
    measured = {cells[0]: cells for cells in map(_cells, re.findall(r"^\| `.*$", column, re.MULTILINE))}
    shown = [_cells(line) for line in re.findall(r"^\| `.*$", README, re.MULTILINE) if "×" in line]
    assert {cells[0] for cells in shown} == set(measured)
    for method, *numbers in shown:
        _, _, in_all, _, *ratios = measured[method]
        assert numbers == [re.sub(r" \(.*\)", "", cell) for cell in (in_all, *ratios)]  # seeds' spread left out


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]
