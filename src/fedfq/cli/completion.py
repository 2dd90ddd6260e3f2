"""What a shell offers after TAB: the names of methods, tasks and splits.

Nothing heavy is loaded for it: an answer that takes a second comes too late. So methods and splits stand here as well,
and a test compares them with what there is.
"""

from __future__ import annotations

from collections.abc import Iterable

from fedfq.tasks import TASKS

METHODS = (
    *("fedavg", "fedavg-2bit", "fedavg-4bit", "fedavg-8bit", "fedpaq", "aqg", "acsgd", "acsgd-topk"),
    *("fedfq", "fedfq-exact", "fedfq-cgsa", "topk", "stc", "signsgd", "eden", "qsgd", "dadaquant"),
)
SPLITS = ("iid", "one-class", "shards:2", "dirichlet:0.3", "natural")


def complete_method(incomplete: str) -> list[str]:
    return _filter_by_start(incomplete, METHODS)


def complete_methods(incomplete: str) -> list[str]:
    """The last of several, with commas between."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in complete_method(last)]


def complete_task(incomplete: str) -> list[str]:
    return _filter_by_start(incomplete, TASKS)


def complete_split(incomplete: str) -> list[str]:
    return _filter_by_start(incomplete, SPLITS)


def _filter_by_start(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
