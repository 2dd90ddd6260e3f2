"""The payload around the tensors with the common step: layout, integers, and tensors with a step of their own.

Several steps are tried for the latter; what does not depend on them is made once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..format.container import Container, describe_layout
from ..format.layout import sort_by_name
from ..format.sections import IntegerSection
from ..format.small import SmallSections, is_small
from ..tensors import EXACT, QUANTIZED, Tensor
from .own_steps import FINENESS, Statistics, code, code_small

SHARED_FROM = 2  # small tensors; one alone has a section of its own
HOPELESS = 1.3  # times what there is room for: what is estimated to take more is not tried
PARTS_TRIED = (1.2, 1.0, 0.85, 0.7, 0.5, 0.3)  # of the room, by estimate, until what is chosen really fits


class Frame:
    """What a payload has whatever the steps are, and what comes of each choice of steps."""

    def __init__(
        self, tensors: Sequence[Tensor], *, as_digest: bool, with_gain: bool, basis: bytes | None, may_share: bool
    ) -> None:
        """`basis` is the digest of the shared basis. Small tensors share sections if they may."""
        self.layout = [tensor.spec for tensor in tensors]
        self.as_digest, self.with_gain, self.basis = as_digest, with_gain, basis
        self.shares = may_share and sum(map(is_small, self.layout)) >= SHARED_FROM
        self._description = describe_layout(self.layout, as_digest)
        self._ordered = sort_by_name(self.layout) if as_digest else self.layout
        by_name = {tensor.spec.name: tensor for tensor in tensors}
        self._small = [by_name[spec.name] for spec in self._ordered if self.shares and is_small(spec)]
        self._large = [tensor for tensor in tensors if not (self.shares and is_small(tensor.spec))]
        self._integers = {t.spec.name: IntegerSection.of(t.array) for t in self._large if t.kind == EXACT}
        words = [tensor.array.reshape(-1).astype(np.int64) for tensor in self._small if tensor.kind == EXACT]
        self._small_integers = IntegerSection.of(np.concatenate([np.empty(0, np.int64), *words]))
        self.bare = self.make_container({})

    def make_container(self, steps: Mapping[str, float]) -> Container:
        """The payload without the tensors of the common step; those that are named have `steps` of their own."""
        small = None
        if self.shares:
            owners = [tensor for tensor in self._small if tensor.spec.name in steps]
            small = SmallSections(self._ordered, *code_small(owners, steps), self._small_integers)
        own = {t.spec.name: code(t, steps[t.spec.name]) for t in self._large if t.spec.name in steps}
        return Container(
            self.layout,
            self._integers | own,
            as_digest=self.as_digest,
            with_gain=self.with_gain,
            basis=self.basis,
            small=small,
            description=self._description,
        )

    def join_common(self, steps: Mapping[str, float]) -> list[Tensor]:
        """The tensors of the common step as they are coded: small ones in one, in the order of the payload."""
        large = [tensor for tensor in self._large if tensor.kind == QUANTIZED and tensor.spec.name not in steps]
        small = [tensor for tensor in self._small if tensor.kind != EXACT and tensor.spec.name not in steps]
        return [*large, Tensor.join(small)] if small else large

    def fit_statistics(
        self, statistics: Statistics, room: float, *, shared: bool
    ) -> tuple[dict[str, float], Container]:
        """Steps of statistics, as fine as the room in bytes allows, and the payload with them.

        With `shared` set, the room is for the weights as well: statistics take a share of it.
        """
        for fineness, share in FINENESS:
            most = room * share if shared else room
            if statistics.estimate_bytes(fineness) > HOPELESS * most:
                continue
            steps = statistics.choose(fineness)
            container = self.make_container(steps)
            if len(steps) == len(statistics.names) and container.minimum - self.bare.minimum <= most:
                return steps, container
        for part in PARTS_TRIED:
            steps = statistics.choose_within(part * most, fineness)
            container = self.make_container(steps)
            if container.minimum - self.bare.minimum <= most:
                return steps, container
        return {}, self.bare
