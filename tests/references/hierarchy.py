"""The Gram hierarchy (arXiv:2606.09744) by brute force, one example, neuron or Jacobian at a time, in float64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def forward(weights: Sequence[Tensor], biases: Sequence[Tensor | None], slopes: Sequence[float], x: Tensor) -> Tensor:
    """x^L of one example, with autograd's own activation."""
    for weight, bias, slope in zip(weights, biases, slopes, strict=True):
        h = weight @ x if bias is None else weight @ x + bias
        x = torch.where(h > 0, h, slope * h)
    return x


def outputs(weights, biases, slopes, readout, x) -> Tensor:
    """f (n, C)."""
    return torch.stack([readout @ forward(weights, biases, slopes, one) for one in x])


def conjugate(weights, biases, slopes, readout, x, layer: int) -> Tensor:
    """g^ℓ (n, C, N_ℓ) = ∂f_μ/∂x^ℓ_μ by autograd."""
    found = []
    for one in x:
        here = forward(weights[:layer], biases[:layer], slopes[:layer], one).detach()

        def rest(inner: Tensor) -> Tensor:
            return readout @ forward(weights[layer:], biases[layer:], slopes[layer:], inner)

        found.append(torch.func.jacrev(rest)(here))
    return torch.stack(found)


def layer_kernels(weights, biases, slopes, readout, x) -> list[Tensor]:
    """J^ℓ J^ℓᵀ for each layer, (n, C, n, C), the layer's weights and bias together."""
    kernels = []
    for layer in range(len(weights)):

        def f(weight: Tensor, bias: Tensor, layer: int = layer) -> Tensor:
            own = [*weights[:layer], weight, *weights[layer + 1 :]]
            shifts = [*biases[:layer], None if biases[layer] is None else bias, *biases[layer + 1 :]]
            return outputs(own, shifts, slopes, readout, x)

        bias = torch.zeros(len(weights[layer]), dtype=x.dtype) if biases[layer] is None else biases[layer]
        by_weight, by_bias = torch.func.jacrev(f, (0, 1))(weights[layer], bias)
        jacobian = torch.cat([by_weight.flatten(2), by_bias], dim=2)
        kernels.append(torch.einsum("ncp,mdp->ncmd", jacobian, jacobian))
    return kernels


def pullback(weights, biases, slopes, readout, x, layer: int, levels: Sequence[int] | None = None) -> Tensor:
    """A^ℓ (n, C, N, n, C, N) from its closed form, with transports as Jacobians by autograd."""
    depth, n = len(weights), len(x)
    levels = range(layer + 1, depth + 1) if levels is None else levels
    here = [forward(weights[:layer], biases[:layer], slopes[:layer], one).detach() for one in x]
    width, outs = len(here[0]), len(readout)
    total = torch.zeros(n, outs, width, n, outs, width, dtype=x.dtype)
    for level in levels:

        def lower(inner: Tensor, level: int = level) -> Tensor:
            part = slice(layer, level - 1)
            return forward(weights[part], biases[part], slopes[part], inner)

        def upper(shift: Tensor, inner: Tensor, level: int = level) -> Tensor:
            bias = shift if biases[level - 1] is None else biases[level - 1] + shift
            part = slice(level - 1, depth)
            return readout @ forward(weights[part], [bias, *biases[level:]], slopes[part], inner)

        transports = [torch.func.jacrev(lower)(one) for one in here]
        zero = torch.zeros(len(weights[level - 1]), dtype=x.dtype)
        signals = [torch.func.jacrev(upper)(zero, lower(one)) for one in here]
        for mu in range(n):
            for nu in range(n):
                gram = signals[mu] @ signals[nu].T
                total[mu, :, :, nu] += torch.einsum("cd,ij->cidj", gram, transports[mu].T @ transports[nu])
    return total


Net = Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


def network_pullback(net: Net, here: Tensor, offsets: dict[str, Tensor], tied: dict[str, str]) -> Tensor:
    """A at layer value ``here`` (n, ...) of a network given as ``net(x_one, offsets) -> (f_one, site inputs)``.

    ``offsets[site]`` (T, o) are zeros that the network adds to ``u = W v``; its site inputs are (T, i). Sites
    with the same entry in ``tied`` share one weight, so that their cross terms count.
    """

    def inputs(one: Tensor) -> dict[str, Tensor]:
        return net(one, offsets)[1]

    jacobians, signals = [], []
    for one in here:
        moved = torch.func.jacrev(inputs)(one)
        jacobians.append({site: j.flatten(2) for site, j in moved.items()})  # (T, i, N)
        signals.append(torch.func.jacrev(lambda shift, one=one: net(one, shift)[0])(offsets))  # (C, T, o)
    n, outs, width = len(here), next(iter(signals[0].values())).shape[0], here[0].numel()
    total = torch.zeros(n, outs, width, n, outs, width, dtype=here.dtype)
    for mu in range(n):
        for nu in range(n):
            for first in offsets:
                for second in offsets:
                    if tied[first] == tied[second]:
                        gram = torch.einsum("cpo,dqo->cpdq", signals[mu][first], signals[nu][second])
                        total[mu, :, :, nu] += torch.einsum(
                            "cpdq,pia,qib->cadb", gram, jacobians[mu][first], jacobians[nu][second]
                        )
    return total
