"""The operations whose second derivatives are not checked at run time: their formulas against differences, here."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError

from gramscope.capture.backward_graph import is_leaf, nodes_below
from gramscope.capture.node_rules import operation
from gramscope.kernels.expansion import Expansion
from gramscope.ops.operations import PROVEN
from zoo.once import DetachedTanh

# Away from kinks, roots and ties.
PLACES = torch.tensor([[-1.7, 0.4, 1.3, -0.6], [0.9, -2.2, 0.2, 1.8], [-0.3, 1.1, -1.2, 2.4]], dtype=torch.float64)


def image(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


MATRIX, SMALL, PHOTO = image(4, 2), image(3, 4), image(2, 4, 6, 6)
CASES = {
    "Abs": [(torch.abs, PLACES)],
    "AdaptiveAvgPool2D": [(lambda z: F.adaptive_avg_pool2d(z, 2), image(2, 2, 5, 5))],
    "Add": [(torch.add, PLACES, SMALL), (lambda a, b: torch.add(a, b, alpha=-2.5), PLACES, SMALL[0])],
    "Addmm": [
        (torch.addmm, image(2), SMALL, MATRIX),
        (lambda *a: torch.addmm(*a, beta=2, alpha=3), image(2), SMALL, MATRIX),
    ],
    "AvgPool2D": [(lambda z: F.avg_pool2d(z, 3, stride=2, padding=1), image(1, 2, 5, 5))],
    "Baddbmm": [(torch.baddbmm, image(2, 3, 2), image(2, 3, 4), image(2, 4, 2))],
    "Bmm": [(torch.bmm, image(2, 3, 4), image(2, 4, 2))],
    "Cat": [(lambda a, b: torch.cat([a, b, a], 1), PLACES, SMALL)],
    "Clamp": [(lambda z: z.clamp(-1, 1), PLACES)],
    "ClampMin": [(lambda z: z.clamp_min(0.1), PLACES)],
    "Clone": [(torch.clone, PLACES)],
    "Convolution": [
        (F.conv1d, image(2, 3, 7), image(2, 3, 3), image(2)),
        (lambda *a: F.conv2d(*a, stride=2, padding=1, dilation=2), image(2, 2, 6, 6), image(2, 2, 3, 3), image(2)),
        (lambda *a: F.conv2d(*a, padding=1, groups=2), image(1, 4, 4, 4), image(2, 2, 3, 3)),
        (lambda *a: F.conv_transpose2d(*a, stride=2, output_padding=1), image(1, 2, 3, 3), image(2, 2, 3, 3), image(2)),
        (F.conv3d, image(1, 1, 3, 3, 3), image(1, 1, 2, 2, 2)),
    ],
    "Cos": [(torch.cos, PLACES)],
    "Div": [(torch.div, SMALL, PLACES), (lambda z: z / 3, PLACES)],
    "Elu": [(F.elu, PLACES), (lambda z: F.elu(z, 0.5), PLACES), (F.selu, PLACES)],
    "Embedding": [(lambda w: F.embedding(torch.tensor([[0, 2], [2, 1]]), w), image(3, 2))],
    "Exp": [(torch.exp, PLACES)],
    "Expand": [(lambda z: z[None].expand(2, -1, -1), PLACES)],
    "Gelu": [(F.gelu, PLACES), (lambda z: F.gelu(z, approximate="tanh"), PLACES)],
    "LeakyRelu": [(lambda z: F.leaky_relu(z, 0.2), PLACES)],
    "Log": [(torch.log, PLACES.abs())],
    "LogSoftmax": [(lambda z: F.log_softmax(z, 1), PLACES), (lambda z: F.log_softmax(z, 0), PLACES)],
    "Logsumexp": [(lambda z: z.logsumexp(1), PLACES)],
    "MaxPool2DWithIndices": [(lambda z: F.max_pool2d(z, 2), torch.arange(32.0).double().sin().reshape(1, 2, 4, 4))],
    "Mean": [(torch.mean, PLACES), (lambda z: z.mean((0, 1), keepdim=True), PLACES)],
    "Mm": [(torch.mm, SMALL, MATRIX)],
    "Mul": [(torch.mul, PLACES, SMALL), (torch.mul, PLACES, SMALL[0]), (lambda z: z * 3, PLACES)],
    "Neg": [(torch.neg, PLACES)],
    "Permute": [(lambda z: z.permute(1, 0), PLACES)],
    "Relu": [(torch.relu, PLACES)],
    "ReshapeAlias": [(lambda z: torch.ops.aten._reshape_alias(z, (4, 3), (3, 1)), PLACES)],
    "Select": [(lambda z: z[1], PLACES)],
    "Sigmoid": [(torch.sigmoid, PLACES)],
    "Silu": [(F.silu, PLACES)],
    "Sin": [(torch.sin, PLACES)],
    "Slice": [(lambda z: z[:, 1:3], PLACES)],
    "Softmax": [(lambda z: F.softmax(z, 1), PLACES), (lambda z: F.softmax(z, 0), PLACES)],
    "Softplus": [(F.softplus, PLACES), (lambda z: F.softplus(z, beta=2.0), PLACES)],
    "Squeeze": [(lambda z: z[:, None].squeeze(1), PLACES)],
    "Stack": [(lambda a, b: torch.stack([a, b], 1), PLACES, SMALL)],
    "Sub": [(torch.sub, PLACES, SMALL), (lambda a, b: torch.sub(a, b, alpha=-2.5), PLACES, SMALL[0])],
    "Sum": [(torch.sum, PLACES), (lambda z: z.sum(1), PLACES)],
    "T": [(torch.t, PLACES)],
    "Tanh": [(torch.tanh, PLACES)],
    "Transpose": [(lambda z: z.transpose(0, 1), PLACES)],
    "Unsqueeze": [(lambda z: z.unsqueeze(1), PLACES)],
    "UnsafeView": [(torch.matmul, image(2, 3, 4), MATRIX)],
    "View": [(lambda z: z.view(4, 3), PLACES)],
}


def test_every_proven_operation_has_a_case():
    assert set(CASES) == PROVEN


@pytest.mark.parametrize("name", sorted(CASES))
def test_second_derivatives_are_those_of_differences(name):
    for function, *arguments in CASES[name]:
        leaves = [argument.clone().requires_grad_() for argument in arguments]
        nodes = nodes_below([function(*leaves)])
        assert name in {operation(node) for node in nodes if not is_leaf(node)}
        assert gradcheck(function, leaves)
        # Squared, so that an operation that is linear in its arguments shows what its gradient depends on.
        assert gradgradcheck(lambda *given, f=function: f(*given) ** 2, leaves)


def test_the_comparison_finds_a_wrong_formula():
    """A function whose gradient is right, and whose second derivative is missing."""
    leaf = PLACES.clone().requires_grad_()
    assert gradcheck(DetachedTanh.apply, leaf)
    with pytest.raises(GradcheckError):
        gradgradcheck(DetachedTanh.apply, leaf)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return 2 * z

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class Hooked(nn.Module):
    def forward(self, z):
        z.register_hook(lambda g: 2 * g)
        return z


@pytest.mark.parametrize(
    ("last", "proven"),
    [
        (nn.ReLU(), True),
        (nn.BatchNorm1d(5).eval(), True),  # by its definition
        (nn.LayerNorm(5), False),  # it has a root
        (Hooked(), False),
        (nn.CosineSimilarity(), False),
        (type("Own", (nn.Module,), {"forward": lambda self, z: Doubled.apply(z)})(), False),
    ],
)
def test_networks_of_other_operations_and_with_hooks_are_not_proven(last, proven):
    def outputs(model, x):
        z = model[1](model[0](x), x) if isinstance(last, nn.CosineSimilarity) else model(x)
        return z.reshape(len(x), -1)

    model = nn.Sequential(nn.Linear(5, 5), last)
    assert Expansion(model, torch.randn(3, 5), outputs=outputs).proven is proven
