"""A federation in one process: real ClientApps, real messages, which go through Flower's own serialisation."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import serde
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedfq.flower.arrays import blob
from fedfq.flower.protocol import LACKS, MODEL, ORDER, UPDATE, seal, unseal
from tests.updates import Array as NDArray
from tests.updates import network

Train = Callable[[dict[str, NDArray], Context, int], dict[str, NDArray]]

RUN = 7


class LocalGrid(Grid):
    """Nodes 1, 2, ... of one app. `tamper(node, reply)` may change what comes back.

    Who tampers with a node's reply knows that node's token, and sees and leaves payloads without the tag.
    """

    def __init__(self, app: ClientApp, nodes: int = 4, node_config: dict[int, dict[str, Any]] | None = None) -> None:
        self.app = app
        self.contexts = {node: context(node, (node_config or {}).get(node, {})) for node in range(1, nodes + 1)}
        self.tamper: Callable[[int, Message], Message] = lambda node, reply: reply
        self.sent: list[Message] = []
        self.replies: list[Message] = []  # of the last round
        self.log: list[Message] = []  # all that was ever sent

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        self.sent = [travelled(message) for message in messages]
        replies = []
        for message in sorted(self.sent, key=lambda message: message.metadata.dst_node_id):
            node = message.metadata.dst_node_id
            reply = travelled(self._run(message))
            if is_no_answer(reply):
                replies.append(reply)
                continue
            change_payloads(reply, lambda sealed: bytes(unseal(sealed)[0]))
            reply = self.tamper(node, reply)
            change_payloads(reply, lambda payload, sent=message: seal(payload, sent.content[ORDER]["token"]))
            replies.append(reply)
        again = {node_of(reply) for reply in self.replies if is_no_answer(reply)}  # who are asked a second time
        asked = {node_of(reply) for reply in replies}
        earlier = self.replies if again and asked <= again else []
        self.replies = [reply for reply in earlier if node_of(reply) not in asked] + replies
        self.log += self.sent
        return [travelled(reply) for reply in replies]

    def _run(self, message: Message) -> Message:
        """What Flower makes of an app's exception."""
        try:
            return self.app(travelled(message), self.contexts[message.metadata.dst_node_id])
        except TypeError as error:
            if MODEL not in str(error):
                raise  # a mistake in a test
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>"), reply_to=message)

    def restart(self, node: int) -> None:
        """The SuperNode restarts under the same id: what was in its memory is gone."""
        self.contexts[node] = context(node, self.contexts[node].node_config)

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    run = create_message = push_messages = pull_messages = set_run  # type: ignore[assignment]


def change_payloads(reply: Message, change: Callable[[bytes], bytes]) -> None:
    """Change what is in a reply's Arrays of payloads."""
    for record in reply.content.array_records.values() if reply.has_content() else ():
        for name, array in record.items():
            if array.stype == UPDATE:
                record[name] = blob(change(array.data), UPDATE)


def node_of(reply: Message) -> int:
    return reply.metadata.src_node_id


def is_no_answer(reply: Message) -> bool:
    """Whether the node could do nothing with what it was sent."""
    return MODEL in (reply.error.reason or "") if reply.has_error() else LACKS in reply.content


def payload_of(reply: Message) -> bytes:
    """The payload in a reply, without its tag."""
    (array,) = reply.content["arrays"].values()
    assert array.stype == UPDATE
    return bytes(unseal(array.data)[0])


def context(node: int, node_config: Any = None) -> Context:
    return Context(run_id=RUN, node_id=node, node_config=node_config or {}, state=RecordDict(), run_config={})


def travelled(message: Message) -> Message:
    return serde.message_from_proto(serde.message_to_proto(message))


def app(mods: list[Any], train: Train | None = None) -> ClientApp:
    """An app that trains with `train(model, context, round)`, by default by adding a random network's update."""
    client = ClientApp(mods=mods)

    @client.train()
    def _(message: Message, context: Context) -> Message:
        model = arrays(message.content["arrays"])
        round_ = int(message.content["config"]["server-round"])
        trained = (train or drift)(model, context, round_)
        records = {
            "arrays": record(trained),
            "metrics": MetricRecord({"num-examples": 10 * number(context), "loss": 0.5}),
        }
        return Message(RecordDict(records), reply_to=message)

    @client.evaluate()
    def _(message: Message, context: Context) -> Message:
        loss = float(sum(value.sum() for value in arrays(message.content["arrays"]).values()))
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "loss": loss})}), reply_to=message)

    @client.query()
    def _(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    return client


def drift(model: dict[str, NDArray], context: Context, round_: int) -> dict[str, NDArray]:
    """Clients move in one common direction and in one of their own."""
    common, own = network(1000), network(100 * number(context) + round_)
    return {name: value + (common[name] + own[name]).astype(value.dtype) for name, value in model.items()}


def number(context: Context) -> int:
    """1, 2, ...: in a simulation, node ids are random."""
    return int(context.node_config.get("partition-id", context.node_id - 1)) + 1


def arrays(record: Any) -> dict[str, NDArray]:
    return {name: array.numpy() for name, array in record.items()}


def record(model: dict[str, NDArray]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in model.items()})
