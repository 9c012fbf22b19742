"""Activation functions with the three derivatives that the finite-width recursions need."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.checks import check_number
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.streams import streams_put_back

ORDERS = 4  # s, s', s'', s'''
_DERIVATIVE_NAMES = ("s", "s'", "s''", "s'''")

Real: TypeAlias = float | int
Jets: TypeAlias = Float[Tensor, "orders *points"]


class Activation(ABC):
    """A function of one real variable and its derivatives s, s', s'', s'''.

    >>> resolve("gelu").jets(torch.zeros((), dtype=torch.float64))[1].item()
    0.5
    """

    name: str

    @abstractmethod
    def jets(self, z: Float[Tensor, "*points"]) -> Jets:
        """s, s', s'', s''' at ``z``, stacked in front: (4, *points)."""

    def batched_jets(self, z: Float[Tensor, "*points"]) -> Jets:
        """As :meth:`jets`, for use inside ``torch.vmap``."""
        return self.jets(z)

    def bend_width(self) -> float:
        """The least of max|s⁽ᵏ⁾|/max|s⁽ᵏ⁺¹⁾| on [-8, 8], k = 1, 2: how fine a grid must be to see every bend."""
        sizes = self.jets(torch.linspace(-8, 8, 1999, dtype=torch.float64, device="cpu"))[1:].abs().amax(dim=-1)
        bent = sizes[1:] > 1e-12 * sizes[0]
        return float((sizes[:-1] / sizes[1:])[bent].min()) if bool(bent.any()) else math.inf

    def is_steep(self) -> bool:
        """Whether s grows clearly faster than linearly, so that its moments have long tails."""
        near, far = (
            self.jets(torch.tensor([-z, z], dtype=torch.float64, device="cpu"))[0].abs().max() for z in (8.0, 16.0)
        )
        return not bool(far <= 2.5 * near)

    def is_odd(self) -> bool:
        """Whether s(-z) = -s(z), to rounding, wherever it is looked at."""
        z = torch.linspace(0.01, 12, 97, dtype=torch.float64, device="cpu")
        left, right = self.jets(-z)[:2], self.jets(z)[:2]
        signs = torch.tensor([[-1.0], [1.0]], dtype=torch.float64, device="cpu")
        return bool(((left - signs * right).abs() <= 1e-14 * right.abs()).all())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class Smooth(Activation):
    """An activation whose derivatives are written out, or come from autograd, and are continuous."""

    def __init__(self, name: str, jets: Callable[[Tensor], list[Tensor]]) -> None:
        self.name = name
        self._jets = jets

    def jets(self, z: Float[Tensor, "*points"]) -> Jets:
        return torch.stack(self._jets(z))


class Differentiated(Smooth):
    """A callable with its derivatives by autograd."""

    def __init__(self, name: str, function: Callable[[Tensor], Tensor]) -> None:
        self._function = streams_put_back()(function)
        super().__init__(name, lambda z: _autograd_jets(self._function, z, name))

    def batched_jets(self, z: Float[Tensor, "*points"]) -> Jets:
        # autograd.grad does not run inside vmap; torch.func.grad does, but computes everything anew for each order.
        orders = [self._function]
        for _ in range(1, ORDERS):
            orders.append(_slope(orders[-1]))
        return torch.stack([order(z) for order in orders])


def _slope(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    slope: Callable[[Tensor], Tensor] = torch.func.grad(lambda z: function(z).sum())
    return slope


class Kinked(Activation):
    """Piecewise linear, s(z) = a₊ z for z > 0 and a₋ z for z < 0: scale invariant; ReLU is (1, 0).

    ``jets`` is what autograd computes: s'' = s''' = 0, and s'(0) = a₋. The δ(z) of the other definition of s'' enters
    through closed forms (see ``kinked.py``).
    """

    def __init__(self, a_plus: Real, a_minus: Real, name: str | None = None) -> None:
        self.a_plus, self.a_minus = check_number(a_plus, "a_plus"), check_number(a_minus, "a_minus")
        if self.a_plus == 0 and self.a_minus == 0:
            raise InputError(
                "at least one slope of a piecewise linear activation must not be 0: s = 0 carries nothing."
            )
        self.name = name or f"piecewise linear ({self.a_plus:g}, {self.a_minus:g})"

    @property
    def A_2(self) -> float:
        """(a₊² + a₋²)/2, so that <s s> = A_2 K and <s's'> = A_2."""
        return (self.a_plus**2 + self.a_minus**2) / 2

    @property
    def A_4(self) -> float:
        """(a₊⁴ + a₋⁴)/2, so that <s⁴> = 3 A_4 K²."""
        return (self.a_plus**4 + self.a_minus**4) / 2

    @property
    def is_linear(self) -> bool:
        return self.a_plus == self.a_minus

    def jets(self, z: Float[Tensor, "*points"]) -> Jets:
        # Of two plain numbers torch.where makes float32, whatever z is.
        slope = torch.where(z > 0, torch.full_like(z, self.a_plus), torch.full_like(z, self.a_minus))
        zero = torch.zeros_like(z)
        return torch.stack([slope * z, slope, zero, zero])


def _tanh(z: Tensor) -> list[Tensor]:
    t = torch.tanh(z)
    # 1 - t² would lose all digits in the tails.
    decay = torch.exp(-2 * z.abs())
    d = 4 * decay / (1 + decay) ** 2
    return [t, d, -2 * t * d, (4 * t * t - 2 * d) * d]


def _sin(z: Tensor) -> list[Tensor]:
    s, c = torch.sin(z), torch.cos(z)
    return [s, c, -s, -c]


def _erf(z: Tensor) -> list[Tensor]:
    d = 2 / math.sqrt(math.pi) * torch.exp(-z * z)
    return [torch.erf(z), d, -2 * z * d, (4 * z * z - 2) * d]


def _gelu(z: Tensor) -> list[Tensor]:
    cdf = torch.special.ndtr(z)
    pdf = torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return [z * cdf, cdf + z * pdf, (2 - z * z) * pdf, (z * z - 4) * z * pdf]


def _silu(z: Tensor) -> list[Tensor]:
    g = torch.sigmoid(z)
    d1 = g * torch.sigmoid(-z)
    d2 = d1 * (1 - 2 * g)
    d3 = d1 * ((1 - 2 * g) ** 2 - 2 * d1)
    return [z * g, g + z * d1, 2 * d1 + z * d2, 3 * d2 + z * d3]


_NAMED: dict[str, Activation] = {
    **{name: Smooth(name, jets) for name, jets in
       {"tanh": _tanh, "sin": _sin, "erf": _erf, "gelu": _gelu, "silu": _silu}.items()},
    "linear": Kinked(1.0, 1.0, "linear"), "relu": Kinked(1.0, 0.0, "relu"),
    "leaky_relu": Kinked(1.0, 0.01, "leaky_relu"),
}  # fmt: skip
_NAMED |= {"swish": _NAMED["silu"], "identity": _NAMED["linear"]}

# Functions and modules of torch that are one of the above; autograd's second derivative of a kink is 0, so a ReLU
# must never be taken for a smooth callable.
_FUNCTIONS: dict[object, str] = {
    torch.tanh: "tanh", nn.functional.tanh: "tanh", torch.sin: "sin", torch.erf: "erf", torch.special.erf: "erf",
    torch.relu: "relu", nn.functional.relu: "relu", nn.functional.leaky_relu: "leaky_relu",
    nn.functional.gelu: "gelu", nn.functional.silu: "silu",
}  # fmt: skip


def resolve(activation: "str | Activation | Callable[[Tensor], Tensor]") -> Activation:
    """The activation of that name, of that torch module or function, or of any callable that autograd differentiates.

    Names: tanh, sin, erf (the plain error function), gelu (exact), silu, linear, relu, leaky_relu (slope 0.01; other
    slopes: ``Kinked(1, slope)`` or ``nn.LeakyReLU(slope)``). A callable is differentiated three times by autograd;
    that its derivatives integrate back to the function is checked, so that a hidden kink is found out.

    >>> resolve("relu").A_2, resolve(nn.LeakyReLU(0.5)).a_minus
    (0.5, 0.5)
    >>> resolve(lambda z: z * torch.cos(z)).name
    '<lambda>'
    """
    if isinstance(activation, Activation):
        return activation
    if isinstance(activation, str):
        name = activation.lower().replace("-", "_").replace(" ", "_")
        if name not in _NAMED:
            raise InputError(
                f"activation must be one of {', '.join(_NAMED)}, or a callable of a tensor, got {activation!r}."
            )
        return _NAMED[name]
    if isinstance(activation, nn.Module):
        return _of_module(activation)
    if not callable(activation):
        raise InputError(
            f"activation must be a name, a torch module or a callable of a tensor, got {type(activation).__name__}."
        )
    if isinstance(activation, Hashable) and activation in _FUNCTIONS:
        return _NAMED[_FUNCTIONS[activation]]
    return differentiated(activation)


def _of_module(module: nn.Module) -> Activation:
    if isinstance(module, nn.LeakyReLU):
        return Kinked(1.0, float(module.negative_slope))
    if isinstance(module, nn.PReLU) and module.weight.numel() == 1:
        return Kinked(1.0, float(module.weight.detach().item()))
    plain = {nn.Tanh: "tanh", nn.SiLU: "silu", nn.ReLU: "relu", nn.Identity: "linear"}
    if type(module) in plain:
        return _NAMED[plain[type(module)]]
    if isinstance(module, nn.GELU) and module.approximate == "none":
        return _NAMED["gelu"]
    return differentiated(module, type(module).__name__)


def differentiated(function: Callable[[Tensor], Tensor], name: str | None = None) -> Differentiated:
    """Derivatives of a callable by autograd, checked against the function itself.

    ∫ s⁽ᵏ⁺¹⁾ over each small interval must give the difference of s⁽ᵏ⁾, for k = 0, 1, 2; a kink fails for some k, as
    autograd knows nothing of the δ function there.
    """
    label = name or str(getattr(function, "__name__", type(function).__name__))
    result = Differentiated(label, function)
    _check_elementwise(result)
    _check_derivatives(result)
    return result


def _autograd_jets(function: Callable[[Tensor], Tensor], z: Tensor, label: str) -> list[Tensor]:
    with torch.enable_grad():
        leaf = z.detach().clone().requires_grad_()
        value = function(leaf)
        if not isinstance(value, Tensor) or value.shape != leaf.shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"activation {label!r} must map a tensor to a tensor of the same shape, element by element, "
                f"got {got} for {tuple(leaf.shape)}."
            )
        found = [value]
        for order in range(1, ORDERS):
            found.append(_derivative(found[-1], leaf, order, label))
    return [part.detach() for part in found]


def _derivative(value: Tensor, leaf: Tensor, order: int, label: str) -> Tensor:
    if not value.requires_grad:
        # A constant: its derivative is zero, and whether it truly is one is for the check to find out.
        return torch.zeros_like(leaf)
    try:
        (slope,) = torch.autograd.grad(value.sum(), leaf, create_graph=order < ORDERS - 1, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"activation {label!r} must have three derivatives, but autograd failed at {_DERIVATIVE_NAMES[order]}: "
            f"{error}. Write it with differentiable torch operations, or use a named activation."
        ) from error
    return torch.zeros_like(leaf) if slope is None else slope


def _check_elementwise(activation: Smooth) -> None:
    z = torch.linspace(-2.3, 2.7, 12, dtype=torch.float64, device="cpu").reshape(3, 4)
    together = activation.jets(z)[0].flatten()
    alone = torch.cat([activation.jets(v.reshape(1))[0] for v in z.flatten()])
    differs = ~torch.isclose(together, alone, rtol=1e-9, atol=1e-9, equal_nan=True)
    if bool(differs.any()):
        where = int(differs.nonzero()[0])
        raise InputError(
            f"activation {activation.name!r} must act on each element alone, but s({float(z.flatten()[where]):.3g}) is "
            f"{float(alone[where]):.6g} by itself and {float(together[where]):.6g} among other elements. The theory is "
            "that of elementwise activations: leave out softmax, normalisation and noise."
        )


def _check_derivatives(activation: Smooth, reach: float = 6.0, cells: int = 1200) -> None:
    step = 2 * reach / cells
    # Three Gauss-Legendre points a cell: exact to degree 5, an error of about step⁷ where s is smooth. The grid is
    # shifted so that a kink at 0, ±1, ... lies inside a cell and not on its edge.
    shift = 0.37 * step
    left = torch.arange(cells, dtype=torch.float64, device="cpu") * step - reach + shift
    nodes = torch.tensor([-math.sqrt(0.6), 0.0, math.sqrt(0.6)], dtype=torch.float64, device="cpu")
    weights = torch.tensor([5 / 18, 8 / 18, 5 / 18], dtype=torch.float64, device="cpu") * step
    inner = left[:, None] + step * (nodes + 1) / 2
    at_inner, at_left, at_right = (activation.jets(z) for z in (inner, left, left + step))
    _check_jets_finite(activation, at_inner)
    worst, where, kind = 0.0, 0.0, 0
    for order in range(ORDERS - 1):
        gap = ((at_inner[order + 1] * weights).sum(-1) - (at_right[order] - at_left[order])).abs()
        gap = gap / (1 + at_inner[order : order + 2].abs().max())
        if float(gap.max()) > worst:
            worst, where, kind = float(gap.max()), float(left[gap.argmax()]), order
    if worst > 1e-7:
        raise UnsupportedError(
            f"activation {activation.name!r} must have three derivatives, but {_DERIVATIVE_NAMES[kind + 1]} of "
            f"autograd does not integrate to {_DERIVATIVE_NAMES[kind]} near z = {where:.3g} (off by {worst:.2g}). "
            "There is a kink, a jump or a bend narrower than 0.05. Use 'relu', 'leaky_relu' or Kinked(a_plus, a_minus) "
            "for a kink at 0, or a smooth activation."
        )


def _check_jets_finite(activation: Smooth, jets: Tensor) -> None:
    finite = torch.isfinite(jets).flatten(1).all(-1)
    if not bool(finite.all()):
        missing = [_DERIVATIVE_NAMES[i] for i in range(ORDERS) if not bool(finite[i])]
        raise UnsupportedError(
            f"activation {activation.name!r} must have finite derivatives on [-6, 6], but {', '.join(missing)} is not "
            "finite there. Guard singular points (torch.where with safe arguments), or use a named activation."
        )
