"""Error feedback: nothing that a payload leaves out is lost, it only comes later."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedfq import BudgetError, Codec, ErrorFeedback, decode
from tests.updates import Array, assert_identical, draw, network, nmse

QUANTIZED = [name for name, value in network().items() if value.dtype.kind == "f" and "running" not in name]


def update_of(round_: int) -> dict[str, Array]:
    return {"w": draw("laplace", (40, 60), round_), "b": draw("normal", (60,), 1000 + round_)}


def copy(residual: dict[str, Array]) -> dict[str, Array]:
    return {name: value.copy() for name, value in residual.items()}


# --- The recursion -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec",
    [
        Codec(ratio=20),
        Codec(ratio=20, layout="digest", threads=2),
        Codec(ratio=20, allocator="exact"),
        Codec(ratio=20, rounding="stochastic"),
    ],
    ids=["waterfill", "digest", "exact", "stochastic"],
)
def test_p_is_update_plus_e_and_e_becomes_p_minus_q(codec: Codec) -> None:
    memory = ErrorFeedback(codec)
    e = {name: np.zeros_like(network()[name]) for name in QUANTIZED}
    for round_ in range(4):
        update = network(round_)
        p = {name: value + e[name] if name in e else value for name, value in update.items()}
        payload = memory.encode(update, seed=round_)
        assert payload == codec.encode(p, round_)
        q = decode(payload, like=update)
        e = {name: p[name] - q[name] for name in QUANTIZED}
        assert_identical(memory.residual, e)


def test_counters_and_statistics_have_no_memory() -> None:
    """What is late of a variance's fall could make it negative."""
    memory = ErrorFeedback(Codec(ratio=20))
    memory.encode(network())
    assert set(memory.residual) == set(QUANTIZED)


def test_the_sum_of_what_is_decoded_tracks_the_sum_of_updates() -> None:
    """After any number of rounds, the server lacks exactly the memory, and that stays bounded."""
    codec = Codec(ratio=16)
    memory = ErrorFeedback(codec)
    sent = {name: np.zeros(value.shape) for name, value in update_of(0).items()}
    received, without = copy(sent), copy(sent)
    sizes = []
    for round_ in range(80):
        update = update_of(round_)
        with_memory, plain = decode(memory.encode(update)), decode(codec.encode(update))
        for name in sent:
            sent[name] += update[name]
            received[name] += with_memory[name]
            without[name] += plain[name]
            np.testing.assert_allclose(received[name] + memory.residual[name], sent[name], atol=1e-3)
        sizes.append(float(sum(np.sum(e.astype(np.float64) ** 2) for e in memory.residual.values())))
    energy = sum(np.sum(value.astype(np.float64) ** 2) for value in update_of(0).values())
    assert max(sizes[40:]) < 1.2 * max(sizes[:40])
    assert max(sizes) < 5 * energy
    assert nmse(sent, received) < 0.02
    assert nmse(sent, received) < 0.2 * nmse(sent, without)


def test_a_constant_update_arrives_in_full_even_where_every_payload_drops_most_of_it() -> None:
    update = {"w": draw("laplace", (40, 60))}
    memory = ErrorFeedback(Codec(ratio=64))
    total = np.zeros((40, 60))
    for _ in range(100):
        total += decode(memory.encode(update))["w"]
    assert nmse(update, {"w": (total / 100).astype(np.float32)}) < 0.01
    assert nmse(update, decode(Codec(ratio=64).encode(update))) > 0.3


def test_float16_updates_are_remembered_in_float32() -> None:
    memory = ErrorFeedback(Codec(ratio=20))
    update = {"w": draw("normal", (30, 40)).astype(np.float16)}
    payload = memory.encode(update)
    assert decode(payload)["w"].dtype == np.float16
    sent = decode(payload, like={"w": update["w"].astype(np.float32)})["w"]  # as an Accumulator adds it
    np.testing.assert_array_equal(memory.residual["w"], update["w"].astype(np.float32) - sent)
    assert memory.residual["w"].dtype == np.float32


def test_a_tensor_that_is_not_trained_in_a_round_keeps_its_memory() -> None:
    memory = ErrorFeedback(Codec(max_bytes=100))
    update = {"a": draw("normal", (8, 16)), "b": draw("normal", (8, 16))}
    memory.encode(update)
    kept = memory.residual["b"].copy()
    memory.encode({"a": update["a"]})
    np.testing.assert_array_equal(memory.residual["b"], kept)


# --- Rollback ----------------------------------------------------------------------------------------------


def test_rollback_restores_the_memory_exactly() -> None:
    memory = ErrorFeedback(Codec(ratio=20))
    memory.encode(network(0))
    memory.encode(network(1))
    before = copy(memory.residual)
    lost = memory.encode(network(2))
    memory.rollback()
    assert_identical(memory.residual, before)
    assert memory.encode(network(2)) == lost


def test_rollback_of_the_first_encode() -> None:
    memory = ErrorFeedback(Codec(ratio=20))
    payload = memory.encode(network())
    memory.rollback()
    assert memory.encode(network()) == payload


def test_rollback_twice_is_refused() -> None:
    memory = ErrorFeedback(Codec(ratio=20))
    with pytest.raises(ValueError, match="nothing to roll back"):
        memory.rollback()
    memory.encode(network(0))
    memory.encode(network(1))
    memory.rollback()
    before = copy(memory.residual)
    with pytest.raises(ValueError, match="nothing to roll back"):
        memory.rollback()
    assert_identical(memory.residual, before)


# --- Failure -----------------------------------------------------------------------------------------------


def test_a_failed_encode_leaves_the_memory() -> None:
    memory = ErrorFeedback(Codec(max_bytes=1000))
    memory.encode(network(0))
    before, state = copy(memory.residual), {name: value.copy() for name, value in memory.state_dict().items()}
    not_finite, reshaped = network(1), network(1)
    not_finite["fc.weight"][3, 4] = np.nan
    reshaped["fc.weight"] = reshaped["fc.weight"].T
    with pytest.raises(ValueError, match="tensor 'fc.weight' has entries that are not finite"):
        memory.encode(not_finite)
    with pytest.raises(ValueError, match=r"tensor 'fc.weight' has shape \(144, 40\), its memory has \(40, 144\)"):
        memory.encode(reshaped)
    with pytest.raises(TypeError):
        memory.encode({**network(1), "w": None})
    memory.codec = Codec(max_bytes=10)
    with pytest.raises(BudgetError):
        memory.encode(network(1))
    assert_identical(memory.residual, before)
    assert_identical(memory.state_dict(), state)
    memory.rollback()  # still that of the encode that worked


def test_the_update_is_not_changed() -> None:
    memory = ErrorFeedback(Codec(ratio=20))
    update = network()
    memory.encode(update)
    memory.encode(update)
    assert_identical(update, network())


# --- Save and load -----------------------------------------------------------------------------------------


def through_npz(state: dict[str, Array], folder: Path) -> Any:
    np.savez(folder / "memory.npz", **state)
    return np.load(folder / "memory.npz", allow_pickle=False)


def through_safetensors(state: dict[str, Array], folder: Path) -> Any:
    save_file(state, folder / "memory.safetensors")
    return load_file(folder / "memory.safetensors")


@pytest.mark.parametrize("through", [through_npz, through_safetensors])
@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_a_saved_memory_continues_with_the_same_bytes(through: Any, rounds: int, tmp_path: Path) -> None:
    codec = Codec(ratio=20)
    memory, restored = ErrorFeedback(codec), ErrorFeedback(codec)
    for round_ in range(rounds):
        memory.encode(network(round_))
    restored.load_state_dict(through(memory.state_dict(), tmp_path))
    assert_identical(dict(sorted(restored.residual.items())), dict(sorted(memory.residual.items())))
    if rounds:  # what can be rolled back still can
        memory.rollback()
        restored.rollback()
    for round_ in range(10, 13):
        assert restored.encode(network(round_), seed=round_) == memory.encode(network(round_), seed=round_)


def test_after_a_rollback_there_is_nothing_to_roll_back_in_the_state_either(tmp_path: Path) -> None:
    memory, restored = ErrorFeedback(Codec(ratio=20)), ErrorFeedback(Codec(ratio=20))
    memory.encode(network(0))
    memory.encode(network(1))
    memory.rollback()
    restored.load_state_dict(through_npz(memory.state_dict(), tmp_path))
    with pytest.raises(ValueError, match="nothing to roll back"):
        restored.rollback()


def test_a_state_is_a_snapshot() -> None:
    memory = ErrorFeedback(Codec(ratio=20))
    memory.encode(network(0))
    state = memory.state_dict()
    frozen = copy(state)
    memory.encode(network(1))
    assert_identical(state, frozen)
    restored = ErrorFeedback(Codec(ratio=20))
    restored.load_state_dict(state)
    state["residual/fc.weight"][...] = 99
    assert_identical(restored.residual, {name: frozen[f"residual/{name}"] for name in QUANTIZED})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"momentum/w": np.zeros(3, np.float32)}, "not a state of ErrorFeedback: unexpected entry 'momentum/w'"),
        ({"w": np.zeros(3, np.float32)}, "unexpected entry 'w'"),
        ({"residual/w": np.array([1.0, np.nan])}, "the memory of 'w' is not finite"),
        ({"previous/w": np.array([np.inf])}, "the memory of 'w' is not finite"),
        ({"residual/w": np.array(["a", "b"])}, "could not convert"),
    ],
)
def test_garbage_is_refused_and_changes_nothing(state: dict[str, Array], message: str) -> None:
    memory = ErrorFeedback(Codec(ratio=20))
    memory.encode(network())
    before = {name: value.copy() for name, value in memory.state_dict().items()}
    for garbage in (state, {**before, **state}):
        with pytest.raises(ValueError, match=message):
            memory.load_state_dict(garbage)
    assert_identical(memory.state_dict(), before)


def test_a_state_of_another_model_is_refused_when_used() -> None:
    memory = ErrorFeedback(Codec(ratio=20))
    memory.load_state_dict({"residual/w": np.zeros((3, 4), np.float32)})
    with pytest.raises(ValueError, match=r"tensor 'w' has shape \(5,\), its memory has \(3, 4\)"):
        memory.encode({"w": np.ones(5, np.float32)})


def test_unbiased_payloads_have_no_memory() -> None:
    with pytest.raises(ValueError, match="unbiased=True leaves noise"):
        ErrorFeedback(Codec(ratio=16, unbiased=True))
