"""Orders: what a client follows, and what it does not."""

import pytest

from fedfq.flower.protocol import (
    LONGEST_REASON,
    NOTHING_HELD,
    TAG_BYTES,
    HeldVersion,
    ModelOrder,
    Refusal,
    TrainOrder,
    fits,
    new_token,
    printable,
    seal,
    unseal,
)

MODEL = {"round": 3, "initial": "0123456789abcdef"}
GOOD = MODEL | {"accepted": 2, "basis": True, "sketch": True, "token": bytes(16)}


@pytest.mark.parametrize("change", [{}, {"initial": "f" * 16}, {"accepted": 0}, {"round": 2**31 - 1}])
def test_an_order_is_read_as_it_was_sent(change):
    assert TrainOrder.read(GOOD | change) == TrainOrder(**GOOD | change)


def test_an_evaluation_needs_less():
    assert ModelOrder.read(MODEL) == ModelOrder(**MODEL)
    for fields in ({"round": -1}, {"initial": "../x"}, GOOD):
        with pytest.raises(Refusal):
            ModelOrder.read(MODEL | fields)


BAD = {
    "sketch": [1, 0, "", "yes", None, [True]],
    "round": [0, -1, 2**31, 1.0, True, "3", "../3", [3], b"3"],
    "accepted": [-1, 3, 0.0, False, "../../x", [1]],
    "basis": [1, 0, "", None],
    "initial": [
        *("x/../../../../victim/authorized_keys", "..", "", "/", "0" * 15 + "/", ["f" * 16], 0, b""),
        *("0123456789ABCDEF", "0123456789abcde", "0123456789abcdef0", "0123456789abcdef\n"),
    ],
    "token": [b"", bytes(15), bytes(17), "0" * 16, 16],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_an_order_that_says_anything_else_is_refused_by_the_fields_name(field, value):
    with pytest.raises(Refusal, match=f"its '{field}' is"):
        TrainOrder.read(GOOD | {field: value})


@pytest.mark.parametrize("fields", [{}, GOOD | {"more": 1}, {name: GOOD[name] for name in list(GOOD)[1:]}])
def test_an_order_with_other_fields_is_of_another_version(fields):
    with pytest.raises(Refusal, match="another version"):
        TrainOrder.read(fields)


def test_a_refusal_does_not_repeat_a_megabyte():
    with pytest.raises(Refusal) as refused:
        TrainOrder.read(GOOD | {"initial": "a" * 1_000_000})
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("held", [NOTHING_HELD, HeldVersion(7, "0123456789abcdef"), HeldVersion(0, "f" * 16)])
def test_what_is_held_travels_as_two_numbers(held):
    assert all(-(2**63) <= number < 2**63 for number in held.write())
    assert HeldVersion.read(held.write()) == held


@pytest.mark.parametrize("claim", [None, 3, [], [1], [1, 2, 3], [1.0, 2.0], "7", [1, 2**63], [1, -(2**63) - 1]])
def test_other_claims_are_none(claim):
    assert HeldVersion.read(claim) is None


def test_a_tag_fits_its_payload_and_token_only():
    token, other = new_token(), new_token()
    assert token != other
    payload, tag = unseal(seal(b"payload", token))
    assert (bytes(payload), len(tag)) == (b"payload", TAG_BYTES)
    assert fits(payload, tag, token)
    assert not fits(payload, tag, other)
    assert not fits(memoryview(b"Payload"), tag, token)
    assert not fits(*unseal(b"short"), token)


def test_what_others_say_is_one_short_line():
    assert printable("a\nb\x1b[31m ü") == "a?b?[31m ü"
    assert len(printable("x" * 10**6)) == LONGEST_REASON
