"""The `fedfq` command: one file per group of commands. Nothing else imports it."""

from fedfq.cli.codec import app, main

__all__ = ["app", "main"]
