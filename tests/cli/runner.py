"""The command line as tests call it: in this process, or in one of its own."""

import os
import subprocess
import sys

from typer.testing import CliRunner

from fedfq.cli import app


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def ok(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refused(*arguments):
    """The one line on stderr; nothing else is said."""
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert isinstance(result.exception, SystemExit)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("fedfq: ")
    return lines[0]


def shell(*arguments, **environment):
    command = [sys.executable, "-c", "from fedfq.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
