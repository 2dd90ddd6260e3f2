"""`fedfq run`, `fedfq compare` and `fedfq demo`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedfq.cli.completion import complete_method, complete_methods
from fedfq.cli.errors import FAILED
from fedfq.cli.options import (
    Earlier,
    Learning,
    Machine,
    NormGain,
    Pauses,
    Target,
    Training,
    gather,
    name_gain,
    option,
    spread,
)
from fedfq.cli.progress import came_to_nothing, saying_how_to_go_on, showing_progress
from fedfq.cli.settings import Execution, merge_settings
from fedfq.codec.ratio import DEFAULT_RATIO
from fedfq.tasks import TASKS

if TYPE_CHECKING:
    from fedfq.federation.config import Config
    from fedfq.report.runs import RunData

TASK_NAMES = f"TASK is one of {', '.join(TASKS)}."  # below the options, where no narrow column cuts them
CELL_CHARACTERS = 12  # of a table's column, behind a space

DEMO = {"task": "digits", "rounds": 30, "local_steps": 10}
DEMO_METHODS = ["fedavg", "fedfq@32", "fedfq@64", "fedfq@128"]
DEMO_TARGET = 0.9  # accuracy


@spread
def run(
    *,
    learning: Learning,
    method: Annotated[
        str | None,
        option(
            "How updates travel, as in fedfq@256 or stc; `fedfq methods` lists them.",
            "fedfq",
            autocompletion=complete_method,
        ),
    ] = None,
    ratio: Annotated[
        float | None,
        option("float32 bytes / payload bytes, at least.", f"the method's; fedfq: {DEFAULT_RATIO}, but 4 KB at least"),
    ] = None,
    training: Training,
    unbiased: Annotated[
        bool | None,
        typer.Option(
            "--unbiased/--no-unbiased",
            help="Noise instead of bias: what is left out is sketched, and clients keep no memory.",
            show_default="the method's; fedfq: unbiased",
        ),
    ] = None,
    error_feedback: Annotated[
        bool | None,
        typer.Option(
            "--error-feedback/--no-error-feedback",
            help="Send later what was left out.",
            show_default="the method's; fedfq: no-error-feedback",
        ),
    ] = None,
    gain: Annotated[
        bool | None,
        typer.Option(
            "--gain/--no-gain",
            help="Scale up fully what shrank on the way, or not at all.",
            show_default="the method's; fedfq: no-gain",
        ),
    ] = None,
    norm_gain: NormGain = False,
    basis: Annotated[str | None, option("shared, adaptive or identity.", "the method's; fedfq: shared")] = None,
    engine: Annotated[str | None, option("inline, or flower: the same run in Flower's simulation.", "inline")] = None,
    pauses: Pauses,
    machine: Machine,
    out: Annotated[Path | None, option("Folder of the run.", "runs/TASK-METHOD-SEED")] = None,
    earlier: Earlier,
    config: Annotated[
        Path | None, option("The same options from a file; those given here win.", "none", metavar="FILE.toml")
    ] = None,
) -> None:
    """Train a federation: clients train, updates are compressed, the server averages.

    A run can be killed at any moment and goes on with --resume; its result is the same. The exit code is 1 if no update
    was accepted in the last tenth of its rounds.
    """
    _run(*merge_settings(name_gain(gather(locals()))))


def _run(settings: dict[str, Any], execution: Execution) -> None:
    from fedfq.report.runs import read_run

    config, folder = (_find_run if execution.resume else _name_run)(settings, execution)
    run_federation = _choose_engine(execution)
    resources = execution.resolve()
    with saying_how_to_go_on(lambda: _say_how_to_go_on(folder, execution)), showing_progress(config.rounds) as bar:
        run_federation(config, folder, **resources, watch=bar(config.label, folder))
    done = read_run(folder)
    for line in summarise([done], None, len(config.label)):
        typer.echo(line)
    typer.echo(folder)
    if came_to_nothing(done):
        raise typer.Exit(FAILED)


@spread
def compare(
    *,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, with commas between: fedavg,fedfq@64,fedfq@256:gain=true.", autocompletion=complete_methods
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for one run per method, and report.html.")],
    learning: Learning,
    training: Training,
    pauses: Pauses,
    target: Target = None,
    machine: Machine,
    earlier: Earlier,
) -> None:
    """Run several methods on the same model, clients and batches, and compare what they cost and reach.

    Can be stopped at any moment and goes on with --resume. The exit code is 1 if a method had no update accepted in the
    last tenth of its rounds.
    """
    given = gather(locals())
    settings, execution = merge_settings({name: given[name] for name in given if name not in ("methods", "target")})
    with saying_how_to_go_on(lambda: "the same command with --resume goes on there"):
        typer.echo(compare_methods(methods.split(","), settings, execution, out, out / "report.html", target))


def demo(
    report: Annotated[Path, typer.Option(metavar="FILE", help="The page that is written.")] = Path("report.html"),
) -> None:
    """Train a federation on handwritten digits, with and without compression, and compare. Takes about a minute."""
    if not report.parent.is_dir():
        raise ValueError(f"{report.parent}: no such folder")
    with TemporaryDirectory() as folder:
        page = compare_methods(DEMO_METHODS, DEMO, Execution(workers=1), Path(folder), report, DEMO_TARGET)
        typer.echo(f"open {page} in a browser")


# One run


def _name_run(settings: dict[str, Any], execution: Execution) -> tuple[Config, Path]:
    """A new run, and its folder."""
    from fedfq.federation.config import Config

    config = Config.make(**settings)
    name = f"{config.task}-{config.label}-{config.seed}".replace(":", "-")
    return config, execution.out or Path("runs") / name


def _find_run(settings: dict[str, Any], execution: Execution) -> tuple[Config, Path]:
    """The run in OUT. Options that would make it another one are refused."""
    from fedfq.federation.config import Config
    from fedfq.federation.folder import Folder

    if execution.out is None:
        raise ValueError("--resume needs --out, the folder of the run")
    found = Folder(execution.out).config()
    if settings and Config.make(**settings) != found:
        raise ValueError(f"{execution.out}: holds a run with another configuration; --resume needs no other options")
    return found, execution.out


def _say_how_to_go_on(folder: Path, execution: Execution) -> str:
    """How to continue the run that was interrupted."""
    from fedfq.federation.folder import Folder

    run = Folder(folder)
    if not run.holds_run:
        return "no round was finished, and nothing is left"
    done = f"{len(run.rounds())} of {run.config().rounds} rounds are done"
    if execution.engine == "flower":
        return f"{done}, but a run on Flower cannot be continued"
    given = {f"--{name}".replace("_", "-"): getattr(execution, name) for name in ("workers", "device", "data_dir")}
    options = [word for option, value in given.items() if value is not None for word in (option, str(value))]
    return f"{done}; to go on: {shlex.join(['fedfq', 'run', '--out', str(folder), '--resume', *options])}"


def _choose_engine(execution: Execution) -> Callable[..., Any]:
    """What runs a federation."""
    engine = execution.engine or "inline"
    if engine == "inline":
        from fedfq.federation.loop import run as run_inline

        return partial(run_inline, resume=execution.resume, overwrite=execution.overwrite)
    if engine != "flower":
        raise ValueError(f"unknown engine {engine!r}; there are inline and flower")
    if execution.resume:
        raise ValueError("--resume goes with the inline engine: a run on Flower cannot be continued")
    from fedfq.flower.engine import run as run_on_flower

    return partial(run_on_flower, overwrite=execution.overwrite)


# Several runs


def compare_methods(
    specs: list[str], settings: dict[str, Any], execution: Execution, out: Path, page: Path, target: float | None
) -> Path:
    """One run after the other, into folders named after their methods; a table and a page of them all."""
    from fedfq.federation.config import Config
    from fedfq.report.page import check_name, write_report

    check_name(page)
    if target is not None and not 0 < target <= 1:
        raise ValueError(f"--target is an accuracy between 0 and 1, got {target}")
    configs = [Config.make(method=spec, **settings) for spec in specs]
    labels = [config.label for config in configs]
    if len(set(labels)) < len(labels):
        raise ValueError("a method is listed twice")
    folders = [out / label.replace(":", "-") for label in labels]
    for config, folder in zip(configs, folders):  # all of them, before the first one runs
        _refuse_other_run(config, folder, execution)
    width = max(map(len, labels))
    failed = False
    for number, (config, folder) in enumerate(zip(configs, folders)):
        done = _run_one(config, folder, execution)
        for line in summarise([done], target, width)[1 if number else 0 :]:
            typer.echo(line)
        failed |= came_to_nothing(done)
    write_report(folders, page, target)
    if failed:
        typer.echo(page)
        raise typer.Exit(FAILED)
    return page


def _refuse_other_run(config: Config, folder: Path, execution: Execution) -> None:
    from fedfq.federation.folder import Folder

    found = Folder(folder)
    if not (execution.resume and found.holds_run):
        found.refuse_if_taken(overwrite=execution.overwrite)
    elif found.config() != config:
        raise ValueError(f"{folder}: holds a run with another configuration")


def _run_one(config: Config, folder: Path, execution: Execution) -> RunData:
    from fedfq.federation.folder import Folder
    from fedfq.federation.loop import run as run_federation
    from fedfq.report.runs import read_run

    resume = execution.resume and Folder(folder).holds_run
    resources = execution.resolve() | {"resume": resume, "overwrite": execution.overwrite}
    with showing_progress(config.rounds) as bar:
        run_federation(config, folder, **resources, watch=bar(config.label, folder))
    return read_run(folder)


# What they came to


def summarise(runs: list[RunData], target: float | None, width: int) -> list[str]:
    """A heading and one line per run, of the same width in every call, so that a table can grow line by line."""
    from fedfq.report.runs import summary_rows

    columns = ["accuracy", "up MB", "ratio", "claimed", "down MB", "total MB", "ratio"]
    columns += [f"up to {target:.0%}", f"total to {target:.0%}"] if target is not None else []
    lines = ["method".ljust(width) + _align(columns)]
    for row in summary_rows(runs, target):
        cells = [
            _format(row["accuracy"], "{:.1%}"),
            f"{row['uplink_bytes'] / 1e6:,.2f}",
            _format(row["wire_ratio"], "{:,.1f}x"),
            _format(row["claimed_ratio"], "{:,.1f}x"),
            f"{row['downlink_bytes'] / 1e6:,.2f}",
            f"{row['total_bytes'] / 1e6:,.2f}",
            _format(row["total_ratio"], "{:,.1f}x"),
        ]
        if target is not None:
            reached = row["bytes_to_target"], row["total_bytes_to_target"]
            cells += ["never" if size is None else f"{size / 1e6:,.2f}" for size in reached]
        lines.append(row["run"].ljust(width) + _align(cells))
    return lines


def _align(cells: list[str]) -> str:
    return "".join(" " + cell.rjust(CELL_CHARACTERS) for cell in cells)


def _format(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
