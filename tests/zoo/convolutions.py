"""Convolutions in every setting, pooling and resampling."""

import torch
from torch import nn

from zoo.case import Call, normal, registry

CASES, case = registry()


def convolutional(layer, positions):
    """The layer followed by a nonlinear readout, so that its signals differ from position to position."""
    with torch.no_grad():
        features = layer(torch.zeros(1, layer.in_channels, *positions)).numel()
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(features, 2))


CONVOLUTIONS = {
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), (6,)),
    "conv1d_stride_padding": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), (6,)),
    "conv1d_same": (lambda: nn.Conv1d(3, 2, 3, padding="same"), (5,)),
    "conv1d_same_even_kernel": (lambda: nn.Conv1d(3, 2, 4, padding="same"), (5,)),
    "conv1d_same_even_kernel_dilated": (lambda: nn.Conv1d(2, 2, 2, padding="same", dilation=3), (6,)),
    "conv1d_one_by_one": (lambda: nn.Conv1d(3, 4, 1), (4,)),
    "conv1d_circular": (lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), (5,)),
    "conv1d_groups_stride_dilation": (lambda: nn.Conv1d(4, 4, 2, stride=2, dilation=2, groups=2), (7,)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3), (4, 4)),
    "conv2d_no_bias": (lambda: nn.Conv2d(2, 3, 2, bias=False), (4, 3)),
    "conv2d_valid": (lambda: nn.Conv2d(2, 3, (2, 3), padding="valid"), (4, 4)),
    "conv2d_same": (lambda: nn.Conv2d(2, 2, (3, 5), padding="same"), (3, 4)),
    "conv2d_same_even_kernel": (lambda: nn.Conv2d(2, 2, (2, 4), padding="same"), (3, 4)),
    "conv2d_same_even_kernel_reflect": (
        lambda: nn.Conv2d(2, 2, (2, 3), padding="same", padding_mode="reflect"),
        (3, 4),
    ),
    "conv2d_unequal_padding_and_stride": (
        lambda: nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(2, 1)),
        (3, 5),
    ),
    "conv2d_reflect": (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), (3, 4)),
    "conv2d_circular": (lambda: nn.Conv2d(2, 2, 3, padding=(1, 2), padding_mode="circular"), (3, 4)),
    "conv2d_replicate": (lambda: nn.Conv2d(2, 2, 3, padding=2, stride=2, padding_mode="replicate"), (3, 4)),
    "conv2d_dilation": (lambda: nn.Conv2d(2, 2, 2, dilation=(2, 1), padding=1), (4, 3)),
    "conv2d_groups": (lambda: nn.Conv2d(4, 6, 2, groups=2), (3, 3)),
    "conv2d_depthwise": (lambda: nn.Conv2d(3, 3, 3, padding=1, groups=3), (3, 3)),
    "conv2d_depthwise_multiplier": (lambda: nn.Conv2d(3, 6, 2, groups=3, bias=False), (3, 3)),
    "conv2d_one_by_one": (lambda: nn.Conv2d(3, 4, 1), (2, 3)),
    "conv2d_one_by_one_stride": (lambda: nn.Conv2d(3, 4, 1, stride=2), (3, 4)),
    "conv2d_stride_leaves_a_border": (lambda: nn.Conv2d(2, 2, 2, stride=3), (6, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2), (3, 2, 3)),
    "conv3d_stride_padding_groups": (
        lambda: nn.Conv3d(2, 4, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1), groups=2),
        (2, 3, 2),
    ),
    "conv3d_replicate_dilation": (
        lambda: nn.Conv3d(1, 2, 2, dilation=2, padding=1, padding_mode="replicate"),
        (3, 2, 2),
    ),
    "conv3d_same_even_kernel": (lambda: nn.Conv3d(1, 2, 2, padding="same"), (2, 2, 3)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(3, 2, 3), (3,)),
    "conv_transpose1d_all_settings": (
        lambda: nn.ConvTranspose1d(4, 2, 3, stride=3, padding=2, output_padding=2, groups=2, dilation=2),
        (3,),
    ),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(2, 3, 2), (2, 3)),
    "conv_transpose2d_stride_padding": (
        lambda: nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1, output_padding=1),
        (2, 3),
    ),
    "conv_transpose2d_groups_no_bias": (lambda: nn.ConvTranspose2d(4, 4, 2, groups=2, bias=False), (2, 2)),
    "conv_transpose2d_depthwise": (lambda: nn.ConvTranspose2d(3, 3, 2, stride=2, groups=3), (2, 2)),
    "conv_transpose2d_dilation": (
        lambda: nn.ConvTranspose2d(2, 2, 2, dilation=(1, 2), padding=(0, 1)),
        (2, 3),
    ),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 1, 2), (2, 1, 2)),
    "conv_transpose3d_all_settings": (
        lambda: nn.ConvTranspose3d(
            2, 2, (1, 2, 2), stride=(1, 2, 2), padding=(0, 1, 0), output_padding=(0, 1, 1), groups=2
        ),
        (1, 2, 2),
    ),
}


def _register_convolution(name, layer, positions):
    def build():
        return convolutional(layer(), positions)

    build.__name__ = name
    case(lambda n: torch.randn(n, layer().in_channels, *positions))(build)


for _name, (_layer, _positions) in CONVOLUTIONS.items():
    _register_convolution(_name, _layer, _positions)


@case(normal(2, 3, 3))
def conv_transpose2d_asked_output_size():
    return Call(
        lambda m, x: torch.tanh(m.up(x, output_size=[6, 5])).flatten(1) @ m.readout,
        up=nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1),
        readout=torch.randn(2 * 6 * 5, 2),
    )


@case(normal(2, 6, 6))
def conv_deep():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 2, 2)
    )


@case(normal(2, 5, 8))
def conv2d_one_by_one_behind_others():
    """Kernels of one entry whose steps leave a border, and that have a signal to hand on."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 4, 1, stride=(3, 2)), nn.Tanh(), nn.Conv2d(4, 2, 1), nn.Tanh(),
        nn.Conv2d(2, 2, 1, stride=2, padding=1), nn.Flatten(), nn.Linear(12, 2),
    )  # fmt: skip


@case(normal(1, 3, 2, 4))
def conv3d_one_by_one_behind_another():
    return nn.Sequential(
        nn.Conv3d(1, 3, 1), nn.Tanh(), nn.Conv3d(3, 2, 1, stride=(2, 1, 3)), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)
    )


@case(normal(2, 4, 4))
def pooling_max_average_adaptive():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(4, 4, 1),
        nn.AvgPool2d(2, padding=1),
        nn.Conv2d(4, 3, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(3, 2),
    )


@case(normal(2, 5))
def pooling_adaptive_max():
    return nn.Sequential(nn.Conv1d(2, 4, 2), nn.AdaptiveMaxPool1d(2), nn.Flatten(), nn.Linear(8, 2))


@case(normal(2, 3, 3))
def upsample():
    return nn.Sequential(
        nn.Conv2d(2, 2, 2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(2, 1, 3),
        nn.Upsample(scale_factor=2, mode="nearest"),
        nn.Conv2d(1, 1, 2, stride=2),
    )


@case(normal(1, 2, 2))
def pixel_shuffle():
    return nn.Sequential(nn.Conv2d(1, 4, 2, padding=1), nn.PixelShuffle(2), nn.Tanh(), nn.Conv2d(1, 1, 4, stride=2))
