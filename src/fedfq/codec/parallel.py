"""Work spread over threads: the kernels release the GIL, so tiles are coded side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

Spread = Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]


@contextmanager
def workers(threads: int) -> Iterator[Spread]:
    """A `map` to a list, in the order of the items, over so many threads."""
    if threads == 1:
        yield lambda function, items: [function(item) for item in items]
    else:
        with ThreadPoolExecutor(threads) as pool:
            yield lambda function, items: list(pool.map(function, items))
