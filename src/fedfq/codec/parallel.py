"""Work spread over threads: the kernels release the GIL, so tiles are coded side by side."""

from __future__ import annotations

from _thread import LockType, allocate_lock, start_new_thread
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, TypeVar

from threadpoolctl import ThreadpoolController

Spread = Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]
T = TypeVar("T")


def with_workers(threads: int, work: Callable[[Spread], T]) -> T:
    """work(spread), where `spread` is a `map` to a list, in the order of the items, over so many threads.

    This is no context manager, because Ctrl-C may come at any time: in `__enter__` or at the beginning of `__exit__`
    too, and nobody would take the limit of matrix products back then.
    """
    ours = object()
    try:
        _single_threaded_products.begin(ours)
        if threads == 1:
            return work(lambda function, items: [function(item) for item in items])
        return work(lambda function, items: _map_in_threads(threads, function, list(items)))
    except SystemError as error:
        if error.__cause__ is None:
            raise
        # Ctrl-C while compiled code makes Python objects of its result: numba goes on, and Python then complains
        raise error.__cause__ from None
    finally:
        try:
            _single_threaded_products.end(ours)
        except BaseException:  # Ctrl-C just now
            _single_threaded_products.end(ours)
            raise


def check_threads(threads: object) -> None:
    """Refuse what is no number of threads."""
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise ValueError(f"threads must be a positive integer, got {threads!r}")


def _map_in_threads(threads: int, function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """[function(item) for item in items], in so many threads. Of several errors, that of the first item is raised.

    Built of what the interpreter does in one piece. Ctrl-C inside a pool of the standard library, whose locks are
    Python code, may leave one of them held, and everybody waiting.
    """
    tasks: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    results: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
    for task in enumerate(items):
        tasks.put(task)

    def work(busy: LockType) -> None:
        if not busy.acquire(blocking=False):
            return  # the work was given up before this thread began
        with suppress(Empty):
            while True:
                number, item = tasks.get_nowait()
                try:
                    results.put((number, function(item), None))
                except BaseException as error:
                    results.put((number, None, error))
        busy.release()

    busy = [allocate_lock() for _ in range(min(threads, len(items)))]
    found: dict[int, tuple[Any, BaseException | None]] = {}
    try:
        for lock in busy:
            start_new_thread(work, (lock,))
        while len(found) < len(items):
            number, value, error = results.get()
            found[number] = value, error
            if error is not None:  # what was not begun yet comes later in the list
                break
    finally:
        with suppress(Empty):
            while True:
                tasks.get_nowait()
        for lock in busy:  # nobody works on after the return
            lock.acquire()
    with suppress(Empty):
        while True:
            number, value, error = results.get_nowait()
            found[number] = value, error
    for number in sorted(found):
        if (first := found[number][1]) is not None:
            raise first
    return [found[number][0] for number in range(len(items))]


class _SingleThreadedProducts:
    """Keeps numpy's matrix products to one thread while anyone needs it.

    Threads of their own would get in the way of ours, and what they round would depend on how many there are. The
    setting is one of the whole process: the first to come makes it, the last to leave takes it back. Both methods may
    be interrupted anywhere and called again.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._users: set[object] = set()
        self._controller: Any = None
        self._before: Any = None

    def begin(self, user: object) -> None:
        with self._lock:
            self._users.add(user)
            if self._before is None:
                if self._controller is None:
                    self._controller = ThreadpoolController().select(user_api="blas")
                self._before = self._controller.limit(limits=None)  # changes nothing, but knows how it was
                self._take_control()
                self._controller.limit(limits=1)

    def end(self, user: object) -> None:
        with self._lock:
            self._users.discard(user)
            if not self._users and self._before is not None:
                self._take_control()
                self._before.restore_original_limits()
                self._take_control()  # and give it away
                self._before = None

    def _take_control(self) -> None:
        """Newer releases of threadpoolctl let one thread set limits of OpenBLAS, the first that did, and ignore others:
        the last to leave would change nothing. Now the next thread is the first."""
        for library in self._controller.lib_controllers:
            if hasattr(library, "clear_controlling_thread"):
                library.clear_controlling_thread(force=True)


_single_threaded_products = _SingleThreadedProducts()
