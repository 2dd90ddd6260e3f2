"""What can go wrong, as types a caller can tell apart."""

from __future__ import annotations

import math


class FedFQError(Exception):
    """Base class of the errors that fedfq raises on its own account."""


class BudgetError(FedFQError, ValueError):
    """The byte budget is below the smallest payload this update can have.

    `minimum` is that smallest size in bytes: any budget from there on succeeds. `raw` is the update's
    size uncompressed, where it is known.
    """

    def __init__(self, budget: int, minimum: int, raw: int | None = None) -> None:
        ratio = ""
        if raw is not None and raw >= minimum:
            ratio = f", a ratio of {math.floor(100 * raw / minimum) / 100:g} at most"
        super().__init__(
            f"a budget of {budget} bytes is too small: this update needs at least {minimum} bytes{ratio}, "
            'for names and shapes (layout="digest" sends 8 bytes instead) and for integers, before any float, and '
            "if unbiased=True for the smallest sketch"
        )
        self.budget = budget
        self.minimum = minimum
        self.raw = raw

    def __reduce__(self) -> tuple[type[BudgetError], tuple[int, int, int | None]]:
        return BudgetError, (self.budget, self.minimum, self.raw)


class PayloadError(FedFQError, ValueError):
    """The bytes are not a payload that may be decoded here.

    `reason` is one of
    "truncated"  the bytes end too early;
    "magic"      they are not a fedfq payload at all;
    "version"    they are one of a version (or with a feature) that this release cannot read;
    "checksum"   they were damaged on the way;
    "layout"     names or shapes differ from `like=`, or `like=` is needed and was not given;
    "basis"      they were made with a shared basis, and another or none was given;
    "held"       they are a message for who holds another version of the model, or another model;
    "limit"      the decoded update would be larger than the caller allows;
    "malformed"  anything else that a fedfq encoder never writes.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[PayloadError], tuple[str, str]]:
        return PayloadError, (self.reason, str(self))
