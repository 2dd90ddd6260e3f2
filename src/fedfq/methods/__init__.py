"""Every method by its name: `make("fedfq", ratio=256)`, or `parse("fedfq@256:gain=true")` as on the command line."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from .acsgd import ACSGD, ACSGDTopK
from .aqg import AQG
from .dadaquant import DAdaQuant
from .eden import Eden
from .fedavg import FedAvg
from .fedfq import FedFQ, FedFQWidths
from .fedpaq import FedPAQ
from .fixed import Fixed
from .method import Method, Order, Server, State, Update, Upload
from .qsgd import QSGD
from .signsgd import SignSGD
from .stc import STC
from .topk import TopK

METHODS: dict[str, Callable[..., Method]] = {
    "fedavg": FedAvg,
    "fedavg-2bit": partial(Fixed, bits=2),
    "fedavg-4bit": partial(Fixed, bits=4),
    "fedavg-8bit": partial(Fixed, bits=8),
    "fedpaq": FedPAQ,
    "aqg": AQG,
    "acsgd": ACSGD,
    "acsgd-topk": ACSGDTopK,
    "fedfq": FedFQ,
    "fedfq-exact": partial(FedFQWidths, allocator="exact"),
    "fedfq-cgsa": partial(FedFQWidths, allocator="cgsa"),
    "topk": TopK,
    "stc": STC,
    "signsgd": SignSGD,
    "eden": Eden,
    "qsgd": QSGD,
    "dadaquant": DAdaQuant,
}


def make(name: str, **options: Any) -> Method:
    """The method of this name; options it does not have are refused."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}{_nearest(name, METHODS)}; there are {', '.join(METHODS)}")
    taken = options_of(name)
    for option in options:
        if option not in taken:
            known = f"it has {', '.join(taken)}" if taken else "it has none"
            raise ValueError(f"method {name} has no option {option!r}{_nearest(option, taken)}; {known}")
    return METHODS[name](**options)


def options_of(name: str) -> dict[str, Any]:
    """The options of a method and their defaults."""
    made = METHODS[name]
    kind: Any = made.func if isinstance(made, partial) else made
    fixed = made.keywords if isinstance(made, partial) else {}
    return {field.name: field.default for field in fields(kind) if field.name not in fixed}


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of `name@ratio:option=value:...`; `@ratio` is short for `:ratio=`."""
    head, *rest = text.split(":")
    name, _, ratio = head.partition("@")
    pairs = [f"ratio={ratio}", *rest] if ratio else rest
    options = {}
    for pair in pairs:
        option, equals, value = pair.partition("=")
        if not equals or not option or not value:
            raise ValueError(f"{text!r}: expected option=value, got {pair!r}")
        options[option.replace("-", "_")] = _value(value)
    return name, options


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


__all__ = ["METHODS", "Method", "Order", "Server", "State", "Update", "Upload", "make", "options_of", "parse"]
