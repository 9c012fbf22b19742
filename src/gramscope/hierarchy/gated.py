"""Networks whose ReLU masks come from another network: controls for what masks do and what weights do.

``f(x) = Σ over paths`` of a ReLU network is a product of weights along the path and of masks (gates). Here the two are
taken from two networks: the *values* network has the weights, the *gates* network has the masks. Gates of the initial
network with trained values are the frozen-mask control of arXiv:2606.09744, section 4.6 ("neglecting threshold-crossing
events", eq. 90), which makes that approximation a network of its own. The counterpart holds the values and trains the
gates.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.base.checks import check_choice, check_number
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.user_warnings import warn
from gramscope.capture.network import copied
from gramscope.ops.kinks import FixedSides, Side, Sides


class _StepFunction(torch.autograd.Function):
    """``1[h > 0]`` with the derivative of ``sigmoid(β h)`` instead of its own, which is zero (straight through)."""

    @staticmethod
    def forward(ctx: "torch.autograd.function.FunctionCtx", h: Tensor, sharpness: float) -> Tensor:
        ctx.save_for_backward(h)
        ctx.sharpness = sharpness  # type: ignore[attr-defined]
        return (h > 0).to(h.dtype)

    @staticmethod
    def backward(ctx: "torch.autograd.function.FunctionCtx", *gradients: Tensor) -> tuple[Tensor, None]:
        (h,) = ctx.saved_tensors  # type: ignore[attr-defined]
        s = torch.sigmoid(ctx.sharpness * h)  # type: ignore[attr-defined]
        return gradients[0] * ctx.sharpness * s * (1 - s), None  # type: ignore[attr-defined]


_step: Callable[[Tensor, float], Tensor] = _StepFunction.apply


class _Gates(Sides):
    """Notes the side of every kink of a forward pass; with a sharpness as numbers that have a gradient."""

    def __init__(self, sharpness: float | None) -> None:
        super().__init__()
        self._sharpness = sharpness

    def ramp(self, z: Tensor) -> Tensor:
        if self._sharpness is None:
            return super().ramp(z)
        self.sides.append(Side(self._operation, _step(z, self._sharpness)))
        return z


class GatedNetwork(nn.Module):
    """The weights of ``values`` with the masks of ``gates``: ``h ↦ σ(h_gates) · h_values`` at every ReLU.

    Make it with :func:`frozen_masks` or :func:`masks_only`. Every piecewise-linear operation counts, in modules and in
    functions: ReLUs of any kind, clamps, maxima, and max pooling, of which the gates choose the places. Masks are
    matched by the order of the calls. Kinks and jumps of other operations keep deciding by the values network;
    ``other_gates`` names those that were called, and a warning does so once.

    Args:
        values: the network whose weights carry the signal.
        gates: the network whose masks are used; it is run first, on the same inputs. Of the two, the one that is not
            trained is copied and held.
        train: "values" (masks are constants, the gates network runs in evaluation mode) or "gates" (gradients reach the
            gates by the derivative of ``sigmoid(sharpness · h)`` in place of the step's, which is zero).
        sharpness: β of that sigmoid.
    """

    def __init__(self, values: nn.Module, gates: nn.Module, *, train: str, sharpness: float = 4.0) -> None:
        super().__init__()
        check_choice(train, "train", ("values", "gates"))
        held = copied(gates if train == "values" else values).requires_grad_(False).eval()
        self.values, self.gates = (values, held) if train == "values" else (held, gates)
        self.trained, self.sharpness = train, check_number(sharpness, "sharpness", above=0.0)
        self.other_gates: tuple[str, ...] = ()

    def train(self, mode: bool = True) -> "GatedNetwork":
        """As in torch, but the network that is held stays in evaluation mode: it is a fixed function of the input."""
        super().train(mode)
        (self.gates if self.trained == "values" else self.values).eval()
        return self

    def forward(self, *args: object, **kwargs: object) -> Any:  # whatever the model returns
        gates = self._noted(*args, **kwargs)
        left = iter(gates.sides)
        held = FixedSides(left)
        try:
            with held:
                out = self.values(*args, **kwargs)
        except InputError as error:
            raise InputError(
                f"values and gates must run their kinks in one order and with one shape. Use two copies of one model. "
                f"In the run of values {error}"
            ) from error
        if next(left, None) is not None:
            raise InputError(
                "values must run as many kinks as gates, but masks are left over. Use copies of one model."
            )
        self._name_others({*gates.nonsmooth_ops, *held.nonsmooth_ops})
        return out

    def masks(self, *args: object, **kwargs: object) -> list[Tensor]:
        """The masks of the gates network, one for each kink: bool, or 0 and 1 with a graph; of maxima their places."""
        return [side.place for side in self._noted(*args, **kwargs).sides]

    def _noted(self, *args: object, **kwargs: object) -> Sides:
        noted = _Gates(self.sharpness if self.trained == "gates" else None)
        with noted, torch.set_grad_enabled(self.trained == "gates" and torch.is_grad_enabled()):
            self.gates(*args, **kwargs)
        if not noted.sides:
            raise UnsupportedError(
                "the model must call a ReLU (nn.ReLU, F.relu, leaky_relu) to have masks, but it called none. Smooth "
                "activations such as GELU have no masks to freeze."
            )
        return noted

    def _name_others(self, others: set[str]) -> None:
        fresh = sorted(others - set(self.other_gates))
        if fresh:
            self.other_gates = tuple(sorted({*self.other_gates, *fresh}))
            warn(
                f"the model has kinks or jumps that cannot be frozen ({', '.join(fresh)}): they still follow the "
                "values network. Replace them by ReLUs, clamps or maxima for a control of masks alone."
            )


def frozen_masks(model: nn.Module, reference: nn.Module | None = None) -> GatedNetwork:
    """The frozen-mask control of a ReLU network: ``model``'s weights are trained, its masks are those of ``reference``.

    The model itself is trained (its parameters are those of ``result.values``), a copy of the reference decides. By
    default the reference is the model as it stands: then the outputs are unchanged, and under training no mask flips.
    What such a network learns, masks need not change for (arXiv:2606.09744, eq. 90: fixed masks).

    Args:
        model: any module with ReLUs, also functional ones.
        reference: a network of the same form, e.g. the trained one; it is copied.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x, control = torch.randn(5, 3), frozen_masks(net)
        >>> torch.equal(control(x), net(x)), all(p.requires_grad for p in control.values.parameters())
        (True, True)
    """
    return GatedNetwork(model, model if reference is None else reference, train="values")


def masks_only(model: nn.Module, reference: nn.Module | None = None, *, sharpness: float = 4.0) -> GatedNetwork:
    """The masks-only control: ``model``'s masks are trained, the weights of the signal are those of ``reference``.

    Gradients reach the masks by a straight-through estimate: the step's derivative is replaced by that of
    ``sigmoid(sharpness · h)``. That is a choice, not part of the source. The last linear layer is held as well.

    Args:
        model: any module with ReLUs; its parameters are trained (those of ``result.gates``).
        reference: whose weights carry the signal; by default a copy of the model as it is.
        sharpness: β of the surrogate sigmoid.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> control = masks_only(net)
        >>> control(torch.randn(5, 3)).square().sum().backward()
        >>> net[0].weight.grad is not None, net[2].weight.grad is None
        (True, True)
    """
    return GatedNetwork(model if reference is None else reference, model, train="gates", sharpness=sharpness)
