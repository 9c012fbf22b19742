"""The weights of the watched model, and the names under which their numbers are kept."""

from collections import Counter

from torch import Tensor, nn

from gramscope import measures
from gramscope.capture.network import named_parameters
from gramscope.record.subject import layer_of


def weight_keys(model: nn.Module) -> dict[str, str]:
    """Weights by name: the layer's name where the layer has one weight, else the weight's own, so that none is hidden.

    Counted over all parameters, frozen ones too: a series keeps its name when a weight is frozen or set free.

    >>> weight_keys(nn.Sequential(nn.Linear(2, 3), nn.GRU(3, 2)))
    {'0.weight': '0', '1.weight_ih_l0': '1.weight_ih_l0', '1.weight_hh_l0': '1.weight_hh_l0'}
    """
    weights = [name for name, p in named_parameters(model).items() if p.dim() >= 2]
    of_layer = Counter(layer_of(name) for name in weights)
    return {name: layer_of(name) if of_layer[layer_of(name)] == 1 else name for name in weights}


def layer_matrices(model: nn.Module) -> dict[str, Tensor]:
    """The weight of each layer that is one matrix."""
    named, found = named_parameters(model), {}
    for name, weight in measures.weight_forms(model).items():
        matrices = weight.form.matrices(named[name])
        if len(matrices) == 1:
            found[layer_of(name)] = matrices[0].cpu()
    return found
