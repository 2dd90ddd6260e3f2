"""Work spread over threads: the kernels release the GIL, so tiles are coded side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any

from threadpoolctl import ThreadpoolController

Spread = Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]


@contextmanager
def workers(threads: int) -> Iterator[Spread]:
    """A `map` to a list, in the order of the items, over so many threads."""
    with _single_threaded_products:
        if threads == 1:
            yield lambda function, items: [function(item) for item in items]
        else:
            with ThreadPoolExecutor(threads) as pool:
                yield lambda function, items: list(pool.map(function, items))


class _SingleThreadedProducts:
    """Keeps numpy's matrix products to one thread while anyone is inside.

    Threads of their own would get in the way of ours, and what they round would depend on how many there are. The
    setting is one of the whole process: the first to come in makes it, the last to leave takes it back.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0
        self._controller: Any = None
        self._limit: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                if self._controller is None:
                    self._controller = ThreadpoolController().select(user_api="blas")
                self._limit = self._controller.limit(limits=1)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._limit.restore_original_limits()


_single_threaded_products = _SingleThreadedProducts()
