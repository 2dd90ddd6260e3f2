"""Who holds what."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfq.tasks import Arrays, Data, split

SPLITS = ("iid", "one-class", "shards:1", "shards:2", "shards:5", "dirichlet:0.001", "dirichlet:0.3", "dirichlet:100")


def a_data_set(labels, groups=None):
    labels = np.asarray(labels)
    return Data(Arrays(np.zeros(len(labels)), labels), Arrays(labels, labels), groups)


def balanced(examples=5000, classes=10, seed=0):
    return a_data_set(np.random.default_rng(seed).permutation(np.arange(examples) % classes))


def classes(data, parts):
    return [set(data.train.labels[part].tolist()) for part in parts]


@given(
    spec=st.sampled_from(SPLITS),
    clients=st.integers(1, 20),
    labels=st.lists(st.integers(0, 4), min_size=100, max_size=200),
    seed=st.integers(0, 1000),
)
def test_everything_is_given_out_once_and_nobody_has_nothing(spec, clients, labels, seed):
    parts = split(spec, a_data_set(labels), clients, seed)
    assert len(parts) == clients and all(len(part) > 0 for part in parts)
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))


@pytest.mark.parametrize("spec", SPLITS)
def test_the_seed_decides(spec):
    data = balanced()
    first, again, other = (split(spec, data, 20, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other))


def test_iid():
    data = balanced()
    parts = split("iid", data, 10, 0)
    assert {len(part) for part in parts} == {500}
    shares = np.stack([np.bincount(data.train.labels[part], minlength=10) for part in parts])
    assert shares.min() >= 25 and shares.max() <= 75


def test_one_class_as_in_the_paper():
    data = balanced(50_000)
    parts = split("one-class", data, 100, 0)
    assert {len(part) for part in parts} == {500}
    assert all(len(held) == 1 for held in classes(data, parts))


def test_shards_as_mcmahan():
    data = balanced(50_000)
    parts = split("shards:2", data, 100, 0)
    assert {len(part) for part in parts} == {500}
    held = classes(data, parts)
    assert all(1 <= len(own) <= 2 for own in held) and len(held[0] | held[1] | held[2]) > 2


def test_dirichlet_is_more_uneven_the_smaller_alpha_is():
    data = balanced()

    def unevenness(alpha):
        parts = split(f"dirichlet:{alpha}", data, 10, 0)
        shares = np.stack([np.bincount(data.train.labels[part], minlength=10) for part in parts]) / 500
        return float((shares**2).sum())

    assert 1 <= unevenness(1000) < unevenness(1) < unevenness(0.1) < unevenness(0.01) <= 10


@pytest.mark.parametrize("alpha", ["1e-300", "1e6"])
def test_extreme_dirichlet(alpha):
    parts = split(f"dirichlet:{alpha}", balanced(300), 20, 0)
    assert sorted(np.concatenate(parts)) == list(range(300)) and min(map(len, parts)) > 0


def test_natural():
    groups = [np.arange(0, 3), np.arange(3, 4), np.arange(4, 9)]
    data = a_data_set(np.zeros(10, int), groups)
    assert split("natural", data, 3, 0) == groups
    some = [part.tolist() for part in split("natural", data, 2, 5)]
    assert some == [part.tolist() for part in split("natural", data, 2, 5)]
    assert len(some) == 2 and all(part in [group.tolist() for group in groups] for part in some)
    drawn = {str(split("natural", data, 1, seed)) for seed in range(20)}
    assert len(drawn) == 3


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        ("IID", 2, r"unknown split 'IID'.*the splits are iid, one-class, shards:K, dirichlet:ALPHA, natural"),
        ("shard:2", 2, r"did you mean 'shards'\?"),
        ("dirichelt:0.3", 2, r"did you mean 'dirichlet'\?"),
        ("", 2, "unknown split ''"),
        ("shards", 2, "it is written shards:K"),
        ("dirichlet", 2, "it is written dirichlet:ALPHA"),
        ("iid:3", 2, "it is written iid"),
        ("one-class:", 2, "it is written one-class"),
        ("shards:0", 2, "must be a whole number above 0"),
        ("shards:1.5", 2, "must be a whole number above 0"),
        ("shards:-2", 2, "must be a whole number above 0"),
        ("shards:", 2, "must be a whole number above 0"),
        ("shards:" + "9" * 400, 2, "must be a whole number above 0"),
        ("dirichlet:0", 2, "must be a number above 0"),
        ("dirichlet:nan", 2, "must be a number above 0"),
        ("dirichlet:inf", 2, "must be a number above 0"),
        ("dirichlet:x", 2, "must be a number above 0"),
        ("natural", 2, "this data knows no clients of its own"),
        ("iid", 0, "there must be at least one client, not 0"),
        ("iid", 101, "100 examples are too few for 101 clients"),
        ("shards:60", 2, "100 examples are too few for 2 clients with 60 shards each"),
    ],
)
def test_refused(spec, clients, message):
    with pytest.raises(ValueError, match=message):
        split(spec, balanced(100), clients, 0)


def test_more_clients_than_the_data_knows():
    with pytest.raises(ValueError, match="there are 1 clients, not 2"):
        split("natural", a_data_set([0, 1], [np.arange(2)]), 2, 0)
