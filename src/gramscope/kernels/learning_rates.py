"""Learning-rate tensors by layer: λ_b for every bias, λ_W divided by the fan-in for every weight."""

from collections.abc import Mapping

from torch import nn

from gramscope.base.checks import check_number
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.capture.network import unwrap

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
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if isinstance(module, WEIGHTED) and name == "weight":
                rates[full] = _rate(lambda_W, prefix, "lambda_W") / _fan_in(module)
            elif isinstance(module, WEIGHTED) and name == "bias":
                rates[full] = _rate(lambda_b, prefix, "lambda_b")
            elif other is not None:
                rates[full] = check_number(other, "other", least=0.0)
            else:
                raise UnsupportedError(
                    f"parameter {full!r} of {type(module).__name__} ({tuple(parameter.shape)}) is neither the weight "
                    "nor the bias of a linear or convolutional layer. Pass other=... for its learning rate, or a dict "
                    "by parameter name as metric."
                )
    return {name: rate for name, rate in rates.items() if name in dict(model.named_parameters())}


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
