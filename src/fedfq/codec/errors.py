"""What can go wrong, as types a caller can tell apart."""

from __future__ import annotations


class FedFQError(Exception):
    """Base class of the errors that fedfq raises on its own account."""


class BudgetError(FedFQError, ValueError):
    """The byte budget is below the smallest payload this update can have.

    `minimum` is that smallest size in bytes: any budget from there on succeeds.
    """

    def __init__(self, budget: int, minimum: int) -> None:
        super().__init__(f"a budget of {budget} bytes is too small: this update needs at least {minimum} bytes")
        self.budget = budget
        self.minimum = minimum

    def __reduce__(self) -> tuple[type[BudgetError], tuple[int, int]]:
        return BudgetError, (self.budget, self.minimum)


class PayloadError(FedFQError, ValueError):
    """The bytes are not a payload that may be decoded here.

    `reason` is one of
    "truncated"  the bytes end too early;
    "magic"      they are not a fedfq payload at all;
    "version"    they are one of a version (or with a feature) that this release cannot read;
    "checksum"   they were damaged on the way;
    "layout"     names or shapes differ from `like=`, or `like=` is needed and was not given;
    "basis"      they were made with a shared basis, and another or none was given;
    "limit"      the decoded update would be larger than the caller allows;
    "malformed"  anything else that a fedfq encoder never writes.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[PayloadError], tuple[str, str]]:
        return PayloadError, (self.reason, str(self))
