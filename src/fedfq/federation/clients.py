"""The clients of a federation, simulated: in this process or several, with the same result.

Every client trains in one thread and draws its random numbers from (seed, round, client), so nothing depends on which
process it runs in, nor when. The global model lies in memory that the processes share.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from ctypes import c_bool, c_char
from multiprocessing import resource_tracker
from multiprocessing.sharedctypes import RawArray, RawValue
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from fedfq import tasks
from fedfq.codec.errors import BudgetError
from fedfq.federation.client import load, local_sgd, refuse_unusable, state
from fedfq.federation.config import Config
from fedfq.federation.memory import Memories, Written
from fedfq.methods import Order, RoundContext, State
from fedfq.methods.warm import warm_up
from fedfq.signals import postponed
from fedfq.tasks.task import Examples, evaluate
from fedfq.types import Array

TRAINING, SAMPLING, ENCODING = 1, 2, 3  # what random numbers are drawn for
TEST_CHUNK = 1000  # test examples that one process evaluates at a time

S = TypeVar("S")
T = TypeVar("T")


def random(config: Config, *numbers: int) -> np.random.Generator:
    """Independent random numbers for every purpose, round and client."""
    return np.random.default_rng([config.seed, *numbers])


class Job(NamedTuple):
    """One client's work in one round."""

    round: int
    client: int
    announcement: bytes
    memory: int | None  # the round in which its memory was written


class Answer(NamedTuple):
    """What came of it. `refused` says why there is no update, if there is none."""

    client: int
    samples: int
    payload: bytes | None
    claimed_bits: float
    loss: float
    memory: Written | None  # what it would remember, once its update is accepted
    refused: str | None
    train_s: float
    encode_s: float  # with what is worked out from the models
    memory_s: float  # reading what it remembers, and writing it


class Worker:
    """All that a process needs to play any client."""

    def __init__(
        self, config: Config, data_dir: Path | None, memory_folder: Path, theta: Any, initial: Any, device: str
    ) -> None:
        self.config = config
        self.task = tasks.get(config.task)
        self.data = self.task.load(data_dir)
        self.shards = tasks.split(config.split, self.data, config.clients, config.seed)
        self.model = self.task.model(config.seed).to(device)
        self.method = config.make_method()
        self.memories = Memories(memory_folder)
        self.theta = views(theta, state(self.model))
        self.initial = views(initial, state(self.model))
        self._context = RoundContext()
        warm_up(self.method, self.initial)  # no client's time is that of a compiler

    def train(self, job: Job) -> Answer:
        own = self.shards[job.client]
        how = self.config.local_training(job.round)
        rng = random(self.config, TRAINING, job.round, job.client)
        start = time.perf_counter()
        update, loss = local_sgd(self.model, self.theta, self.task, self.data.train, own, how, rng)
        trained = time.perf_counter()
        memory = self.memories.read(job.client, job.memory)
        remembered = time.perf_counter()
        seed = int(random(self.config, ENCODING, job.round, job.client).integers(2**62))
        order = Order(self._open_round(job.round), job.client, seed, job.announcement)
        payload, claimed, refused = None, 0.0, None
        new: State = {}
        try:
            payload, claimed, new = self.method.encode(update, memory, order)
        except BudgetError:
            raise  # no client could ever send anything
        except ValueError as error:  # the training diverged
            refused = str(error)
        encoded = time.perf_counter()
        written = self.memories.write(job.client, job.round, new)
        end = time.perf_counter()
        times = (trained - start, encoded - remembered, remembered - trained + end - encoded)
        return Answer(job.client, len(own), payload, claimed, loss, written, refused, *times)

    def _open_round(self, number: int) -> RoundContext:
        """What a client works out from the models. It is the same for all, so a process does it once per round."""
        if self._context.number != number:
            self._context = self.method.open_round(number, self.theta, self.initial)
        return self._context

    def test_examples(self, whole: bool) -> Examples:
        return self.data.whole_test if whole and self.data.whole_test is not None else self.data.test

    def evaluate(self, part: tuple[int, bool]) -> tuple[float, float, int]:
        """Right answers and summed loss on one chunk of the test examples, from this one on; or of the whole test."""
        start, whole = part
        load(self.model, self.theta)
        chunk = _Chunk(self.test_examples(whole), start)
        accuracy, loss = evaluate(self.model, self.task, chunk)
        return accuracy * len(chunk), loss * len(chunk), len(chunk)


class _Chunk:
    """Some of the test examples."""

    def __init__(self, examples: Any, start: int) -> None:
        self.examples = examples
        self.indices = np.arange(start, min(start + TEST_CHUNK, len(examples)))
        self.labels = examples.labels[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, indices: Array) -> tuple[Array, Array]:
        return self.examples.take(self.indices[indices])


class Clients:
    """Workers, one or several; a context manager, as processes must be ended."""

    def __init__(
        self, config: Config, data_dir: Path | None, memory_folder: Path, workers: int, device: str = "cpu"
    ) -> None:
        self.config = config
        refuse_unusable(device, config.precision)
        task = tasks.get(config.task)
        model = state(task.model(config.seed))
        theta, initial = (RawArray(c_char, sum(value.nbytes for value in model.values())) for _ in range(2))
        self.theta, self.initial = views(theta, model), views(initial, model)
        for name, value in model.items():
            self.initial[name][...] = value
        self.worker = Worker(config, data_dir, memory_folder, theta, initial, device)
        self._pool: ProcessPoolExecutor | None = None
        self._threads = torch.get_num_threads()
        self._stop = RawValue(c_bool, False)
        if workers > 1:
            context = multiprocessing.get_context("spawn")
            arguments = (os.getpid(), self._stop, config, data_dir, memory_folder, theta, initial, device)
            self._pool = ProcessPoolExecutor(workers, context, _start, arguments)

    def __enter__(self) -> Clients:
        torch.set_num_threads(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.set_num_threads(self._threads)
        self._stop.value = error is not None  # then nobody waits for what they still work at
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def publish(self, theta: Mapping[str, Array]) -> None:
        """What every client trains from."""
        for name, value in theta.items():
            self.theta[name][...] = value

    def train(self, jobs: list[Job]) -> Iterator[Answer]:
        """The answers, in the order of the jobs."""
        return map(self.worker.train, jobs) if self._pool is None else _map(self._pool, _train, jobs)

    def evaluate(self, whole: bool = False) -> tuple[float, float]:
        """Accuracy and mean loss of the published model on the test examples, or on the whole test set."""
        chunks = [(start, whole) for start in range(0, len(self.worker.test_examples(whole)), TEST_CHUNK)]
        parts = map(self.worker.evaluate, chunks) if self._pool is None else _map(self._pool, _evaluate, chunks)
        right, loss, count = (sum(values) for values in zip(*parts))
        return right / count, loss / count


def _map(pool: ProcessPoolExecutor, function: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """`pool.map`, whose first call starts the processes. Ctrl-C in a terminal is sent to them as well, from their very
    first moment on; but it is for the process that starts them, so they inherit that it is blocked."""
    with postponed():
        if not hasattr(signal, "pthread_sigmask"):  # Windows
            return pool.map(function, items)
        resource_tracker.ensure_running()  # its own start would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return pool.map(function, items)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def views(shared: Any, like: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays with the shapes of `like` in one piece of memory."""
    result, at = {}, 0
    for name, value in like.items():
        result[name] = np.frombuffer(shared, value.dtype, value.size, at).reshape(value.shape)
        at += value.nbytes
    return result


# In the processes of the pool

_worker: Worker


def _start(parent: int, stop: Any, *arguments: Any) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be blocked
    threading.Thread(target=_end_with, args=(parent, stop), daemon=True).start()  # it may be gone already
    torch.set_num_threads(1)
    _worker = Worker(*arguments)


def _end_with(parent: int, stop: Any) -> None:
    """End when the parent says so, or is gone: a killed one cannot tell its workers to stop."""
    while os.getppid() == parent and not stop.value:
        time.sleep(0.2)
    os._exit(1)


def _train(job: Job) -> Answer:
    return _worker.train(job)


def _evaluate(part: tuple[int, bool]) -> tuple[float, float, int]:
    return _worker.evaluate(part)
