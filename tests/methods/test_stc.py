"""STC: a payload by hand, and its size against the formula."""

import struct

import numpy as np
import pytest

from fedfq.methods import make
from tests.methods.cases import encode, order, payload_of
from tests.updates import draw

EIGHT = np.array([0.1, -4, 0.2, 0, 3, 0, -0.3, 2], np.float32)


def test_a_payload_by_hand():
    """-4, 3 and 2 at 1, 4 and 7 become -3, 3, 3. k/n = 3/8 has b* = 1; gaps less one of 1, 2, 2; signs 1, 0, 0."""
    upload = encode(make("stc", sparsity=3 / 8), {"h": EIGHT})
    assert upload.payload == struct.pack("<f", 3.0) + bytes([0b11_010_010, 0b100_00000])
    decoded = make("stc", sparsity=3 / 8).decode(payload_of(upload), {"h": EIGHT})
    assert decoded["h"].tolist() == [0, -3, 0, 0, 3, 0, 0, 3]
    np.testing.assert_allclose(upload.memory["h"], [0.1, -1, 0.2, 0, 0, 0, -0.3, -1], atol=1e-7)


def test_what_was_left_out_is_sent_later():
    """e makes the third entry, 0.2 per round, the largest of all in the end."""
    made, memory, seen = make("stc", sparsity=1 / 8), {}, set()
    h = np.array([0, 1, 0.2, 0, 0, 0, 0, 0], np.float32)
    for number in range(8):
        upload = made.encode({"h": h}, memory, order(seed=number))
        memory = upload.memory
        seen.update(np.flatnonzero(made.decode(payload_of(upload), {"h": h})["h"]).tolist())
    assert seen == {1, 2}


@pytest.mark.parametrize("sparsity", [1 / 25, 1 / 100, 1 / 400])
def test_the_size_is_that_of_the_formula(sparsity: float):
    """Entries in no particular order: what is claimed is what it takes, within chance."""
    upload = encode(make("stc", sparsity=sparsity), {"h": draw("laplace", (300_000,))})
    assert 8 * len(payload_of(upload)) == pytest.approx(upload.claimed_bits, rel=0.02)


def test_a_ratio_sends_as_many_as_fit():
    h = draw("laplace", (50_000,))
    made = make("stc", ratio=100)
    sent = np.count_nonzero(made.decode(payload_of(encode(made, {"h": h})), {"h": h})["h"])
    assert 2000 - 8 <= len(payload_of(encode(made, {"h": h}))) <= 2000
    more = encode(make("stc", sparsity=(sent + 20) / h.size), {"h": h})
    assert len(payload_of(more)) + 4 > 2000
