"""Signals that may end a program: heeded, postponed, or left unheard."""

import signal

import pytest

from fedfq.signals import ending_by_signal, postponed, undisturbed


@pytest.fixture(autouse=True)
def heeded(monkeypatch: pytest.MonkeyPatch):
    """Even if the tests run in the background, where Ctrl-C is ignored."""
    before = {kind: signal.signal(kind, signal.SIG_DFL) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for kind, handler in before.items():
        signal.signal(kind, handler)


def test_a_signal_raises_what_the_exit_code_is_made_of() -> None:
    with ending_by_signal():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        for kind in (signal.SIGTERM, signal.SIGHUP):
            with pytest.raises(SystemExit) as raised:
                signal.raise_signal(kind)
            assert raised.value.code == 128 + kind
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_postponed_signal_takes_effect_afterwards() -> None:
    done = []
    with ending_by_signal(), pytest.raises(SystemExit):
        with postponed():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)  # the first one counts
            done.append("all of it")
        done.append("too much")
    assert done == ["all of it"]


def test_what_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ending_by_signal(), postponed():
        signal.raise_signal(signal.SIGHUP)
    with undisturbed():
        signal.raise_signal(signal.SIGINT)
