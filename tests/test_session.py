"""A client's session: the same payloads as the parts it is made of, whatever the engine."""

from typing import Any

import numpy as np
import pytest

from fedfq import Codec, ErrorFeedback, SharedBasis, decode, inspect
from fedfq.metrics import nmse
from fedfq.session import ClientSession, derive_basis
from tests.updates import Array, low_rank

INITIAL = {"w": low_rank(40, 60, 5), "n": np.arange(3)}
MODEL = {"w": INITIAL["w"] + low_rank(40, 60, 3), "n": np.arange(3)}
UPDATE = {"w": low_rank(40, 60, 3, noise=0.1), "n": np.ones(3, np.int64)}


def test_without_error_feedback_nothing_is_kept() -> None:
    session = ClientSession(ratio=16, unbiased=False, error_feedback=False, gain="none")
    sent = session.encode(UPDATE, {}, seed=3)
    assert sent.payload == Codec(ratio=16, layout="digest").encode(UPDATE, seed=3)
    assert sent.residual == {} and sent.nmse is None


def test_payloads_are_unbiased_unless_a_memory_or_a_gain_is_asked_for() -> None:
    assert ClientSession().is_unbiased and not ClientSession().has_memory and ClientSession().codec_gain == "none"
    sent = ClientSession(ratio=16).encode(UPDATE, {}, seed=3)
    assert sent.payload == Codec(ratio=16, unbiased=True, layout="digest").encode(UPDATE, seed=3)
    for options in ({"error_feedback": True}, {"gain": "norm"}, {"unbiased": False}):
        session = ClientSession(**options)
        assert not session.is_unbiased and session.has_memory and session.codec_gain == "norm"


def test_with_error_feedback_it_is_error_feedback() -> None:
    session, memory = (
        ClientSession(ratio=16, error_feedback=True),
        ErrorFeedback(Codec(ratio=16, gain="norm", layout="digest")),
    )
    residual: dict[str, Array] = {}
    for seed in (1, 2, 3):
        before = {name: array.copy() for name, array in residual.items()}
        sent = session.encode(UPDATE, residual, seed)
        assert sent.payload == memory.encode(UPDATE, seed)
        for name, array in before.items():  # what was given is not changed
            np.testing.assert_array_equal(residual[name], array)
        residual = sent.residual


@pytest.mark.parametrize("error_feedback", [True, False])
def test_the_nmse_is_that_of_what_the_server_decodes(error_feedback: bool) -> None:
    session = ClientSession(ratio=16, error_feedback=error_feedback, gain="none")
    sent = session.encode(UPDATE, {}, 0, measure=True)
    assert sent.nmse == pytest.approx(nmse(UPDATE, decode(sent.payload, like=UPDATE)), rel=1e-4)


def test_a_client_may_have_a_budget_of_its_own() -> None:
    session = ClientSession(ratio=16)
    assert len(session.encode(UPDATE, {}, 0, codec=session.make_codec(max_bytes=333)).payload) <= 333


def test_both_sides_derive_the_same_basis_and_none_of_a_model_that_diverged() -> None:
    basis = derive_basis(MODEL, INITIAL)
    assert basis is not None and basis.digest == SharedBasis(MODEL, INITIAL).digest
    assert derive_basis(MODEL | {"w": np.full((40, 60), np.nan, np.float32)}, INITIAL) is None


def test_only_the_shared_basis_needs_the_initial_model() -> None:
    assert [ClientSession(basis=basis).uses_initial for basis in ("shared", "adaptive", "identity")] == [
        True,
        False,
        False,
    ]


def test_options_that_do_not_fit_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="basis must be one of 'shared', 'adaptive', 'identity'; got 'own'"):
        ClientSession(basis="own")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ratio must be at least 1"):
        ClientSession(ratio=0.5)


def test_an_unbiased_session_has_neither_memory_nor_gain() -> None:
    session = ClientSession(ratio=16, unbiased=True)
    sent = session.encode(UPDATE, {}, seed=1)
    assert inspect(sent.payload, like=UPDATE).sketch_bytes > 0 and not sent.residual
    assert session.encode(UPDATE, {}, seed=1, measure=True).payload == sent.payload
    assert inspect(sent.payload, like=UPDATE).gain == 1.0 and not session.has_memory


@pytest.mark.parametrize("option", [{"error_feedback": True}, {"gain": "norm"}, {"gain": True}])
def test_unbiased_and_what_contradicts_it(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="unbiased=True goes without"):
        ClientSession(unbiased=True, **option)
