"""Ctrl-C at any time is a KeyboardInterrupt, and leaves the threads of matrix products as they were."""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import FrameType
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from threadpoolctl import ThreadpoolController, threadpool_limits

from fedfq import Codec, decode, encode
from fedfq.codec import parallel
from fedfq.codec.parallel import with_workers
from tests.updates import draw, network

FILES = (parallel.__file__, threadpoolctl.__file__)


def product_threads() -> list[int]:
    return [library["num_threads"] for library in ThreadpoolController().select(user_api="blas").info()]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with threadpool_limits(2, user_api="blas"):
        assert set(product_threads()) == {2}  # or nothing is tested here
        yield


def interrupted(place: int, work: Callable[[], object]) -> BaseException | None:
    """What comes out of work that is interrupted in `FILES` at the so many-th place where Python looks for signals.

    These are the beginnings of functions and the ends of calls.
    """
    passed = 0

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal passed
        if event in ("call", "c_return") and frame.f_code.co_filename in FILES:
            passed += 1
            if passed == place:
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        work()
    except BaseException as error:
        return error
    finally:
        sys.setprofile(None)
    return None


@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_anywhere_restores_the_threads_of_products(threads: int) -> None:
    payload = encode(network(), ratio=20)
    decode(payload, threads=threads)
    held = []  # as an interactive session holds the last one: nothing may wait for its end
    for place in count(1):
        error = interrupted(place, lambda: decode(payload, threads=threads))
        assert set(product_threads()) == {2}, place
        if error is None:
            break
        held.append(error)
    assert len(held) > 20 and {type(error) for error in held} == {KeyboardInterrupt}
    parallel.with_workers(1, lambda _: None)
    assert set(product_threads()) == {2}


def test_products_have_one_thread_until_the_last_has_left() -> None:
    """Whichever thread was first: some libraries heed only that one."""
    found, leave = [], [threading.Event() for _ in range(3)]
    here, left = threading.Semaphore(0), threading.Semaphore(0)

    def work(number: int) -> None:
        here.release()
        leave[number].wait()
        found.append(product_threads())

    def run(number: int) -> None:
        with_workers(1, lambda _: work(number))
        left.release()
        leave[-1].wait()  # threads that ended are not heeded anyway

    def turn(number: int) -> None:
        leave[number].set()
        left.acquire()

    with ThreadPoolExecutor(2) as pool:
        for number in range(2):
            pool.submit(run, number)
            here.acquire()
        turn(0)
        found.append(product_threads())
        turn(1)
        afterwards = product_threads()
        with_workers(1, lambda _: found.append(product_threads()))
        leave[-1].set()
    assert [set(numbers) for numbers in found] == [{1}] * 4
    assert set(afterwards) == set(product_threads()) == {2}


@pytest.mark.parametrize("threads", [1, 2])
def test_errors_come_out_and_restore_the_threads_of_products(threads: int) -> None:
    def fail(number: int) -> None:
        raise ZeroDivisionError(number)

    with pytest.raises(ZeroDivisionError):
        with_workers(threads, lambda spread: spread(fail, range(3)))
    assert set(product_threads()) == {2}


def test_an_interrupt_of_compiled_code_is_a_keyboard_interrupt() -> None:
    """Signals are sent while a large matrix is encoded: most arrive when a kernel has just ended."""
    update, codec = {"w": draw("normal", (700, 700))}, Codec(ratio=8, basis="identity")
    codec.encode(update)
    found: Counter[type] = Counter()
    for number in range(40):
        timer = threading.Timer(0.002 + 0.0007 * number, lambda: os.kill(os.getpid(), signal.SIGINT))
        try:
            timer.start()
            while True:
                codec.encode(update)
        except BaseException as error:
            found[type(error)] += 1
        timer.join()
    assert found == {KeyboardInterrupt: 40}
    assert set(product_threads()) == {2}


def test_other_system_errors_stay_what_they_are() -> None:
    def fail(_: object) -> None:
        raise SystemError("something else")

    with pytest.raises(SystemError, match="something else"):
        with_workers(1, fail)


def test_the_result_is_that_of_the_work() -> None:
    for threads in (1, 3):
        assert with_workers(threads, lambda spread: spread(np.square, range(5))) == [0, 1, 4, 9, 16]


def test_items_are_mapped_in_order_and_the_first_error_is_raised() -> None:
    def spread(function: Any, items: Any) -> Any:
        return parallel.with_workers(3, lambda spread: spread(function, items))

    assert spread(lambda item: 2 * item, range(50)) == list(range(0, 100, 2))
    assert spread(lambda item: item, []) == []
    with pytest.raises(ZeroDivisionError):
        spread(lambda item: 1 // item, [3, 2, 1, 0, "text"])


def test_an_interrupt_of_threads_neither_hangs_nor_breaks_a_lock() -> None:
    """Signals at random places of short decodings, for some seconds; in a process of its own, which may be killed."""
    script = """
import random, signal, time
import numpy as np, fedfq
signal.signal(signal.SIGALRM, signal.default_int_handler)
update = {"a": np.random.default_rng(0).standard_normal((300, 300)).astype("f4"), "b": np.ones((50, 4, 3), "f4")}
payload = fedfq.encode(update, ratio=16)
fedfq.decode(payload, threads=2)
began = time.perf_counter()
fedfq.decode(payload, threads=2)
longest, end, interrupts = time.perf_counter() - began, time.monotonic() + 6, 0
while time.monotonic() < end:
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, longest))
            fedfq.decode(payload, threads=2)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupts += 1
print(interrupts)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50
