"""Parametrised weights, wrapped models, structured outputs, outputs that are derivatives, small nets."""

import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from zoo.case import Call, normal, registry, weight

CASES, case = registry()


def mlp(d_in=4, d_out=2):
    return nn.Sequential(nn.Linear(d_in, 5), nn.Tanh(), nn.Linear(5, d_out))


# --- parametrisations


@case(normal(4), fallback_ok=True)
def weight_norm():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 2))


@case(normal(2, 5), fallback_ok=True)
def weight_norm_conv():
    return nn.Sequential(
        parametrizations.weight_norm(nn.Conv1d(2, 3, 2), dim=1), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)
    )


@case(normal(4), fallback_ok=True)
def weight_norm_by_hook():
    """The old API: a pre-forward hook writes the weight, which is not a leaf."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 2))


@case(normal(4), fallback_ok=True)
def spectral_norm_eval():
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 2))


@case(normal(4), fallback_ok=True, train=True)
def spectral_norm_train():
    """Every forward pass in train mode moves the buffers u and v: a second pass is another function."""
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 2))


@case(normal(4), fallback_ok=True)
def orthogonal():
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))


class LowRankUpdate(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.down, self.up = weight(1, columns), weight(rows, 1)

    def forward(self, w):
        return w + self.up @ self.down


@case(normal(4), fallback_ok=True)
def lora_parametrization():
    layer = nn.Linear(4, 5)
    parametrize.register_parametrization(layer, "weight", LowRankUpdate(5, 4))
    layer.parametrizations.weight.original.requires_grad_(False)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 2))


@case(normal(4), fallback_ok=True)
def one_parametrized_layer_called_twice():
    layer = parametrizations.weight_norm(nn.Linear(4, 4))
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 2))


@case(normal(4))
def lora_module():
    model = Call(
        lambda m, x: m.head(torch.tanh(m.base(x) + 0.5 * m.up(m.down(x)))),
        base=nn.Linear(4, 5),
        down=nn.Linear(4, 1, bias=False),
        up=nn.Linear(1, 5, bias=False),
        head=nn.Linear(5, 2),
    )
    model.base.requires_grad_(False)
    return model


# --- subclasses and wrappers


class ScaledLinear(nn.Linear):
    """A Linear whose forward is not that of nn.Linear: a rule for nn.Linear would be wrong here."""

    def forward(self, x):
        return F.linear(x, self.weight * 2 + self.weight.mean(), self.bias) + x.sum(-1, keepdim=True)


@case(normal(4), fallback_ok=True)
def subclass_with_another_forward():
    return nn.Sequential(ScaledLinear(4, 5), nn.Tanh(), nn.Linear(5, 2))


class StandardisedConv(nn.Conv2d):
    def forward(self, x):
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


@case(normal(2, 3, 3), fallback_ok=True)
def conv_with_standardised_weights():
    return nn.Sequential(StandardisedConv(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))


@case(normal(4), fallback_ok=True)
def layer_reached_past_its_forward():
    """The Linear is never called; only its parameters are used."""
    return Call(lambda m, x: F.linear(torch.tanh(x), m.inner.weight, m.inner.bias), inner=nn.Linear(4, 3))


@case(normal(4), fallback_ok=True)
def functional_call_inside():
    return Call(
        lambda m, x: torch.func.functional_call(m.net, {n: 2 * p for n, p in m.net.named_parameters()}, (x,)),
        net=mlp(),
    )


@case(normal(4), fallback_ok=True)
def layer_output_changed_by_a_hook():
    """The user's own forward hook scales the layer's output."""
    layer = nn.Linear(4, 5)
    layer.register_forward_hook(double_the_output)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 2))


def double_the_output(module, args, output):
    return 2 * output + output.flip(1)


@case(normal(4), fallback_ok=True)
def compiled():
    return torch.compile(mlp(), backend="eager")


@case(normal(4), fallback_ok=True)
def compiled_in_place():
    model = mlp()
    model.compile(backend="eager")
    return model


@case(normal(4), fallback_ok=True)
def compiled_submodule():
    return nn.Sequential(torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend="eager"), nn.Linear(4, 2))


@case(normal(4))
def data_parallel():
    return nn.DataParallel(mlp())


@case(normal(4))
def submodule_named_module():
    """`module.` is a real part of these names, not a wrapper's prefix."""
    return Call(lambda m, x: m.module(x), module=mlp())


@case(normal(4), fallback_ok=True)
def torchscript_traced():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(mlp(), torch.randn(2, 4))


@case(normal(4), fallback_ok=True)
def torchscript_scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(mlp())


# --- structured outputs


@case(normal(4))
def returns_a_tuple():
    return Call(lambda m, x: (m.head(x), {"hidden": x}, 3), head=mlp())


@case(normal(4))
def returns_a_dict_with_logits():
    return Call(
        lambda m, x: {"hidden": (h := torch.tanh(m.inner(x))), "logits": m.head(h)},
        inner=nn.Linear(4, 3),
        head=nn.Linear(3, 2),
    )


@case(normal(4))
def returns_a_dict_without_logits():
    return Call(lambda m, x: {"ids": torch.arange(len(x)), "value": m.head(x), "other": x}, head=mlp())


@dataclass
class Prediction:
    ids: Tensor
    value: Tensor


@case(normal(4))
def returns_a_dataclass():
    return Call(lambda m, x: Prediction(torch.arange(len(x)), m.head(x)), head=mlp())


@case(normal(4), needs="transformers")
def returns_a_model_output():
    from transformers.modeling_outputs import SequenceClassifierOutput

    return Call(lambda m, x: SequenceClassifierOutput(loss=m.head(x).mean(), logits=m.head(x)), head=mlp())


# --- outputs that are derivatives


@case(normal(4), fallback_ok=True)
def energy_and_forces():
    """The forward pass differentiates: the weights enter the forces through a backward graph too."""

    def run(m, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(m.energy(x).sum(), x, create_graph=True)
        return -force

    return Call(run, energy=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)))


def pde_residual(model, x):
    """u_t + u u_x - u_xx of Burgers' equation, at points x = (t, x)."""
    x = x.detach().requires_grad_()
    u = model(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (ddu,) = torch.autograd.grad(du[:, 1].sum(), x, create_graph=True)
    return du[:, :1] + u * du[:, 1:] - 0.1 * ddu[:, 1:]


@case(normal(2), outputs=pde_residual, fallback_ok=True)
def pinn_residual():
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))


def square_of_the_output(model, x):
    return model(x) ** 2


@case(normal(4), outputs=square_of_the_output, fallback_ok=True)
def callable_output():
    return mlp()


# --- whole small nets


class BasicBlock(nn.Module):
    def __init__(self, d_in, d_out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(d_in, d_out, 3, stride, 1, bias=False), nn.BatchNorm2d(d_out)
        self.conv2, self.bn2 = nn.Conv2d(d_out, d_out, 3, 1, 1, bias=False), nn.BatchNorm2d(d_out)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or d_in != d_out:
            self.down = nn.Sequential(nn.Conv2d(d_in, d_out, 1, stride, bias=False), nn.BatchNorm2d(d_out))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


@case(normal(3, 8, 8), n=2)
def resnet18_narrow():
    stem = [
        nn.Conv2d(3, 2, 3, 1, 1, bias=False),
        nn.BatchNorm2d(2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    widths = [2, 2, 3, 3, 4]
    blocks = [
        BasicBlock(widths[i] if j == 0 else widths[i + 1], widths[i + 1], 2 if i > 0 and j == 0 else 1)
        for i in range(4)
        for j in range(2)
    ]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2.0)
    return model


@case(normal(1, 4, 4))
def unet_with_skip():
    def run(m, x):
        top = torch.relu(m.down(x))
        return m.out(torch.cat([top, m.up(torch.relu(m.middle(top)))], 1)).mean((2, 3))

    return Call(
        run,
        down=nn.Conv2d(1, 2, 3, padding=1),
        middle=nn.Conv2d(2, 3, 2, stride=2),
        up=nn.ConvTranspose2d(3, 2, 2, stride=2),
        out=nn.Conv2d(4, 2, 1),
    )
