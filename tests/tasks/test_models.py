"""Networks: their exact sizes, and what is special about them."""

import pytest
import torch
from torch import nn

from fedfq.tasks import models


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("build", "count", "side"),
    [
        (models.SimpleCNN, 1_068_298, 24),
        (lambda: models.SimpleCNN(lrn=True), 1_068_298, 24),
        (models.vgg11, 9_225_610, 32),
        (models.vgg11_paper, 124_272_202, 32),
        (models.resnet20, 269_722, 32),
    ],
)
def test_networks_for_cifar10(build, count, side):
    with torch.device("meta"):  # shapes only: the paper's VGG11 has half a gigabyte
        model = build()
        assert parameters(model) == count
        assert model(torch.empty(2, 3, side, side)).shape == (2, 10)


def test_networks_for_digits_and_text():
    assert parameters(models.digits_cnn()) == 71_754
    assert models.digits_cnn()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert parameters(models.NextCharLSTM()) == 819_920
    assert models.NextCharLSTM()(torch.zeros(2, 80, dtype=torch.long)).shape == (2, 80)


def test_local_response_norm_is_that_of_pytorch():
    x = 20 * torch.randn(3, 64, 5, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(models.LocalResponseNorm(64)(x), nn.LocalResponseNorm(9, alpha=1e-3)(x))


def test_what_is_sent_of_a_model():
    """Constants stay at home; the statistics of batch norm do not."""
    assert sum(tensor.numel() for tensor in models.SimpleCNN(lrn=True).state_dict().values()) == 1_068_298
    state = models.resnet20().state_dict()
    statistics = [tensor for name, tensor in state.items() if name.endswith(("running_mean", "running_var"))]
    assert sum(tensor.numel() for tensor in statistics) == 1_376


def test_the_way_around_a_residual_block_has_no_parameters():
    block = models.Residual(16, 32).eval()
    for parameter in block.parameters():
        nn.init.zeros_(parameter)  # only the way around is left
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any() and not out[:, 24:].any()
