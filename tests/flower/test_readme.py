"""The README's four lines, put into an app of the form of Flower's PyTorch quickstart."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedfq.flower.arrays import size
from fedfq.flower.protocol import TAG_BYTES
from tests.flower.local import LocalGrid

README = Path(__file__).parents[2] / "README.md"

CLIENT = """
import torch
from flwr.app import ArrayRecord, MetricRecord, Message, RecordDict
from flwr.clientapp import ClientApp


def make_model():
    torch.manual_seed(0)
    return torch.nn.Linear(400, 300)


app = ClientApp()


@app.train()
def train(msg, context):
    model = torch.nn.Linear(400, 300)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    generator = torch.Generator().manual_seed(context.node_id)
    x, truth = torch.randn(200, 400, generator=generator), torch.arange(120000.0).reshape(300, 400) / 1e6
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), x @ truth.T)
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": 200})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg, context):
    model = torch.nn.Linear(400, 300)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)
"""

SERVER = """
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()
result = None


@app.main()
def main(grid, context):
    global result
    torch.manual_seed(0)
    fraction_evaluate = 0.5
    strategy = FedAvg(fraction_evaluate=fraction_evaluate)
    result = strategy.start(grid, ArrayRecord(torch.nn.Linear(400, 300).state_dict()), num_rounds=4)
"""


def diff() -> dict[str, list[tuple[str, str]]]:
    """The changed lines of each file: (kind, line)."""
    text = re.search(r"```diff\n(.*?)```", README.read_text(), re.DOTALL)[1]
    files: dict[str, list[tuple[str, str]]] = {}
    for line in text.splitlines():
        if line.startswith(" # "):
            changes = files.setdefault(line[3:], [])
        else:
            changes.append((line[0], line[1:]))
    return files


def patched(source: str, changes: list[tuple[str, str]]) -> str:
    for k, (kind, line) in enumerate(changes):
        if kind == "-":
            assert source.count(f"\n{line}\n") == 1, f"the app has no line {line!r}"
            source = source.replace(f"\n{line}\n", f"\n{changes[k + 1][1]}\n")
        elif k == 0 or changes[k - 1][0] != "-":
            source = f"{line}\n{source}"
    return source


def loaded(name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def test_there_are_four_lines() -> None:
    assert sum(kind == "+" for changes in diff().values() for kind, _ in changes) <= 4


RAW = 4 * 301 * 300


def run(name: str, changes: dict[str, list[tuple[str, str]]], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, LocalGrid]:
    """The app with these changes; the server's result, and the grid that it was trained on."""
    client = loaded("client_app", patched(CLIENT, changes.get("client_app.py", [])))
    server = loaded("server_app", patched(SERVER, changes.get("server_app.py", [])))
    monkeypatch.setitem(sys.modules, "client_app", client)
    grid = LocalGrid(client.app, nodes=3)
    server.app(grid, Context(run_id=7, node_id=0, node_config={}, state=RecordDict(), run_config={}))
    return server.result, grid


def test_with_them_the_quickstart_trains_as_before_with_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, metrics, sent = {}, {}, {}
    for name, changes in (("stock", {}), ("fedfq", diff())):
        result, grid = run(name, changes, monkeypatch)
        metrics[name], sent[name] = result.train_metrics_clientapp, sum(size(each.content) for each in grid.log)
        losses[name] = [metrics[name][round_]["train_loss"] for round_ in range(1, 5)]
    assert losses["fedfq"][0] == losses["stock"][0]
    assert losses["fedfq"] == pytest.approx(losses["stock"], rel=0.05)
    assert losses["stock"][-1] < 0.8 * losses["stock"][0]
    assert all(metrics["fedfq"][round_]["fedfq-bytes"] <= 3 * (4096 + TAG_BYTES) for round_ in range(1, 5))
    assert sent["fedfq"] - 3 * RAW < 0.1 * (sent["stock"] - 3 * RAW)  # all but the initial model, evaluations too


def test_with_one_more_line_the_initial_model_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = re.findall(r"`(fedfq_mod\(initial=\w+\))`", README.read_text())
    changes = diff()
    changes["client_app.py"] = [(kind, line.replace("fedfq_mod()", said)) for kind, line in changes["client_app.py"]]
    _, grid = run("initial", changes, monkeypatch)
    assert max(size(message.content) for message in grid.log) < RAW / 10
