"""Three rounds of a real simulation, with Ray; the model and the metrics go to a file. (Run by test_simulation.py.)"""

import json
import sys

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from fedfq.flower import Compressed, fedfq_mod
from tests.flower.local import app, arrays, record
from tests.updates import network

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    result = Compressed(FedAvg()).start(grid, record(network(5)), num_rounds=3)
    metrics = {round_: dict(record) for round_, record in result.train_metrics_clientapp.items()}
    np.savez(sys.argv[1], metrics=json.dumps(metrics), **arrays(result.arrays))


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, app([fedfq_mod(32)]), num_supernodes=3, backend_config=resources)
