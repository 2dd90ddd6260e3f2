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

from fedfq.cli.completion import complete_method, complete_methods, complete_split, complete_task
from fedfq.cli.progress import came_to_nothing, progress, saying_how_to_go_on
from fedfq.codec.ratio import DEFAULT_RATIO
from fedfq.tasks import TASKS

if TYPE_CHECKING:
    from fedfq.federation.config import Config

OptionalInt = int | None
OptionalFloat = float | None


def _option(text: str, default: str, **more: Any) -> Any:
    """What is not given stays None, so that a file may give it: the help says in words what is taken then."""
    return typer.Option(help=text, show_default=default, **more)


# What both commands take.
OF_TASK = "the task's"
Task = Annotated[
    str | None,
    _option("What is trained; `fedfq data show TASK` draws its data.", "digits", autocompletion=complete_task),
]
Split = Annotated[
    str | None,
    _option(
        "Who holds what: iid, one-class, shards:2, dirichlet:0.3 or natural.", OF_TASK, autocompletion=complete_split
    ),
]
Rounds = Annotated[OptionalInt, _option("Rounds of the federation.", OF_TASK)]
NumberOfClients = Annotated[OptionalInt, _option("Clients there are.", OF_TASK)]
PerRound = Annotated[OptionalInt, _option("Clients that train in a round.", OF_TASK)]
LocalSteps = Annotated[OptionalInt, _option("Steps of SGD of a client in a round.", OF_TASK)]
LocalEpochs = Annotated[OptionalInt, _option("Epochs instead of steps.", "steps")]
BatchSize = Annotated[OptionalInt, _option("Examples in a step.", OF_TASK)]
Rate = Annotated[OptionalFloat, _option("Learning rate of the first round.", OF_TASK)]
RateDecay = Annotated[OptionalFloat, _option("Factor of the learning rate, every round.", OF_TASK)]
Weighting = Annotated[str | None, _option("Clients count by their 'samples', or alike ('mean').", "samples")]
Seed = Annotated[OptionalInt, _option("Of everything that is random.", "0")]
EvalEvery = Annotated[OptionalInt, _option("Rounds between two evaluations.", "1")]
CheckpointEvery = Annotated[OptionalInt, _option("Rounds between two checkpoints.", "10")]
Workers = Annotated[OptionalInt, _option("Processes that train clients.", "one per core")]
Device = Annotated[str | None, _option("Where clients train: cpu, or as PyTorch has it, cuda.", "cpu")]
DataDir = Annotated[Path | None, _option("Where the data sets are.", "$FEDFQ_DATA, or fedfq in the user's cache")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in OUT.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in OUT, if it holds one.")]

NAMES = f"TASK is one of {', '.join(TASKS)}."  # below the options, where no narrow column cuts them

# Options that are not part of a configuration, and those that are the method's.
NOT_RESULTS = ("engine", "workers", "data_dir", "device", "out", "resume", "overwrite", "config")
OF_METHOD = ("ratio", "error_feedback", "gain", "basis")

FAILED = 1  # the exit code of a run that came to nothing


def run(
    task: Task = None,
    split: Split = None,
    method: Annotated[
        str | None,
        _option(
            "How updates travel, as in fedfq@256 or stc; `fedfq methods` lists them.",
            "fedfq",
            autocompletion=complete_method,
        ),
    ] = None,
    ratio: Annotated[
        OptionalFloat,
        _option("float32 bytes / payload bytes, at least.", f"the method's; fedfq: {DEFAULT_RATIO}"),
    ] = None,
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
        bool | None,
        typer.Option(
            "--error-feedback/--no-error-feedback",
            help="Send later what was left out.",
            show_default="the method's; fedfq: error-feedback",
        ),
    ] = None,
    gain: Annotated[
        bool | None,
        typer.Option(
            "--gain/--no-gain",
            help="Scale up fully what shrank on the way, or not at all.",
            show_default="the method's; fedfq: by half",
        ),
    ] = None,
    basis: Annotated[str | None, _option("shared, adaptive or identity.", "the method's; fedfq: shared")] = None,
    engine: Annotated[str | None, _option("inline, or flower: the same run in Flower's simulation.", "inline")] = None,
    eval_every: EvalEvery = None,
    checkpoint_every: CheckpointEvery = None,
    workers: Workers = None,
    device: Device = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, _option("Folder of the run.", "runs/TASK-METHOD-SEED")] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    config: Annotated[
        Path | None,
        _option("The same options from a file; those given here win.", "none", metavar="FILE.toml"),
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
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, with commas between: fedavg,fedfq@64,fedfq@256:gain=true.", autocompletion=complete_methods
        ),
    ],
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
    target: Annotated[OptionalFloat, _option("Show the uplink bytes to this accuracy, as 0.6.", "not shown")] = None,
    workers: Workers = None,
    device: Device = None,
    data_dir: DataDir = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
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
        where = dict.fromkeys(NOT_RESULTS) | {"out": Path(folder), "workers": 1}
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
        if not (where["resume"] and Folder(folder).holds_run):
            Folder(folder).refuse_if_taken(overwrite=where["overwrite"])
        elif Folder(folder).config() != configuration:
            raise ValueError(f"{folder}: holds a run with another configuration")
    failed = []
    for number, (configuration, folder) in enumerate(zip(configurations, folders)):
        again = {"resume": where["resume"] and Folder(folder).holds_run, "overwrite": where["overwrite"]}
        with progress(configuration.rounds) as bar:
            watch = bar(configuration.label, folder)
            run_federation(configuration, folder, **again, **machine(where), watch=watch)
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


def _settings(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the result depends on, and the rest, from a TOML file and the command line, which wins."""
    from fedfq.federation.config import read_toml, refuse_unknown

    known = list(given)
    given = {name: value for name, value in given.items() if value is not None}
    found: dict[str, Any] = {}
    if (path := given.get("config")) is not None:
        found = read_toml(path)
        refuse_unknown(found, [name for name in known if name not in ("config", "resume", "overwrite")], str(path))
        for name in ("out", "data_dir"):
            if name in found:
                found[name] = Path(found[name])
    method = _take_method(found, given)
    given = found | given
    where = {name: given.pop(name, None) for name in NOT_RESULTS}
    if where["resume"] and where["overwrite"]:
        raise ValueError("give --resume or --overwrite, not both")
    return given | method, where


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

        return partial(run_inline, resume=where["resume"], overwrite=where["overwrite"])
    if engine != "flower":
        raise ValueError(f"unknown engine {engine!r}; there are inline and flower")
    if where["resume"]:
        raise ValueError("--resume goes with the inline engine: a run on Flower cannot be continued")
    from fedfq.flower.engine import run as run_on_flower

    return partial(run_on_flower, overwrite=where["overwrite"])


def machine(where: dict[str, Any]) -> dict[str, Any]:
    workers = where["workers"] if where["workers"] is not None else os.cpu_count() or 1
    if not isinstance(workers, int) or workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers!r}")
    return {"workers": workers, "data_dir": where["data_dir"], "device": where["device"] or "cpu"}
