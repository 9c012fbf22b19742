"""Fully connected networks of finite width: kernel, NTK and their 1/n tensors, layer by layer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor

from gramscope.base.checks import check_choice, check_count, check_finite, check_tensor
from gramscope.base.errors import InputError
from gramscope.theory.activation_functions import Activation, Kinked, Real, resolve
from gramscope.theory.gaussian_expectations import check_kernel, gaussian_moments
from gramscope.theory.infinite_width import InfiniteWidthKernels, infinite_width_kernels
from gramscope.theory.narrow_flow import DecimalGram, narrow_layers, of_gram, of_inputs
from gramscope.theory.recursions import LayerStack, Rates, first_layer, next_layer
from gramscope.theory.self_overlap import with_self_overlap

Rate: TypeAlias = Real | Sequence[Real] | Tensor | np.ndarray
Widths: TypeAlias = Sequence[int] | np.ndarray | int


class FiniteWidthMLP:
    """An ensemble of multilayer perceptrons at initialisation, described by its hyperparameters.

    z¹ = b + W x, z^{l+1} = b + W s(z^l), output z^L; E[b b] = C_b, E[W_ij W_ij] = C_W/n_{l-1}; trained with the
    learning-rate tensor λ_b (biases), λ_W/n_{l-1} (weights). Source: Roberts, Yaida and Hanin,
    "The Principles of Deep Learning Theory" (PDLT), chapters 4, 8 and 11.

    Args:
        widths: n_0, n_1, ..., n_L, with the number of features of x first; other inputs are refused. With ``depth`` the
            input width n_0 may be left out, and a single number stands for all of n_1 ... n_L.
        activation: a name, a torch module, or a callable; see :func:`gramscope.theory.resolve`.
        C_b, C_W, lambda_b, lambda_W: numbers, or one number for each layer.
        depth: L. With it, ``widths`` of L entries are n_1 ... n_L and of L + 1 entries n_0 ... n_L.
        skip: δ of a residual network, ``z^{l+1} = δ z^l + b + W s(z^l)``; one number for layers 2 ... L - 1, or one for
            each of the L layers (that of layer 1 is 0). A layer with a skip must be as wide as the one below. At order
            1/n a neuron is then correlated with itself in every layer above (:mod:`gramscope.theory.self_overlap`),
            so the cost grows with the square of the depth. PDLT, appendix B has K and V, docs/finite-width.md the rest.

    >>> mlp = FiniteWidthMLP(widths=[2, 64, 64, 64, 64], activation="tanh", C_b=0.1, C_W=1.6, lambda_b=0.4, lambda_W=1)
    >>> flow = mlp.flow(torch.tensor([[1.0, -0.5]]))
    >>> len(flow), round(flow[4].Q.item(), 7)
    (4, -1.1254453)
    >>> residual = FiniteWidthMLP(widths=[2, 64, 64, 1], activation="relu", C_W=1.0, skip=0.5**0.5)
    >>> residual.flow(torch.eye(2)).K(2)[0, 0].item()             # C_W/2 + δ² = 1: the signal keeps its size
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
        depth: int | None = None,
        skip: Rate = 0.0,
    ) -> None:
        self.widths = checked_widths(widths, depth)
        self.depth = depth
        self.activation = resolve(activation)
        self.C_b = checked_rates(C_b, "C_b", at_least=0.0)
        self.C_W = checked_rates(C_W, "C_W", above=0.0)
        self.lambda_b = checked_rates(lambda_b, "lambda_b", at_least=0.0)
        self.lambda_W = checked_rates(lambda_W, "lambda_W", at_least=0.0)
        self.skip = checked_rates(skip, "skip", at_least=0.0)

    def __repr__(self) -> str:
        rates = ", ".join(f"{name}={_shown(getattr(self, name))}" for name in ("C_b", "C_W", "lambda_b", "lambda_W"))
        last = "" if self.depth is None else f", depth={self.depth}"
        last += f", skip={_shown(self.skip)}" if any(self.skip) else ""
        return f"FiniteWidthMLP(widths={list(self.widths)}, activation={self.activation.name!r}, {rates}{last})"

    def flow(self, x: Shaped[Tensor, "..."], kink: str = "distributional", *, tol: Real = 1e-10) -> "Flow":
        """K, Θ, V, D, F, A, B, P, Q of every layer for the inputs ``x``; ``flow[l]`` with l = 1..L, in float64.

        Args:
            x: inputs of shape (n, n_0); the cost is that of n⁴/24 expectations over four samples a layer.
            kink: definition of s'' for ReLU-like activations. "distributional" is the limit of smooth activations, with
                s'' = δ: what a small step of real training feels in the mean. "autograd" is what second derivatives of
                autograd compute: s'' = 0 inside the network. They differ in P and Q, between different inputs.
            tol: to which the Gaussian expectations are refined, where they have no closed form.
        """
        inputs = _checked_inputs(x)
        gram = inputs @ inputs.T / x.shape[1]
        return self._flow(gram, of_inputs(inputs, x.dtype), x.shape[1], inputs, kink, tol)

    def flow_from_gram(self, gram: Shaped[Tensor, "..."], kink: str = "distributional", *, tol: Real = 1e-10) -> "Flow":
        """As :meth:`flow`, from the matrix x·x/n_0 of the inputs: it is all that the theory knows of them.

        >>> mlp = FiniteWidthMLP(depth=3, widths=32, activation="relu", C_W=2.0)
        >>> mlp.flow_from_gram(torch.eye(2)).K(3)[0, 0].item()
        2.0
        """
        check_tensor(gram, "gram")
        matrix = gram.detach().to(torch.float64)
        check_kernel(matrix, "gram")
        return self._flow(matrix, of_gram(matrix), None, None, kink, tol)

    def infinite_width(self, x: Shaped[Tensor, "..."], x2: Shaped[Tensor, "..."] | None = None) -> InfiniteWidthKernels:
        """NNGP and NTK of the output at infinite width, between ``x`` (n, n_0) and ``x2`` (m, n_0; default ``x``).

        They are ``flow(x)[L].K`` and ``.Theta``, from pairs of inputs alone: n·m expectations a layer instead of n⁴/24,
        so for hundreds of inputs. float64.

        >>> mlp = FiniteWidthMLP(widths=[2, 64, 1], activation="relu", C_W=2.0)
        >>> found = mlp.infinite_width(torch.eye(2))
        >>> found.nngp[0, 0].item(), found.ntk[0, 0].item()
        (1.0, 3.0)
        """
        inputs = _checked_inputs(x)
        others = inputs if x2 is None else _checked_inputs(x2)
        if others.shape[1] != inputs.shape[1]:
            raise InputError(f"x2 must have the {inputs.shape[1]} features of x, got {others.shape[1]}.")
        rates = self.layer_rates(len(self.layer_widths(inputs.shape[1])))
        return infinite_width_kernels(self.activation, rates, inputs, others.to(inputs.device))

    def _flow(
        self, gram: Tensor, source: DecimalGram, n_0: int | None, x: Tensor | None, kink: str, tol: Real
    ) -> "Flow":
        check_choice(kink, "kink", ("distributional", "autograd"))
        widths = self.layer_widths(n_0)
        rates = self.layer_rates(len(widths))
        # At layer 1 there is nothing to carry.
        ratios = [Fraction(widths[place], widths[place - 1]) if place else Fraction(1) for place in range(len(widths))]
        # A smooth activation has the s'' that autograd computes: there is nothing to choose.
        explicit = kink == "distributional" or not isinstance(self.activation, Kinked)
        layers = None
        if isinstance(self.activation, Kinked) and not self.activation.is_linear:
            layers = narrow_layers(self.activation, source, gram, rates, ratios, explicit)
        if layers is None:
            layers = [first_layer(gram, rates[0])]
            for rate, ratio in zip(rates[1:], ratios, strict=False):
                moments = gaussian_moments(self.activation, layers[-1].K, tol)
                layers.append(next_layer(layers[-1], moments, rate, float(ratio), explicit))
        if any(rate.skip for rate in rates):
            layers = with_self_overlap(
                layers, rates, ratios, lambda kernel: gaussian_moments(self.activation, kernel, tol), explicit
            )
        return Flow(tuple(layers), self, widths, rates, gram, x, kink)

    def layer_widths(self, n_0: int | None = None) -> tuple[int, ...]:
        """n_1 ... n_L, given the number of features of the inputs."""
        if self.depth is not None and len(self.widths) == self.depth:
            return self.widths
        if n_0 is not None and self.widths[0] != n_0:
            shown, advice = list(self.widths), ""
            if self.depth is None:
                advice = f" If these are n_1 ... n_L, without n_0, pass depth={len(self.widths)}."
            raise InputError(f"x must have n_0 = {self.widths[0]} features to match widths={shown}, got {n_0}.{advice}")
        if len(self.widths) == 1:
            raise InputError(f"widths must hold at least one layer after n_0, got {list(self.widths)}.")
        return self.widths[1:]

    def layer_rates(self, depth: int) -> tuple[Rates, ...]:
        """The hyperparameters of layers 1..L."""
        columns = []
        for name in ("C_b", "C_W", "lambda_b", "lambda_W"):
            values = getattr(self, name)
            if len(values) not in (1, depth):
                raise InputError(f"{name} must be one number or one for each of the {depth} layers, got {len(values)}.")
            columns.append(values * depth if len(values) == 1 else values)
        return tuple(Rates(*row) for row in zip(*columns, self._skips(depth), strict=True))

    def _skips(self, depth: int) -> tuple[float, ...]:
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
        return skips


@dataclass(frozen=True, repr=False)
class Flow(LayerStack):
    """The layers of :meth:`FiniteWidthMLP.flow`; ``flow[l]`` counts from 1, as the theory does."""

    mlp: FiniteWidthMLP
    widths: tuple[int, ...]
    rates: tuple[Rates, ...]
    gram: Tensor
    x: Tensor | None
    kink: str

    def __repr__(self) -> str:
        n = self.gram.shape[0]
        kink = f", kink={self.kink!r}" if self.has_kink else ""
        return f"Flow({len(self)} layers of widths {list(self.widths)}, {n} input{'s' if n > 1 else ''}{kink})"

    @property
    def has_kink(self) -> bool:
        return isinstance(self.mlp.activation, Kinked) and not self.mlp.activation.is_linear

    def K(self, layer: int) -> Tensor:
        """The kernel of a layer."""
        return self[layer].K

    def inputs(self) -> Tensor:
        """Inputs with this matrix of products: the given ones, or a square root √n_0 G^½ of the Gram matrix."""
        if self.x is not None:
            return self.x
        values, vectors = torch.linalg.eigh(self.gram)
        return vectors * (values.clamp(min=0) * len(values)).sqrt()

    def fan_in(self, layer: int) -> int:
        """n_{l-1}, the n of the 1/n tensors of layer l ≥ 2."""
        if not 2 <= layer <= len(self):
            raise IndexError(f"layer must be 2 ... {len(self)}: only these have a hidden layer below, got {layer!r}.")
        return self.widths[layer - 2]

    def ntk_drift(self, samples: Tensor | Sequence[int] | None = None) -> Float[Tensor, "n n"]:
        """Mean change of the output NTK in one step of gradient descent on ½Σ(z - y)², divided by the step η.

        E[H_ii;12(1) - H_ii;12(0)]/η = -(1/n_{L-1}) Σ_a (P_12aa + n_L Q_12aa + Q_1a2a + (1↔2)), for targets that do not
        depend on the network; the sum runs over the training inputs ``samples`` (indices; all of them by default).
        Source: PDLT (arXiv:2106.10165), chapter 11.

        >>> mlp = FiniteWidthMLP(widths=[2, 64, 1], C_b=0.1, C_W=1.6, lambda_b=0.4)
        >>> round(mlp.flow(torch.tensor([[1.0, -0.5]])).ntk_drift().item(), 7)    # -(2/n)(P + 2Q)
        0.0159268
        """
        layer = self[len(self)]
        index = _checked_samples(samples, layer.K.shape[0])
        P, Q = layer.P, layer.Q
        half = torch.einsum("abcc->abc", P) + self.widths[-1] * torch.einsum("abcc->abc", Q)
        half = (half + torch.einsum("acbc->abc", Q))[..., index.to(P.device)].sum(-1)
        return -(half + half.T) / self.fan_in(len(self))


def _checked_inputs(x: Tensor) -> Float64[Tensor, "n n_0"]:
    check_tensor(x, "x")
    if x.ndim != 2:
        advice = " Add a batch axis: x[None]." if x.ndim < 2 else " Flatten the features: x.flatten(1)."
        raise InputError(f"x must have shape (n, n_0), got {tuple(x.shape)}.{advice}")
    if x.shape[0] == 0 or x.shape[1] == 0:
        raise InputError(f"x must hold at least one input of at least one feature, got shape {tuple(x.shape)}.")
    check_finite(x, "x", "Remove or correct those inputs.")
    return x.detach().to(torch.float64)


def check_flow(value: object, what: str) -> None:
    """Raise unless ``value`` is a flow, and not the ensemble that it is the flow of."""
    if not isinstance(value, Flow):
        advice = " Pass mlp.flow(x)." if isinstance(value, FiniteWidthMLP) else ""
        raise InputError(
            f"{what} must be a Flow, as FiniteWidthMLP(...).flow(x) gives, got {type(value).__name__}.{advice}"
        )


def _checked_samples(samples: Tensor | Sequence[int] | None, n: int) -> Tensor:
    if samples is None:
        return torch.arange(n, device="cpu")
    if not isinstance(samples, Tensor | Sequence | np.ndarray) or np.ndim(samples) == 0:
        raise InputError(
            f"samples must be a list or a tensor of indices of the {n} inputs of this flow, got {samples!r}."
        )
    index = torch.as_tensor(samples, device="cpu") if len(samples) else torch.arange(0, device="cpu")
    if index.dtype is torch.bool and tuple(index.shape) == (n,):
        return index.nonzero()[:, 0]
    whole = index.ndim == 1 and index.dtype is not torch.bool and not index.is_floating_point()
    if not whole or bool(((index < -n) | (index >= n)).any()):
        raise InputError(
            f"samples must be indices of the {n} inputs of this flow, 0 ... {n - 1}, or a mask of {n}, got {samples!r}."
        )
    return index


def checked_widths(widths: Widths, depth: int | None) -> tuple[int, ...]:
    if depth is not None:
        check_count(depth, "depth")
    if isinstance(widths, int):
        if depth is None:
            raise InputError(
                f"widths must be a list n_0, ..., n_L when depth is not given, got {widths}. Pass depth too."
            )
        widths = [widths] * depth
    if not isinstance(widths, Sequence | np.ndarray):
        raise InputError(f"widths must be a list n_0, ..., n_L, got {widths!r}.")
    found = tuple(check_count(width, "each of the widths") for width in widths)
    if len(found) == 0 or (depth is not None and len(found) not in (depth, depth + 1)):
        raise InputError(
            f"widths must hold n_1 ... n_L or n_0 ... n_L ({depth} or {(depth or 0) + 1} numbers for depth {depth}), "
            f"got {list(found)}."
        )
    return found


def checked_rates(
    value: Rate, name: str, at_least: float | None = None, above: float | None = None
) -> tuple[float, ...]:
    given = list(value) if isinstance(value, Sequence | Tensor | np.ndarray) else [value]
    if any(isinstance(v, str | bytes) for v in [value, *given]):
        raise InputError(f"{name} must be a number, or one for each layer, got the text {value!r}.")
    try:
        found = tuple(float(v) for v in given)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} must be a number, or one for each layer, got {value!r}.") from error
    for v in found:
        if not math.isfinite(v) or (above is not None and v <= above) or (at_least is not None and v < at_least):
            bound = f"> {above:g}" if above is not None else f">= {at_least:g}"
            raise InputError(f"{name} must be finite and {bound}, got {v:g}. It is a variance or a learning rate.")
    return found


def _shown(values: tuple[float, ...]) -> str:
    return f"{values[0]:g}" if len(values) == 1 else str([float(f"{v:g}") for v in values])
