"""fedfq: model updates of federated learning as few bytes, inside a byte budget."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedfq.version import __version__ as __version__

if TYPE_CHECKING:
    from fedfq.codec.codec import Codec
    from fedfq.codec.decode import Accumulator, decode
    from fedfq.codec.errors import BudgetError, FedFQError, PayloadError
    from fedfq.codec.inspect import Report, TensorReport, inspect
    from fedfq.codec.shared_basis import SharedBasis
    from fedfq.feedback import ErrorFeedback

# Loaded when first used (`__getattr__`): the command line should not wait for numba before it can print its help.
_HOMES = {
    "fedfq.codec.codec": ("Codec",),
    "fedfq.codec.decode": ("Accumulator", "decode"),
    "fedfq.codec.errors": ("BudgetError", "FedFQError", "PayloadError"),
    "fedfq.codec.inspect": ("Report", "TensorReport", "inspect"),
    "fedfq.codec.shared_basis": ("SharedBasis",),
    "fedfq.feedback": ("ErrorFeedback",),
}


def encode(update: Any, *, seed: int = 0, shared_basis: "SharedBasis | None" = None, **options: Any) -> bytes:
    """`Codec(**options).encode(update, seed)`: as `encode(update, ratio=64)`; 256 if no size is given."""
    from fedfq.codec.codec import Codec

    return Codec(**options).encode(update, seed, shared_basis=shared_basis)


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = getattr(import_module(home), name)
            return globals()[name]
    raise AttributeError(f"module 'fedfq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "encode",
    "decode",
    "inspect",
    "Codec",
    "Accumulator",
    "ErrorFeedback",
    "SharedBasis",
    "Report",
    "TensorReport",
    "FedFQError",
    "PayloadError",
    "BudgetError",
]
