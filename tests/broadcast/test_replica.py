"""A client among messages that are not for it, or that somebody has made up: it keeps what it holds."""

from collections.abc import Callable

import numpy as np
import pytest

from fedfq import Broadcast, PayloadError, Replica, encode
from fedfq.codec.format.message import EXACT, HELD, NOTHING, Message, Step, hash_model, write_exact
from tests.broadcast.models import Model, hand_out, initial_model, train
from tests.updates import assert_identical


def a_server(rounds: int, seed: int = 1, ratio: float = 60) -> Broadcast:
    """With so few bytes that there are new anchors every few rounds."""
    server = Broadcast(initial_model(), ratio=ratio)
    for model in train(initial_model(), rounds, seed):
        server.advance(model)
    return server


@pytest.fixture
def client() -> tuple[Broadcast, Replica]:
    server, replica = a_server(4), Replica(initial_model())
    hand_out(server, replica)
    return server, replica


def refused(replica: Replica, message: bytes) -> str:
    """Why; and the replica is as it was."""
    before = replica.version, {name: array.tobytes() for name, array in replica.state_dict().items()}
    with pytest.raises(PayloadError) as caught:
        replica.receive(message)
    assert before == (replica.version, {name: array.tobytes() for name, array in replica.state_dict().items()})
    return f"{caught.value.reason}: {caught.value}"


def test_messages_for_others_are_refused_with_what_is_held(client: tuple[Broadcast, Replica]) -> None:
    server, replica = client
    assert refused(replica, a_server(2).message(0)) == "held: a message for who has version 0: version 4 is held"
    older = Message(HELD, 4, hash_model(server.model), 0, b"", [], 2, bytes(8), b"").to_bytes()
    assert refused(replica, older) == "held: a message for version 2: version 4 is held already"
    other_run = a_server(9, seed=5, ratio=6)
    assert refused(replica, other_run.message(4)).startswith("held: version 4 of the server is another model")
    other = Broadcast({"w": np.zeros((3, 3), np.float32)})
    assert refused(Replica(initial_model()), other.message(0)).startswith("held: ")
    assert refused(replica, other.message(None)).startswith("malformed: the model: not one whole compressed block")
    assert_identical(hand_out(server, replica), server.model)


def test_a_message_can_be_received_twice(client: tuple[Broadcast, Replica]) -> None:
    """A transport may deliver it again."""
    server, replica = client
    model = list(train(initial_model(), 5))[-1]
    server.advance(model)
    message = server.message(replica.version)
    first = replica.receive(message)
    assert_identical(replica.receive(message), first)


def test_what_is_returned_is_the_callers_to_change(client: tuple[Broadcast, Replica]) -> None:
    server, replica = client
    for _ in range(2):
        model = replica.receive(server.message(replica.version))
        for array in model.values():
            array[...] = 1
        assert_identical(replica.receive(server.message(replica.version)), server.model)


def test_the_initial_model_may_be_trained_on_after_it_was_given() -> None:
    initial = initial_model()
    replica, server = Replica(initial), a_server(3)
    initial["fc.weight"][...] = 7
    assert_identical(hand_out(server, replica), server.model)


def test_a_function_makes_the_initial_model_when_it_is_needed() -> None:
    calls: list[int] = []

    def make() -> Model:
        calls.append(1)
        return initial_model()

    replica, server = Replica(make), a_server(3)
    assert not calls
    assert_identical(hand_out(server, replica), server.model)
    assert calls


HELD_DIGEST = hash_model(initial_model())
LIES: dict[str, Callable[[], Message]] = {
    "another model than it says": lambda: made(payload=encode(changed(), step=0.01, keep=()), digest=bytes(8)),
    "numbers that are not finite": lambda: made(payload=encode(changed(3e38), step=1e36, keep=())),
    "a payload of another model": lambda: made(payload=encode({"w": np.zeros(3, np.float32)}, step=1)),
    "no payload at all": lambda: made(payload=b"nothing of ours"),
    "a message in a message": lambda: made(payload=a_server(1).message(0)),
    "a model of zeros, cut": lambda: made(start=EXACT, exact=b"\x03\x00"),
    "a bomb": lambda: made(start=EXACT, exact=write_exact({"w": np.zeros(10**7, np.float32)})),
    "nothing, and no step": lambda: made(start=NOTHING, digest=b"another!"),
    "versions beyond all": lambda: made(steps=[Step(2**62, b"")], version=2**62),
}


def made(
    start: int = HELD,
    exact: bytes = b"",
    steps: list[Step] | None = None,
    payload: bytes = b"",
    version: int = 1,
    digest: bytes = bytes(8),
) -> Message:
    held = HELD_DIGEST if start == HELD else b""
    return Message(start, 0, held, 0, exact, steps or [], version, digest, payload)


def changed(by: float = 1.0) -> Model:
    """A difference: statistics are whole numbers in it."""
    model = initial_model()
    return {
        name: np.zeros(array.shape, np.int32)
        if "running" in name
        else np.full_like(array, by if array.dtype == np.float32 else 0)
        for name, array in model.items()
    }


@pytest.mark.parametrize("lie", LIES)
def test_a_hostile_server_is_refused_and_nothing_changes(lie: str) -> None:
    replica = Replica(initial_model())
    assert refused(replica, LIES[lie]().to_bytes()).partition(":")[0] in (
        "held",
        "malformed",
        "magic",
        "layout",
        "truncated",
    )
    server = a_server(2)
    assert_identical(hand_out(server, replica), server.model)


def test_a_state_of_something_else_is_refused_and_nothing_changes(client: tuple[Broadcast, Replica]) -> None:
    server, replica = client
    state = replica.state_dict()
    broken = {
        "nothing": {},
        "another model": Replica({"w": np.zeros(3, np.float32)}).state_dict(),
        "not finite": state | {"anchor/fc.bias": np.full(40, np.nan, np.float32)},
        "another shape": state | {"anchor/fc.bias": np.zeros(41, np.float32)},
        "another number": state | {"anchor/fc.bias": state["anchor/fc.bias"] + 1},
        "no versions": state | {"versions": np.array([7.5, 0])},
        "versions in no order": state | {"versions": np.array([3, 5])},
        "no digest": state | {"digest": np.zeros(0, np.uint8)},
        "no anchor": {name: array for name, array in state.items() if not name.startswith("anchor/")}
        | {"versions": np.array([4, 2])},
        "a payload that is none": state | {"last": np.zeros(5, np.uint8)},
    }
    for what, bad in broken.items():
        with pytest.raises(ValueError, match="not a state of this Replica"):
            replica.load_state_dict(bad)
        assert_identical(hand_out(server, replica), server.model), what


def test_a_state_that_a_function_made_is_for_a_replica_with_arrays_too() -> None:
    replica, server = Replica(initial_model()), a_server(3)
    replica.load_state_dict(Replica(initial_model).state_dict())
    assert_identical(hand_out(server, replica), server.model)


def test_only_bytes_are_messages() -> None:
    with pytest.raises(TypeError, match="a message is bytes, got str"):
        Replica(initial_model()).receive("message")  # type: ignore[arg-type]
