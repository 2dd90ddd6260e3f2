"""fedfq: model updates of federated learning as few bytes, inside a byte budget."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedfq.version import __version__ as __version__

if TYPE_CHECKING:
    from fedfq.broadcast.replica import Replica
    from fedfq.broadcast.server import Broadcast
    from fedfq.codec.codec import Codec
    from fedfq.codec.decode import Accumulator, decode
    from fedfq.codec.errors import BudgetError, FedFQError, PayloadError
    from fedfq.codec.inspect import Report, TensorReport, inspect
    from fedfq.codec.shared_basis import SharedBasis
    from fedfq.feedback import ErrorFeedback

# Loaded when first used (`__getattr__`): the command line should not wait for numba before it can print its help.
_HOMES = {
    "fedfq.broadcast.replica": ("Replica",),
    "fedfq.broadcast.server": ("Broadcast",),
    "fedfq.codec.codec": ("Codec",),
    "fedfq.codec.decode": ("Accumulator", "decode"),
    "fedfq.codec.errors": ("BudgetError", "FedFQError", "PayloadError"),
    "fedfq.codec.inspect": ("Report", "TensorReport", "inspect"),
    "fedfq.codec.shared_basis": ("SharedBasis",),
    "fedfq.feedback": ("ErrorFeedback",),
}


def encode(update: Any, *, seed: int = 0, shared_basis: "SharedBasis | None" = None, **options: Any) -> bytes:
    """Turn an update into bytes: `Codec(**options).encode(update, seed)`.

    update        mapping from names to numpy arrays, torch tensors or other arrays; or a torch module
    seed          of the random numbers that the search for factors starts from
    shared_basis  directions that the decoder holds too (`SharedBasis`)
    options       of `Codec`: mostly a size, such as `ratio=64` or `max_bytes=70_000` (the default: ratio 256, but 4 KB)

    Returns the payload, which fits the size. Raises `BudgetError` if no payload can be that small, `ValueError` for
    entries that are not finite or options that do not fit, and `TypeError` for what is no tensor.

    >>> import fedfq, numpy as np
    >>> update = {"w": np.outer(np.arange(50.0), np.arange(40.0)).astype(np.float32)}
    >>> payload = fedfq.encode(update, ratio=32)
    >>> len(payload) <= 50 * 40 * 4 / 32
    True
    >>> {name: tensor.shape for name, tensor in fedfq.decode(payload).items()}
    {'w': (50, 40)}
    """
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
    "Broadcast",
    "Replica",
    "SharedBasis",
    "Report",
    "TensorReport",
    "FedFQError",
    "PayloadError",
    "BudgetError",
]
