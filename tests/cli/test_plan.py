"""`fedfq plan` as its users meet it."""

from pathlib import Path

import pytest

from tests.cli.runner import ok, refused

MODEL = ("plan", "--parameters", "100000", "--codec-seconds", "0.1", "0.01")
SMALL = (*MODEL, "--clients", "4")


def test_the_command_prints_a_table_and_draws(tmp_path: Path) -> None:
    out = tmp_path / "plan.svg"
    said = ok(*SMALL, "--ratio", "1", "--ratio", "32", "--ratio", "64", "--out", out)
    assert "recommended" in said and "fastest" in said and said.endswith(f"{out}\n")
    first = out.read_bytes()
    ok(*SMALL, "--ratio", "1", "--ratio", "32", "--ratio", "64", "--out", out)
    assert out.read_bytes() == first and b"ring: recommended" in first


def test_the_command_measures_the_codec() -> None:
    assert "measured here" in ok("plan", "--parameters", "100000", "--clients", "2", "--ratio", "8")


def test_own_lines_and_a_shared_link_differ() -> None:
    shared, own = (ok(*SMALL, how, "--ratio", "1") for how in ("--shared", "--own"))
    assert shared != own


@pytest.mark.slow
def test_the_command_at_scale_says_what_lines_it_assumes() -> None:
    said = ok(*MODEL, "--scale", "--ratio", "1", "--ratio", "64")
    assert "log-normal, median 10 Mbit/s" in said and "10,000 of 1,000,000 clients" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ratio", "0.5"), "ratio must be at least 1"),
        (("--uplink-mbps", "0"), "a bandwidth must be positive"),
        (("--steps", "0"), "steps must be at least 1"),
        (("--out", "plan.png"), "a figure is named .svg or .pdf"),
        (("--codec-seconds", "-1", "0"), "encode_seconds must be 0 or more"),
        (("--scale",), "--clients does not go with --scale"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(*SMALL, *arguments)
