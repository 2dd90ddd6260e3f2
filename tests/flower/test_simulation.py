"""One real simulation: messages and contexts go through Flower and Ray to other processes and back."""

import json
import subprocess
import sys

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg

from fedfq.flower import Compressed, fedfq_mod
from tests.flower.local import LocalGrid, app, arrays, record
from tests.updates import network


@pytest.mark.slow
def test_a_simulation_gives_what_a_federation_in_one_process_gives(tmp_path):
    pytest.importorskip("ray")
    out = tmp_path / "result.npz"
    subprocess.run([sys.executable, "-m", "tests.flower.simulate", str(out)], check=True, timeout=300)
    expected = Compressed(FedAvg()).start(LocalGrid(app([fedfq_mod(32)]), 3), record(network(5)), num_rounds=3)
    with np.load(out) as simulated:
        metrics = json.loads(str(simulated["metrics"]))
        for name, value in arrays(expected.arrays).items():
            assert simulated[name].dtype == value.dtype
            np.testing.assert_allclose(simulated[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
    for round_, own in expected.train_metrics_clientapp.items():
        assert metrics[str(round_)] == pytest.approx(dict(own), rel=1e-3)
