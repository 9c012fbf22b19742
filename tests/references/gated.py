"""A gated ReLU network as a sum over paths: products of weights, switched by masks, one example at a time."""

from itertools import product

import torch
from torch import Tensor


def path_sum(weights: list[Tensor], gates: list[Tensor], x: Tensor) -> Tensor:
    """Outputs of a bias-free network of ``weights`` whose hidden units are switched by the ReLU masks of ``gates``."""
    found = []
    for one in x:
        masks, here = [], one
        for weight in gates[:-1]:
            here = weight @ here
            masks.append((here > 0).double())
            here = here.clamp(min=0)
        f = torch.zeros(len(weights[-1]), dtype=torch.float64)
        for path in product(*(range(w.shape[1]) for w in weights)):
            value = one[path[0]]
            for layer, weight in enumerate(weights[:-1]):
                value = value * weight[path[layer + 1], path[layer]] * masks[layer][path[layer + 1]]
            f += value * weights[-1][:, path[-1]]
        found.append(f)
    return torch.stack(found)
