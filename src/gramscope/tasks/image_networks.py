"""VGG-16 for small images, and a convolution network with a wide last layer."""

from torch import nn

from gramscope.base.checks import check_counts, check_number
from gramscope.base.errors import InputError
from gramscope.base.rng import seeded

STAGES = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))  # channels, as multiples of the width


def vgg16(
    channels: int = 3, classes: int = 10, width: int = 64, *, hidden: int = 4096, batch_norm: bool = True,
    dropout: float = 0.5, seed: int = 0,
) -> nn.Sequential:  # fmt: skip
    """VGG-16 for images of 32 x 32: thirteen convolutions in five stages with a max pool each, and three linear layers.

    The features of its layers, flattened, are 16,384, 8,192, 4,096, 2,048, 512 and 4,096 numbers at the default width.
    ``batch_norm`` puts a batch norm behind each convolution.

    Reference: Simonyan & Zisserman 2015 (configuration D); arXiv:2410.04264, figures 3 and 22b.

    >>> import torch
    >>> vgg16(width=2, hidden=8)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    check_counts(1, channels=channels, classes=classes, width=width, hidden=hidden)
    check_number(dropout, "dropout", least=0.0, below=1.0)
    layers: list[nn.Module] = []
    fan_in = channels
    with seeded(seed):
        for stage in STAGES:
            for multiple in stage:
                layers += [nn.Conv2d(fan_in, multiple * width, 3, padding=1)]
                layers += [nn.BatchNorm2d(multiple * width)] if batch_norm else []
                layers += [nn.ReLU()]
                fan_in = multiple * width
            layers += [nn.MaxPool2d(2)]
        return nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(fan_in, hidden), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, classes),
        )  # fmt: skip


def wide_cnn(
    channels: int = 1, classes: int = 10, width: int = 32, *, hidden: int = 1024, size: int = 28, seed: int = 0
) -> nn.Sequential:
    """Two convolutions with max pools, then a linear layer of ``hidden`` units, whose outputs are the features.

    For square images given flat or as (n, channels, size, size). The last layer has 1,024 inputs, as in
    arXiv:2410.04264, figure 16, which states this width and nothing else of its network.

    >>> wide_cnn(width=2)[-1].in_features
    1024
    """
    check_counts(1, channels=channels, classes=classes, width=width, hidden=hidden, size=size)
    if size < 4:
        raise InputError(f"size must be at least 4, since two pools halve the image, got {size}.")
    with seeded(seed):
        return nn.Sequential(
            nn.Flatten(), nn.Unflatten(1, (channels, size, size)),
            nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(2 * width * (size // 4) ** 2, hidden), nn.ReLU(), nn.Linear(hidden, classes),
        )  # fmt: skip
