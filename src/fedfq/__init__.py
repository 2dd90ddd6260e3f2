"""fedfq: model updates of federated learning as few bytes, inside a byte budget."""

from typing import Any

from fedfq.codec.codec import Codec
from fedfq.codec.decode import Accumulator, decode
from fedfq.codec.errors import BudgetError, FedFQError, PayloadError
from fedfq.codec.inspect import Report, TensorReport, inspect
from fedfq.feedback import ErrorFeedback

__version__ = "0.1.0"


def encode(update: Any, *, seed: int = 0, **options: Any) -> bytes:
    """`Codec(**options).encode(update, seed)`: for instance `encode(update, ratio=64)`."""
    return Codec(**options).encode(update, seed)


__all__ = [
    "encode",
    "decode",
    "inspect",
    "Codec",
    "Accumulator",
    "ErrorFeedback",
    "Report",
    "TensorReport",
    "FedFQError",
    "PayloadError",
    "BudgetError",
]
