"""Messages with a model, mutated: `fuzz_messages` for seconds instead of minutes."""

from tests.attacks.fuzz_messages import fuzz


def test_mutated_messages_are_refused_or_lead_to_the_model_that_they_state() -> None:
    outcomes = fuzz(3000, seed=1)
    assert set(outcomes) >= {"accepted", "held", "malformed", "truncated", "checksum", "layout"}
    assert outcomes["accepted"] < 600
