"""Signals that end a program, Ctrl-C, SIGTERM and SIGHUP: how they are turned into errors, postponed or ignored."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, SIGTERM and SIGHUP SystemExit(128 + number), so that what was begun is ended."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    with _handling(leave):
        yield


@contextmanager
def postponed() -> Iterator[None]:
    """A signal that arrives in here takes effect afterwards, unless an error ends it before."""
    arrived: list[int] = []
    with _handling(lambda number, frame: arrived.append(number)):
        yield
    for number in arrived[:1]:
        signal.raise_signal(number)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore signals while a clean-up runs, so that it is finished."""
    with _handling(signal.SIG_IGN):
        yield


@contextmanager
def _handling(handler: Any) -> Iterator[None]:
    """Signals that are ignored stay so: that is what nohup and a shell's & are for. (None: a handler not of Python.)"""
    if threading.current_thread() is not threading.main_thread():  # only there can handlers be set
        yield
        return
    heeded = [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
