"""The `fedfq` command. Commands import what they need when they run, so that `fedfq --help` is quick."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import fedfq
from fedfq.cli import bench as bench_commands
from fedfq.cli import data as data_commands
from fedfq.cli import federation as federation_commands
from fedfq.cli.methods import methods
from fedfq.cli.plan import plan
from fedfq.cli.report import report
from fedfq.cli.reproduce import reproduce
from fedfq.codec.errors import FedFQError, PayloadError
from fedfq.codec.ratio import DEFAULT_RATIO

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from fedfq.files import Array

BAD_INPUT = 2
INTERRUPTED = 130
# Who brings what.
EXTRAS = {"torch": "sim", "sklearn": "sim", "matplotlib": "report", "simpy": "plan", "flwr": "flower"}
CARRIED = ("float16", "float32", "integer")  # kinds of sections that are not quantised


class Commands(TyperGroup):
    """Whatever bad input raises becomes one line and an exit code here, for every command."""

    def invoke(self, ctx: Any) -> Any:  # a context of click, which recent versions of typer have inside
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise  # whoever reads our output went away: click knows what to do
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except (FedFQError, ValueError, TypeError, MemoryError) as error:
            _fail(str(error) or "not enough memory")
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in EXTRAS:
                raise
            _fail(f"this needs {package}, which is not installed: pip install 'fedfq[{EXTRAS[package]}]'")


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(federation_commands.demo)
app.command(epilog=federation_commands.NAMES)(federation_commands.run)
app.command(epilog=federation_commands.NAMES)(federation_commands.compare)
app.command()(methods)
app.add_typer(bench_commands.app, name="bench")
app.add_typer(data_commands.app, name="data")
app.command()(report)
app.command()(reproduce)
app.command()(plan)


def main() -> None:
    """Entry point of the `fedfq` script."""
    app(prog_name="fedfq")  # also as `python -m fedfq`, where shells complete `fedfq`


def _fail(message: str) -> NoReturn:
    typer.echo(f"fedfq: {' '.join(message.split())}", err=True)
    raise typer.Exit(BAD_INPUT)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedfq {fedfq.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Model updates of federated learning as few bytes, inside a byte budget."""


# encode


class Allocator(StrEnum):
    waterfill = "waterfill"
    exact = "exact"
    cgsa = "cgsa"


class Rounding(StrEnum):
    deadzone = "deadzone"
    stochastic = "stochastic"


class Basis(StrEnum):
    adaptive = "adaptive"
    identity = "identity"


class Layout(StrEnum):
    full = "full"
    digest = "digest"


def _size(text: str, default: str | bool = True) -> Any:
    return typer.Option(
        help=text, show_default=default, rich_help_panel=f"Size (one of these; --ratio {DEFAULT_RATIO} if none)"
    )


@app.command()
def encode(
    source: Annotated[Path, typer.Argument(metavar="IN")],
    target: Annotated[Path, typer.Argument(metavar="OUT")],
    ratio: Annotated[
        float | None, _size("At least so many times smaller than float32.", f"{DEFAULT_RATIO}, if no size is given")
    ] = None,
    bits_per_parameter: Annotated[float | None, _size("At most so many bits per parameter.")] = None,
    max_bytes: Annotated[int | None, _size("At most so many bytes.")] = None,
    step: Annotated[float | None, _size("This quantisation step, whatever it takes.")] = None,
    claimed_ratio: Annotated[float | None, _size("As the paper counts (exact and cgsa only).")] = None,
    base: Annotated[Path | None, typer.Option(metavar="MODEL", help="Encode IN minus this model.")] = None,
    allocator: Annotated[Allocator, typer.Option(help="How bits are divided.")] = Allocator.waterfill,
    rounding: Annotated[
        Rounding | None,
        typer.Option(help="To levels.", show_default="deadzone for waterfill, else stochastic as in the paper"),
    ] = None,
    basis: Annotated[
        Basis | None,
        typer.Option(
            help="Low-rank factors where they pay, or entries as they are.",
            show_default="adaptive for waterfill with a dead zone, else identity",
        ),
    ] = None,
    gain: Annotated[bool, typer.Option("--gain/--no-gain", help="Undo the shrinking of a dead zone.")] = False,
    layout: Annotated[Layout, typer.Option(help="Digest: names and shapes stay at home.")] = Layout.full,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Send these as float16. Repeatable.",
            show_default="*running_mean and *running_var",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="For factors, stochastic rounding and cgsa.")] = 0,
    threads: Annotated[int, typer.Option(help="Does not change the bytes.")] = 1,
) -> None:
    """Compress an update to a payload.

    IN is the update, or with --base a checkpoint: .safetensors or .npz. OUT is the payload, for instance update.fq.
    """
    from fedfq.files import SUFFIXES, read_tensors, write_bytes

    options: dict[str, Any] = _one_size(
        ratio=ratio,
        bits_per_parameter=bits_per_parameter,
        max_bytes=max_bytes,
        step=step,
        claimed_ratio=claimed_ratio,
    )
    options |= {"allocator": allocator.value, "gain": gain, "layout": layout.value, "threads": threads}
    if basis:
        options["basis"] = basis.value
    if rounding:
        options["rounding"] = rounding.value
    if keep:
        options["keep"] = keep
    codec = fedfq.Codec(**options)
    if target.suffix.lower() in SUFFIXES:
        raise ValueError(f"{target}: a payload is no file of tensors; name it .fq, for instance")
    _refuse_overwriting(target, source, base)
    update = read_tensors(source)
    if base is not None:
        update = _difference(update, read_tensors(base), base)
    began = time.perf_counter()
    try:
        payload = codec.encode(update, seed)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{source}: {error}") from error
    seconds = time.perf_counter() - began
    report = fedfq.inspect(payload, like=update)
    nmse = _nmse(report, payload, update)
    write_bytes(target, payload)
    typer.echo(f"{target}: {_summary(report, nmse)}, {seconds:.2f} s")
    if base is None:
        _warn_of_checkpoint(source, update, report, nmse)


def _one_size(**sizes: float | None) -> dict[str, float]:
    given = {name: value for name, value in sizes.items() if value is not None}
    if len(given) > 1:
        names = ["--" + name.replace("_", "-") for name in given]
        raise ValueError(f"give one size, not {' and '.join(names)}")
    return given


def _nmse(report: fedfq.Report, payload: bytes, update: Mapping[str, Array]) -> float:
    """The NMSE of quantised tensors: others would hide it, or have none."""
    from fedfq.metrics import nmse

    quantised = {tensor.name: update[tensor.name] for tensor in report.tensors if tensor.kind not in CARRIED}
    return nmse(quantised, fedfq.decode(payload, like=update))


def _summary(report: fedfq.Report, nmse: float) -> str:
    """What was won and lost."""
    return (
        f"{report.bytes:,} bytes instead of {report.raw_bytes:,} ({report.ratio:.1f}x), "
        f"{report.bits_per_parameter:.3g} bits/parameter, NMSE {nmse:.3g}"
    )


def _warn_of_checkpoint(source: Path, update: Mapping[str, Array], report: fedfq.Report, nmse: float) -> None:
    from fedfq.cli.checkpoints import looks_like_checkpoint

    if looks_like_checkpoint(update, report.bits_per_parameter, nmse):
        typer.echo(
            f"fedfq: warning: {source} looks like a checkpoint, not like an update (NMSE {nmse:.2g}); to encode what "
            "changed since an earlier checkpoint, name that with --base",
            err=True,
        )


def _difference(new: Mapping[str, Array], base: Mapping[str, Array], base_path: Path) -> dict[str, Array]:
    """new - base. Integers wrap around, as `_sum` does, and booleans are compared: both come back exactly."""
    import numpy as np

    if only := sorted(set(new) ^ set(base)):
        where = "lacks" if only[0] in new else "has, and the input lacks,"
        raise ValueError(f"{base_path} {where} the tensor {only[0]!r}")
    result = {}
    for name, array in new.items():
        other = base[name]
        if array.shape != other.shape:
            raise ValueError(f"tensor {name!r} has shape {array.shape}, in {base_path} {other.shape}")
        if array.dtype != other.dtype and not (array.dtype.kind == other.dtype.kind == "f"):
            raise ValueError(f"tensor {name!r} has dtype {array.dtype}, in {base_path} {other.dtype}")
        with np.errstate(over="ignore", invalid="ignore"):  # the codec refuses what is not finite
            if array.dtype.kind == "f":
                result[name] = np.subtract(array, other, dtype=np.result_type(array, other, np.float32))
            elif array.dtype.kind in "iu":
                result[name] = np.subtract(array, other)
            elif array.dtype.kind == "b":
                result[name] = array ^ other
            else:
                raise ValueError(f"tensor {name!r} has dtype {array.dtype}, which is no kind of number")
    return result


# decode


@app.command()
def decode(
    source: Annotated[Path, typer.Argument(metavar="IN")],
    target: Annotated[Path, typer.Argument(metavar="OUT")],
    like: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="Refuse an update that does not fit this model.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="Add the update to this model, and write the sum.")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(help="Refuse an update larger than this, if no model is given.", show_default="1 GiB")
    ] = None,
) -> None:
    """Restore an update from its payload, or apply it to a checkpoint.

    IN is the payload, OUT the file to write: .safetensors or .npz. What was bfloat16 is written as float32.
    """
    from fedfq.files import read_tensors, suffix, write_tensors

    suffix(target)
    if like and base:
        raise ValueError("give --like or --base, not both")
    _refuse_overwriting(target, source, like, base)
    payload = source.read_bytes()
    model_path = like or base
    model = read_tensors(model_path) if model_path else None
    limit: dict[str, Any] = {} if max_bytes is None else {"max_bytes": max_bytes}
    with _naming(source, model_path):
        fedfq.inspect(payload, like=model)  # what is no payload is refused before anything is compiled
        tensors = fedfq.decode(payload, like=model, **limit)
    if base is not None and model is not None:
        tensors = _sum(model, tensors)
    write_tensors(target, tensors)
    parameters = sum(array.size for array in tensors.values())
    typer.echo(f"{target}: {len(tensors):,} tensors, {parameters:,} parameters")


def _sum(model: Mapping[str, Array], update: Mapping[str, Array]) -> dict[str, Array]:
    """model + update, in the model's order and dtypes."""
    import numpy as np

    result = {}
    for name, array in model.items():
        if array.dtype.kind == "b":
            result[name] = array ^ update[name]
            continue
        try:
            with np.errstate(over="raise" if array.dtype.kind == "f" else "ignore"):
                result[name] = np.asarray(array + update[name])
        except FloatingPointError:
            raise ValueError(f"tensor {name!r}: the sum does not fit into {array.dtype}") from None
    return result


# inspect


@app.command()
def inspect(
    source: Annotated[Path, typer.Argument(metavar="IN")],
    like: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="Needed where the payload holds a digest of its layout.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what the payload IN holds, and what each tensor takes of it."""
    from fedfq.files import read_tensors

    payload = source.read_bytes()
    model = read_tensors(like) if like else None
    with _naming(source, like):
        report = fedfq.inspect(payload, like=model)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        _print(_report_table(report))


def _report_table(report: fedfq.Report) -> Table:
    numbers = ("bytes", "share", "bits/\nparam", "non-zeros")
    table = _table("tensor", "shape", "dtype", "kind", right=numbers, padding=0)

    def sizes(item: fedfq.Report | fedfq.TensorReport) -> list[str]:
        share, bits = item.bytes / report.bytes, item.bits_per_parameter
        return [f"{item.bytes:,}", f"{share:.1%}", f"{bits:.3f}", f"{item.nonzeros:,}"]

    for tensor in report.tensors:
        kind = tensor.kind.replace("factors", f"rank {tensor.rank}")
        table.add_row(_printable(tensor.name), _shape(tensor.shape), tensor.dtype, kind, *sizes(tensor))
    header = report.header_bytes
    table.add_row("(header)", "", "", "", f"{header:,}", f"{header / report.bytes:.1%}", "", "")
    table.show_footer = True
    for column, text in zip(table.columns, [f"total ({report.ratio:.1f}x)", "", "", "", *sizes(report)]):
        column.footer = text
    return table


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _printable(name: str) -> str:
    """A tensor's name comes from whoever wrote the payload: no control characters may reach the terminal."""
    return name if name.isprintable() else repr(name)


# What the commands share


def _refuse_overwriting(target: Path, *inputs: Path | None) -> None:
    for path in inputs:
        if path is not None and target.exists() and path.exists() and target.samefile(path):
            raise ValueError(f"{target}: the output would overwrite an input")


@contextmanager
def _naming(path: Path, model: Path | None) -> Iterator[None]:
    """Errors of a payload say which file it is, and which option helps."""
    try:
        yield
    except PayloadError as error:
        message = str(error)
        if error.reason == "layout" and model is None:
            message = "the payload holds only a digest of its layout: name the model with --like"
        elif error.reason == "limit":
            message += "; --max-bytes raises it"
        raise PayloadError(error.reason, f"{path}: {message}") from error


def _table(*left: str, right: tuple[str, ...], padding: int = 1) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, padding=(0, padding, 0, 0), show_edge=False)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _print(content: RenderableType) -> None:
    """As wide as the terminal; as wide as it needs to be when the output goes to a file or a pipe."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 1000, highlight=False, markup=False, emoji=False).print(content)
