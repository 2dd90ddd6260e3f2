"""Orders: what a client follows, and what it does not."""

import pytest

from fedfq.flower.protocol import (
    LONGEST_REASON,
    TAG_BYTES,
    Refusal,
    TrainOrder,
    fits,
    new_token,
    printable,
    seal,
    unseal,
)

GOOD = {"round": 3, "accepted": 2, "model": "0123456789abcdef", "initial": "f" * 16, "sketch": True, "token": bytes(16)}


@pytest.mark.parametrize("change", [{}, {"model": "", "initial": ""}, {"accepted": 0}, {"round": 2**31 - 1}])
def test_an_order_is_read_as_it_was_sent(change):
    assert TrainOrder.read(GOOD | change) == TrainOrder(**GOOD | change)


BAD = {
    "sketch": [1, 0, "", "yes", None, [True]],
    "round": [0, -1, 2**31, 1.0, True, "3", "../3", [3], b"3"],
    "accepted": [-1, 3, 0.0, False, "../../x", [1]],
    "model": [
        "x/../../victim",
        "0123456789ABCDEF",
        "0123456789abcde",
        "0123456789abcdef0",
        "0123456789abcdef\n",
        b"",
        7,
    ],
    "initial": ["x/../../../../victim/authorized_keys", "..", "", "/", "0" * 15 + "/", ["f" * 16], 0],
    "token": [b"", bytes(15), bytes(17), "0" * 16, 16],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_an_order_that_says_anything_else_is_refused_by_the_fields_name(field, value):
    with pytest.raises(Refusal, match=f"its '(initial|{field})' is"):
        TrainOrder.read(GOOD | {field: value})


@pytest.mark.parametrize("fields", [{}, GOOD | {"more": 1}, {name: GOOD[name] for name in list(GOOD)[1:]}])
def test_an_order_with_other_fields_is_of_another_version(fields):
    with pytest.raises(Refusal, match="another version"):
        TrainOrder.read(fields)


def test_a_refusal_does_not_repeat_a_megabyte():
    with pytest.raises(Refusal) as refused:
        TrainOrder.read(GOOD | {"model": "a" * 1_000_000})
    assert len(str(refused.value)) < 200


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
