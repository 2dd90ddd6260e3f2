"""The payload around the tensors with the common step."""

import numpy as np

from fedfq.codec.encoder.frame import Frame
from fedfq.codec.encoder.own_steps import Statistics
from fedfq.codec.format.container import Encoding, parse
from fedfq.codec.tensors import Tensor, read
from tests.updates import Array


def gaussian(*shape: int, scale: float = 1.0) -> Array:
    return (scale * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


UPDATE = {
    "weight": gaussian(50, 40),
    "bias": gaussian(40),
    "bn.running_mean": gaussian(2000),
    "ln.running_mean": gaussian(10),
    "ids": np.arange(2000),
    "count": np.array(7),
}


def frame(update: dict[str, Array] = UPDATE, *, as_digest: bool = False, may_share: bool = True) -> Frame:
    tensors = read(update, ("*running*",))
    return Frame(tensors, as_digest=as_digest, with_gain=False, basis=None, may_share=may_share)


def test_small_tensors_share_and_others_have_sections_of_their_own() -> None:
    steps = {"bn.running_mean": 0.125, "ln.running_mean": 0.5}
    made = frame().make_container(steps)
    assert set(made.fixed) == {"ids", "bn.running_mean"} and made.small is not None
    apart = frame(may_share=False).make_container(steps)
    assert set(apart.fixed) == {"ids", "count", "bn.running_mean", "ln.running_mean"} and apart.small is None


def test_the_minimum_is_what_the_payload_takes_without_the_common_step() -> None:
    made = frame().make_container({"bn.running_mean": 0.125})
    assert made.minimum == len(made.to_bytes(Encoding())) > frame().bare.minimum
    assert list(parse(made.to_bytes(Encoding()), None).sections) == ["weight", "bn.running_mean", "ids"]


def test_tensors_of_the_common_step_are_those_without_their_own() -> None:
    """Statistics among the small ones keep their place, as zeros."""
    weight, joined = frame().join_common({"bn.running_mean": 0.125})
    assert weight.spec.name == "weight" and joined.spec.shape == (2, 32)
    assert np.array_equal(joined.array.reshape(-1)[:40], UPDATE["bias"]) and not joined.array.reshape(-1)[40:].any()
    sorted_by_name = frame({"b": gaussian(3), "a": gaussian(4)}, as_digest=True).join_common({})
    assert np.array_equal(sorted_by_name[0].array.reshape(-1)[:4], gaussian(4))


def statistics_of(update: dict[str, Array]) -> Statistics:
    return Statistics([Tensor(name, value) for name, value in update.items()])


def test_statistics_are_as_fine_as_the_room_allows() -> None:
    update = {"bn.running_mean": gaussian(2000)}
    errors = []
    for room in (100, 300, 600, 1200, 3000):
        steps, container = frame(update).fit_statistics(statistics_of(update), room, shared=False)
        assert container.minimum - frame(update).bare.minimum <= room
        errors.append(steps.get("bn.running_mean", np.inf))
    assert errors == sorted(errors, reverse=True) and errors[1] > errors[-1]


def test_where_not_all_fit_the_most_valuable_are_sent() -> None:
    update = {f"{k}.running_mean": gaussian(3000) for k in range(3)} | {
        "v.running_var": np.full(3000, -0.9, np.float32)
    }
    steps, container = frame(update).fit_statistics(statistics_of(update), 400, shared=False)
    assert "v.running_var" in steps and 1 <= len(steps) < 4
    assert container.minimum - frame(update).bare.minimum <= 400


def test_statistics_leave_room_for_the_weights() -> None:
    update = {"bn.running_mean": gaussian(2000)}
    _, container = frame(update).fit_statistics(statistics_of(update), 1000, shared=True)
    assert container.minimum - frame(update).bare.minimum <= 500
