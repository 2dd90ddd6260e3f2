"""Help for whoever mistyped a name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(wrong: str, valid: Iterable[str]) -> str:
    """The name that was perhaps meant, in words to follow the wrong one; nothing where none is near."""
    near = get_close_matches(wrong, list(valid), n=1, cutoff=0.4)
    return f" (did you mean {near[0]!r}?)" if near else ""
