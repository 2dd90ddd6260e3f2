"""Groups of options: typer sees single options, a command whole groups."""

from dataclasses import dataclass
from inspect import signature
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from fedfq.cli.options import Machine, gather, name_gain, spread


@dataclass(frozen=True)
class Box:
    width: Annotated[int, typer.Option(help="Of the box.")] = 3
    lid: Annotated[bool, typer.Option("--lid")] = False


@spread
def pack(
    *, name: Annotated[str, typer.Argument()], before: int = 1, box: Box, after: Annotated[str, typer.Option()] = "x"
) -> None:
    """Pack a box."""
    typer.echo(f"{name} {before} {box} {after} {gather(dict(name=name, box=box))}")


def test_a_group_stands_where_its_options_would():
    assert list(signature(pack).parameters) == ["name", "before", "width", "lid", "after"]
    assert pack.__doc__ == "Pack a box." and pack.__name__ == "pack"


def test_a_command_gets_its_groups():
    app = typer.Typer()
    app.command()(pack)
    said = CliRunner().invoke(app, ["shoes", "--width", "7", "--lid"]).stdout
    assert said == "shoes 1 Box(width=7, lid=True) x {'name': 'shoes', 'width': 7, 'lid': True}\n"
    assert "Box(width=3, lid=False)" in CliRunner().invoke(app, ["shoes"]).stdout
    assert "Of the box." in CliRunner().invoke(app, ["--help"]).stdout


def test_a_machine_is_used_whole_unless_it_is_said_otherwise():
    assert Machine().resolve()["workers"] >= 1 and Machine().resolve()["device"] == "cpu"
    for wrong in (Machine(workers=0), Machine(workers="2"), Machine(device=3)):
        with pytest.raises(ValueError, match="--workers must be|--device must be"):
            wrong.resolve()


@pytest.mark.parametrize(
    ("given", "gain"),
    [
        ({"gain": None, "norm_gain": False}, None),
        ({"gain": True, "norm_gain": False}, "full"),
        ({"gain": False, "norm_gain": False}, "none"),
        ({"gain": None, "norm_gain": True}, "norm"),
    ],
)
def test_the_flags_of_the_gain_are_one_value(given: dict[str, bool | None], gain: str | None) -> None:
    assert name_gain(given) == {"gain": gain}


def test_two_flags_of_the_gain_are_refused() -> None:
    with pytest.raises(ValueError, match="give --no-gain or --norm-gain, not both"):
        name_gain({"gain": False, "norm_gain": True})
