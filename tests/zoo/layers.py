"""Linear, embedding and normalisation layers, each in its awkward settings."""

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
    return Call(
        lambda m, a, b: m.mix(torch.tanh(m.inner(a)), b),
        inner=nn.Linear(3, 3),
        mix=nn.Bilinear(3, 4, 2, bias=False),
    )


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


@case(ids(6, 3))
def embedding_bag_mean():
    return nn.Sequential(nn.EmbeddingBag(6, 4), nn.Tanh(), nn.Linear(4, 2))


@case(lambda n: torch.tensor([[1, 1, 0], [0, 2, 5], [4, 4, 4]])[:n])
def embedding_bag_sum_padding_idx():
    return nn.Sequential(nn.EmbeddingBag(6, 4, mode="sum", padding_idx=0), nn.Tanh(), nn.Linear(4, 2))


@case(ids(6, 3), fallback_ok=True)
def embedding_bag_max():
    return nn.Sequential(nn.EmbeddingBag(6, 4, mode="max"), nn.Linear(4, 2))


@case(several(ids(6, 3), normal(3)))
def embedding_bag_weighted():
    return Call(
        lambda m, i, w: m.head(torch.tanh(m.bag(i, per_sample_weights=w))),
        bag=nn.EmbeddingBag(6, 4, mode="sum"),
        head=nn.Linear(4, 2),
    )


@case(ids(6, 3))
def embedding_bag_offsets():
    return Call(
        lambda m, i: m.head(torch.tanh(m.bag(i.flatten(), torch.arange(0, i.numel(), i.shape[1])))),
        bag=nn.EmbeddingBag(6, 4),
        head=nn.Linear(4, 2),
    )


@case(lambda n: torch.tensor([[1, -1, -1], [0, 2, 5], [-1, -1, -1], [4, 4, -1]])[:n])
def embedding_bag_of_unequal_lengths():
    """One is empty."""

    def run(m, i):
        counts = (i >= 0).sum(1)
        return m.head(torch.tanh(m.bag(i[i >= 0], counts.cumsum(0) - counts)))

    return Call(run, bag=nn.EmbeddingBag(6, 4), head=nn.Linear(4, 2))


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
    return nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True), nn.ReLU(), nn.Flatten(), nn.Linear(15, 2)
    )


@case(normal(2, 3, 4), train=True)
def instance_norm2d_train():
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)
    )


@case(normal(2, 3, 4))
def instance_norm2d_running_statistics():
    return nn.Sequential(
        with_statistics(nn.InstanceNorm2d(2, affine=True, track_running_stats=True)),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 2),
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
