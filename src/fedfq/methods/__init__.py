"""Every method by its name: `make("fedfq", ratio=256)`, or `parse("fedfq@256:gain=true")` as on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from numbers import Integral, Real
from types import MappingProxyType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedfq.hints import nearest

from .acsgd import ACSGD, ACSGDTopK
from .aqg import AQG
from .dadaquant import DAdaQuant
from .eden import Eden
from .fedavg import FedAvg
from .fedfq import FedFQ, FedFQWidths
from .fedpaq import FedPAQ
from .fixed import Fixed
from .method import Method, Order, RoundContext, Server, State, Update, Upload
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
    """The method of this name; options it does not have, or of another type, are refused."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}{nearest(name, METHODS)}; there are {', '.join(METHODS)}")
    taken = options_of(name)
    for option in options:
        if option not in taken:
            known = f"it has {', '.join(taken)}" if taken else "it has none"
            raise ValueError(f"method {name} has no option {option!r}{nearest(option, taken)}; {known}")
    types = get_type_hints(_kind(name))
    for option, value in options.items():
        if not _fits(value, types[option]):
            raise ValueError(f"method {name}: {option} must be {_in_words(types[option])}, got {value!r}")
    return METHODS[name](**options)


def options_of(name: str) -> dict[str, Any]:
    """The options of a method and their defaults."""
    made = METHODS[name]
    fixed = made.keywords if isinstance(made, partial) else {}
    return {field.name: field.default for field in fields(_kind(name)) if field.name not in fixed}


def meanings_of(name: str) -> dict[str, tuple[str, str]]:
    """For every option of a method, in words: which values it may have, and what it means."""
    hints = get_type_hints(_kind(name), include_extras=True)
    return {option: (_in_words(hints[option].__origin__), hints[option].__metadata__[0]) for option in options_of(name)}


def _kind(name: str) -> Any:
    made = METHODS[name]
    return made.func if isinstance(made, partial) else made


_PLAIN: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    type(None): (type(None), "left out"),
}


def _fits(value: Any, hint: Any) -> bool:
    """Whether an option of this type may have the value."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    return isinstance(value, _PLAIN[hint][0]) and (hint is bool or not isinstance(value, bool))


def _in_words(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_in_words, get_args(hint)))
    return " or ".join(map(repr, get_args(hint))) if get_origin(hint) is Literal else _PLAIN[hint][1]


def parse(text: str, beside: Mapping[str, Any] = MappingProxyType({})) -> tuple[str, dict[str, Any]]:
    """Name and options of `name@ratio:option=value:...`, and options given beside it; none may be given twice.

    `@ratio` is short for `:ratio=`.
    """
    if not isinstance(text, str):
        raise ValueError(f"method must be a name, got {text!r}")
    head, *rest = text.split(":")
    name, _, ratio = head.partition("@")
    pairs = [f"ratio={ratio}", *rest] if ratio else rest
    options: dict[str, Any] = {}
    for pair in pairs:
        option, equals, value = pair.partition("=")
        if not equals or not option or not value:
            raise ValueError(f"{text!r}: expected option=value, got {pair!r}")
        option = option.replace("-", "_")
        if option in options:
            raise ValueError(f"{text!r}: {option} is given twice")
        options[option] = _value(value)
    for option, value in beside.items():
        if option in options:
            raise ValueError(f"{option} is given twice: in {text!r}, and as {written(value)} beside it")
    return name, {**options, **beside}


def written(value: Any) -> str:
    """An option's value as it is typed."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


__all__ = [
    "METHODS",
    "Method",
    "Order",
    "RoundContext",
    "Server",
    "State",
    "Update",
    "Upload",
    "make",
    "meanings_of",
    "options_of",
    "parse",
    "written",
]
