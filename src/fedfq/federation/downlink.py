"""What goes down to the clients of a round, the same in every engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def models_sent(clients: Iterable[int], settled: Collection[int], moved: bool) -> dict[int, int]:
    """How many models each client is sent: the current one and, if that has moved since, the initial one beside it.

    Those who are `settled` have the initial model, or do not want it.
    """
    return {client: 2 if moved and client not in settled else 1 for client in clients}
