"""The networks of the benchmark, built from Sequential and one Residual so that a twin in JAX is mechanical."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

CLASSES = 10


class Residual(nn.Module):
    """``relu(branch(x) + shortcut(x))``, the block of a ResNet."""

    def __init__(self, branch: nn.Sequential, shortcut: nn.Sequential) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d h2 w2"]:
        return torch.relu(self.branch(x) + self.shortcut(x))


def mlp(widths: tuple[int, ...] = (784, 1024, 1024, 1024, CLASSES)) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def tutorial_cnn() -> nn.Sequential:
    """The network of PyTorch's NTK tutorial: no padding, no ReLU after the last convolution."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3),
        nn.Flatten(),
        nn.Linear(21632, CLASSES),
    )


def _convolution(fan_in: int, fan_out: int, stride: int, size: int = 3) -> list[nn.Module]:
    conv = nn.Conv2d(fan_in, fan_out, size, stride=stride, padding=size // 2, bias=False)
    return [conv, nn.BatchNorm2d(fan_out)]


def _block(fan_in: int, fan_out: int, stride: int) -> Residual:
    branch = nn.Sequential(*_convolution(fan_in, fan_out, stride), nn.ReLU(), *_convolution(fan_out, fan_out, 1))
    same = fan_in == fan_out and stride == 1
    shortcut = nn.Sequential() if same else nn.Sequential(*_convolution(fan_in, fan_out, stride, 1))
    return Residual(branch, shortcut)


def cifar_resnet(channels: tuple[int, ...], blocks: int) -> nn.Sequential:
    """A ResNet for 32x32 images: one stage per entry of ``channels``, ``blocks`` blocks a stage."""
    layers: list[nn.Module] = [*_convolution(3, channels[0], 1), nn.ReLU()]
    fan_in = channels[0]
    for stage, fan_out in enumerate(channels):
        for block in range(blocks):
            layers.append(_block(fan_in, fan_out, 2 if stage and not block else 1))
            fan_in = fan_out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(fan_in, CLASSES))


def resnet8() -> nn.Sequential:
    return cifar_resnet((16, 32, 64), blocks=1)


def resnet18() -> nn.Sequential:
    return cifar_resnet((64, 128, 256, 512), blocks=2)


_BUILDERS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "mlp": (mlp, (784,)),
    "cnn": (tutorial_cnn, (3, 32, 32)),
    "resnet8": (resnet8, (3, 32, 32)),
    "resnet18": (resnet18, (3, 32, 32)),
}


def build(name: str, n: int, device: torch.device, seed: int = 0) -> tuple[nn.Sequential, Tensor]:
    """The named network in eval mode with ``n`` random inputs; weights and inputs depend on the seed alone."""
    builder, shape = _BUILDERS[name]
    torch.manual_seed(seed)
    model = builder()
    _settle_batch_norm(model, shape)
    x = torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed + 1))
    return model.eval().to(device), x.to(device)


def _settle_batch_norm(model: nn.Module, shape: tuple[int, ...]) -> None:
    # With the initial statistics (mean 0, variance 1) batch norm would be the identity, and
    # a peer that drops the statistics would still agree.
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    if not norms:
        return
    for norm in norms:
        norm.momentum = 1.0
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.uniform_(norm.bias, -0.2, 0.2)
    with torch.no_grad():
        model.train()(torch.randn(16, *shape))
