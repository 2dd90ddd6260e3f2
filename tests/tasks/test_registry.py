"""Tasks by name."""

import pickle
import subprocess
import sys

import pytest

from fedfq import tasks
from fedfq.tasks import Defaults, Task
from fedfq.tasks.splits import split


@pytest.fixture
def registry(monkeypatch):
    """What is registered in a test is forgotten after it."""
    monkeypatch.setattr(tasks, "TASKS", list(tasks.TASKS))
    monkeypatch.setattr(tasks, "_registered", dict(tasks._registered))


def a_task(name):
    return Task(name, build=None, load=None, prepare=None, defaults=Defaults(1, 1, 1, 1, 1, 0.1))


def test_names():
    assert tasks.TASKS == [
        "digits",
        "cifar10-simplecnn",
        "cifar10-simplecnn-lrn",
        "cifar10-vgg11",
        "cifar10-vgg11-paper",
        "cifar10-resnet20",
        "shakespeare-lstm",
    ]


@pytest.mark.parametrize("name", tasks.TASKS)
def test_a_task_is_found_and_can_go_to_another_process(name):
    task = tasks.get(name)
    assert task.name == name
    assert pickle.loads(pickle.dumps(task)).defaults == task.defaults


@pytest.mark.parametrize("name", tasks.TASKS)
def test_defaults_make_sense(name):
    defaults = tasks.get(name).defaults
    assert 0 < defaults.per_round <= defaults.clients
    assert defaults.rounds > 0 and defaults.eval_every > 0 and defaults.local_steps > 0 and defaults.batch_size > 0
    assert 0 < defaults.lr < 2 and 0.9 < defaults.lr_decay <= 1


@pytest.mark.parametrize("wrong", ["cifar10-vg11", "CIFAR10-vgg11"])
def test_a_mistyped_name(wrong):
    with pytest.raises(ValueError, match="did you mean 'cifar10-vgg11'.*shakespeare-lstm"):
        tasks.get(wrong)


def test_a_name_unlike_any():
    with pytest.raises(ValueError, match="unknown task 'qqq'; the tasks are digits, "):
        tasks.get("qqq")


def test_a_task_of_ones_own(registry):
    mine = tasks.register(a_task("mine"))
    assert tasks.get("mine") is mine and tasks.TASKS[-1] == "mine"
    with pytest.raises(ValueError, match="there is a task named 'mine' already"):
        tasks.register(a_task("mine"))


def test_nobody_takes_our_names(registry, monkeypatch):
    """Not even before we have loaded what they stand for."""
    tasks.get("digits")
    monkeypatch.delitem(tasks._registered, "digits")
    monkeypatch.delitem(sys.modules, "fedfq.tasks.digits")
    with pytest.raises(ValueError, match="there is a task named 'digits' already"):
        tasks.register(a_task("digits"))
    assert tasks.get("digits").build is not None


def test_public_names():
    for name in tasks.__all__:
        assert hasattr(tasks, name)
    assert tasks.split is split
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tasks.nonsense


def test_the_import_is_light():
    code = "import sys, fedfq.tasks, fedfq.tasks.store, fedfq.cli.data; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
