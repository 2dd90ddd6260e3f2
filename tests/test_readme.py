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
    """Of every column: MB of all clients to the target, and how many times fewer than FedAvg's."""
    heading, *shown = map(_cells, re.findall(r"^\| (?:method \| SimpleCNN|`.*×).*$", README, re.MULTILINE))
    columns = [_measured(title) for title in heading[1:-2]]
    assert len(columns) >= 3 and {row[0] for row in shown} == set(columns[0])
    for method, *cells, wire, claimed in shown:
        found = [column[method] for column in columns]
        assert cells == [mb if fewer == "–" else f"{mb} ({fewer})" for mb, fewer, _, _ in found]
        assert [wire, claimed] == found[0][2:]


def _measured(title: str) -> dict[str, list[str]]:
    """MB in all, fewer, wire and claimed by method; several seeds' spread is left out."""
    table = (ROOT / "results" / "reproduce" / "table2.md").read_text("utf-8")
    column = table.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = map(_cells, re.findall(r"^\| `.*$", column, re.MULTILINE))
    return {method: [re.sub(r" \(.*\)", "", cell) for cell in (mb, *ratios)] for method, _, mb, _, *ratios in rows}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]
