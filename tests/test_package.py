"""The package's public names, which are loaded when they are first used."""

import subprocess
import sys

import pytest

import fedfq


def test_every_public_name_is_there():
    for name in fedfq.__all__:
        assert name in dir(fedfq)
        assert callable(getattr(fedfq, name))


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fedfq.nonsense


def test_the_import_is_light_and_names_work_in_every_form():
    code = (
        "import sys, fedfq\n"
        "assert 'numba' not in sys.modules and 'Codec' in dir(fedfq)\n"
        "from fedfq import *\n"
        "from fedfq import PayloadError\n"
        "assert Codec is fedfq.Codec and not {'torch', 'flwr'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
