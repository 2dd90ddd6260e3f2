"""Options that several commands take: each is declared once, here.

Those that go together are the fields of a class. A command takes such a group as one keyword parameter
(`machine: Machine`) and is decorated with `spread`, which shows typer one option per field.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from fedfq.cli.completion import complete_split, complete_task

OF_TASK = "the task's"


def option(text: str, default: str, **more: Any) -> Any:
    """An option that is None where it is not given: the help says in words what is taken then."""
    return typer.Option(help=text, show_default=default, **more)


NormGain = Annotated[
    bool, typer.Option("--norm-gain", help="Scale up what shrank to the update's norm: about half of --gain.")
]


def name_gain(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with --gain, --no-gain or --norm-gain as the one value that it names."""
    gain, norm_gain = given.get("gain"), given.get("norm_gain")
    if gain is not None and norm_gain:
        raise ValueError(f"give --{'gain' if gain else 'no-gain'} or --norm-gain, not both")
    named = "norm" if norm_gain else None if gain is None else "full" if gain else "none"
    return {name: value for name, value in given.items() if name != "norm_gain"} | {"gain": named}


Split = Annotated[
    str | None,
    option(
        "Who holds what: iid, one-class, shards:2, dirichlet:0.3 or natural.", OF_TASK, autocompletion=complete_split
    ),
]
NumberOfClients = Annotated[int | None, option("Clients there are.", OF_TASK)]
DataDir = Annotated[
    Path | None, option("Where the data sets are.", "$FEDFQ_DATA, or fedfq in the user's cache", metavar="DIR")
]
Target = Annotated[
    float | None, option("Count the uplink bytes to this accuracy, such as 0.8.", "not counted", metavar="ACCURACY")
]


@dataclass(frozen=True)
class Learning:
    """What is learned, and by whom."""

    task: Annotated[
        str | None,
        option("What is trained; `fedfq data show TASK` draws its data.", "digits", autocompletion=complete_task),
    ] = None
    split: Split = None


@dataclass(frozen=True)
class Training:
    """How the federation trains."""

    rounds: Annotated[int | None, option("Rounds of the federation.", OF_TASK)] = None
    clients: NumberOfClients = None
    per_round: Annotated[int | None, option("Clients that train in a round.", OF_TASK)] = None
    local_steps: Annotated[int | None, option("Steps of SGD of a client in a round.", OF_TASK)] = None
    local_epochs: Annotated[int | None, option("Epochs instead of steps.", "steps")] = None
    batch_size: Annotated[int | None, option("Examples in a step.", OF_TASK)] = None
    lr: Annotated[float | None, option("Learning rate of the first round.", OF_TASK)] = None
    lr_decay: Annotated[float | None, option("Factor of the learning rate, every round.", OF_TASK)] = None
    down_ratio: Annotated[
        str | None,
        option(
            "float32 bytes / bytes of the model on its way down; auto: 128, but 4 KB; own: stc's; 1: all bits.",
            "the method's; fedfq: auto, stc: own, others: 1",
            metavar="RATIO",
        ),
    ] = None
    initial_ratio: Annotated[
        float | None,
        option("The initial model is sent, so many times smaller. Not with --down-ratio 1.", "clients make it"),
    ] = None
    weighting: Annotated[str | None, option("Clients count by their 'samples', or alike ('mean').", "samples")] = None
    precision: Annotated[
        str | None, option("Of what clients' layers compute: float32, or bfloat16, twice as fast.", "float32")
    ] = None
    seed: Annotated[int | None, option("Of everything that is random.", "0")] = None


@dataclass(frozen=True)
class Pauses:
    """What is done between rounds, and how often."""

    eval_every: Annotated[int | None, option("Rounds between two evaluations.", "1")] = None
    checkpoint_every: Annotated[int | None, option("Rounds between two checkpoints.", "10")] = None


@dataclass(frozen=True)
class Machine:
    """What a run may use of the machine."""

    workers: Annotated[int | None, option("Processes that train clients.", "one per core")] = None
    device: Annotated[str | None, option("Where clients train: cpu, or as PyTorch has it, cuda.", "cpu")] = None
    data_dir: DataDir = None

    def resolve(self) -> dict[str, Any]:
        """As arguments of `federation.loop.run`. They may come from a file, and be of any type."""
        workers = self.workers if self.workers is not None else os.cpu_count() or 1
        if not isinstance(workers, int) or workers < 1:
            raise ValueError(f"--workers must be at least 1, got {workers!r}")
        device = self.device if self.device is not None else "cpu"
        if not isinstance(device, str):
            raise ValueError(f"--device must be a name, got {device!r}")
        return {"workers": workers, "data_dir": self.data_dir, "device": device}


@dataclass(frozen=True)
class Earlier:
    """What becomes of an earlier run in the same folder."""

    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in OUT.")] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in OUT, if it holds one.")] = False


# Groups


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Show typer one option per field of a command's groups; the command itself is given whole groups."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    shown: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name in groups:
            types = get_type_hints(groups[name], include_extras=True)
            shown += [
                Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=types[each.name])
                for each in fields(groups[name])
            ]
        else:
            shown.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @wraps(command)
    def take(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
        command(**given)

    take.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    take.__dict__["__signature__"] = Signature(shown)
    return take


def gather(parameters: dict[str, Any]) -> dict[str, Any]:
    """Values by option, from a command's parameters (its `locals()`), some of which are groups."""
    values: dict[str, Any] = {}
    for name, value in parameters.items():
        values |= vars(value) if is_dataclass(value) else {name: value}
    return values


def refuse_given(context: typer.Context, names: Sequence[str], what: str) -> None:
    """Refuse options that would have no effect."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":  # the enum's home depends on the version of typer
            raise ValueError(f"--{name.replace('_', '-')} does not go with {what}")
