"""All that a run's result depends on, in one place: what `run.json` holds and a TOML file may say."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields
from itertools import chain, combinations
from pathlib import Path
from typing import Any, Literal

from fedfq import methods, tasks
from fedfq.codec.ratio import check_ratio
from fedfq.federation.client import LocalTraining
from fedfq.federation.downlink import AUTO, OWN, Ratio
from fedfq.hints import nearest
from fedfq.tasks import splits

METHOD_OPTIONS = "options"
LARGEST_SEED = 2**63 - 1  # that PyTorch takes
LARGEST_RATE = 3e38  # that float32 holds


@dataclass(frozen=True)
class Config:
    """n = `clients`, |W| = `per_round`, tau = `local_steps` (or `local_epochs`), eta = `lr` * `lr_decay`^t."""

    task: str
    method: str
    split: str
    rounds: int
    clients: int
    per_round: int
    local_steps: int | None
    local_epochs: int | None
    batch_size: int
    lr: float
    lr_decay: float
    down_ratio: Ratio = 1  # of the model on its way down; 1: all bits; the method's, if none is given
    initial_ratio: float | None = None  # of the initial model, if clients do not make it themselves
    weighting: Literal["samples", "mean"] = "samples"
    precision: Literal["float32", "bfloat16"] = "float32"  # of what clients' layers compute
    seed: int = 0
    eval_every: int = 1
    checkpoint_every: int = 10
    options: dict[str, Any] = field(default_factory=dict)  # of the method, all of them

    @staticmethod
    def make(**given: Any) -> Config:
        """A configuration from what was given; the task's defaults for the rest. None means not given."""
        given = {name: value for name, value in given.items() if value is not None}
        for name in ("task", "split"):
            if name in given and not isinstance(given[name], str):
                raise ValueError(f"{name} must be a name, got {given[name]!r}")
        task = tasks.get(given.pop("task", "digits"))
        name, options = methods.parse(given.pop("method", "fedfq"), given.pop(METHOD_OPTIONS, {}))
        made = methods.make(name, **options)
        options = {option: getattr(made, option) for option in methods.options_of(name)}
        if "local_steps" in given and "local_epochs" in given:
            raise ValueError("give local_steps or local_epochs, not both")
        given["down_ratio"] = _read_ratio(given.get("down_ratio", made.down_ratio))
        values = asdict(task.defaults) | {"local_epochs": None}
        if "local_epochs" in given:
            values["local_steps"] = None
        config = Config(task=task.name, method=name, **{**values, **given}, options=options)
        config.check()
        return config

    def check(self) -> None:
        """Refuse what cannot be run, before anything is loaded."""
        for name in ("rounds", "clients", "per_round", "batch_size", "eval_every", "checkpoint_every"):
            _at_least(name, getattr(self, name), 1)
        for name in ("local_steps", "local_epochs"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _at_least("seed", self.seed, 0)
        if self.seed > LARGEST_SEED:
            raise ValueError(f"seed must be at most {LARGEST_SEED}, got {self.seed}")
        for name in ("lr", "lr_decay"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LARGEST_RATE:
                raise ValueError(f"{name} must be a positive number, at most {LARGEST_RATE:g}, got {value!r}")
        if self.per_round > self.clients:
            raise ValueError(f"per_round = {self.per_round} is more than there are clients ({self.clients})")
        if self.weighting not in ("samples", "mean"):
            raise ValueError(f"weighting must be 'samples' or 'mean', got {self.weighting!r}")
        if self.precision not in ("float32", "bfloat16"):
            raise ValueError(f"precision must be 'float32' or 'bfloat16', got {self.precision!r}")
        if self.down_ratio == OWN and self.make_method().down_ratio != OWN:
            raise ValueError(f"down_ratio={OWN!r} goes with methods whose paper has a way down of its own, as stc")
        if self.down_ratio not in (AUTO, OWN):
            _check_ratio("down_ratio", self.down_ratio)
        if self.initial_ratio is not None:
            _check_ratio("initial_ratio", self.initial_ratio)
            if self.down_ratio in (1, OWN):
                raise ValueError(f"initial_ratio does not go with a down_ratio of {self.down_ratio}")
        splits.parse(self.split)
        self.make_method()

    def local_training(self, round_: int) -> LocalTraining:
        """How a client trains in this round."""
        lr = self.lr * self.lr_decay ** (round_ - 1)
        return LocalTraining(self.local_steps, self.local_epochs, self.batch_size, lr, self.precision)

    def make_method(self) -> methods.Method:
        return methods.make(self.method, **self.options)

    @property
    def digest(self) -> str:
        """Names the configuration: equal ones have the same, whether a number is written 1 or 1.0."""
        text = json.dumps(_canonical(asdict(self)), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def label(self) -> str:
        """The method and its options in short, as `methods.parse` reads them."""
        defaults = methods.options_of(self.method)
        options = {name: self.options[name] for name in defaults if name != "ratio" and name in self.options}
        shown = {name: value for name, value in options.items() if None is not defaults[name] != value}
        open_ = [name for name in options if defaults[name] is None]
        for chosen in chain.from_iterable(combinations(open_, count) for count in range(len(open_) + 1)):
            said = shown | {name: options[name] for name in chosen}
            implied = methods.make(self.method, **said)  # what follows from the fewest options is not said
            if all(getattr(implied, name) == value for name, value in options.items()):
                break
        ratio = self.options.get("ratio")
        at = "" if ratio is None else f"@{ratio:g}" if float(f"{ratio:g}") == ratio else f"@{ratio}"
        return self.method + at + "".join(f":{name}={methods.written(value)}" for name, value in said.items())


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a TOML file: those of `fedfq run`, with dashes or underscores."""
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    given: dict[str, Any] = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name in given:
            raise ValueError(f"{path}: {name} is given twice")
        given[name] = value
    return given


def refuse_unknown(keys: Mapping[str, Any], known: list[str], where: str) -> None:
    """Name the first key that is not known, and the nearest one that is."""
    for key in keys:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}{nearest(key, known)}; the keys are {', '.join(known)}")


def from_json(found: Mapping[str, Any]) -> Config:
    """The configuration in a `run.json`."""
    refuse_unknown(found, [f.name for f in fields(Config)], "run.json")
    for each in fields(Config):
        if each.default is MISSING and each.default_factory is MISSING and each.name not in found:
            raise ValueError(f"no {each.name!r}")
    config = Config(**found)
    config.check()
    return config


def _at_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _read_ratio(value: Any) -> Any:
    """A ratio that may have been given as text."""
    if isinstance(value, str) and value not in (AUTO, OWN):
        with suppress(ValueError):
            return float(value)
        raise ValueError(f"down_ratio must be a number, {AUTO!r} or {OWN!r}, got {value!r}")
    return value


def _check_ratio(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    with suppress(OverflowError):  # of an integer of hundreds of digits
        return check_ratio(float(value), name)
    raise ValueError(f"{name} is too large")


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _canonical(each) for key, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
