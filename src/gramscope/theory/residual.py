"""Residual multilayer perceptrons of finite width: ``z^{l+1} = δ z^l + b + W s(z^l)``."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from gramscope.base.errors import InputError
from gramscope.theory.activation_functions import Activation
from gramscope.theory.finite_width import FiniteWidthMLP, Rate, Widths, checked_rates
from gramscope.theory.recursions import Rates


class ResidualMLP(FiniteWidthMLP):
    """An ensemble of residual networks at initialisation: hidden layers after the first add ``δ`` times their input.

    ``z¹ = b + W x``, ``z^{l+1} = δ z^l + b + W s(z^l)`` for l + 1 < L, output ``z^L = b + W s(z^{L-1})``. The
    answers of :meth:`flow` and :meth:`infinite_width` are as for ``FiniteWidthMLP``. To leading order the skip adds δ²
    to both susceptibilities; at order 1/n a neuron also meets itself in every layer above
    (:mod:`gramscope.theory.self_overlap`), so that the cost grows with the square of the depth.

    Args:
        skip: δ, one number for layers 2 ... L - 1, or one for each of the L layers (that of layer 1 is 0). A layer with
            a skip must be as wide as the one below.

    Reference: PDLT (arXiv:2106.10165), appendix B, for the kernel and V; for the others see docs/finite-width.md.

    Example:
        >>> import torch
        >>> from gramscope.theory.residual import ResidualMLP
        >>> net = ResidualMLP(widths=[2, 64, 64, 1], activation="relu", C_W=1.0, skip=0.5**0.5)
        >>> net.flow(torch.eye(2)).K(2)[0, 0].item()             # C_W/2 + δ² = 1: the signal keeps its size
        0.5
    """

    def __init__(
        self,
        widths: Widths,
        activation: str | Activation | Callable[[Tensor], Tensor] = "tanh",
        C_b: Rate = 0.0,
        C_W: Rate = 1.0,
        lambda_b: Rate = 1.0,
        lambda_W: Rate = 1.0,
        *,
        skip: Rate = 1.0,
        depth: int | None = None,
    ) -> None:
        super().__init__(widths, activation, C_b, C_W, lambda_b, lambda_W, depth=depth)
        self.skip = checked_rates(skip, "skip", at_least=0.0)

    def layer_rates(self, depth: int) -> tuple[Rates, ...]:
        """The hyperparameters of layers 1..L, each with its skip."""
        skips = self.skip if len(self.skip) > 1 else (0.0, *self.skip * (depth - 2), 0.0)[:depth]
        if len(skips) != depth:
            raise InputError(f"skip must be one number or one for each of the {depth} layers, got {len(skips)}.")
        widths = self.widths[-depth:]
        for place, skip in enumerate(skips):
            if skip and (place == 0 or widths[place] != widths[place - 1]):
                below = "the input" if place == 0 else f"{widths[place - 1]} below"
                raise InputError(
                    f"a layer with a skip must be as wide as the layer below, but layer {place + 1} has width "
                    f"{widths[place]} over {below}. Set its skip to 0, or make the widths equal."
                )
        plain = super().layer_rates(depth)
        return tuple(replace(rate, skip=skip) for rate, skip in zip(plain, skips, strict=True))
