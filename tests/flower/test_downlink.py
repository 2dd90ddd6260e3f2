"""The server's half of the way down: what each node is sent for what it acknowledged."""

import numpy as np
import pytest

from fedfq.flower.arrays import digest
from fedfq.flower.downlink import AllBits, Differences
from fedfq.flower.protocol import NOTHING_HELD, HeldVersion
from tests.flower.local import record
from tests.updates import assert_identical, network

INITIAL = network(5)


def moved(rounds: int) -> dict[str, np.ndarray]:
    return {name: value + np.asarray(rounds, value.dtype) for name, value in INITIAL.items()}


def acknowledged(downlink: Differences, node: int, version: int) -> None:
    downlink.acknowledge(node, HeldVersion(version, downlink._broadcast.digest(version).hex()))


def test_nodes_that_hold_the_same_share_one_record() -> None:
    downlink = Differences(record(INITIAL), None, None)
    downlink.advance(record(moved(1)))
    for node in (1, 2, 3):
        acknowledged(downlink, node, 1)
    downlink.advance(record(moved(2)))
    acknowledged(downlink, 3, 0)
    assert downlink.record(1) is downlink.record(2)
    assert downlink.record(1) is not downlink.record(3)


def test_a_model_that_has_not_moved_is_no_new_version() -> None:
    """That of an evaluation is what the next training starts from."""
    downlink = Differences(record(INITIAL), None, None)
    downlink.advance(record(moved(1)))
    acknowledged(downlink, 1, 1)
    before = downlink.model
    downlink.advance(record(moved(1)))
    assert_identical(downlink.model, before)
    assert len(downlink.record(1)["message"].data) < 50


def test_new_nodes_are_taken_for_what_most_are() -> None:
    downlink = Differences(record(INITIAL), None, None)
    assert set(downlink.record(1)) == {"message"}  # perhaps they make the initial model
    for node in (1, 2):
        downlink.acknowledge(node, NOTHING_HELD)
    assert set(downlink.record(1)) == set(downlink.record(9)) == {"message", "initial"}
    for node in (3, 4, 5, 6):
        acknowledged(downlink, node, 0)
    assert set(downlink.record(9 + 1)) == {"message"}


@pytest.mark.parametrize("claim", [HeldVersion(1, "0" * 16), HeldVersion(7, "0" * 16), HeldVersion(-7, "0" * 16), None])
def test_only_what_was_a_version_is_believed(claim: HeldVersion | None) -> None:
    downlink = Differences(record(INITIAL), None, None)
    downlink.advance(record(moved(1)))
    acknowledged(downlink, 1, 1)
    downlink.acknowledge(1, claim)
    assert set(downlink.record(1)) == {"message", "initial"}


def test_a_model_that_is_not_finite_leaves_nodes_with_the_last_one() -> None:
    downlink = Differences(record(INITIAL), None, None)
    downlink.advance(record(moved(1)))
    before = downlink.model
    downlink.advance(record({**moved(2), "fc.bias": np.full(40, np.nan, np.float32)}))
    assert_identical(downlink.model, before)


def test_all_bits_go_beside_the_initial_model_until_that_is_acknowledged() -> None:
    downlink = AllBits(record(INITIAL), uses_initial=True)
    assert set(downlink.record(1)) == {"model"}  # it is the initial one
    downlink.advance(record(moved(1)))
    assert set(downlink.record(1)) == {"model", "initial"}
    downlink.acknowledge(1, HeldVersion(0, digest(INITIAL)))
    assert set(downlink.record(1)) == {"model"}
    downlink.acknowledge(1, HeldVersion(0, "0" * 16))
    assert set(downlink.record(1)) == {"model", "initial"}
