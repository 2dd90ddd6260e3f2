"""What compression costs and saves on Flower, for `fedfq bench flower`: seconds per round in simulation, bytes on a
wire, the server's memory."""

from __future__ import annotations

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from fedfq.bench.codec import Say, in_new_process, machine
from fedfq.flower.engine import simulate

Row = dict[str, Any]
CLIENTS = 10
RATIO = 256  # the default of `fedfq_mod`
MODELS = {"ResNet-20": "resnet20", "10 M parameters": "40x500"}  # that are sent over a wire

TITLES = {
    "simulation": f"A round in Flower's simulation, {CLIENTS} clients, without and with fedfq at {RATIO}x",
    "server_memory": "Memory of a server that averages 50 replies, above what it had before, in models",
    "wire": "Bytes of one client in one round: of its Arrays, and at the server's interface",
}


def run(quick: bool, say: Say) -> Row:
    """`quick` leaves out the large models."""
    result: Row = {**machine(), "flwr": version("flwr")}
    cases = [("1 M parameters, no training", 1_000_000, False), ("SimpleCNN, ten steps of training", 0, True)]
    if not quick:
        cases.insert(1, ("11 M parameters, no training", 11_000_000, False))
    result["simulation"] = []
    for label, parameters, training in cases:
        say(f"a round in simulation: {label}")
        result["simulation"].append(simulation(label, parameters, training, 1 if quick else 2))
    say("the server's memory")
    result["server_memory"] = [server_memory(1_000_000 if quick else 11_000_000)]
    say("bytes on the wire")
    try:
        names = list(MODELS)[: 1 if quick else None]
        result["wire"] = [wire(name, variant) for name in names for variant in ("fedavg", "fedfq")]
    except (ValueError, RuntimeError) as error:  # what was measured so far is not lost
        say(f"not measured: {error}")
    return result


def simulation(label: str, parameters: int, training: bool, repeats: int) -> Row:
    """The best round without and with fedfq, which take turns in one simulation."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "seconds.json")
        settings = {"parameters": parameters, "training": training, "ratio": RATIO, "rounds": 3, "repeats": repeats}
        simulate("fedfq.bench.flower_app", settings | {"out": str(out)}, CLIENTS, os.cpu_count() or 1, out.exists)
        seconds = json.loads(out.read_text())
    best = {f"{name}_s": float(np.min(times)) for name, times in seconds.items()}
    return {"case": label, **best, "ratio": best["fedfq_s"] / best["fedavg_s"]}


def wire(model: str, variant: str) -> Row:
    """What passes the server's link for one client in a round, all of Flower's requests, headers and acknowledgements.

    The mean of rounds after the first.
    """
    from fedfq.network.deployment import deployed
    from fedfq.network.links import network

    clients, fast = 2, 1000.0
    settings = {"variant": variant, "rounds": 8, "ratio": RATIO, "model": MODELS[model]}
    settings |= {"steps": 0, "step-seconds": 0.0, "slow-motion": 1.0}
    with network(clients, fast, fast) as machines, deployed(machines) as deployment:
        rounds = deployment.run(settings)[1:]

    def per_client(key: str) -> float:
        return float(np.mean([each[key] for each in rounds])) / clients

    return {
        "model": model,
        "sent as": "float32" if variant == "fedavg" else f"fedfq, {RATIO}x up",
        "payload up": per_client("payload_bytes"),
        "interface up": per_client("uplink_bytes"),
        "payload down": per_client("down_payload_bytes"),
        "interface down": per_client("downlink_bytes"),
    }


SERVER_MEMORY = """
import ctypes, gc, sys
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from fedfq.bench.flower_app import make_up_model, step
from fedfq.flower.mod import fedfq_mod
from fedfq.flower.protocol import ORDER, seal, unseal
from fedfq.flower.strategy import Compressed
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
class Nodes:
    def get_node_ids(self):
        return list(range(1, 51))
model = ArrayRecord({name: Array(value) for name, value in make_up_model(int(sys.argv[1])).items()})
raw = sum(len(array.data) for array in model.values())
strategy = Compressed(FedAvg(fraction_evaluate=0.0))
def train(message, context):
    arrays = {name: Array(array.numpy() + step(array.shape)) for name, array in message.content["arrays"].items()}
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 1})}),
                   reply_to=message)
messages = list(strategy.configure_train(1, model, ConfigRecord(), Nodes()))
context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
tokens = [message.content[ORDER]["token"] for message in messages]
initial = {name: array.numpy() for name, array in model.items()}
first = fedfq_mod(64, initial=initial)(messages[0], context, train)
payload = bytes(unseal(next(iter(first.content["arrays"].values())).data)[0])
del context, initial
def replies():
    for message, token in zip(messages, tokens):
        sealed = seal(payload, token)
        array = Array("uint8", (len(sealed),), "fedfq.v1", sealed)
        records = {"arrays": ArrayRecord({"update": array}), "metrics": first.content["metrics"]}
        yield Message(RecordDict(records), reply_to=message)
arrived = list(replies())
gc.collect()
ctypes.CDLL(None).malloc_trim(0)  # what encoding took goes back to the system, so that it is not there to be used
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = status("VmRSS")
strategy.aggregate_train(1, arrived)
print((status("VmHWM") - before) / raw)
"""


def server_memory(parameters: int) -> Row:
    models = in_new_process(SERVER_MEMORY, str(parameters))
    return {"parameters": parameters, "replies": 50, "models_above": models, "bar": 2.0}
