"""Which errors are for the user: those become one line and exit code 2. All others are bugs, and keep their traceback.

An error is for the user if
- it is a `FedFQError`;
- it is a ValueError or TypeError that a `raise` statement of ours refuses something with. What a library raises, and
  what numpy and others raise from C when we call them, means that we have not looked at our input: a bug;
- the operating system says it, of a file or of a full disk;
- an extra is not installed.
"""

from __future__ import annotations

import dis

from fedfq.codec.errors import FedFQError

FAILED = 1  # exit code of a command that did its work, but in vain
BAD_INPUT = 2
INTERRUPTED = 130

# Packages, and the extra that brings them.
EXTRAS = {"torch": "sim", "sklearn": "sim", "matplotlib": "report", "simpy": "plan", "flwr": "flower"}


def explain(error: Exception) -> str | None:
    """What the user is told of an error; None if it is a bug."""
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package in EXTRAS:
            return f"this needs {package}, which is not installed: pip install 'fedfq[{EXTRAS[package]}]'"
    elif isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    elif refuses(error):
        return str(error)
    return None


def refuses(error: Exception) -> bool:
    """Whether this is our refusal of something that was given, rather than a mistake that surfaced."""
    if isinstance(error, FedFQError):
        return True
    traceback = error.__traceback__
    if traceback is None or not isinstance(error, ValueError | TypeError):
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = traceback.tb_frame.f_globals.get("__name__", "")
    instruction = traceback.tb_frame.f_code.co_code[traceback.tb_lasti]
    return module.partition(".")[0] == "fedfq" and dis.opname[instruction] == "RAISE_VARARGS"
