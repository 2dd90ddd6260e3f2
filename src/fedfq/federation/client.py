"""What a client does between two uploads: local SGD from the global model (Eq. 2)."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedfq.methods.method import Update
from fedfq.tasks.task import Examples, Task, device_of
from fedfq.types import Array


class LocalTraining(NamedTuple):
    """How long and how a client trains: tau steps, or epochs over its own examples."""

    steps: int | None
    epochs: int | None
    batch_size: int
    lr: float
    precision: str = "float32"  # or "bfloat16": of what layers compute; weights and their changes are float32


def refuse_unusable(device: str, precision: str = "float32") -> None:
    """Refuse a device that is not there, or that does not compute in this precision."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # PyTorch's, in many words
        raise ValueError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    if precision == "bfloat16" and torch.device(device).type == "cpu" and not _computes_bfloat16():
        raise ValueError("precision bfloat16 needs a processor with its instructions (AVX512-BF16): use float32 here")


def _computes_bfloat16() -> bool:
    """Where instructions for it are lacking, PyTorch would emulate them, at a fraction of the speed of float32."""
    x86 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    arm = platform.machine() in ("aarch64", "arm64") and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(x86() or arm)


def local_sgd(
    model: nn.Module,
    theta: Mapping[str, Array],
    task: Task,
    examples: Examples,
    own: Array,
    how: LocalTraining,
    rng: np.random.Generator,
) -> tuple[Update, float]:
    """h_i = theta_i - theta_t after theta_i <- theta_i - lr * gradient, tau times; and the mean training loss.

    `model` is a network to work in, whatever its weights are; `own` are the client's examples.
    """
    load(model, theta)
    device = device_of(model)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=how.lr)
    losses = []
    for indices in batches(own, how, rng):
        x, y = (part.to(device) for part in task.prepare(*examples.take(indices), rng))
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=how.precision == "bfloat16"):
            output = model(x)
        loss = functional.cross_entropy(output.float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {name: value - theta[name] for name, value in state(model).items()}, float(np.mean(losses))


def batches(own: Array, how: LocalTraining, rng: np.random.Generator) -> Iterator[Array]:
    """Indices batch by batch: the client's examples in random order, again and again; a rest is the last batch."""
    size = min(how.batch_size, len(own))
    steps = how.steps if how.steps is not None else (how.epochs or 0) * -(-len(own) // size)
    while steps > 0:
        order = rng.permutation(own)
        for start in range(0, len(own), size):
            if steps > 0:
                yield order[start : start + size]
                steps -= 1


def state(model: nn.Module) -> dict[str, Array]:
    """The model's tensors as numpy arrays, which on the processor share its memory."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in model.state_dict().items()}


def load(model: nn.Module, theta: Mapping[str, Array]) -> None:
    """Copy theta into the model."""
    own = model.state_dict()
    with torch.no_grad():
        for name, value in theta.items():
            own[name].copy_(torch.from_numpy(np.asarray(value, order="C")))
