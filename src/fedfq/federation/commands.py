"""`fedfq run` and `fedfq compare`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedfq.federation.progress import came_to_nothing, progress, saying_how_to_go_on
from fedfq.tasks import TASKS

if TYPE_CHECKING:
    from fedfq.federation.config import Config

OptionalInt = int | None
OptionalFloat = float | None

# What both commands take. Whatever is not given is the task's default.
Task = Annotated[
    str | None, typer.Option(help=f"What is trained: {', '.join(TASKS)}. `fedfq data show TASK` draws its data.")
]
Split = Annotated[str | None, typer.Option(help="Who holds what: iid, one-class, shards:2, dirichlet:0.3 or natural.")]
Rounds = Annotated[OptionalInt, typer.Option(help="Rounds of the federation.")]
NumberOfClients = Annotated[OptionalInt, typer.Option(help="Clients there are.")]
PerRound = Annotated[OptionalInt, typer.Option(help="Clients that train in a round.")]
LocalSteps = Annotated[OptionalInt, typer.Option(help="Steps of SGD of a client in a round.")]
LocalEpochs = Annotated[OptionalInt, typer.Option(help="Epochs instead of steps.")]
BatchSize = Annotated[OptionalInt, typer.Option(help="Examples in a step.")]
Rate = Annotated[OptionalFloat, typer.Option(help="Learning rate of the first round.")]
RateDecay = Annotated[OptionalFloat, typer.Option(help="Factor of the learning rate, every round.")]
Weighting = Annotated[str | None, typer.Option(help="Clients count by their 'samples', or alike ('mean').")]
Seed = Annotated[OptionalInt, typer.Option(help="Of everything that is random.")]
EvalEvery = Annotated[OptionalInt, typer.Option(help="Rounds between two evaluations.")]
CheckpointEvery = Annotated[OptionalInt, typer.Option(help="Rounds between two checkpoints.")]
Workers = Annotated[OptionalInt, typer.Option(help="Processes that train clients (default: one a core).")]
Device = Annotated[str | None, typer.Option(help="Where clients train: cpu (default), or as PyTorch has it, cuda.")]
DataDir = Annotated[Path | None, typer.Option(help="Where the data sets are, if not in the cache.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in OUT.")]

FAILED = 1  # the exit code of a run that came to nothing
NOT_RESULTS = ("engine", "workers", "data_dir", "device", "out", "resume", "config")  # not part of a configuration


def run(
    task: Task = None,
    split: Split = None,
    method: Annotated[
        str | None,
        typer.Option(help="How updates travel, as in fedfq@256 or stc; `fedfq methods` lists them."),
    ] = None,
    ratio: Annotated[OptionalFloat, typer.Option(help="float32 bytes / payload bytes, at least.")] = None,
    rounds: Rounds = None,
    clients: NumberOfClients = None,
    per_round: PerRound = None,
    local_steps: LocalSteps = None,
    local_epochs: LocalEpochs = None,
    batch_size: BatchSize = None,
    lr: Rate = None,
    lr_decay: RateDecay = None,
    weighting: Weighting = None,
    seed: Seed = None,
    error_feedback: Annotated[
        bool | None, typer.Option("--error-feedback/--no-error-feedback", help="Send later what was left out.")
    ] = None,
    gain: Annotated[
        bool | None,
        typer.Option(
            "--gain/--no-gain", help="Scale up fully what shrank on the way, or not at all; default: by half."
        ),
    ] = None,
    basis: Annotated[str | None, typer.Option(help="shared, adaptive or identity.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="inline (default), or flower: the same run in Flower's simulation.")
    ] = None,
    eval_every: EvalEvery = None,
    checkpoint_every: CheckpointEvery = None,
    workers: Workers = None,
    device: Device = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run (default: runs/TASK-METHOD-SEED).")] = None,
    resume: Resume = False,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="The same options from a file; those given here win.")
    ] = None,
) -> None:
    """Train a federation: clients train, updates are compressed, the server averages.

    A run can be killed at any moment and goes on with --resume; its result is the same. The exit code is 1 if no update
    was accepted in the last tenth of its rounds.
    """
    settings, where = _settings(locals())
    from fedfq.report.runs import read_run, summary_rows

    configuration, folder = _resumed(settings, where) if where["resume"] else _new(settings, where)
    run_federation = _engine(where)
    with saying_how_to_go_on(lambda: _to_go_on(folder, where)), progress(configuration.rounds) as bar:
        run_federation(configuration, folder, **machine(where), watch=bar(configuration.label, folder))
    done = read_run(folder)
    for line in summary_lines(summary_rows([done]), None, len(configuration.label)):
        typer.echo(line)
    typer.echo(folder)
    if came_to_nothing(done):
        raise typer.Exit(FAILED)


def compare(
    methods: Annotated[str, typer.Option(help="Methods, with commas between: fedavg,fedfq@64,fedfq@256:gain=true.")],
    out: Annotated[Path, typer.Option(help="Folder for one run a method, and report.html.")],
    task: Task = None,
    split: Split = None,
    rounds: Rounds = None,
    clients: NumberOfClients = None,
    per_round: PerRound = None,
    local_steps: LocalSteps = None,
    local_epochs: LocalEpochs = None,
    batch_size: BatchSize = None,
    lr: Rate = None,
    lr_decay: RateDecay = None,
    weighting: Weighting = None,
    seed: Seed = None,
    eval_every: EvalEvery = None,
    checkpoint_every: CheckpointEvery = None,
    target: Annotated[OptionalFloat, typer.Option(help="Show the uplink bytes to this accuracy, as 0.6.")] = None,
    workers: Workers = None,
    device: Device = None,
    data_dir: DataDir = None,
    resume: Resume = False,
) -> None:
    """Run several methods on the same model, clients and batches, and compare what they cost and reach.

    Can be stopped at any moment and goes on with --resume. The exit code is 1 if a method had no update accepted in the
    last tenth of its rounds.
    """
    given = locals()
    settings, where = _settings({name: given[name] for name in given if name not in ("methods", "target")})
    with saying_how_to_go_on(lambda: "the same command with --resume goes on there"):
        typer.echo(compared(methods.split(","), settings, where, out / "report.html", target))


DEMO = {"task": "digits", "rounds": 30, "local_steps": 10}
DEMO_METHODS = ["fedavg", "fedfq@32", "fedfq@64", "fedfq@128"]


def demo(
    report: Annotated[Path, typer.Option(metavar="FILE", help="The page that is written.")] = Path("report.html"),
) -> None:
    """Train a federation on handwritten digits, with and without compression, and compare. Takes about a minute."""
    if not report.parent.is_dir():
        raise ValueError(f"{report.parent}: no such folder")
    with TemporaryDirectory() as folder:
        where = {"out": Path(folder), "resume": False, "workers": 1, "data_dir": None, "device": None}
        typer.echo(f"open {compared(DEMO_METHODS, DEMO, where, report, target=0.9)} in a browser")


def compared(
    specs: list[str], settings: dict[str, Any], where: dict[str, Any], report: Path, target: float | None
) -> Path:
    """One run after the other, into folders named after their methods; a table and a page of them all."""
    from fedfq.federation.config import Config
    from fedfq.federation.folder import Folder
    from fedfq.federation.loop import run as run_federation
    from fedfq.report.page import check_name, write_report
    from fedfq.report.runs import read_run, summary_rows

    check_name(report)
    if target is not None and not 0 < target <= 1:
        raise ValueError(f"--target is an accuracy between 0 and 1, got {target}")
    configurations = [Config.make(method=spec, **settings) for spec in specs]
    labels = [configuration.label for configuration in configurations]
    if len(set(labels)) < len(labels):
        raise ValueError("a method is listed twice")
    out: Path = where["out"]
    folders = [out / label.replace(":", "-") for label in labels]
    for configuration, folder in zip(configurations, folders):  # all of them, before the first one runs
        if Folder(folder).holds_run:
            if not where["resume"]:
                raise ValueError(f"{folder}: already holds a run (--resume continues it)")
            if Folder(folder).config() != configuration:
                raise ValueError(f"{folder}: holds a run with another configuration")
    failed = []
    for number, (configuration, folder) in enumerate(zip(configurations, folders)):
        again = Folder(folder).holds_run
        with progress(configuration.rounds) as bar:
            watch = bar(configuration.label, folder)
            run_federation(configuration, folder, resume=again, **machine(where), watch=watch)
        done = read_run(folder)
        for line in summary_lines(summary_rows([done], target), target, max(map(len, labels)))[1 if number else 0 :]:
            typer.echo(line)
        failed += [done] if came_to_nothing(done) else []
    write_report(folders, report, target)
    if failed:
        typer.echo(report)
        raise typer.Exit(FAILED)
    return report


def summary_lines(rows: list[dict[str, Any]], target: float | None, width: int) -> list[str]:
    """A heading and a line a run, of the same width in every call, so that a table can grow line by line."""
    columns = ["accuracy", "uplink MB", "ratio", "claimed", "downlink MB"]
    columns += [f"MB to {target:.0%}"] if target is not None else []
    lines = ["method".ljust(width) + "".join(column.rjust(14) for column in columns)]
    for row in rows:
        cells = [
            _shown(row["accuracy"], "{:.1%}"),
            f"{row['uplink_bytes'] / 1e6:,.2f}",
            _shown(row["wire_ratio"], "{:,.1f}x"),
            _shown(row["claimed_ratio"], "{:,.1f}x"),
            f"{row['downlink_bytes'] / 1e6:,.2f}",
        ]
        if target is not None:
            reached = row["bytes_to_target"]
            cells.append("never" if reached is None else f"{reached / 1e6:,.2f}")
        lines.append(row["run"].ljust(width) + "".join(cell.rjust(14) for cell in cells))
    return lines


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def methods() -> None:
    """List the methods: where they come from, what they claim to cost, what they remember, whether they are unbiased.

    Options go behind the name: fedfq@256:gain=true.
    """
    import sys

    from rich import box
    from rich.console import Console
    from rich.table import Table

    from fedfq.methods import METHODS, make, options_of

    columns = ("method", "paper", "claimed cost", "client keeps", "server keeps", "unbiased", "options")
    table = Table(*columns, box=box.SIMPLE, show_edge=False)
    for name in METHODS:
        method = make(name)
        options = ", ".join(f"{option}={value}" for option, value in options_of(name).items())
        memories = (method.client_memory, method.server_memory)
        table.add_row(name, method.paper, method.claims, *memories, "yes" if method.unbiased else "no", options)
    Console(width=None if sys.stdout.isatty() else 1000, highlight=False, markup=False, emoji=False).print(table)


def _settings(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the result depends on, and the rest, from a TOML file and the command line, which wins."""
    from fedfq.federation.config import read_toml, refuse_unknown

    known = list(given)
    given = {name: value for name, value in given.items() if value is not None}
    if (path := given.get("config")) is not None:
        found = read_toml(path)
        refuse_unknown(found, [name for name in known if name not in ("config", "resume")], str(path))
        for name in ("out", "data_dir"):
            if name in found:
                found[name] = Path(found[name])
        given = found | given
    where = {name: given.pop(name, None) for name in NOT_RESULTS}
    options = {name: given.pop(name) for name in ("ratio", "error_feedback", "gain", "basis") if name in given}
    return given | ({"options": options} if options else {}), where


def _new(settings: dict[str, Any], where: dict[str, Any]) -> tuple[Config, Path]:
    from fedfq.federation.config import Config

    config = Config.make(**settings)
    name = f"{config.task}-{config.label}-{config.seed}".replace(":", "-")
    return config, where["out"] or Path("runs") / name


def _resumed(settings: dict[str, Any], where: dict[str, Any]) -> tuple[Config, Path]:
    """The run in OUT. Options that would make it another one are refused."""
    from fedfq.federation.config import Config
    from fedfq.federation.folder import Folder

    if where["out"] is None:
        raise ValueError("--resume needs --out, the folder of the run")
    found = Folder(where["out"]).config()
    if settings and Config.make(**settings) != found:
        raise ValueError(f"{where['out']}: holds a run with another configuration; --resume needs no other options")
    return found, where["out"]


def _to_go_on(folder: Path, where: dict[str, Any]) -> str:
    """How to continue the run that was interrupted."""
    from fedfq.federation.folder import Folder

    run = Folder(folder)
    if not run.holds_run:
        return "no round was finished, and nothing is left"
    done = f"{len(run.rounds())} of {run.config().rounds} rounds are done"
    if where["engine"] == "flower":
        return f"{done}, but a run on Flower cannot be continued"
    given = {f"--{name}".replace("_", "-"): where[name] for name in ("workers", "device", "data_dir")}
    options = [word for option, value in given.items() if value is not None for word in (option, str(value))]
    return f"{done}; to go on: {shlex.join(['fedfq', 'run', '--out', str(folder), '--resume', *options])}"


def _engine(where: dict[str, Any]) -> Callable[..., Any]:
    """What runs a federation."""
    engine = where["engine"] or "inline"
    if engine == "inline":
        from fedfq.federation.loop import run as run_inline

        return partial(run_inline, resume=where["resume"])
    if engine != "flower":
        raise ValueError(f"unknown engine {engine!r}; there are inline and flower")
    if where["resume"]:
        raise ValueError("--resume goes with the inline engine: a run on Flower cannot be continued")
    from fedfq.flower.engine import run as run_on_flower

    return run_on_flower


def machine(where: dict[str, Any]) -> dict[str, Any]:
    workers = where["workers"] if where["workers"] is not None else os.cpu_count() or 1
    if not isinstance(workers, int) or workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers!r}")
    return {"workers": workers, "data_dir": where["data_dir"], "device": where["device"] or "cpu"}
