"""Linear, convolutional, embedding, normalisation and pooling layers, each in its awkward settings."""

import torch
from torch import nn

from zoo.case import Call, ids, normal, registry, several

CASES, case = registry()


# --- Linear


@case(normal(4))
def linear_bias():
    return nn.Linear(4, 3)


@case(normal(4))
def linear_no_bias():
    return nn.Linear(4, 3, bias=False)


@case(normal(2, 4))
def linear_3d():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


@case(normal(2, 2, 3))
def linear_4d():
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))


@case(normal(4))
def linear_one_output():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


@case(normal(4))
def linear_output_without_channel_axis():
    return Call(lambda m, x: m.net(x).squeeze(1), net=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)))


@case(normal(4), n=1, n2=1)
def single_example():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


@case(normal(1, 4), n=1, n2=1)
def single_example_single_token():
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 1))


@case(normal(5))
def mlp_relu():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))


@case(normal(5))
def mlp_tanh():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


@case(normal(5))
def mlp_gelu():
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5), nn.GELU("tanh"), nn.Linear(5, 2))


@case(normal(5))
def mlp_of_several_activations():
    parts = [nn.SiLU(), nn.ELU(), nn.Softplus(), nn.LeakyReLU(0.1), nn.Hardswish(), nn.Sigmoid()]
    return nn.Sequential(nn.Linear(5, 5), *[m for a in parts for m in (a, nn.Linear(5, 5))])


@case(several(normal(3), normal(4)))
def bilinear():
    return nn.Bilinear(3, 4, 2)


@case(several(normal(2, 3), normal(2, 4)))
def bilinear_tokens_no_bias():
    return Call(lambda m, a, b: m.mix(torch.tanh(m.inner(a)), b), inner=nn.Linear(3, 3), mix=nn.Bilinear(3, 4, 2, bias=False))


# --- convolutions


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
    "conv2d_unequal_padding_and_stride": (lambda: nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(2, 1)), (3, 5)),
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
    "conv3d_stride_padding_groups": (lambda: nn.Conv3d(2, 4, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1), groups=2), (2, 3, 2)),
    "conv3d_replicate_dilation": (lambda: nn.Conv3d(1, 2, 2, dilation=2, padding=1, padding_mode="replicate"), (3, 2, 2)),
    "conv3d_same_even_kernel": (lambda: nn.Conv3d(1, 2, 2, padding="same"), (2, 2, 3)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(3, 2, 3), (3,)),
    "conv_transpose1d_all_settings": (
        lambda: nn.ConvTranspose1d(4, 2, 3, stride=3, padding=2, output_padding=2, groups=2, dilation=2),
        (3,),
    ),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(2, 3, 2), (2, 3)),
    "conv_transpose2d_stride_padding": (lambda: nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1, output_padding=1), (2, 3)),
    "conv_transpose2d_groups_no_bias": (lambda: nn.ConvTranspose2d(4, 4, 2, groups=2, bias=False), (2, 2)),
    "conv_transpose2d_depthwise": (lambda: nn.ConvTranspose2d(3, 3, 2, stride=2, groups=3), (2, 2)),
    "conv_transpose2d_dilation": (lambda: nn.ConvTranspose2d(2, 2, 2, dilation=(1, 2), padding=(0, 1)), (2, 3)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 1, 2), (2, 1, 2)),
    "conv_transpose3d_all_settings": (
        lambda: nn.ConvTranspose3d(2, 2, (1, 2, 2), stride=(1, 2, 2), padding=(0, 1, 0), output_padding=(0, 1, 1), groups=2),
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


@case(normal(5))
def dropout_in_eval():
    return nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Tanh(), nn.AlphaDropout(0.3), nn.Linear(6, 2))


# --- embeddings


def tokens_then(layer, features, outputs=2):
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(features, outputs))


@case(ids(7, 3))
def embedding():
    return tokens_then(nn.Embedding(7, 4), 12)


@case(lambda n: torch.tensor([[1, 1, 2], [2, 2, 2], [0, 1, 1]])[:n])
def embedding_repeated_ids():
    return tokens_then(nn.Embedding(4, 3), 9)


@case(lambda n: torch.tensor([[1, 0, 2], [0, 0, 3], [3, 1, 1]])[:n])
def embedding_padding_idx():
    return tokens_then(nn.Embedding(4, 3, padding_idx=0), 9)


@case(ids(5, 3))
def embedding_max_norm():
    return tokens_then(nn.Embedding(5, 4, max_norm=0.5), 12)


@case(ids(5, 3))
def embedding_sparse():
    return tokens_then(nn.Embedding(5, 4, sparse=True), 12)


@case(ids(6))
def embedding_one_id_an_example():
    return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2))


@case(ids(6, 2, 2))
def embedding_grid_of_ids():
    return tokens_then(nn.Embedding(6, 2), 8)


@case(ids(6, 3), fallback_ok=True)
def embedding_bag_mean():
    return nn.Sequential(nn.EmbeddingBag(6, 4), nn.Tanh(), nn.Linear(4, 2))


@case(lambda n: torch.tensor([[1, 1, 0], [0, 2, 5], [4, 4, 4]])[:n], fallback_ok=True)
def embedding_bag_sum_padding_idx():
    return nn.Sequential(nn.EmbeddingBag(6, 4, mode="sum", padding_idx=0), nn.Tanh(), nn.Linear(4, 2))


@case(ids(6, 3), fallback_ok=True)
def embedding_bag_max():
    return nn.Sequential(nn.EmbeddingBag(6, 4, mode="max"), nn.Linear(4, 2))


@case(several(ids(6, 3), normal(3)), fallback_ok=True)
def embedding_bag_weighted():
    return Call(
        lambda m, i, w: m.head(torch.tanh(m.bag(i, per_sample_weights=w))),
        bag=nn.EmbeddingBag(6, 4, mode="sum"),
        head=nn.Linear(4, 2),
    )


@case(ids(6, 3), fallback_ok=True)
def embedding_bag_offsets():
    return Call(
        lambda m, i: m.head(torch.tanh(m.bag(i.flatten(), torch.arange(0, i.numel(), i.shape[1])))),
        bag=nn.EmbeddingBag(6, 4),
        head=nn.Linear(4, 2),
    )


# --- normalisation


@case(normal(5))
def layer_norm():
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 2))


@case(normal(3, 4))
def layer_norm_tokens_no_bias():
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5, bias=False), nn.Tanh(), nn.Linear(5, 2))


@case(normal(3, 4))
def layer_norm_two_axes():
    return nn.Sequential(nn.LayerNorm((3, 4)), nn.Flatten(), nn.Linear(12, 2))


@case(normal(2, 3, 4))
def layer_norm_two_axes_and_positions():
    return nn.Sequential(nn.LayerNorm((3, 4)), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2))


@case(normal(5))
def layer_norm_without_parameters():
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 2))


@case(normal(3, 4))
def rms_norm():
    return nn.Sequential(nn.Linear(4, 5), nn.RMSNorm(5), nn.Tanh(), nn.Linear(5, 2))


@case(normal(2, 3, 3))
def group_norm():
    return nn.Sequential(nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


@case(normal(4))
def group_norm_without_positions():
    return nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(3, 6), nn.Tanh(), nn.Linear(6, 2))


@case(normal(2, 6))
def instance_norm1d():
    return nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True), nn.ReLU(), nn.Flatten(), nn.Linear(15, 2))


@case(normal(2, 3, 4), train=True)
def instance_norm2d_train():
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2))


@case(normal(2, 3, 4))
def instance_norm2d_running_statistics():
    return nn.Sequential(
        with_statistics(nn.InstanceNorm2d(2, affine=True, track_running_stats=True)), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)
    )


def with_statistics(norm):
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return norm


@case(normal(4))
def batch_norm1d_eval():
    return nn.Sequential(nn.Linear(4, 5), with_statistics(nn.BatchNorm1d(5)), nn.ReLU(), nn.Linear(5, 2))


@case(normal(3, 4))
def batch_norm1d_eval_positions():
    return nn.Sequential(with_statistics(nn.BatchNorm1d(3)), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))


@case(normal(2, 4, 4))
def batch_norm2d_eval():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False),
        with_statistics(nn.BatchNorm2d(3)),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 2),
    )


@case(normal(4))
def prelu_one():
    return nn.Sequential(nn.Linear(4, 6), nn.PReLU(), nn.Linear(6, 2))


@case(normal(2, 3, 3))
def prelu_per_channel():
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.PReLU(3), nn.Flatten(), nn.Linear(12, 2))
