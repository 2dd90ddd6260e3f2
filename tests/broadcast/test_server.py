"""The way down: clients hold the server's bits, whatever they missed, and what is left out does not add up."""

from typing import Any

import numpy as np
import pytest
import torch

import fedfq
from fedfq import Broadcast, BudgetError, Replica
from fedfq.broadcast.server import OVERHEAD
from tests.broadcast.models import Model, hand_out, initial_model, train
from tests.updates import assert_identical, raw_size

WEIGHTS = ("conv.weight", "bn.weight", "fc.weight", "fc.bias")


def distance(one: Model, other: Model) -> float:
    return sum(float(np.sum((one[name].astype(np.float64) - other[name]) ** 2)) for name in WEIGHTS)


# --- Clients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"ratio": 40}, {"initial_ratio": 4}, {"ratio": 12, "initial_ratio": 6}], ids=str
)
def test_clients_that_come_and_go_hold_what_the_server_says_they_hold(options: dict[str, Any]) -> None:
    """Some are there every round, some rarely, some restart from what they saved, some join late."""
    initial = initial_model()
    server = Broadcast(initial, **options)
    known = "initial_ratio" not in options
    replicas = {number: Replica(initial) for number in range(6)}
    held: dict[int, int | None] = dict.fromkeys(replicas, 0 if known else None)
    rng = np.random.default_rng(3)
    for round_, model in enumerate(train(server.model, 40)):
        server.advance(model)
        assert server.version == round_ + 1
        for number in {0, *rng.choice(6, 2).tolist()}:
            if rng.random() < 0.2:  # it restarts
                saved = replicas[number].state_dict()
                replicas[number] = Replica(lambda: initial)
                replicas[number].load_state_dict(saved)
            received = replicas[number].receive(server.message(held[number]))
            assert_identical(received, server.model)
            held[number] = replicas[number].version
            assert held[number] == server.version
    late = Replica(initial)
    assert_identical(late.receive(server.message(0 if known else None)), server.model)


def test_a_client_that_lost_everything_is_sent_all_bits() -> None:
    server = Broadcast(initial_model())
    for model in train(initial_model(), 5):
        server.advance(model)
    stranger = Replica(lambda: initial_model(seed=9))  # another initial model
    with pytest.raises(fedfq.PayloadError, match="version 0 of the server is another model") as caught:
        stranger.receive(server.message(0))
    assert caught.value.reason == "held"
    assert_identical(stranger.receive(server.message(None)), server.model)
    for model in train(server.model, 5, seed=2):
        server.advance(model)
        assert_identical(hand_out(server, stranger), server.model)


def test_who_holds_the_newest_version_is_sent_next_to_nothing() -> None:
    server, replica = Broadcast(initial_model()), Replica(initial_model())
    assert len(server.message(0)) < OVERHEAD
    assert_identical(hand_out(server, replica), initial_model())
    server.advance(next(train(initial_model(), 1)))
    hand_out(server, replica)
    message = server.message(replica.version)
    assert len(message) < OVERHEAD
    assert_identical(replica.receive(message), server.model)
    server.advance(list(train(initial_model(), 2))[1])
    assert_identical(hand_out(server, replica), server.model)


def test_a_compressed_initial_model_becomes_the_servers_own() -> None:
    initial = initial_model()
    server = Broadcast(initial, initial_ratio=4)
    assert len(server.message(None)) <= raw_size(initial) / 4 + OVERHEAD
    assert 0 < distance(server.model, initial) < 0.1 * distance(initial, {name: 0 * initial[name] for name in initial})
    empty = Replica({name: np.zeros_like(array) for name, array in initial.items()})  # names and shapes are enough
    assert_identical(empty.receive(server.message(None)), server.model)


# --- What is left out --------------------------------------------------------------------------------------


def test_what_clients_lack_does_not_add_up() -> None:
    """It is about as much as a round changes, after a hundred rounds as after ten, in a fraction of the bytes."""
    before = initial_model()
    server = Broadcast(before, ratio=24)
    sizes, changes, left_out = [], [], []
    for model in train(before, 100):
        changes.append(distance(model, before))
        before = model
        server.advance(model)
        sizes.append(len(server.message(max(0, server.version - 2))))
        assert distance(model, server.model) == pytest.approx(server.left_out * mean(changes), rel=1e-4)
        left_out.append(server.left_out)
    assert np.mean(left_out[50:]) < 2 * np.mean(left_out[5:20]) + 4
    assert sum(sizes) < 100 * raw_size(before) / 12


def mean(changes: list[float]) -> float:
    """Of rounds' changes, with weights that fall by 0.8."""
    found = changes[0]
    for change in changes[1:]:
        found = 0.8 * found + 0.2 * change
    return found


def test_statistics_are_precise_however_far_they_fall_and_counters_exact() -> None:
    """From 1 to 2e-3: a difference in the step of the weights would make variances negative."""
    server = Broadcast(initial_model(), ratio=16)
    for model in train(initial_model(), 50):
        server.advance(model)
        held = server.model
        for name in ("bn.running_mean", "bn.running_var"):
            np.testing.assert_allclose(held[name], model[name], rtol=2**-11)
        assert held["bn.num_batches_tracked"] == model["bn.num_batches_tracked"]
        np.testing.assert_array_equal(held["mask"], model["mask"])


@pytest.mark.parametrize("ratio", [6, 20, 60])
def test_a_ratio_is_a_promise_for_who_was_there_in_the_last_round(ratio: float) -> None:
    server, replica = Broadcast(initial_model(), ratio=ratio), Replica(initial_model())
    for model in train(initial_model(), 10):
        server.advance(model)
        message = server.message(replica.version)
        assert len(message) <= raw_size(model) / ratio
        assert_identical(replica.receive(message), server.model)


def test_a_ratio_that_no_payload_can_have_is_refused_at_once() -> None:
    with pytest.raises(BudgetError, match="at least"):
        Broadcast(initial_model(), ratio=5000)
    with pytest.raises(BudgetError):
        Broadcast(initial_model(), initial_ratio=1e6)


# --- Anchors -----------------------------------------------------------------------------------------------


def test_a_new_anchor_comes_when_too_much_is_left_out() -> None:
    """With bytes enough there is none; with few, there is one every few rounds."""

    def count_anchors(ratio: float) -> int:
        server = Broadcast(initial_model(), ratio=ratio)
        for model in train(initial_model(), 40):
            server.advance(model)
        return len(server.state_dict()["anchors"]) - 1

    assert count_anchors(6) <= 1
    assert 2 < count_anchors(60) < 30


def test_who_was_away_for_too_long_is_sent_all_bits_in_less() -> None:
    """Payloads that are larger together than the model are not kept."""
    server = Broadcast(initial_model())
    rng = np.random.default_rng(0)
    model = initial_model()
    for _ in range(30):
        for name in WEIGHTS:  # noise, which nothing compresses well
            model[name] = model[name] + rng.standard_normal(model[name].shape).astype(np.float32)
        server.advance(model)
        server.message(server.version - 1)
    assert len(server.message(0)) < 1.1 * raw_size(model)
    assert_identical(Replica(initial_model()).receive(server.message(0)), server.model)


# --- State, types and bad input ----------------------------------------------------------------------------


def test_a_server_goes_on_from_its_state_with_the_same_bytes() -> None:
    models = list(train(initial_model(), 20))
    server = Broadcast(initial_model())
    for round_, model in enumerate(models[:10]):
        server.advance(model)
        server.message(round_ // 2)
    other = Broadcast(initial_model())
    other.load_state_dict(server.state_dict())
    for model in models[10:]:
        for each in (server, other):
            each.advance(model)
        assert server.message(3) == other.message(3) and server.left_out == other.left_out
        assert_identical(server.model, other.model)


def test_a_state_of_another_model_is_refused_and_nothing_changes() -> None:
    server = Broadcast(initial_model())
    server.advance(next(train(initial_model(), 1)))
    before = server.message(0)
    other = Broadcast({"w": np.zeros((20, 20), np.float32)})
    own = server.state_dict()
    broken = [own | {"anchors": np.array(versions)} for versions in ([], [100], [-1], [0.5], [1, 0])]
    broken += [own | {"numbers": np.array([np.nan, 1, 1])}, own | {"digests": own["digests"][:8]}]
    for state in (other.state_dict(), {}, {"anchors": np.zeros(3)}, *broken):
        with pytest.raises(ValueError, match="not a state of this Broadcast"):
            server.load_state_dict(state)
    assert server.message(0) == before


def test_models_of_torch_come_back_as_such() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30)).to(torch.bfloat16)
    server, replica = Broadcast(net), Replica(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1)
    server.advance(net)
    received = hand_out(server, replica)
    for name, tensor in net.state_dict().items():
        assert received[name].dtype == tensor.dtype and received[name].shape == tensor.shape
    net.load_state_dict(received)


def test_looking_at_the_model_or_the_state_and_changing_them_changes_nothing() -> None:
    """Also where numbers lie beyond the largest of the caller's dtype."""
    float8 = torch.float8_e4m3fn
    weights = torch.full((30, 40), 448.0).to(float8)
    server, replica = Broadcast({"w": weights}, ratio=6), Replica({"w": weights})
    rng = torch.Generator().manual_seed(0)
    for _ in range(10):
        server.advance({"w": (440 + 40 * torch.randn(30, 40, generator=rng)).clamp(-448, 448)})
        server.model["w"].fill_(1.0)
        for state in (server.state_dict(), replica.state_dict()):
            for array in filter(lambda each: each.flags.writeable, state.values()):
                array[...] = 7
        replica.receive(server.message(replica.version))
        assert replica.version == server.version


def test_one_enormous_round_is_forgotten() -> None:
    """The energy of a change may lie beyond float32."""
    server = Broadcast(initial_model(), ratio=60)
    models = list(train(initial_model(), 60))
    server.advance(models[0] | {"fc.bias": np.full(40, 1e25, np.float32)})
    for model in models:
        server.advance(model)
        assert np.isfinite(server.left_out)
    assert server.left_out >= 0


def test_integers_beyond_the_default_size_are_sent_all_the_same() -> None:
    rng = np.random.default_rng(0)
    counters = {"n": np.zeros(5000, np.int64), "w": np.zeros((10, 10), np.float32)}
    server, replica = Broadcast(counters), Replica(counters)
    server.advance(counters | {"n": rng.integers(0, 1 << 40, 5000)})
    assert_identical(hand_out(server, replica), server.model)
    with pytest.raises(BudgetError):
        Broadcast(counters, ratio=100)


@pytest.mark.parametrize("ratio", [0, 0.5, np.nan, True, "auto"])
def test_what_is_no_ratio_is_refused(ratio: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="ratio must be"):
        Broadcast(initial_model(), ratio=ratio)


def test_what_is_not_finite_or_another_model_changes_nothing() -> None:
    model = next(train(initial_model(), 1))
    server = Broadcast(initial_model())
    server.advance(model)
    before, version = server.message(0), server.version
    for bad in (
        model | {"fc.bias": np.full(40, np.nan, np.float32)},
        model | {"fc.bias": np.zeros(41, np.float32)},
        {name: array for name, array in model.items() if name != "mask"},
        model | {"more": np.zeros(3)},
        model | {"mask": np.zeros(10, np.int32)},
    ):
        with pytest.raises(ValueError):
            server.advance(bad)
    assert server.version == version and server.message(0) == before


@pytest.mark.parametrize("held", [-1, 2, 10**30, "x", 0.5])
def test_there_is_no_message_for_a_version_that_never_was(held: Any) -> None:
    server = Broadcast(initial_model())
    server.advance(next(train(initial_model(), 1)))
    with pytest.raises(ValueError, match="there is no version"):
        server.message(held)


def test_a_model_that_stands_still_is_no_trouble() -> None:
    server, replica = Broadcast(initial_model()), Replica(initial_model())
    for _ in range(3):
        server.advance(initial_model())
        assert len(server.message(0)) < 100
        assert_identical(hand_out(server, replica), initial_model() | {})
    for model in train(initial_model(), 3):
        server.advance(model)
        server.advance(model)
        assert_identical(hand_out(server, replica), server.model)


@pytest.mark.parametrize(
    "model", [{}, {"empty": np.zeros((0, 3), np.float32)}, {"n": np.array(3)}, {"x": np.float32(1)}]
)
def test_odd_models(model: Model) -> None:
    server, replica = Broadcast(model), Replica(model)
    server.advance({name: array + 1 for name, array in model.items()})
    assert_identical(hand_out(server, replica), server.model)
    assert_identical(Replica(model).receive(server.message(None)), server.model)
