"""The `fedfq` command: which commands there are, and what becomes of their errors."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedfq.cli import bench, codec, data, federation, methods, plan, report, reproduce
from fedfq.cli.errors import BAD_INPUT, INTERRUPTED, explain
from fedfq.version import __version__


class Commands(TyperGroup):
    """What bad input raises becomes one line and an exit code here, for every command; a bug keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:  # a context of click, which recent versions of typer have inside
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise  # whoever reads our output went away: click knows what to do
        except Exception as error:
            message = explain(error)
            if message is None:
                raise
            typer.echo(f"fedfq: {' '.join(message.split())}", err=True)
            raise typer.Exit(BAD_INPUT) from None


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(federation.demo)
app.command(epilog=federation.TASK_NAMES)(federation.run)
app.command(epilog=federation.TASK_NAMES)(federation.compare)
app.command()(methods.methods)
app.command()(report.report)
app.command()(reproduce.reproduce)
app.command()(plan.plan)
app.command()(codec.encode)
app.command()(codec.decode)
app.command()(codec.inspect)
app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")


def main() -> None:
    """Entry point of the `fedfq` script."""
    app(prog_name="fedfq")  # also as `python -m fedfq`, where shells complete `fedfq`


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedfq {__version__}")
        raise typer.Exit


@app.callback()
def _take_common_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Model updates of federated learning as few bytes, inside a byte budget."""
