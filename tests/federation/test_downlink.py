"""How many models go down to a client."""

from fedfq.federation.downlink import models_sent


def test_the_initial_model_goes_once_to_each_client_as_soon_as_it_is_another_one() -> None:
    assert models_sent([1, 2, 3], settled=set(), moved=False) == {1: 1, 2: 1, 3: 1}
    assert models_sent([1, 2, 3], settled={1, 3}, moved=True) == {1: 1, 2: 2, 3: 1}
