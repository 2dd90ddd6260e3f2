"""Flower without a network, and with a home of its own."""

import os

import pytest
from flwr.supercore.task_identity import TaskIdentity

from tests.flower.local import RUN

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"


@pytest.fixture(autouse=True)
def flower_home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    for field, value in (("run_id", RUN), ("node_id", 1), ("task_id", 1)):
        monkeypatch.setattr(TaskIdentity, f"_{field}", value)
    return tmp_path / "flwr"
