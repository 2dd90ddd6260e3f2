"""One round's messages, and second ones, in the same round, for nodes that could do nothing with the first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from logging import INFO

from flwr.app import Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from .arrays import size
from .downlink import Downlink
from .protocol import HELD, LACKS, MODEL, HeldVersion

Make = Callable[[int, RecordDict], RecordDict]


class Exchange:
    """`make` turns what the strategy would send a node into what it is sent; `bytes` are those of all Arrays in it.

    Nodes may do `without_mod`: who cannot read what it is sent gets what the strategy would have sent.
    """

    def __init__(
        self,
        grid: Grid,
        timeout_s: float,
        downlink: Downlink,
        messages: list[Message],
        make: Make,
        *,
        without_mod: bool = False,
    ) -> None:
        self._grid = grid
        self._timeout_s = timeout_s
        self._downlink = downlink
        self._make = make
        self._may_lack_mod = without_mod
        self._types = {message.metadata.dst_node_id: message.metadata.message_type for message in messages}
        self._originals = {message.metadata.dst_node_id: message.content for message in messages}
        self.without_mod: set[int] = set()  # nodes that could not read what they were sent
        self.bytes = 0
        for message in messages:
            node = message.metadata.dst_node_id
            message.content = make(node, self._originals[node])
            self.bytes += size(message.content)

    def complete(self, replies: Iterable[Message]) -> list[Message]:
        """All replies, those to second messages in place of those to the first; nobody is asked a third time."""
        kept, second = [], {}
        for reply in replies:
            node = reply.metadata.src_node_id
            content = self._second(node, reply) if node in self._originals and node not in second else None
            if content is None:
                kept.append(reply)
            else:
                second[node] = Message(content, node, self._types[node])
                self.bytes += size(content)
        if second:
            # With the time of a whole round: one that never answered may have used up that of the first messages.
            kept += self._grid.send_and_receive(list(second.values()), timeout=self._timeout_s)
        for reply in kept:
            if reply.has_content() and (metric := _find_claim(reply.content)) is not None:
                self._downlink.acknowledge(reply.metadata.src_node_id, HeldVersion.read(metric))
        return kept

    def _second(self, node: int, reply: Message) -> RecordDict | None:
        """What a node is sent after this reply; None if it was an answer."""
        if reply.has_error():
            # Flower's own words of an Array that no mod has unpacked name its type.
            if not self._may_lack_mod or MODEL not in (reply.error.reason or ""):
                return None
            log(INFO, "fedfq: node %s evaluates without fedfq_mod, and is sent the model as it is", node)
            self.without_mod.add(node)
            return self._originals[node]
        if LACKS not in reply.content:
            return None
        held = HeldVersion.read(_find_claim(reply.content))
        self._downlink.acknowledge(node, held)
        log(INFO, "fedfq: node %s holds version %s, and is sent what it lacks", node, held.version if held else "?")
        return self._make(node, self._originals[node])


def _find_claim(content: RecordDict) -> object | None:
    """What a node says it holds, in an answer or instead of one."""
    return next((metrics[HELD] for metrics in content.metric_records.values() if HELD in metrics), None)
