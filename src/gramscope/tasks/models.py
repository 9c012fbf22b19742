"""Networks to train and watch, in plain torch, each seeded without touching the global random stream."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.checks import check_choice
from gramscope.base.rng import seeded


class Residual(nn.Module):
    """``relu(branch(x) + shortcut(x))``."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d h2 w2"]:
        return torch.relu(self.branch(x) + self.shortcut(x))


def _block(fan_in: int, fan_out: int, stride: int) -> Residual:
    branch = nn.Sequential(
        nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False), nn.BatchNorm2d(fan_out), nn.ReLU(),
        nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False), nn.BatchNorm2d(fan_out),
    )  # fmt: skip
    same = stride == 1 and fan_in == fan_out
    shortcut = nn.Identity() if same else nn.Sequential(
        nn.Conv2d(fan_in, fan_out, 1, stride, bias=False), nn.BatchNorm2d(fan_out)
    )  # fmt: skip
    return Residual(branch, shortcut)


def cnn(channels: int = 1, classes: int = 10, width: int = 16, size: int = 8, *, seed: int = 0) -> nn.Sequential:
    """Two convolutions, a pool and a linear readout, for square images given flat or as (n, channels, size, size).

    >>> cnn(size=8)(torch.zeros(2, 64)).shape
    torch.Size([2, 10])
    """
    with seeded(seed):
        return nn.Sequential(
            nn.Flatten(), nn.Unflatten(1, (channels, size, size)), nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
            nn.Linear(2 * width * (size // 2) ** 2, classes),
        )  # fmt: skip


def resnet18(channels: int = 3, classes: int = 10, width: int = 64, *, seed: int = 0) -> nn.Sequential:
    """ResNet-18 for small images: a 3 x 3 stem, four stages of two blocks, no first pool."""
    stages: list[nn.Module] = []
    fan_in = width
    with seeded(seed):
        for place in range(4):
            fan_out = width * 2**place
            stages += [_block(fan_in, fan_out, 1 if place == 0 else 2), _block(fan_out, fan_out, 1)]
            fan_in = fan_out
        return nn.Sequential(
            nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), *stages,
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(fan_in, classes),
        )  # fmt: skip


class Recurrent(nn.Module):
    """A recurrent layer with a linear readout at every step: (n, time, inputs) -> (n, time, outputs)."""

    def __init__(self, kind: str, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        cells = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
        check_choice(kind, "kind", cells)
        self.cell = cells[kind](inputs, hidden, batch_first=True)
        self.readout = nn.Linear(hidden, outputs)

    def forward(self, x: Float[Tensor, "n time inputs"]) -> Float[Tensor, "n time outputs"]:
        return self.readout(self.cell(x)[0])


def recurrent(kind: str, inputs: int, hidden: int, outputs: int, *, seed: int = 0) -> Recurrent:
    """An RNN, GRU or LSTM with a readout; see :class:`Recurrent`."""
    with seeded(seed):
        return Recurrent(kind, inputs, hidden, outputs)
