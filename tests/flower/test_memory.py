"""A client's memory: in Flower's context, or on disk."""

import os
import time

import numpy as np
import pytest

from fedfq.broadcast.replica import Replica
from fedfq.broadcast.server import Broadcast
from fedfq.flower.arrays import digest, pack
from fedfq.flower.memory import MAX_STATE_BYTES, MODELS_KEPT, InState, OnDisk, memory_of
from tests.flower.local import RUN, context, record
from tests.updates import assert_identical

RESIDUAL = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32)}
OTHER = {name: 2 * value for name, value in RESIDUAL.items()}
INITIAL = pack(record(RESIDUAL))


def test_large_models_are_remembered_on_disk():
    """Where they are float16, too: what a client remembers of them is float32."""
    most = MAX_STATE_BYTES // MODELS_KEPT // 4  # numbers of four bytes
    cases = [
        *((most - 1000, np.float32, InState), (most + 1000, np.float32, OnDisk)),
        *((most // 2 + 1000, np.float16, InState), (most + 1000, np.float16, OnDisk)),
        *((most // 2 - 1000, np.float64, InState), (most // 2 + 1000, np.float64, OnDisk)),
    ]
    for count, dtype, kind in cases:
        assert isinstance(memory_of(context(1), {"w": np.zeros(count, dtype)}), kind)


@pytest.mark.parametrize("kind", [InState, OnDisk])
def test_residuals_of_the_accepted_and_the_last_round_are_kept(kind):
    memory = kind(context(1))
    assert memory.residual(0) == {}
    memory.keep_residual(1, RESIDUAL, accepted=0)
    memory.keep_residual(4, OTHER, accepted=1)
    assert_identical(memory.residual(1), RESIDUAL)
    assert_identical(memory.residual(4), OTHER)
    memory.keep_residual(6, RESIDUAL, accepted=1)  # what was sent in round 4 was lost
    assert memory.residual(4) == {}
    assert_identical(memory.residual(1), RESIDUAL)


@pytest.mark.parametrize("kind", [InState, OnDisk])
def test_the_initial_model_is_known_by_its_digest(kind):
    memory, name = kind(context(1)), digest(RESIDUAL)
    assert memory.initial(name) is None
    memory.keep_initial(name, INITIAL)
    assert memory.initial("f" * 16) is None
    assert_identical(memory.initial(name), RESIDUAL)


@pytest.mark.parametrize("kind", [InState, OnDisk])
def test_a_replica_is_kept_with_the_model_that_it_began_with(kind):
    server, replica, memory = Broadcast(RESIDUAL), Replica(RESIDUAL), kind(context(1))
    assert memory.replica("0" * 16) is None
    server.advance(OTHER)
    replica.receive(server.message(0))
    memory.keep_replica("0" * 16, replica.state_dict())
    assert memory.replica("f" * 16) is None
    again = Replica(RESIDUAL)
    again.load_state_dict(kind(memory_context(memory)).replica("0" * 16))
    assert (again.version, again.digest) == (1, server.digest(1))


def memory_context(memory):
    """Where this memory is, as the next message finds it."""
    found = context(1)
    if isinstance(memory, InState):
        found.state = memory._state
    return found


def test_files_belong_to_a_run_and_a_node(flower_home):
    one, other = OnDisk(context(1)), OnDisk(context(11))
    one.keep_residual(3, RESIDUAL, accepted=0)
    other.keep_residual(3, OTHER, accepted=0)
    one.keep_residual(4, OTHER, accepted=0)
    assert_identical(other.residual(3), OTHER)
    assert sorted(path.name for path in (flower_home / "fedfq" / "7").iterdir()) == [
        "1-4.safetensors",
        "11-3.safetensors",
    ]


def test_damaged_files_are_as_good_as_none(flower_home):
    memory, name = OnDisk(context(1)), digest(RESIDUAL)
    memory.keep_residual(1, RESIDUAL, accepted=0)
    memory.keep_initial(name, INITIAL)
    memory.keep_replica(name, {"last": np.zeros(4, np.uint8)})
    for path in (flower_home / "fedfq" / "7").iterdir():
        path.write_bytes(path.read_bytes()[:-5])
    assert memory.residual(1) == {}
    assert memory.initial(name) is None
    assert memory.replica(name) is None


def test_folders_of_runs_that_are_over_are_cleared_away(flower_home):
    old, recent = (flower_home / "fedfq" / name for name in ("3", "4"))
    for folder, age in ((old, 8), (recent, 6)):
        folder.mkdir(parents=True)
        (folder / "1-5.safetensors").write_bytes(b"")
        then = time.time() - age * 24 * 3600
        os.utime(folder, (then, then))
    OnDisk(context(1)).keep_residual(1, {"w": np.ones(3, np.float32)}, 0)
    assert not old.exists() and recent.exists()
    assert (flower_home / "fedfq" / str(RUN)).is_dir()
