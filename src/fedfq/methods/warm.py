"""A method's kernels, loaded or compiled before anything is timed."""

from __future__ import annotations

import numpy as np

from .method import Array, Method, Order, State, Update

ROUNDS = 3  # in the first there is neither a memory nor a drift of the model; AQG sends from the second on what changed
SCALE = 1e-3  # about the standard deviation of the entries of an update
RANKS, FALL = 24, 0.8  # directions of a matrix, and the share of one's length that the next has


def warm_up(method: Method, like: Update) -> None:
    """Some rounds of one client that nobody sees, with made-up updates of such a model. Nothing is kept of them."""
    rng = np.random.default_rng(0)
    server, model = method.server(like), dict(like)
    memory: State = {}
    for round_ in range(1, ROUNDS + 1):
        context = method.open_round(round_, model, like)
        server.open_round(context)
        announcement = server.announce({0: 1.0}).get(0, b"")
        update = {name: make_up(value, rng) for name, value in like.items()}
        upload = method.encode(update, memory, Order(context, 0, round_, announcement))
        memory = upload.memory
        server.receive(0, upload.payload, 1.0)
        model = {name: model[name] + change for name, change in server.finish(1.0).items()}


def make_up(value: Array, rng: np.random.Generator) -> Array:
    """Like an update: large along some directions, the same ones whenever it is called, and with some noise; whole
    numbers do not change."""
    if value.dtype.kind != "f":
        return np.zeros_like(value)
    rows = value.shape[0] if value.ndim else 1
    noise = rng.standard_normal((rows, value.size // max(rows, 1)), np.float32)
    ranks = max(1, min(*noise.shape, RANKS))
    fixed = np.random.default_rng(1)
    left, right = fixed.standard_normal((rows, ranks)), fixed.standard_normal((ranks, noise.shape[1]))
    large = (left * FALL ** np.arange(ranks)) @ rng.standard_normal((ranks, ranks)) @ right
    return (SCALE * (large + 0.1 * noise)).reshape(value.shape).astype(value.dtype)
