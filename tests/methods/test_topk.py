"""Top-k: which entries are sent, and what happens to the rest."""

import numpy as np
import pytest

from fedfq.methods import make
from fedfq.methods.sparse import Ranked, sample
from tests.methods.cases import encode, order, payload_of
from tests.updates import draw, raw_size


@pytest.mark.parametrize("k", [0, 1, 3, 500, 1000])
@pytest.mark.parametrize("kind", ["laplace", "sparse", "constant", "zero"])
def test_the_largest_are_found_whatever_their_ties(kind: str, k: int):
    p = draw(kind, (1000,))
    places = Ranked(p).top(k)
    assert places.size == k and (np.diff(places) > 0).all()
    assert (np.sort(np.abs(p[places])) == np.sort(np.abs(p))[1000 - k :]).all()


def test_it_is_the_top_k_of_the_whole_update():
    update = {"a": draw("laplace", (3000,)), "b": 10 * draw("laplace", (2000,), seed=1)}
    made = make("topk", ratio=20)
    decoded = made.decode(payload_of(encode(made, update)), update)
    h, q = (np.concatenate([arrays["a"], arrays["b"]]) for arrays in (update, decoded))
    sent = q != 0
    assert np.abs(h[sent]).min() >= np.abs(h[~sent]).max()
    np.testing.assert_allclose(q[sent], h[sent], rtol=2**-11)


def test_as_many_are_sent_as_fit():
    update = {"h": draw("laplace", (50_000,))}
    payload = payload_of(encode(make("topk", ratio=100), update))
    assert raw_size(update) // 100 - 4 < len(payload) <= raw_size(update) // 100


def test_the_claim_is_the_papers():
    h = draw("laplace", (1 << 14,))
    made = make("topk", ratio=50)
    upload = encode(made, {"h": h})
    k = np.count_nonzero(made.decode(payload_of(upload), {"h": h})["h"])
    assert upload.claimed_bits == k * (32 + 14)


def test_with_memory_all_is_sent_in_the_end():
    """The sum of what is sent follows the sum of updates: the rest stays bounded, as k entries per round catch up."""
    h = draw("laplace", (2000,))
    made, memory, total = make("topk", ratio=20), {}, np.zeros(2000)
    for number in range(100):
        upload = made.encode({"h": h}, memory, order(seed=number))
        total += made.decode(payload_of(upload), {"h": h})["h"]
        memory = upload.memory
    assert np.linalg.norm(100 * h - total) / np.linalg.norm(100 * h) < 0.25


def test_samples_are_even():
    counts = np.zeros(50)
    for key in range(4000):
        chosen = sample(np.uint64(key * 2**40 + 17), 50, 10)
        assert (np.diff(chosen) > 0).all() and chosen.size == 10
        counts[chosen] += 1
    assert np.abs(counts - 800).max() < 5 * np.sqrt(800 * 0.8)
