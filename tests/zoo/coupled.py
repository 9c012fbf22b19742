"""Models in which one example's output depends on another example: no per-example signal exists."""

import torch
from torch import nn

from zoo.case import Call, normal, registry

CASES, case = registry()


@case(normal(4), n=4, n2=3, train=True)
def batch_norm1d_train():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))


@case(normal(1, 4, 4), train=True)
def batch_norm2d_train():
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2))


@case(normal(4), n=4, n2=3)
def batch_norm_without_running_statistics():
    """Batch statistics even in eval mode."""
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Tanh(), nn.Linear(5, 2))


@case(normal(4), n=4, n2=3)
def attention_over_the_batch():
    return Call(
        lambda m, x: m.attend(x[None], x[None], x[None], need_weights=False)[0][0],
        attend=nn.MultiheadAttention(4, 2, batch_first=True),
    )


@case(normal(4))
def batch_mean_subtracted():
    return Call(
        lambda m, x: m.head((h := torch.tanh(m.inner(x))) - h.mean(0)),
        inner=nn.Linear(4, 3),
        head=nn.Linear(3, 2),
    )


@case(normal(4))
def contrastive_similarities():
    """Output (n, n): every example against every other."""
    return Call(lambda m, x: (h := m.inner(x)) @ h.T, inner=nn.Linear(4, 3))


@case(normal(4))
def previous_example_added():
    return Call(
        lambda m, x: m.head((h := torch.tanh(m.inner(x))) + h.roll(1, 0)),
        inner=nn.Linear(4, 3),
        head=nn.Linear(3, 2),
    )


@case(normal(3), n=3)
def batch_taken_for_a_sequence():
    """A recurrent net given (n, d) unbatched: the examples are its time steps."""
    return Call(lambda m, x: m.rnn(x)[0], rnn=nn.GRU(3, 2))
