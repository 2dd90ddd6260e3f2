"""What the README says is so."""

import re
from pathlib import Path

import torch
from typer.main import get_command

from fedfq.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def test_its_python_runs_from_top_to_bottom() -> None:
    """With a model, the initial one, and an update."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    model, initial = (torch.nn.Sequential(torch.nn.Linear(90, 80), torch.nn.BatchNorm1d(80)) for _ in range(2))
    update = {name: 0.01 * torch.randn(value.shape) for name, value in model.state_dict().items()}
    update["1.num_batches_tracked"] = torch.tensor(3)
    names = {"model": model, "initial": initial, "update": update}
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
    """Of every column: MiB of all clients to the target, and how many times fewer than FedAvg's."""
    titles, shown = _shown("uplink, MiB")
    columns = [_measured("table2", title) for title in titles[:-2]]
    assert len(columns) >= 3 and set(shown) == set(columns[0])
    for method, (*cells, wire, claimed) in shown.items():
        found = [column[method] for column in columns]
        assert cells == [why if mib == "–" else f"{mib} ({fewer})" for why, _, mib, _, fewer, *_ in found]
        assert [wire, claimed] == found[0][5:7]


def test_its_table_of_accuracies_is_that_of_the_results() -> None:
    """And in brackets, how many points more than FedAvg's with the same seed."""
    titles, shown = _shown("accuracy, %")
    columns = [_measured("table1", title) for title in titles]
    assert len(columns) >= 3 and set(shown) == set(columns[0])
    for method, cells in shown.items():
        found = [column[method] for column in columns]
        assert cells == [accuracy if above == "–" else f"{accuracy} ({above})" for accuracy, above, *_ in found]


def _shown(what: str) -> tuple[list[str], dict[str, list[str]]]:
    """The README's table with that first title: the others, and what stands under them by method."""
    table = re.search(rf"^\| {re.escape(what)} .*\n\|[-:|]+\n(?:\|.*\n)+", README, re.MULTILINE)
    assert table is not None
    (_, *titles), _, *rows = map(_cells, table[0].splitlines())
    return titles, {method: cells for method, *cells in rows}


def _measured(table: str, title: str) -> dict[str, list[str]]:
    """A column of the results by method; several seeds' spread is left out."""
    text = (ROOT / "results" / "reproduce" / f"{table}.md").read_text("utf-8")
    column = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = map(_cells, re.findall(r"^\| `.*$", column, re.MULTILINE))
    return {method: [re.sub(r" \(.*\)", "", cell) for cell in cells] for method, *cells in rows}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]
