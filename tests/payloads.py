"""Payloads written by hand: sections of any kind with any body, such as no encoder would write."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedfq.codec.format.container import Container, Encoding
from fedfq.codec.format.layout import Spec
from fedfq.codec.format.probability import SHIFTS
from fedfq.codec.format.reader import varint
from fedfq.codec.format.sections import ZERO
from fedfq.types import Array


class HandMade(NamedTuple):
    """A section as far as a container looks at one: its bytes and their number."""

    kind: int
    body: bytes

    def to_bytes(self) -> bytes:
        return bytes([self.kind]) + (b"" if self.kind == ZERO else varint(len(self.body)) + self.body)

    @property
    def size(self) -> int:
        return len(self.to_bytes())


def write(
    layout: Sequence[Spec],
    sections: Sequence[tuple[int, bytes]],
    *,
    as_digest: bool = False,
    step: float | None = None,
    shifts: Array | None = None,
) -> bytes:
    """The payload of this layout whose tensors have these sections, each a kind and a body."""
    made = {spec.name: HandMade(*section) for spec, section in zip(layout, sections, strict=True)}
    shifts = np.zeros(SHIFTS, np.int8) if shifts is None else shifts
    container, encoding = Container(layout, {}, as_digest=as_digest), Encoding(made, step, shifts)  # type: ignore[arg-type]
    payload = container.to_bytes(encoding)
    assert len(payload) == container.size(encoding)
    return payload
