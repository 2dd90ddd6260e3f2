"""The package's public names, which are loaded when they are first used."""

import subprocess
import sys

import numpy as np
import pytest

import fedfq
from fedfq.codec.codec import DEFAULT_RATIO
from fedfq.flower import fedfq_mod
from fedfq.methods import Order, RoundContext, make, options_of


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


def test_one_default_ratio_serves_everywhere():
    """The codec, `fedfq.encode`, methods whose papers name none, and the client mod of Flower."""
    assert fedfq.Codec().ratio == DEFAULT_RATIO == 256
    update = {"w": np.random.default_rng(0).standard_normal((600, 500)).astype("f4")}
    assert fedfq.encode(update) == fedfq.encode(update, ratio=256) == fedfq.Codec().encode(update)
    order = Order(RoundContext(1), 0, 0, b"")
    payloads = {make("fedfq", **options).encode(update, {}, order).payload for options in ({}, {"ratio": 256})}
    assert len(payloads) == 1
    assert options_of("topk")["ratio"] == DEFAULT_RATIO and options_of("fedfq")["ratio"] is None


def test_a_small_model_is_not_squeezed_unless_one_asks_for_it():
    """4 KB: beside some 20 KB that a transport takes for itself, less saves nothing."""
    update = {"w": np.random.default_rng(0).standard_normal((100, 80)).astype("f4")}
    assert 3900 < len(fedfq.encode(update)) <= 4096
    assert len(fedfq.encode(update, ratio=256)) <= 125
    assert fedfq_mod().session.make_codec().least_bytes == 4096
