"""Learning-rate tensors λ, diagonal over the parameters: as a user gives them, and as the theory has them by layer."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.checks import check_finite, check_number
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.streams import streams_put_back
from gramscope.capture.network import unwrap

Rates = Mapping[str, Tensor | float] | Callable[[str, Tensor], Tensor | float] | Tensor | float | None
WEIGHTED = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)


def layer_rates(
    model: nn.Module,
    lambda_b: float | Mapping[str, float],
    lambda_W: float | Mapping[str, float],
    other: float | None = None,
) -> dict[str, float]:
    """The learning-rate tensor of the theory for a real network: λ_b for a bias, ``λ_W / fan-in`` for a weight.

    ``λ^(ℓ)_{μν}`` is diagonal, with ``λ_b^(ℓ)`` on the biases and ``λ_W^(ℓ)/n_{ℓ-1}`` on the weights of layer ℓ.
    Numbers hold for all layers; a mapping gives one for each layer by module name. Linear and convolutional layers are
    known; any other parameter takes ``other``, or is refused by name.

    Rates are finite and not negative: λ is a metric.

    Reference: PDLT (arXiv:2106.10165) equation (8.6).

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> gs.kernels.layer_rates(model, lambda_b=0.5, lambda_W=1.0)
        {'0.weight': 0.25, '0.bias': 0.5, '2.weight': 0.125, '2.bias': 0.5}
    """
    model = unwrap(model)
    rates: dict[str, float] = {}
    for full, parameter in model.named_parameters():
        prefix, _, name = full.rpartition(".")
        module = model.get_submodule(prefix)
        if isinstance(module, WEIGHTED) and name == "weight":
            rates[full] = _rate(lambda_W, prefix, "lambda_W") / _fan_in(module)
        elif isinstance(module, WEIGHTED) and name == "bias":
            rates[full] = _rate(lambda_b, prefix, "lambda_b")
        elif other is not None:
            rates[full] = check_number(other, "other", least=0.0)
        else:
            raise UnsupportedError(
                f"parameter {full!r} of {type(module).__name__} ({tuple(parameter.shape)}) is neither the weight nor "
                "the bias of a linear or convolutional layer. Pass other=... for its learning rate, or a dict by "
                "parameter name as metric."
            )
    return rates


def _rate(rates: float | Mapping[str, float], layer: str, what: str) -> float:
    if not isinstance(rates, Mapping):
        return check_number(rates, what, least=0.0)
    if layer not in rates:
        raise InputError(f"{what} must have an entry for layer {layer!r}, got {', '.join(map(repr, rates))}.")
    return check_number(rates[layer], f"{what}[{layer!r}]", least=0.0)


def _fan_in(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return weight.numel() // (weight.shape[1] * module.groups)
    return weight.numel() // weight.shape[0]


def flat_metric(metric: Rates, parameters: Mapping[str, Tensor], what: str = "metric") -> Float[Tensor, " p"]:
    """A diagonal over all parameters as one vector, of either sign: the preconditioner of a step may have both."""
    entries = metric_by_name(metric, parameters, what)
    return torch.cat([entries[name].expand(p.shape).reshape(-1) for name, p in parameters.items()])


def metric_by_name(metric: Any, parameters: Mapping[str, Tensor], what: str = "metric") -> dict[str, Tensor]:
    """The diagonal of each parameter: one number, or a tensor that expands to the parameter's shape.

    ``metric`` is whatever a user gave as one, None being one for all: it is checked here.
    """
    metric = 1.0 if metric is None else metric
    if callable(metric):
        with streams_put_back():
            metric = {name: metric(name, p) for name, p in parameters.items()}
    elif isinstance(metric, int | float) or (isinstance(metric, Tensor) and metric.dim() == 0):
        metric = dict.fromkeys(parameters, float(metric))
    elif isinstance(metric, Tensor):
        sizes = [p.numel() for p in parameters.values()]
        if metric.shape != (sum(sizes),):
            raise InputError(
                f"{what} must have one entry for each of the {sum(sizes)} parameters, got shape "
                f"{tuple(metric.shape)}. Pass a dict by parameter name for numbers per layer."
            )
        parts = zip(parameters.items(), metric.split(sizes), strict=True)
        metric = {name: part.view(p.shape) for (name, p), part in parts}
    if not isinstance(metric, Mapping):
        raise InputError(
            f"{what} must be a number, a flat tensor, numbers or tensors by parameter name, or a function of (name, "
            f"parameter), got {type(metric).__name__}."
        )
    unknown = sorted(set(metric) - set(parameters))
    if unknown:
        raise InputError(f"{what}: no parameter is called {unknown[0]!r}; there are {', '.join(parameters)}.")
    return {name: _entry(metric.get(name, 0.0), f"{what}[{name!r}]", p) for name, p in parameters.items()}


def rates_by_name(metric: Rates, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same of a learning-rate tensor λ, which is a metric."""
    rates = metric_by_name(metric, parameters)
    least = min((float(rate.min()) for rate in rates.values() if rate.numel()), default=0.0)
    if least < 0:
        raise InputError(
            f"metric must not be negative, but its smallest entry is {least:.3g}: a learning rate below zero "
            "climbs, and J λ Jᵀ is no kernel. To climb, pass the residual with the other sign."
        )
    return rates


def _entry(value: Tensor | float, name: str, parameter: Tensor) -> Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    try:
        tensor = torch.as_tensor(value, dtype=dtype, device=parameter.device)
        tensor.expand(parameter.shape)
    except (RuntimeError, TypeError, ValueError) as error:
        got = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
        raise InputError(
            f"{name} must be a number or have the shape {tuple(parameter.shape)} of the parameter, got {got}."
        ) from error
    check_finite(tensor, name, "Pass finite numbers.")
    return tensor
