"""`fedfq encode`, `fedfq decode` and `fedfq inspect`: updates and payloads as files."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fedfq
from fedfq.cli.errors import refuses
from fedfq.cli.options import NormGain, name_gain, spread
from fedfq.cli.output import escape, make_console, make_table
from fedfq.codec.errors import PayloadError
from fedfq.codec.ratio import DEFAULT_RATIO

if TYPE_CHECKING:
    from rich.table import Table

    from fedfq.files import Array


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
        help=text,
        show_default=default,
        rich_help_panel=f"Size (one of these; --ratio {DEFAULT_RATIO} if none, but 4 KB)",
    )


@dataclass(frozen=True)
class Size:
    """How large a payload may become: in one way, or as by default."""

    ratio: Annotated[
        float | None,
        _size(
            "At least so many times smaller than float32.", f"{DEFAULT_RATIO}, but 4 KB at least, if no size is given"
        ),
    ] = None
    bits_per_parameter: Annotated[float | None, _size("At most so many bits per parameter.")] = None
    max_bytes: Annotated[int | None, _size("At most so many bytes.")] = None
    step: Annotated[float | None, _size("This quantisation step, whatever it takes.")] = None
    claimed_ratio: Annotated[float | None, _size("As the paper counts (exact and cgsa only).")] = None

    def choose(self) -> dict[str, Any]:
        """As options of a codec."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) > 1:
            names = ["--" + name.replace("_", "-") for name in given]
            raise ValueError(f"give one size, not {' and '.join(names)}")
        return given


@dataclass(frozen=True)
class Coding:
    """How an update is coded."""

    allocator: Annotated[Allocator, typer.Option(help="How bits are divided.")] = Allocator.waterfill
    rounding: Annotated[
        Rounding | None,
        typer.Option(help="To levels.", show_default="deadzone for waterfill, else stochastic as in the paper"),
    ] = None
    basis: Annotated[
        Basis | None,
        typer.Option(
            help="Low-rank factors where they pay, or entries as they are.",
            show_default="adaptive for waterfill with a dead zone, else identity",
        ),
    ] = None
    gain: Annotated[
        bool | None, typer.Option("--gain/--no-gain", help="Undo the shrinking of a dead zone.", show_default="no-gain")
    ] = None
    norm_gain: NormGain = False
    unbiased: Annotated[
        bool | None,
        typer.Option("--unbiased/--no-unbiased", help="Noise instead of bias.", show_default="no-unbiased"),
    ] = None
    layout: Annotated[Layout, typer.Option(help="Digest: names and shapes stay at home.")] = Layout.full
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Statistics: each is quantised relative to its own size. Repeatable.",
            show_default="those of batch normalisation",
        ),
    ] = None

    def choose(self) -> dict[str, Any]:
        """As options of a codec, which has defaults of its own."""
        given = {name: value for name, value in name_gain(vars(self)).items() if value not in (None, [])}
        return {name: value.value if isinstance(value, StrEnum) else value for name, value in given.items()}


@spread
def encode(
    *,
    source: Annotated[Path, typer.Argument(metavar="IN")],
    target: Annotated[Path, typer.Argument(metavar="OUT")],
    size: Size,
    base: Annotated[Path | None, typer.Option(metavar="MODEL", help="Encode IN minus this model.")] = None,
    coding: Coding,
    seed: Annotated[int, typer.Option(help="For factors, stochastic rounding and cgsa.")] = 0,
    threads: Annotated[int, typer.Option(help="Does not change the bytes.")] = 1,
) -> None:
    """Compress an update to a payload.

    IN is the update, or with --base a checkpoint: .safetensors or .npz. OUT is the payload, for instance update.fq.
    """
    from fedfq.files import SUFFIXES, write_bytes

    codec = fedfq.Codec(**size.choose(), **coding.choose(), threads=threads)
    if target.suffix.lower() in SUFFIXES:
        raise ValueError(f"{target}: a payload is no file of tensors; name it .fq, for instance")
    _refuse_overwriting(target, source, base)
    update = _read_update(source, base)
    began = time.perf_counter()
    with _naming_input(source):
        payload = codec.encode(update, seed)
    seconds = time.perf_counter() - began
    report = fedfq.inspect(payload, like=update)
    nmse = measure_nmse(codec, payload, update)
    write_bytes(target, payload)
    typer.echo(f"{target}: {_summarise(report, nmse)}, {seconds:.2f} s")
    if base is None:
        _warn_of_checkpoint(source, update, report, nmse)


def _read_update(source: Path, base: Path | None) -> Mapping[str, Array]:
    from fedfq.cli.checkpoints import subtract
    from fedfq.files import read_tensors

    tensors = read_tensors(source)
    return tensors if base is None else subtract(tensors, read_tensors(base), base)


@contextmanager
def _naming_input(path: Path) -> Iterator[None]:
    """What the codec refuses, it refuses by the name of the file."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if not refuses(error):
            raise
        raise ValueError(f"{path}: {error}") from error


def measure_nmse(codec: fedfq.Codec, payload: bytes, update: Mapping[str, Array]) -> float:
    """The NMSE of quantised tensors: statistics would hide it, and integers have none."""
    from fedfq.codec.tensors import QUANTIZED, read
    from fedfq.metrics import nmse

    quantised = {tensor.spec.name: tensor.array for tensor in read(update, codec.keep) if tensor.kind == QUANTIZED}
    return nmse(quantised, fedfq.decode(payload, like=update))


def _summarise(report: fedfq.Report, nmse: float) -> str:
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


# decode


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
    from fedfq.cli.checkpoints import add
    from fedfq.files import read_tensors, suffix, write_tensors

    suffix(target)
    if like and base:
        raise ValueError("give --like or --base, not both")
    _refuse_overwriting(target, source, like, base)
    payload = source.read_bytes()
    model_path = like or base
    model = read_tensors(model_path) if model_path else None
    limit: dict[str, Any] = {} if max_bytes is None else {"max_bytes": max_bytes}
    with _naming_payload(source, model_path):
        fedfq.inspect(payload, like=model)  # what is no payload is refused before anything is compiled
        tensors = fedfq.decode(payload, like=model, **limit)
    if base is not None and model is not None:
        tensors = add(model, tensors)
    write_tensors(target, tensors)
    parameters = sum(array.size for array in tensors.values())
    typer.echo(f"{target}: {len(tensors):,} tensors, {parameters:,} parameters")


# inspect


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
    with _naming_payload(source, like):
        report = fedfq.inspect(payload, like=model)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        make_console().print(_tabulate(report))


def _tabulate(report: fedfq.Report) -> Table:
    table = make_table(padding=0)
    for name in ("tensor", "shape", "dtype", "kind"):
        table.add_column(name, overflow="fold")
    for name in ("bytes", "share", "bits/\nparam", "non-zeros"):
        table.add_column(name, justify="right", no_wrap=True)

    def format_sizes(item: fedfq.Report | fedfq.TensorReport) -> list[str]:
        share, bits = item.bytes / report.bytes, item.bits_per_parameter
        if isinstance(item, fedfq.TensorReport) and item.is_small:
            return [""] * 4
        return [f"{item.bytes:,}", f"{share:.1%}", f"{bits:.3f}", f"{item.nonzeros:,}"]

    for tensor in report.tensors:
        kind = tensor.kind.replace("factors", f"rank {tensor.rank}")
        table.add_row(escape(tensor.name), format_shape(tensor.shape), tensor.dtype, kind, *format_sizes(tensor))
    for name, size in (
        ("(small tensors together)", report.small_bytes),
        ("(sketch of the rest)", report.sketch_bytes),
        ("(header)", report.header_bytes),
    ):
        if size:
            table.add_row(name, "", "", "", f"{size:,}", f"{size / report.bytes:.1%}", "", "")
    table.show_footer = True
    for column, text in zip(table.columns, [f"total ({report.ratio:.1f}x)", "", "", "", *format_sizes(report)]):
        column.footer = text
    return table


def format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


# What they share


def _refuse_overwriting(target: Path, *inputs: Path | None) -> None:
    for path in inputs:
        if path is not None and target.exists() and path.exists() and target.samefile(path):
            raise ValueError(f"{target}: the output would overwrite an input")


@contextmanager
def _naming_payload(path: Path, model: Path | None) -> Iterator[None]:
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
