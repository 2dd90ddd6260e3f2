"""What `fedfq run` and `fedfq compare` were asked for, on the command line and in a file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedfq.cli.options import Earlier, Machine

OF_METHOD = ("ratio", "unbiased", "error_feedback", "gain", "basis")  # options that are the method's
PATHS = ("out", "data_dir")


@dataclass(frozen=True)
class Execution(Machine, Earlier):
    """How a run is carried out, and where: all that its result does not depend on."""

    engine: str | None = None
    out: Path | None = None


NOT_IN_FILES = ("config", *(each.name for each in fields(Earlier)))


def merge_settings(given: dict[str, Any]) -> tuple[dict[str, Any], Execution]:
    """What the result depends on, and the rest, from a TOML file (`config`) and the command line, which wins."""
    known = [name for name in given if name not in NOT_IN_FILES]
    given = {name: value for name, value in given.items() if value is not None}
    config = given.pop("config", None)
    found = {} if config is None else _read_file(config, known)
    method = _take_method(found, given)
    given = found | given
    execution = Execution(**{each.name: given.pop(each.name) for each in fields(Execution) if each.name in given})
    if execution.resume and execution.overwrite:
        raise ValueError("give --resume or --overwrite, not both")
    return given | method, execution


def _read_file(path: Path, known: list[str]) -> dict[str, Any]:
    from fedfq.federation.config import read_toml, refuse_unknown

    found = read_toml(path)
    refuse_unknown(found, known, str(path))
    for name in PATHS:
        if name in found:
            if not isinstance(found[name], str) or "\0" in found[name]:
                raise ValueError(f"{path}: {name} must be a path, got {found[name]!r}")
            found[name] = Path(found[name])
    return found


def _take_method(*layers: dict[str, Any]) -> dict[str, Any]:
    """The method and its options, taken out of a file's settings and of the command line's, which win.

    Within one of them, `fedfq@64` beside a ratio would say it twice, and is refused.
    """
    from fedfq.methods import parse

    taken: dict[str, Any] = {}
    options: dict[str, Any] = {}
    outlasting: dict[str, Any] = {}  # options that do not go away with the method's text
    for layer in layers:
        own = {name: layer.pop(name) for name in OF_METHOD if name in layer}
        if "method" in layer:
            taken["method"], options = parse(layer.pop("method"), own)
            options = outlasting | options
        else:
            options = options | own
        outlasting = own
    return taken | ({"options": options} if options else {})
