"""One-dimensional convolution networks with global average pooling, at finite and infinite number of channels.

    z¹_{i;p} = b_i + Σ_{jκ} W_ijκ x_{j;p+κ},   z^{l+1}_{i;p} = b_i + Σ_{jκ} W_ijκ s(z^l_{j;p+κ}),
    output z^L_i = b_i + Σ_j W_ij (1/T) Σ_p s(z^{L-1}_{j;p})

An input at a position is a sample of its own to the theory of fully connected networks: a composite index (input,
position). The weights of a filter tie positions at one shift κ together. Averaging over the weights of a layer pairs
two samples, and a pair that shares its weights is averaged over κ: that is all a convolution adds to the recursions.
The pairs are (ab)(cd) for V, D, F, A, B, (03)(12) for P and (01)(23) for Q. Pooling averages over all positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from gramscope.base.checks import check_choice, check_count, check_finite, check_plain
from gramscope.base.errors import InputError
from gramscope.theory.activation_functions import Activation, Real
from gramscope.theory.finite_width import FiniteWidthMLP, Rate
from gramscope.theory.gaussian_expectations import gaussian_moments
from gramscope.theory.infinite_width import InfiniteWidthKernels, pair_moments
from gramscope.theory.recursions import Layer, LayerStack, Rates, first_layer, next_layer

Maps: TypeAlias = list[Tensor]  # (new, old), one for each shift, scaled such that Σ M T Mᵀ is the average

# Which axes of a tensor share their weights.
PAIRS = dict.fromkeys("VDFABQ", ((0, 1), (2, 3))) | {"P": ((0, 3), (1, 2))}


@dataclass(frozen=True, repr=False)
class ConvFlow(LayerStack):
    """Layers 1 ... L; ``flow[l]`` counts from 1. Samples of hidden layers are (input, position), flattened."""

    channels: tuple[int, ...]
    positions: int


class FiniteWidthConv1d:
    """An ensemble of 1-d convolution networks at initialisation, with a dense output on averages over positions.

    Variances are C_b, C_W/(n k) and learning rates λ_b, λ_W/(n k), with n channels below and k the size of the filter;
    k = 1 for the output. Convolutions keep the T positions.

    Args:
        channels: n_0 (those of the input), n_1, ..., n_L; the last are the outputs.
        kernel_size: k, an odd number.
        padding: "circular" or "zeros".
        activation, C_b, C_W, lambda_b, lambda_W: as for ``FiniteWidthMLP``.

    Reference: PDLT (arXiv:2106.10165), footnote 30; infinite width: Novak et al. (arXiv:1810.05148), Arora et al.
    (arXiv:1904.11955).

    Example:
        >>> import torch
        >>> from gramscope.theory.convolution import FiniteWidthConv1d
        >>> net = FiniteWidthConv1d([1, 16, 16, 1], kernel_size=3, activation="erf", C_W=1.5)
        >>> flow = net.flow(torch.tensor([[[1.0, 0.2, -0.5]]]))
        >>> flow[2].K.shape, flow[3].Q.shape                        # three positions, then one output
        (torch.Size([3, 3]), torch.Size([1, 1, 1, 1]))
    """

    def __init__(
        self,
        channels: Sequence[int],
        kernel_size: int = 3,
        activation: str | Activation | Callable[[Tensor], Tensor] = "tanh",
        C_b: Rate = 0.0,
        C_W: Rate = 1.0,
        lambda_b: Rate = 1.0,
        lambda_W: Rate = 1.0,
        *,
        padding: str = "circular",
    ) -> None:
        if not isinstance(channels, Sequence) or len(channels) < 3:
            raise InputError(f"channels must be n_0, n_1, ..., n_L, three numbers or more, got {channels!r}.")
        self._rates = FiniteWidthMLP(channels, activation, C_b, C_W, lambda_b, lambda_W)
        self.channels, self.activation = self._rates.widths, self._rates.activation
        if check_count(kernel_size, "kernel_size") % 2 == 0:
            raise InputError(f"kernel_size must be odd, so that positions stay where they are, got {kernel_size}.")
        check_choice(padding, "padding", ("circular", "zeros"))
        self.kernel_size, self.padding = kernel_size, padding

    def __repr__(self) -> str:
        return f"FiniteWidthConv1d({self._rates!r}, kernel_size={self.kernel_size}, padding={self.padding!r})"

    def flow(self, x: Shaped[Tensor, "..."], kink: str = "distributional", *, tol: Real = 1e-10) -> ConvFlow:
        """K, Θ, V, D, F, A, B, P, Q of every layer for inputs ``x`` (N, n_0, T); N·T samples, so a few of them.

        ``kink`` and ``tol`` as for ``FiniteWidthMLP.flow``. With a kink no two patches should be almost the same.
        """
        check_choice(kink, "kink", ("distributional", "autograd"))
        inputs = self._inputs(x, "x")
        n, _, positions = inputs.shape
        rates = self._rates.layer_rates(len(self.channels) - 1)
        rows = inputs.transpose(1, 2).reshape(n * positions, -1)
        shifts = self._shifts(n, positions, rows)
        layers = [first_layer(_average(rows @ rows.T / rows.shape[1], shifts, ((0, 1),)), rates[0])]
        for place, rate in enumerate(rates[1:], start=1):
            # At layer 1 there is nothing to carry; then the number of channels over that of the layer below.
            ratio = self.channels[place] / self.channels[place - 1] if place > 1 else 1.0
            maps = _pooling(n, positions, rows) if place == len(rates) - 1 else shifts
            moments = gaussian_moments(self.activation, layers[-1].K, tol)
            unbiased = replace(rate, C_b=0.0, lambda_b=0.0)
            layers.append(
                _averaged(next_layer(layers[-1], moments, unbiased, ratio, kink == "distributional"), maps, rate)
            )
        return ConvFlow(tuple(layers), self.channels, positions)

    def infinite_width(self, x: Shaped[Tensor, "..."], x2: Shaped[Tensor, "..."] | None = None) -> InfiniteWidthKernels:
        """NNGP and NTK of the output with infinitely many channels, between ``x`` and ``x2`` (default ``x``).

        ``flow(x)[L].K`` and ``.Theta``, from pairs alone: N·T x M·T expectations a layer.
        """
        first_inputs = self._inputs(x, "x")
        others = first_inputs if x2 is None else self._inputs(x2, "x2")
        if others.shape[1:] != first_inputs.shape[1:]:
            raise InputError(
                f"x2 must have the channels and positions {tuple(first_inputs.shape[1:])} of x, got "
                f"{tuple(others.shape[1:])}."
            )
        width, positions = first_inputs.shape[1:]
        left, right = (part.transpose(1, 2).reshape(-1, width) for part in (first_inputs, others))
        shifts = [self._shifts(len(part), positions, left) for part in (first_inputs, others)]
        rates = self._rates.layer_rates(len(self.channels) - 1)
        raw = ((left * left).sum(1) / width, (right * right).sum(1) / width, left @ right.T / width)
        first, second, both = self._means(raw, shifts, rates[0])
        theta = rates[0].lambda_b + rates[0].lambda_W * _between(raw[2], *shifts)
        for rate in rates[1:]:
            last = rate is rates[-1]
            maps = [_pooling(len(part), positions, left) for part in (first_inputs, others)] if last else shifts
            rows, columns = first[:, None].expand_as(both), second[None].expand_as(both)
            values, slopes = pair_moments(self.activation, rows, columns, both)
            theta = rate.lambda_b + _between(rate.lambda_W * values + rate.C_W * slopes * theta, *maps)
            if last:
                return InfiniteWidthKernels(rate.C_b + rate.C_W * _between(values, *maps), theta)
            row, column = (pair_moments(self.activation, one, one, one)[0] for one in (first, second))
            first, second, both = self._means((row, column, values), shifts, rate)
        raise AssertionError("a network has an output layer")

    @staticmethod
    def _means(parts: tuple[Tensor, Tensor, Tensor], shifts: list[Maps], rate: Rates) -> list[Tensor]:
        own = [torch.stack(maps).square().sum(dim=0) @ part for part, maps in zip(parts[:2], shifts, strict=True)]
        return [rate.C_b + rate.C_W * part for part in (*own, _between(parts[2], *shifts))]

    def _inputs(self, x: Tensor, name: str) -> Float[Tensor, "n n0 t"]:
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] != self.channels[0] or x.numel() == 0:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InputError(
                f"{name} must be a tensor of shape (n, {self.channels[0]}, positions) for channels={self.channels}, "
                f"got {got}."
            )
        check_plain(x, name)
        check_finite(x, name, "Remove or repair those inputs.")
        if x.shape[2] < self.kernel_size:
            raise InputError(
                f"{name} must have at least kernel_size = {self.kernel_size} positions, got {x.shape[2]}. Take a "
                "smaller filter."
            )
        return x.detach().to(torch.float64)

    def _shifts(self, n: int, positions: int, like: Tensor) -> Maps:
        """For each κ the matrix that puts position p + κ of every input at p, over √k."""
        reach = self.kernel_size // 2
        eye = torch.eye(positions, dtype=like.dtype, device=like.device)
        found = []
        for shift in range(-reach, reach + 1):
            moved = eye.roll(shift, dims=1)
            if self.padding == "zeros":
                moved = moved.triu(shift) if shift > 0 else moved.tril(shift) if shift < 0 else moved
            found.append(torch.block_diag(*[moved] * n) / self.kernel_size**0.5)
        return found


def _pooling(n: int, positions: int, like: Tensor) -> Maps:
    """The mean over the positions of each input."""
    return [torch.block_diag(*[torch.full((1, positions), 1 / positions, dtype=like.dtype, device=like.device)] * n)]


def _between(tensor: Tensor, left: Maps, right: Maps) -> Tensor:
    return torch.stack([a @ tensor @ b.T for a, b in zip(left, right, strict=True)]).sum(dim=0)


def _average(tensor: Tensor, maps: Maps, pairs: tuple[tuple[int, int], ...]) -> Tensor:
    """The average over the shifts of each pair of axes, both moved by the same one."""
    for pair in pairs:
        # The pair last, so that both are matrix products.
        last = tensor.movedim(pair, (-2, -1))
        tensor = torch.stack([one @ last @ one.T for one in maps]).sum(dim=0).movedim((-2, -1), pair)
    return tensor


def _averaged(layer: Layer, maps: Maps, rate: Rates) -> Layer:
    found = {name: _average(tensor, maps, PAIRS.get(name, ((0, 1),))) for name, tensor in layer.tensors().items()}
    return Layer(**found | {"K": rate.C_b + found["K"], "Theta": rate.lambda_b + found["Theta"]})
