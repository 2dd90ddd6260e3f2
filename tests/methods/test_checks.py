"""What every method promises, checked on every method: the one suite that a new method has to pass."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
import pytest

from fedfq.codec.errors import BudgetError, PayloadError
from fedfq.methods import METHODS, Server, State, make
from tests.methods.cases import (
    CASES,
    encode,
    fitting,
    flat,
    has_ratio,
    method,
    mixed,
    order,
    payload_of,
    plain,
    read_only,
)
from tests.methods.fuzz import COUNT, TRACED, fuzz
from tests.updates import Array, assert_identical, raw_size

every = pytest.mark.parametrize("case", CASES)
UNBIASED = [case for case in CASES if method(case).is_unbiased]
# Near to unbiased: the server's part keeps <h, q> = <h, h>, with a uniform rotation in the mean
LEVEL = [*UNBIASED, *(case for case in CASES if case.startswith("eden"))]
STATELESS = ("no memory", "unbiased")
MEMORY = [c for c in CASES if method(c).client_memory != "none" and not any(word in c for word in STATELESS)]
FEEDBACK = [case for case in MEMORY if getattr(method(case), "error_feedback", False)]
# Random rounding and a gain make those that are sent larger, to make up for those that are not
GAIN = [case for case in CASES if getattr(method(case), "gain", False)]
INFLATED = ("fedfq-cgsa", "fedfq-exact", *GAIN)


def through_file(state: State) -> State:
    """What a checkpoint gives back."""
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    return dict(np.load(file))


def assert_like(decoded: Mapping[str, Array], update: Mapping[str, Array]) -> None:
    found = {name: (array.shape, array.dtype) for name, array in decoded.items()}
    assert found == {name: (array.shape, array.dtype) for name, array in update.items()}
    assert all(np.isfinite(array).all() for array in decoded.values())


# What comes back


@every
@pytest.mark.parametrize("update", [mixed(), plain()], ids=["mixed", "plain"])
def test_names_shapes_and_dtypes_come_back_and_all_is_finite(case: str, update: dict[str, Array]):
    made = fitting(case, update)
    assert_like(made.decode(payload_of(encode(made, update)), update), update)


@every
def test_integers_and_statistics_come_back_as_they_are(case: str):
    update = mixed()
    made = fitting(case, update)
    decoded = made.decode(payload_of(encode(made, update)), update)
    for name in ("bn.num_batches_tracked", "mask"):
        assert (decoded[name] == update[name]).all()
    if not case.startswith("fedfq"):  # which codes statistics within its budget: tests/codec/test_codec.py
        for name in ("bn.running_mean", "bn.running_var"):
            np.testing.assert_allclose(decoded[name], update[name], rtol=1e-3, atol=1e-6)


@every
def test_zeros_stay_zeros(case: str):
    update = {name: np.zeros_like(array) for name, array in mixed().items()}
    made = fitting(case, update)
    decoded = made.decode(payload_of(encode(made, update)), update)
    assert_like(decoded, update)
    assert not any(array.any() for array in decoded.values())


@every
@pytest.mark.parametrize("value", [0.5, -3.0, 0.0])
def test_one_element(case: str, value: float):
    update = {"x": np.array([value], np.float32)}
    if has_ratio(case):  # no payload is as small as 4 bytes: statistics, which go as float16, make room
        update["n.running_var"] = np.ones(100, np.float32)
    made = method(case, ratio=1) if has_ratio(case) else method(case)
    decoded = made.decode(payload_of(encode(made, update)), update)
    np.testing.assert_allclose(decoded["x"], value, rtol=0.01)


@every
def test_no_floating_point_entries_at_all(case: str):
    update = {"count": np.arange(100) * 2**40, "empty": np.zeros((3, 0), np.float32)}
    made = fitting(case, update)
    try:
        payload = payload_of(encode(made, update))
    except BudgetError as error:  # integers go as they are: with some bytes beside them, no ratio is left
        assert error.minimum > raw_size(update)
        return
    assert_identical(made.decode(payload, update), update)


@every
@pytest.mark.parametrize("scale", [1e-27, 1e30, 3e38])
def test_tiny_and_huge_updates(case: str, scale: float):
    update = plain()
    largest = max(np.abs(array).max() for array in update.values())
    scaled = {name: (array / largest * np.float32(scale)).astype(np.float32) for name, array in update.items()}
    decoded = method(case).decode(payload_of(encode(method(case), scaled)), scaled)
    assert_like(decoded, scaled)
    usual = method(case).decode(payload_of(encode(method(case), update)), update)
    projection = np.dot(flat(decoded) / scale, flat(scaled) / scale) / np.square(flat(scaled) / scale).sum()
    usual_projection = np.dot(flat(usual), flat(update)) / np.square(flat(update)).sum()
    if scale < 1e38:  # where norms and unbiased values are beyond float32, they are clipped
        assert projection == pytest.approx(usual_projection, rel=0.2 if case in ("fedfq", "fedfq, unbiased") else 0.05)


@every
def test_magnitudes_are_kept(case: str):
    """Peers have averaged over the zeros too, or forgotten to rescale: ten times too small, or too large."""
    update = plain()
    made = method(case)
    h, q = flat(update), flat(made.decode(payload_of(encode(made, update)), update))
    projection = np.dot(h, q) / np.dot(h, h)
    if case in LEVEL:
        assert 0.8 < projection < 1.25
        assert 0.7 < np.dot(np.sign(h), q) / np.abs(h).sum() < 1.35
    else:
        assert 0.02 < projection < 1.1
        sent = q != 0
        assert case in INFLATED or 0.9 < np.abs(q[sent]).mean() / np.abs(h[sent]).mean() < 1.1


# Promises


@every
def test_same_seed_same_bytes(case: str):
    first, second = (payload_of(encode(fitting(case, mixed()), mixed(), seed=11)) for _ in range(2))
    assert first == second


@every
@pytest.mark.parametrize("seed", [0, 2**64, 2**70 + 3])
def test_seeds_may_be_large(case: str, seed: int):
    update = plain()
    assert_like(method(case).decode(payload_of(encode(method(case), update, seed)), update), update)


@every
def test_inputs_stay_as_they_are(case: str):
    """They cannot be written to, and are the same after."""
    update = read_only(plain())
    memory: State = {}
    for number in range(3):
        before = {name: array.copy() for name, array in memory.items()}
        upload = method(case).encode(update, memory, order(seed=number, round=number))
        assert_identical(memory, before)
        memory = read_only(upload.memory)
    assert_identical(update, plain())


@every
def test_what_is_not_finite_is_refused(case: str):
    for value in (np.nan, np.inf):
        update = plain()
        update["layer.bias"][3] = value
        with pytest.raises(ValueError, match="not finite"):
            encode(method(case), update)


@pytest.mark.parametrize("case", UNBIASED)
def test_unbiased_methods_are_right_in_the_mean(case: str):
    """||mean - h||^2 is as large as the variance says. A bias would add its square, 600-fold."""
    rng = np.random.default_rng(5)
    h = rng.laplace(size=60).astype(np.float32)
    made, seeds = fitting(case, {"h": h}), 600
    decoded = np.array(
        [made.decode(payload_of(encode(made, {"h": h}, seed)), {"h": h})["h"] for seed in range(seeds)], np.float64
    )
    expected = decoded.var(axis=0, ddof=1).sum() / seeds + 1e-12
    assert np.square(decoded.mean(axis=0) - h).sum() / expected < 2


@pytest.mark.parametrize("case", [case for case in CASES if has_ratio(case)])
@pytest.mark.parametrize("ratio", [1, 3, 8, 31.7, 100, 400])
def test_a_ratio_is_kept_to_the_byte(case: str, ratio: float):
    update = plain() | {"steps": np.array(3, np.int64), "n.running_var": np.ones(10, np.float32)}
    payload = payload_of(encode(method(case, ratio=ratio), update))
    assert len(payload) <= raw_size(update) / ratio
    if ratio > 16:  # EDEN and STC never need more than 8 and 2 bits per entry
        assert len(payload) > 0.8 * raw_size(update) / ratio
    decoded = method(case, ratio=ratio).decode(payload, update)
    assert_like(decoded, update)


@pytest.mark.parametrize("case", [case for case in CASES if has_ratio(case)])
@pytest.mark.parametrize("update", [plain(), mixed()], ids=["plain", "mixed"])
def test_a_budget_that_is_too_small_says_what_is_needed(case: str, update: dict[str, Array]):
    with pytest.raises(BudgetError) as caught:
        encode(method(case, ratio=1e6), update)
    enough = raw_size(update) / (caught.value.minimum + 0.5)
    assert len(payload_of(encode(method(case, ratio=enough), update))) <= caught.value.minimum
    with pytest.raises(BudgetError):
        encode(method(case, ratio=raw_size(update) / (caught.value.minimum - 0.5)), update)


BAD_OPTIONS = [
    *[
        (name, {"ratio": bad})
        for name in ("eden", "stc", "topk", "fedfq")
        for bad in (0, -1, 0.5, float("nan"), float("inf"))
    ],
    *[("stc", {"sparsity": bad}) for bad in (0.0, -0.1, 1.5, float("nan"))],
    *[("stc", {"sparsity": 0.1, "ratio": 10})],
    *[("qsgd", {"levels": bad}) for bad in (0, -1, 2**21)],
    *[("qsgd", {"bucket": 0})],
    *[("fedpaq", {"levels": bad}) for bad in (0, 2**23)],
    *[("fedpaq", {"norm": "l1"})],
    *[("acsgd", {"rate": bad}) for bad in (0, float("inf"))],
    *[("acsgd", {"alpha": bad}) for bad in (0, 1.1)],
    *[("acsgd", {"rounds": 0})],
    *[(name, {"claimed_ratio": bad}) for name in ("acsgd-topk", "fedfq-cgsa", "fedfq-exact") for bad in (0, 0.5)],
    *[("dadaquant", {"levels": bad}) for bad in (0, 2**16)],
    *[("dadaquant", {"patience": 0})],
]


@pytest.mark.parametrize("name, options", BAD_OPTIONS)
def test_options_out_of_range_are_refused(name: str, options: dict[str, float]):
    with pytest.raises(ValueError, match=" must be |not both"):
        make(name, **options)


# Memory


@pytest.mark.parametrize("case", MEMORY)
def test_a_clients_memory_goes_through_a_file(case: str):
    def run(save: bool) -> list[bytes | None]:
        memory: State = {}
        payloads = []
        for number in range(4):
            upload = method(case).encode(plain(number), memory, order(seed=number, round=number))
            memory = through_file(upload.memory) if save else upload.memory
            payloads.append(upload.payload)
        return payloads

    assert run(save=True) == run(save=False)


@pytest.mark.parametrize("case", [*FEEDBACK, "aqg"])
def test_memory_of_another_model_is_refused(case: str):
    memory = encode(method(case), plain()).memory
    other = plain() | {"layer.weight": np.ones((7, 11), np.float32)}
    with pytest.raises(ValueError, match="memory"):
        method(case).encode(other, memory, order())


@every
def test_after_a_refusal_the_old_memory_gives_the_same_payload(case: str):
    memory = encode(method(case), plain(0)).memory
    first = method(case).encode(plain(1), memory, order(seed=1, round=2))
    again = method(case).encode(plain(1), memory, order(seed=1, round=2))
    assert first.payload == again.payload
    assert_identical(first.memory, again.memory)


@pytest.mark.parametrize("case", [case for case in FEEDBACK if case not in GAIN])
def test_error_feedback_keeps_what_was_not_sent(case: str):
    """All that was sent and what is left in memory are all there was."""
    memory: State = {}
    sent, total = np.zeros(flat(plain()).size), np.zeros(flat(plain()).size)
    for number in range(5):
        update = plain(number)
        upload = method(case).encode(update, memory, order(seed=number))
        sent += flat(method(case).decode(payload_of(upload), update))
        total += flat(update)
        memory = upload.memory
    np.testing.assert_allclose(sent + flat(memory), total, atol=1e-5)


# The server


def play(server: Server, case: str, rounds: range, memories: dict[int, State]) -> list[dict[str, Array]]:
    """Rounds of three clients, one of which sends garbage as well."""
    weights = {0: 1.0, 1: 2.0, 2: 0.5}
    changes = []
    for number in rounds:
        announced = server.announce(weights)
        for client, weight in weights.items():
            told = order(100 * number + client, number, client, announced.get(client, b""))
            upload = method(case).encode(plain(10 * number + client), memories.get(client, {}), told)
            with pytest.raises(PayloadError):
                server.receive(client, b"garbage", weight)
            server.receive(client, upload.payload, weight)
            memories[client] = upload.memory
        changes.append(dict(server.finish(2.0)))
    return changes


@every
def test_a_servers_state_goes_through_a_file(case: str):
    server, memories = method(case).server(plain()), {}
    play(server, case, range(3), memories)
    restored = method(case).server(plain())
    restored.load_state_dict(through_file(server.state_dict()))
    copies = dict(memories)
    assert restored.announce({0: 1.0, 1: 3.0}) == server.announce({0: 1.0, 1: 3.0})
    for left, right in zip(play(server, case, range(3, 5), memories), play(restored, case, range(3, 5), copies)):
        assert_identical(left, right)


@every
def test_a_servers_change_points_where_the_updates_do(case: str):
    server = method(case).server(plain())
    with pytest.raises(ValueError):
        server.load_state_dict({"nonsense": np.zeros(3)})
    update = plain()
    upload = encode(method(case), update)
    for client in range(3):
        server.receive(client, upload.payload, 1.0)
    h, change = flat(update), flat(server.finish(1.0))
    np.testing.assert_allclose(change, flat(method(case).decode(payload_of(upload), update)), rtol=1e-5, atol=1e-9)
    assert np.dot(h, change) > 0


@every
def test_a_round_without_answers_changes_nothing(case: str):
    server = method(case).server(mixed())
    server.receive(0, None, 1.0)
    assert not any(array.any() for array in server.finish(1.0).values())


@every
@pytest.mark.filterwarnings("error")
def test_the_mean_of_the_largest_integers_is_no_overflow(case: str):
    update = plain() | {"signed": np.array([2**63 - 1, -(2**63)]), "unsigned": np.array([2**64 - 1, 0], np.uint64)}
    server = method(case).server(update)
    for client in range(3):
        server.receive(client, encode(method(case), update).payload, 0.7)
    change = server.finish(1.0)
    for name in ("signed", "unsigned"):
        assert change[name].dtype == update[name].dtype
        np.testing.assert_allclose(change[name].astype(np.float64), update[name].astype(np.float64), rtol=1e-12)


# Bytes from strangers


@every
def test_malformed_payloads(case: str):
    fuzz(case, COUNT if case in METHODS else COUNT // 4, traced=TRACED)
