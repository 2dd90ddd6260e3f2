"""The tasks by name, and where a new one is added:

    from fedfq.tasks import Arrays, Data, Defaults, Task, register

    register(Task(name="mine", build=MyNetwork, load=my_data, prepare=my_batch, defaults=Defaults(...)))

`digits.py` is such a task in full.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedfq.hints import nearest

if TYPE_CHECKING:
    from fedfq.tasks.splits import split
    from fedfq.tasks.store import DataMissing
    from fedfq.tasks.task import Arrays, Data, Defaults, Examples, Task, evaluate

# The module that registers each task. It is loaded when first used: `fedfq --help` should not wait for PyTorch.
_HOMES = {
    "digits": "digits",
    "cifar10-simplecnn": "cifar10",
    "cifar10-simplecnn-lrn": "cifar10",
    "cifar10-vgg11": "cifar10",
    "cifar10-vgg11-paper": "cifar10",
    "cifar10-resnet20": "cifar10",
    "shakespeare-lstm": "shakespeare",
}
TASKS = list(_HOMES)
_registered: dict[str, Task] = {}


def register(task: Task) -> Task:
    """Make a task known by its name."""
    if task.name in _HOMES:  # so that nobody takes a name of ours before we do
        import_module(f"{__name__}.{_HOMES[task.name]}")
    if task.name in _registered:
        raise ValueError(f"there is a task named {task.name!r} already")
    _registered[task.name] = task
    if task.name not in TASKS:
        TASKS.append(task.name)
    return task


def get(name: str) -> Task:
    """The task of that name."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}{nearest(name, TASKS)}; the tasks are {', '.join(TASKS)}")
    if name not in _registered:
        import_module(f"{__name__}.{_HOMES[name]}")
    return _registered[name]


_LAZY = {
    "fedfq.tasks.task": ("Arrays", "Data", "Defaults", "Examples", "Task", "evaluate"),
    "fedfq.tasks.store": ("DataMissing",),
    "fedfq.tasks.splits": ("split",),
}


def __getattr__(name: str) -> Any:
    for home, names in _LAZY.items():
        if name in names:
            globals()[name] = getattr(import_module(home), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "TASKS",
    "get",
    "register",
    "Task",
    "Data",
    "Examples",
    "Arrays",
    "Defaults",
    "evaluate",
    "split",
    "DataMissing",
]
