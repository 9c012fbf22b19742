"""Reading a chain out of a module: Linear layers and ReLU-like activations, one after the other."""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from gramscope.base.errors import UnsupportedError
from gramscope.capture.network import unwrap
from gramscope.hierarchy.chain import Chain, make_chain

ADVICE = (
    "Fields needs a chain of Linear layers with ReLU, LeakyReLU or no activation between them. For other networks use "
    "gramscope.hierarchy.NetworkPullback and gramscope.explain_step, which take any module."
)
_NOTHING = (nn.Identity, nn.Flatten, nn.Dropout, nn.AlphaDropout)
_RELU = {torch.relu, F.relu, torch.relu_, F.relu_, "relu", "relu_"}
_LEAKY = {F.leaky_relu, F.leaky_relu_}
_RESHAPE = {torch.flatten, "flatten", "view", "reshape", "contiguous"}


def read_chain(module: nn.Module, readout: Tensor | None) -> tuple[Chain, bool]:
    """The chain that ``module`` computes, and whether its output is one number.

    A last Linear layer without an activation after it is the fixed readout, unless ``readout`` is given. A module that
    ends with an activation, and no readout, is read out by the mean over its last neurons.
    """
    module = unwrap(module)
    layers: list[nn.Linear] = []
    slopes: list[float | None] = []  # None: no activation seen yet
    for step in _steps(module):
        if isinstance(step, nn.Linear):
            if layers and slopes[-1] is None:
                slopes[-1] = 1.0  # two linear layers in a row: the first has no activation
            layers.append(step)
            slopes.append(None)
        elif not layers:
            raise UnsupportedError(f"an activation must follow a Linear layer, but one comes first. {ADVICE}")
        elif slopes[-1] is None:
            slopes[-1] = step
        else:
            # relu(leaky(x)): on each side of zero the slopes multiply, with relu mapping negative values to zero.
            slopes[-1] = slopes[-1] * step
    _check_untied(module, layers)
    offset = None
    if not layers:
        raise UnsupportedError(f"the module must have a Linear layer, got {type(module).__name__}. {ADVICE}")
    if readout is None and slopes[-1] is None:
        last = layers.pop()
        slopes.pop()
        readout, offset = last.weight, last.bias
    if not layers:
        raise UnsupportedError(f"the module must have a Linear layer before its readout. {ADVICE}")
    if all(slope in (None, 1.0) for slope in slopes):
        raise UnsupportedError(f"the module must have an activation between its layers, and has none. {ADVICE}")
    chain = make_chain(
        [layer.weight for layer in layers],
        [layer.bias for layer in layers],
        [1.0 if slope is None else slope for slope in slopes],
        readout,
        offset,
    )
    return chain, readout is None or readout.dim() == 1


def _check_untied(module: nn.Module, layers: list[nn.Linear]) -> None:
    """A weight that is used twice has one gradient, of both uses; the chain would have two that do not know it."""
    seen: set[int] = set()
    names = {id(p): name for name, p in module.named_parameters()}
    for layer in layers:
        for parameter in layer.parameters():
            if id(parameter) in seen:
                raise UnsupportedError(
                    f"each layer must have weights of its own, but {names.get(id(parameter), 'a weight')!r} is used "
                    "more than once. For networks with tied weights use gramscope.kernel and gramscope.explain_step, "
                    "which sum over all uses."
                )
            seen.add(id(parameter))


def _steps(module: nn.Module) -> list[nn.Linear | float]:
    """Linear layers and negative slopes in the order of the forward pass."""
    try:
        traced = fx.symbolic_trace(nn.Sequential(module))  # so that a bare Linear is a layer, too
    except Exception as error:
        raise UnsupportedError(
            f"the forward pass of {type(module).__name__} must be a plain sequence of layers, but it cannot be traced "
            f"({error}). {ADVICE}"
        ) from error
    modules = dict(traced.named_modules())
    steps: list[nn.Linear | float] = []
    previous: fx.Node | None = None
    for node in traced.graph.nodes:
        if node.op == "placeholder" and previous is None:
            previous = node
            continue
        if node.op == "placeholder" and not node.users:
            continue
        if _is_size(node):
            continue
        if previous is None or node.all_input_nodes[:1] != [previous] or not _one_path(previous):
            raise UnsupportedError(f"the layers must follow one another, but {_name(node)!r} branches off. {ADVICE}")
        if node.op != "output":
            steps += _step(node, modules.get(str(node.target)))
        previous = node
    return steps


def _is_size(node: fx.Node) -> bool:
    """``x.shape[0]`` and ``x.size(0)``, which views are written with."""
    return (
        (node.op == "call_method" and node.target in ("size", "dim"))
        or (node.op == "call_function" and node.target is getattr)
        or (node.op == "call_function" and node.target is operator.getitem and _is_size(node.args[0]))  # type: ignore[arg-type]
    )


def _one_path(node: fx.Node) -> bool:
    return sum(not _is_size(user) for user in node.users) <= 1


def _step(node: fx.Node, module: Any) -> list[nn.Linear | float]:
    if node.op == "call_module":
        if type(module) is nn.Linear:
            return [module]
        if isinstance(module, nn.ReLU):
            return [0.0]
        if isinstance(module, nn.LeakyReLU):
            return [float(module.negative_slope)]
        if isinstance(module, _NOTHING):
            if isinstance(module, nn.Dropout | nn.AlphaDropout) and module.training and module.p > 0:
                raise UnsupportedError("dropout must be off: call module.eval() first.")
            return []
    elif node.op in ("call_function", "call_method"):
        if node.target in _RELU:
            return [0.0]
        if node.target in _LEAKY:
            slope = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01)
            return [float(slope)]  # type: ignore[arg-type]
        if node.target in _RESHAPE:
            return []
    what = type(module).__name__ if module is not None else getattr(node.target, "__name__", str(node.target))
    raise UnsupportedError(f"{_name(node) or what!r} is a {what}, which has no place in the chain. {ADVICE}")


def _name(node: fx.Node) -> str:
    """A layer by its name in the user's module, which the tracer wrapped and spells with underscores."""
    return str(node.target).partition(".")[2] if node.op == "call_module" else node.name
