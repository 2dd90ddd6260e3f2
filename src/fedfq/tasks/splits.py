"""Who holds which examples: `iid`, `one-class`, `shards:K`, `dirichlet:ALPHA`, `natural`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fedfq.hints import nearest
from fedfq.types import Array

if TYPE_CHECKING:
    from fedfq.tasks.task import Data


FORMS = ["iid", "one-class", "shards:K", "dirichlet:ALPHA", "natural"]
MAX_SPLIT_PARAMETER = 1_000_000  # far beyond it, what numpy draws from a Dirichlet distribution is no longer one


def split(spec: str, data: Data, clients: int, seed: int) -> list[Array]:
    """The indices into `data.train` that each client holds. Same arguments, same result.

    iid              a random permutation, cut into equal parts
    one-class        sorted by label, cut into equal parts: one class each where classes divide evenly among clients
    shards:K         sorted by label, cut into K shards per client, K random ones for each (McMahan et al.)
    dirichlet:ALPHA  every class is shared out in proportions drawn from Dirichlet(ALPHA) (Hsu et al.)
    natural          the clients that the data itself knows, or some of them at random

    All but `natural` give out every example exactly once. No client is left with nothing.
    """
    name, value = parse(spec)
    if seed < 0:
        raise ValueError(f"the seed must be non-negative, got {seed}")
    rng = np.random.default_rng(seed)
    if clients < 1:
        raise ValueError(f"there must be at least one client, not {clients}")
    if name == "natural":
        return _natural(data.groups, clients, rng)
    shards_each = int(value) if name == "shards" else 1
    if clients * shards_each > len(data.train):
        wanted = f"{clients:,} clients" + (f" with {shards_each:,} shards each" if name == "shards" else "")
        raise ValueError(f"{len(data.train):,} examples are too few for {wanted}")
    if name == "iid":
        return np.array_split(rng.permutation(len(data.train)), clients)
    if name == "dirichlet":
        return _dirichlet(data.train.labels, clients, value, rng)
    return _shards(data.train.labels, clients, shards_each, rng)


def parse(spec: str) -> tuple[str, float]:
    """The name of a split and its parameter; NaN where it takes none."""
    name, colon, parameter = spec.partition(":")
    form = next((form for form in FORMS if form.partition(":")[0] == name), None)
    if form is None:
        hint = nearest(name, [form.partition(":")[0] for form in FORMS])
        raise ValueError(f"unknown split {spec!r}{hint}; the splits are {', '.join(FORMS)}")
    if (":" in form) != bool(colon):
        raise ValueError(f"split {spec!r}: it is written {form}")
    if not colon:
        return name, math.nan
    try:
        value = float(int(parameter)) if name == "shards" else float(parameter)
    except (ValueError, OverflowError):
        value = math.nan
    if not (0 < value <= MAX_SPLIT_PARAMETER):
        kind = "a whole number" if name == "shards" else "a number"
        raise ValueError(
            f"split {spec!r}: what follows the colon must be {kind} above 0 and up to {MAX_SPLIT_PARAMETER:,}"
        )
    return name, value


def _natural(groups: list[Array] | None, clients: int, rng: np.random.Generator) -> list[Array]:
    if groups is None:
        raise ValueError("split 'natural': this data knows no clients of its own")
    if clients > len(groups):
        raise ValueError(f"split 'natural': there are {len(groups):,} clients, not {clients:,}")
    return [groups[index] for index in np.sort(rng.choice(len(groups), clients, replace=False))]


def _shards(labels: Array, clients: int, each: int, rng: np.random.Generator) -> list[Array]:
    order = rng.permutation(len(labels))  # within a class, shards should not follow the order of the files
    by_label = order[np.argsort(labels[order], kind="stable")]
    shards = np.array_split(by_label, clients * each)
    hands = rng.permutation(clients * each).reshape(clients, each)
    return [np.concatenate([shards[shard] for shard in hand]) for hand in hands]


def _dirichlet(labels: Array, clients: int, alpha: float, rng: np.random.Generator) -> list[Array]:
    hands: list[list[Array]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(clients, alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(int)
        for hand, part in zip(hands, np.split(members, cuts)):
            hand.append(part)
    return _feed_the_empty([np.concatenate(hand) for hand in hands])


def _feed_the_empty(parts: list[Array]) -> list[Array]:
    """Whoever got nothing gets one example of whoever has most."""
    for index, part in enumerate(parts):
        if len(part) == 0:
            richest = max(range(len(parts)), key=lambda other: len(parts[other]))
            parts[index], parts[richest] = parts[richest][-1:], parts[richest][:-1]
    return parts
