"""docs/deployment.md, command by command: a real SuperLink with TLS and authentication, real SuperNodes, real sockets.

Then what a federation must survive: a node that sends garbage, one that is killed in a round, one that nobody knows.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fedfq import Replica
from fedfq.files import write_tensors

ROOT = Path(__file__).parents[2]
SERVERS = ("flower-superlink", "flower-supernode")  # commands that go on until they are stopped
TOOLS = ("openssl", "ssh-keygen")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(shutil.which(tool) is None for tool in TOOLS), reason=f"needs the commands {', '.join(TOOLS)}"
    ),
]

HOSTILE = """
import os

from flwr.app import Array, ArrayRecord, MessageType
from flwr.clientapp import ClientApp

from fedfq.flower import app


def garbage(message, context, call_next):
    reply = call_next(message, context)
    if message.metadata.message_type == MessageType.TRAIN and context.node_config.get("hostile"):
        data = os.urandom(2000)
        reply.content["arrays"] = ArrayRecord({"update": Array("uint8", (len(data),), "fedfq.v1", data)})
    return reply


client = ClientApp(mods=[garbage, app.compress])
client.train()(app.train)
client.query()(app.which)
server = app.server
"""

WITNESS = """
import hashlib
import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from fedfq.flower import Compressed, fedfq_mod

ROUNDS, AWAY = 12, (3, 7, 8, 9, 10, 11)  # in some, client 1 is not asked
LONG = 5  # in which client 1 takes long
WAITS = {6: "back", 10: "late"}  # for a file


def initial():  # its replica is on disk, as that of any large model
    return {"weight": np.random.default_rng(0).standard_normal((1850, 1850)).astype(np.float32)}


def note(context, name, **line):
    with open(Path(str(context.run_config["out"])) / name, "a") as file:
        file.write(json.dumps(line) + "\\n")


def bits(model):
    return hashlib.sha256(np.ascontiguousarray(model["weight"]).tobytes()).hexdigest()


client = ClientApp(mods=[fedfq_mod(256, initial=initial)])


@client.train()
def train(message, context):
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    number, round_ = context.node_config["partition-id"], message.content["config"]["server-round"]
    note(context, "seen.jsonl", round=round_, client=number, bits=bits(model))
    if (number, round_) == (1, LONG):
        time.sleep(30)
    rng = np.random.default_rng([number, round_])
    step = np.outer(rng.standard_normal(1850), rng.standard_normal(1850)).astype(np.float32)
    arrays = ArrayRecord({"weight": Array(model["weight"] + 0.01 * step)})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)


@client.query()
def which(message, context):
    found = MetricRecord({"partition-id": context.node_config["partition-id"]})
    return Message(RecordDict({"client": found}), reply_to=message)


class Witness(Compressed):
    def configure_train(self, server_round, arrays, config, grid):
        out = Path(str(self.context.run_config["out"]))
        while server_round in WAITS and not (out / WAITS[server_round]).exists():
            time.sleep(0.2)
        nodes = set(grid.get_node_ids()) - (self.away if server_round in AWAY else set())
        self.strategy.chosen = nodes
        messages = super().configure_train(server_round, arrays, config, grid)
        note(self.context, "server.jsonl", round=server_round, bits=bits(self._downlink.model))
        return messages

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        note(self.context, "metrics.jsonl", round=server_round, **{key: metrics[key] for key in sorted(metrics)})
        return arrays, metrics


class Chosen(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        messages = super().configure_train(server_round, arrays, config, grid)
        return [message for message in messages if message.metadata.dst_node_id in self.chosen]


server = ServerApp()


@server.main()
def main(grid, context):
    asked = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
    found = {reply.content["client"]["partition-id"]: reply.metadata.src_node_id
             for reply in grid.send_and_receive(asked)}
    strategy = Witness(Chosen(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1))
    strategy.context, strategy.away = context, {found[1]}
    note(context, "nodes.jsonl", **{str(number): node for number, node in found.items()})
    strategy.start(grid, ArrayRecord({"weight": Array(initial()["weight"])}), num_rounds=ROUNDS, timeout=20)
    note(context, "done.jsonl", done=True)
"""


class Shell:
    """A terminal: a folder and an environment, in which commands are run one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exports: list[str] = []
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}

    def run(self, block: str, patience: float = 240) -> str:
        self.exports += [line for line in block.splitlines() if line.startswith("export ")]
        done = subprocess.run(
            ["bash", "-ec", "\n".join([*self.exports, block])],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=patience,
        )
        output = done.stdout.decode()
        assert done.returncode == 0, f"{block}\n{output}\n{self.logs()}"
        return output

    def start(self, block: str, name: str) -> None:
        """A command that goes on."""
        with open(self.folder / f"{name}.log", "wb") as log:
            self.running[name] = subprocess.Popen(
                ["bash", "-ec", "\n".join([*self.exports, f"exec {block.strip()}"])],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text("utf-8", "replace")

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)[-2000:]}" for name in self.running)

    def kill(self, name: str) -> None:
        """Without warning, with all that it started."""
        os.killpg(self.running[name].pid, signal.SIGKILL)
        self.running[name].wait()

    def close(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for name, process in self.running.items():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill(name)


def until(shell: Shell, condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}\n{shell.logs()}"
        time.sleep(0.3)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def blocks() -> list[str]:
    """The commands of the guide, with ports that are free here."""
    text = (ROOT / "docs" / "deployment.md").read_text()
    found = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    ports = {port: str(free_port()) for port in ("18000", "19000", "19001")}
    return [re.sub("|".join(ports), lambda match: ports[match[0]], block) for block in found]


def rounds(folder: Path) -> list[dict]:
    path = folder / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shell, list[str]]]:
    """All of the guide was run; its server and clients go on."""
    folder = tmp_path_factory.mktemp("deployment")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    shell, commands = Shell(folder), blocks()
    shell.exports.append("export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.05")  # saves seconds per round
    nodes = 0
    try:
        for block in commands:
            if block.startswith("flower-superlink"):
                shell.start(block, "superlink")
                port = int(re.search(r"--port (\d+)", block)[1])
                until(shell, lambda port=port: listens(port), "the SuperLink")
            elif block.startswith("flower-supernode"):
                name = f"client{nodes}"
                shell.start(block, name)
                until(shell, lambda name=name: "SuperNode ID" in shell.log(name), name)
                nodes += 1
            else:
                shell.run(block)
        yield shell, commands
    finally:
        shell.close()


def test_the_guide_trains_a_model(guide: tuple[Shell, list[str]]) -> None:
    shell, _ = guide
    ledger = rounds(shell.folder / "run")
    assert len(ledger) == 3 and not any(line["rejected"] for line in ledger)
    assert ledger[-1]["accuracy"] > 1.5 * ledger[0]["accuracy"]
    assert (shell.folder / "run" / "report.html").stat().st_size > 10_000


def test_a_clients_own_budget_counts(guide: tuple[Shell, list[str]]) -> None:
    """One client at 32x and one at 64x, as the guide has them."""
    shell, _ = guide
    raw = json.loads((shell.folder / "run" / "run.json").read_text())["raw_bytes"]
    for line in rounds(shell.folder / "run"):
        assert line["downlink_bytes"] < 2 * raw / 10
        assert 0.9 * (raw / 32 + raw / 64) < line["uplink_bytes"] <= raw / 32 + raw / 64


def test_a_node_that_nobody_registered_is_refused(guide: tuple[Shell, list[str]]) -> None:
    shell, commands = guide
    shell.run('ssh-keygen -q -t ecdsa -b 384 -N "" -f stranger')
    first = next(block for block in commands if block.startswith("flower-supernode"))
    block = re.sub(r"--port \d+", f"--port {free_port()}", first.replace("private-key client0", "private-key stranger"))
    shell.start(block, "stranger")
    until(shell, lambda: shell.running["stranger"].poll() is not None, "the stranger to be refused")
    assert "Failed to activate SuperNode" in shell.log("stranger")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_whatever_becomes_of_a_node_it_holds_the_servers_bits(guide: tuple[Shell, list[str]]) -> None:
    """One's replica is cut off; it is killed while it trains, another one after it has answered; the first is away for
    five rounds and finds another model's replica on its disk when it comes back; a third one joins at round ten."""
    shell, commands = guide
    app, out = shell.folder / "witness", shell.folder / "witness-run"
    shutil.copytree(shell.folder / "examples" / "flower-cifar10", app)
    (app / "app.py").write_text(WITNESS)
    out.mkdir()
    nodes = [block for block in commands if block.startswith("flower-supernode")]
    run = next(block for block in commands if block.startswith("flwr run"))
    shell.start(run.replace("examples/flower-cifar10", "witness").replace('out="run"', f'out="{out}"'), "witness")

    def begun(round_: int) -> bool:
        return any(line["round"] >= round_ for line in lines(out / "server.jsonl"))

    def has_seen(client: int, round_: int) -> bool:
        return any((line["client"], line["round"]) == (client, round_) for line in lines(out / "seen.jsonl"))

    until(shell, lambda: begun(3), "round 3", 120)
    node = lines(out / "nodes.jsonl")[0]["1"]
    (replica,) = (shell.folder / "flwr" / "fedfq").rglob(f"{node}-replica.safetensors")
    replica.write_bytes(replica.read_bytes()[:-1000])
    until(shell, lambda: has_seen(0, 5) and has_seen(1, 5), "round 5")
    time.sleep(3)  # client 0 has answered, and waits for the next round; client 1 still trains
    for name in ("client0", "client1"):
        shell.kill(name)
    for name, block in zip(("client0", "client1"), nodes):
        come_back(shell, name, block)
    (out / "back").touch()
    until(shell, lambda: begun(7), "round 7", 120)
    other = Replica({"weight": np.ones((9, 9), np.float32)})
    write_tensors(replica, {**other.state_dict(), "replica-": np.frombuffer(b"0" * 16, np.uint8)})
    shell.run('ssh-keygen -q -t ecdsa -b 384 -N "" -f client3 && flwr supernode register client3.pub ours')
    late = nodes[0].replace("private-key client0", "private-key client3").replace("partition-id=0", "partition-id=3")
    until(shell, lambda: begun(9), "round 9", 120)
    come_back(shell, "client3", re.sub(r"--port \d+", f"--port {free_port()}", late))
    (out / "late").touch()
    until(shell, (out / "done.jsonl").exists, "the end of the run", 240)
    shell.kill("client3")

    bits = {line["round"]: line["bits"] for line in lines(out / "server.jsonl")}
    seen = [(line["round"], line["client"]) for line in lines(out / "seen.jsonl")]
    assert all(line["bits"] == bits[line["round"]] for line in lines(out / "seen.jsonl"))
    assert len(set(bits.values())) == 12
    assert [round_ for round_, client in seen if client == 0] == list(range(1, 13))
    assert [round_ for round_, client in seen if client == 1] == [1, 2, 4, 5, 6, 12]
    assert [round_ for round_, client in seen if client == 3] == [10, 11, 12]
    found = {line["round"]: line for line in lines(out / "metrics.jsonl")}
    assert all(line["fedfq-dropped"] == 0 for line in found.values())
    assert all(line["fedfq-down-bytes"] < 4 * 1850**2 / 4 for line in found.values())


def come_back(shell: Shell, name: str, block: str) -> None:
    """Start a SuperNode. One that was killed is refused until the SuperLink has missed it, a minute later."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        shell.start(block, name)
        until(shell, lambda: "SuperNode ID" in shell.log(name) or shell.running[name].poll() is not None, name)
        if shell.running[name].poll() is None:
            return
    raise AssertionError(shell.logs())


def test_garbage_and_a_node_killed_in_a_round_do_not_stop_the_run(guide: tuple[Shell, list[str]]) -> None:
    shell, commands = guide
    app = shell.folder / "hostile"
    shutil.copytree(shell.folder / "examples" / "flower-cifar10", app)
    (app / "app.py").write_text(HOSTILE)
    shell.run('ssh-keygen -q -t ecdsa -b 384 -N "" -f client2 && flwr supernode register client2.pub ours')
    first = next(block for block in commands if block.startswith("flower-supernode"))
    block = first.replace("private-key client0", "private-key client2").replace(
        '"partition-id=0"', '"partition-id=2 hostile=true"'
    )
    shell.start(re.sub(r"--port \d+", f"--port {free_port()}", block), "client2")
    until(shell, lambda: "SuperNode ID" in shell.log("client2"), "client2")
    run = next(block for block in commands if block.startswith("flwr run"))
    run = run.replace("examples/flower-cifar10", "hostile").replace('out="run"', 'out="hostile-run"')
    run = run.replace("clients=2 per-round=2", "clients=3 per-round=3")
    shell.start(run, "run")
    ledger = shell.folder / "hostile-run"
    until(shell, lambda: len(rounds(ledger)) >= 1, "the first round", 120)
    shell.kill("client1")  # while the second round trains
    until(shell, lambda: (ledger / "model.safetensors").exists(), "the end of the run", 300)
    lines = rounds(ledger)
    assert len(lines) == 3 and lines[-1]["accuracy"] > 1.3 * lines[0]["accuracy"]
    refused = [{each["client"]: each["reason"] for each in line["rejected"]} for line in lines]
    assert all("magic" in reasons[2] for reasons in refused)
    assert list(refused[0]) == [2] and refused[-1][1] == "no reply"
