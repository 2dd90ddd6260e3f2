"""The examples in the docstrings of public names run, and every public name has one."""

import doctest
import inspect
from importlib import import_module

import pytest

import fedfq

FUNCTIONS_AND_CLASSES = [
    *("encode", "decode", "inspect", "Codec", "Accumulator", "ErrorFeedback", "Broadcast", "Replica", "SharedBasis")
]


@pytest.mark.parametrize("name", FUNCTIONS_AND_CLASSES)
def test_the_example_in_the_docstring_runs(name: str) -> None:
    thing = getattr(fedfq, name)
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    (found,) = finder.find(thing, name, module=import_module(thing.__module__))
    assert found.examples, f"{name} has no example"
    assert runner.run(found).failed == 0


def test_every_public_name_is_listed_here() -> None:
    others = {"Report", "TensorReport"} | {name for name in fedfq.__all__ if name.endswith("Error")}
    assert set(fedfq.__all__) - others == set(FUNCTIONS_AND_CLASSES)
    for name in fedfq.__all__:
        assert inspect.getdoc(getattr(fedfq, name))
