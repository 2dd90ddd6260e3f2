"""The `fedfq` command: one file per group of commands. Nothing but `python -m fedfq` imports it.

Commands import what they need when they run, so that `fedfq --help` is quick.
"""

from fedfq.cli.main import app, main

__all__ = ["app", "main"]
