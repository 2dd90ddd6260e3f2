"""Errors: each says what went wrong, to people and to programs."""

import pickle

from fedfq import BudgetError, FedFQError, PayloadError


def test_errors_can_be_told_apart_and_pickled() -> None:
    """They come back from worker processes as they were."""
    payload_error = pickle.loads(pickle.dumps(PayloadError("limit", "too large")))
    assert (payload_error.reason, str(payload_error)) == ("limit", "too large")
    budget_error = pickle.loads(pickle.dumps(BudgetError(10, 60)))
    assert (budget_error.budget, budget_error.minimum) == (10, 60)
    assert "10 bytes is too small" in str(budget_error) and "at least 60 bytes" in str(budget_error)
    assert "a ratio of 6.66 at most" in str(pickle.loads(pickle.dumps(BudgetError(10, 60, 400))))
    for kind in (PayloadError, BudgetError):
        assert issubclass(kind, FedFQError) and issubclass(kind, ValueError)
