"""The way down: what a client is sent in a round, in bytes, and what it holds then."""

from collections.abc import Iterator

import numpy as np
import pytest

from fedfq import Broadcast, Replica, methods
from fedfq.broadcast.server import OVERHEAD
from fedfq.federation.downlink import AUTO, BroadcastDownlink, Downlink, OwnDownlink
from tests.updates import Array, assert_identical, draw, raw_size

Model = dict[str, Array]


def initial_model() -> Model:
    return {"weight": draw("normal", (10, 64)), "bias": np.zeros(10, np.float32), "steps": np.array(0)}


RAW = raw_size(initial_model())


def training(rounds: int) -> Iterator[Model]:
    """A model after every round."""
    model = initial_model()
    for seed in range(1, rounds + 1):
        moves = {"weight": 0.1 * draw("laplace", (10, 64), seed), "bias": 0.1 * draw("normal", (10,), seed), "steps": 5}
        model = {name: np.asarray(value + moves[name]) for name, value in model.items()}
        yield model


# --- All bits, every time ----------------------------------------------------------------------------------


def test_all_bits_of_the_model_cost_the_same_in_every_round() -> None:
    downlink = Downlink(initial_model(), uses_initial=False)
    for model in training(2):
        assert downlink.send([3, 1]) == {3: RAW, 1: RAW}
        downlink.advance(model)
        assert downlink.model is model and downlink.describe() == {}


def test_a_method_that_uses_the_initial_model_has_it_sent_at_a_first_contact() -> None:
    """Until an answer shows that it came, and again to those whose answer shows that they have another one."""
    downlink = Downlink(initial_model(), uses_initial=True)
    assert downlink.send([1, 2]) == {1: RAW, 2: RAW}  # it is the model itself
    downlink.settle(1)
    downlink.advance(next(training(1)))
    assert downlink.send([1, 2]) == {1: RAW, 2: 2 * RAW}
    assert downlink.send([1, 2]) == {1: RAW, 2: 2 * RAW}
    downlink.settle(2)
    downlink.forget(1)
    assert downlink.send([1, 2]) == {1: 2 * RAW, 2: RAW}


def test_all_bits_go_on_from_the_model_alone() -> None:
    model = next(training(1))
    downlink = Downlink(initial_model(), uses_initial=True)
    downlink.load_state_dict(downlink.state_dict(), model)
    assert downlink.model is model and downlink.send([1]) == {1: 2 * RAW}
    with pytest.raises(ValueError, match="keeps no state"):
        downlink.load_state_dict({"versions": np.zeros(1)}, model)


# --- A broadcast -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [AUTO, 4])
def test_a_client_is_sent_the_message_from_what_it_holds_to_the_newest_version(ratio: float | str) -> None:
    """Byte for byte those of a `Broadcast`, with which a replica holds what the downlink says it does."""
    downlink = BroadcastDownlink(initial_model(), ratio, None)
    server = Broadcast(initial_model(), ratio=None if ratio == AUTO else ratio)
    replicas = {client: Replica(initial_model()) for client in range(4)}
    for number, model in enumerate(training(6)):
        chosen = [number % 3, 3]  # some come rarely, one always
        messages = {client: server.message(replicas[client].version) for client in chosen}
        assert downlink.send(chosen) == {client: len(message) for client, message in messages.items()}
        for client, message in messages.items():
            assert_identical(replicas[client].receive(message), downlink.model)
            assert downlink.held[client] == replicas[client].version == number
        downlink.advance(model)
        server.advance(model)
        assert downlink.describe() == {"left_out": server.left_out}
    assert downlink.held == {0: 3, 1: 4, 2: 5, 3: 5}


def test_clients_make_the_initial_model_themselves_or_are_sent_it_so_many_times_smaller() -> None:
    """Then the server begins with what was sent, too. Whoever was there holds it: a second message says little."""
    downlink = BroadcastDownlink(initial_model(), AUTO, None)
    assert_identical(downlink.initial, initial_model())
    assert downlink.send([1])[1] < OVERHEAD
    downlink = BroadcastDownlink(initial_model(), AUTO, 8)
    weights = downlink.initial["weight"], initial_model()["weight"]
    assert 0 < np.mean((weights[0] - weights[1]) ** 2) < 0.1 * np.var(weights[1])
    sent = downlink.send([1])[1]
    assert OVERHEAD < sent <= RAW / 8 + OVERHEAD
    assert downlink.send([1])[1] < OVERHEAD
    downlink.advance(next(training(1)))
    first, second = downlink.send([2, 1]).values()
    assert first > sent and first > second  # a client that comes later needs the initial model and what came after it


def test_a_refused_answer_changes_nothing_about_what_the_client_holds() -> None:
    downlink = BroadcastDownlink(initial_model(), AUTO, 8)
    downlink.send([1])
    for told in (downlink.settle, downlink.forget):
        told(1)
        assert downlink.held == {1: 0} and downlink.send([1])[1] < OVERHEAD


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_clients_keep_the_last_model_that_was_finite(number: float) -> None:
    downlink = BroadcastDownlink(initial_model(), 4, None)
    first, second, third = training(3)
    downlink.advance(first)
    downlink.send([1])
    before = downlink.model
    downlink.advance(second | {"bias": np.full(10, number, np.float32)})
    assert_identical(downlink.model, before)
    assert downlink.send([1])[1] < OVERHEAD and downlink.held == {1: 1}
    downlink.advance(third)
    assert downlink.send([1])[1] > OVERHEAD and downlink.held == {1: 2}
    np.testing.assert_allclose(downlink.model["weight"], third["weight"], atol=0.1)


@pytest.mark.parametrize(("ratio", "initial_ratio"), [(AUTO, None), (4, 8)])
def test_a_broadcast_goes_on_from_its_state_as_if_nothing_had_happened(
    ratio: float | str, initial_ratio: float | None
) -> None:
    whole = BroadcastDownlink(initial_model(), ratio, initial_ratio)
    *before, saved, next_, last = training(6)
    for model in (*before, saved):
        whole.send([1])
        whole.advance(model)
    resumed = BroadcastDownlink(initial_model(), ratio, initial_ratio)
    resumed.load_state_dict(whole.state_dict(), saved)
    resumed.held = dict(whole.held)
    for model in (next_, last):
        assert_identical(resumed.model, whole.model)
        assert resumed.send([1, 2]) == whole.send([1, 2]) and resumed.held == whole.held
        assert resumed.describe() == whole.describe()
        resumed.advance(model)
        whole.advance(model)
    assert_identical(resumed.state_dict(), whole.state_dict())


def test_a_state_of_another_way_down_is_refused_and_changes_nothing() -> None:
    downlink = BroadcastDownlink(initial_model(), AUTO, None)
    state = downlink.state_dict()
    for wrong in ({}, {name: value for name, value in state.items() if name != "true/bias"}):
        with pytest.raises(ValueError, match="not a state of this Broadcast"):
            downlink.load_state_dict(wrong, initial_model())
    assert_identical(downlink.state_dict(), state)


# --- The method's own --------------------------------------------------------------------------------------


def test_who_was_away_is_sent_the_payloads_of_all_rounds_that_it_missed_or_the_model() -> None:
    """As STC has it. What a payload leaves out is in the next one: nothing is lost for good."""
    stc = methods.make("stc", sparsity=0.1)
    downlink = OwnDownlink(initial_model(), stc)
    assert downlink.send([1, 2]) == {1: 0, 2: 0}  # clients make the initial model themselves
    for model in training(3):
        downlink.advance(model)
        downlink.send([1])
    missed, newest = downlink.send([2, 1]).values()
    assert 0 < missed < RAW and newest == 0
    for _ in range(60):  # the model stands still, and clients come to hold it
        downlink.advance(model)
    np.testing.assert_allclose(downlink.model["weight"], model["weight"], atol=1e-5)
    assert downlink.send([1]) == {1: RAW}


def test_the_methods_own_way_down_goes_on_from_its_state() -> None:
    whole, resumed = (OwnDownlink(initial_model(), methods.make("stc", sparsity=0.1)) for _ in range(2))
    *before, last = training(4)
    for model in before:
        whole.advance(model)
    resumed.load_state_dict(whole.state_dict(), model)
    for downlink in (whole, resumed):
        downlink.advance(last)
    assert_identical(resumed.model, whole.model)
    assert resumed.send([1]) == whole.send([1])
