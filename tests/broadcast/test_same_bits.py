"""Clients on other processors hold the server's bits, too: each message says which, and a replica looks."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedfq import Broadcast
from tests.broadcast.models import initial_model, train
from tests.codec.test_same_bits import PROCESSORS

RECEIVE = """
import sys
from pathlib import Path
from safetensors.numpy import load_file
from fedfq import Replica

folder = Path(sys.argv[1])
initial = load_file(folder / "initial.safetensors")
clients = {}
for path in sorted(folder.glob("*.message")):  # by round
    client = path.stem.split("-")[1]
    replica = clients.setdefault(client, Replica(initial))
    if path.stem.endswith("restart"):
        clients[client] = Replica(initial)
        clients[client].load_state_dict(replica.state_dict())
    clients[client].receive(path.read_bytes())
print(sorted(replica.version for replica in clients.values()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_hundred_rounds_with_clients_that_miss_some_restart_and_join_late(tmp_path: Path, processor: str) -> None:
    initial = initial_model()
    save_file(initial, tmp_path / "initial.safetensors")
    server, rng = Broadcast(initial, ratio=40), np.random.default_rng(0)
    held = dict.fromkeys(range(10), 0)
    for round_, model in enumerate(train(initial, 100)):
        server.advance(model)
        for client in rng.choice(10 if round_ > 80 else 8, 2, replace=False).tolist():  # two join late
            restart = "-restart" if rng.random() < 0.1 else ""
            (tmp_path / f"{round_:03d}-{client}{restart}.message").write_bytes(server.message(held[client]))
            held[client] = server.version
    compiler, features, blas = PROCESSORS[processor]
    environment = os.environ | {
        "NUMBA_CPU_NAME": compiler,
        "NUMBA_CPU_FEATURES": features,
        "OPENBLAS_CORETYPE": blas,
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", RECEIVE, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(sorted(held.values()))
