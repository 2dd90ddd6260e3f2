"""The networks of the paper, and a small one for digits.

Where the paper leaves open what a network is, it is the one of the authors' public code.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10
POOL = 0  # in the lists of channels below: halve the image here


def digits_cnn() -> nn.Module:
    """For images of 8 x 8 pixels; 71,754 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(32 * 4 * 4, 128), nn.ReLU()),
        nn.Linear(128, CLASSES),
    )


class LocalResponseNorm(nn.Module):
    """What `nn.LocalResponseNorm` computes, several times faster on a CPU: the sum over channels is a product.

    x / (1 + alpha/size * sum of x^2 over the `size` nearest channels) ** 0.75.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, channels: int, size: int = 9, alpha: float = 1e-3) -> None:
        super().__init__()
        index = torch.arange(channels)
        near = (index[:, None] - index).abs() <= size // 2
        # Not persistent: these are constants, not a part of the model that anybody should send.
        self.register_buffer("weight", (alpha / size * near.float())[:, :, None, None], persistent=False)
        self.register_buffer("bias", torch.ones(channels), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        root = functional.conv2d(x * x, self.weight, self.bias).rsqrt()
        return x * root * root.sqrt()


class SimpleCNN(nn.Sequential):
    """McMahan et al.'s network for CIFAR-10, cropped to 24 x 24 pixels; 1,068,298 parameters with or without `lrn`."""

    def __init__(self, lrn: bool = False) -> None:
        norm = [LocalResponseNorm(64)] if lrn else []
        super().__init__(
            *(nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), *norm),
            *(nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), *norm, nn.MaxPool2d(3, 2, padding=1), nn.Flatten()),
            *(nn.Linear(64 * 6 * 6, 384), nn.ReLU()),
            *(nn.Linear(384, 192), nn.ReLU()),
            nn.Linear(192, CLASSES),
        )


def vgg11() -> nn.Module:
    """The usual form for CIFAR-10: the eight convolutions of VGG11 and one linear layer; 9,225,610 parameters."""
    channels = (64, POOL, 128, POOL, 256, 256, POOL, 512, 512, POOL, 512, 512, POOL)
    return _initialise(nn.Sequential(*_convolutions(channels), nn.Flatten(), nn.Linear(512, CLASSES)))


def vgg11_paper() -> nn.Module:
    """The one that the paper's volumes are of; 124,272,202 parameters, 120 M of them in the linear layers.

    Not Simonyan and Zisserman's VGG11: its eight convolutions come in four pairs, and the 2 x 2 pixels that are left
    are stretched to 7 x 7, as for images of 224 pixels. The authors' dropout is left out, see docs/deviations.md.
    """
    channels = (64, 64, POOL, 128, 128, POOL, 256, 256, POOL, 512, 512, POOL)
    return _initialise(
        nn.Sequential(
            *(*_convolutions(channels), nn.AdaptiveAvgPool2d(7), nn.Flatten()),
            *(nn.Linear(512 * 7 * 7, 4096), nn.ReLU()),
            *(nn.Linear(4096, 4096), nn.ReLU()),
            nn.Linear(4096, CLASSES),
        )
    )


def _convolutions(channels: tuple[int, ...]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    before = 3
    for width in channels:
        if width == POOL:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
    return layers


def _initialise(model: nn.Module) -> nn.Module:
    """As torchvision does for VGG and ResNet: with PyTorch's defaults, `vgg11` did not begin to learn in 60 steps."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return model


class Residual(nn.Module):
    """Two convolutions and a way around them, which has no parameters: He et al.'s option A.

    Where the block halves the image and doubles the channels, the way around takes every other pixel and fills the new
    channels with zeros.
    """

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.stride = width // before
        self.new_channels = width - before
        self.conv1 = nn.Conv2d(before, width, 3, self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        half = self.new_channels // 2
        around = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, half))
        return functional.relu(self.norm2(self.conv2(inner)) + around)


def resnet20() -> nn.Module:
    """He et al.'s for CIFAR-10; 269,722 parameters, and batch norm's 1,376 running statistics."""
    widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
    blocks = [Residual(before, width) for before, width in pairwise(widths)]
    return _initialise(
        nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(64, CLASSES),
        )
    )


class NextCharLSTM(nn.Module):
    """The next of 80 characters after a window of text; 819,920 parameters."""

    def __init__(self, characters: int = 80) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.output = nn.Linear(256, characters)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))
        return self.output(states[:, -1])
