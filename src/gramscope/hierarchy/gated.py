"""Networks whose ReLU masks come from another network: controls for what masks do and what weights do.

``f(x) = Σ over paths`` of a ReLU network is a product of weights along the path and of masks (gates). Here the two are
taken from two networks: the *values* network has the weights, the *gates* network has the masks. Gates of the initial
network with trained values are the frozen-mask control of arXiv:2606.09744, section 4.6 ("neglecting threshold-crossing
events", eq. 90), which makes that approximation a network of its own. The counterpart holds the values and trains the
gates.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gramscope.base.checks import check_number
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.user_warnings import warn
from gramscope.capture.network import copied
from gramscope.ops.torch_calls import RELUS

LEAKY = {F.leaky_relu}
# Other gates of common networks. They stay as they are, and are named.
_OTHERS = {
    F.relu6, F.hardtanh, F.prelu, F.rrelu, torch.abs, Tensor.abs, torch.clamp, Tensor.clamp, torch.maximum,
    F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool1d, torch.max_pool2d, torch.max_pool3d,
    F.adaptive_max_pool1d, F.adaptive_max_pool2d,
}  # fmt: skip


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


class _ReluCalls(TorchFunctionMode):
    """Hands every ReLU of a forward pass to ``act`` with its input and its slope left of zero; names other gates."""

    def __init__(self, act: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self._act = act
        self.others: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        if func in RELUS or func in LEAKY:
            h = args[0] if args else given["input"]
            assert isinstance(h, Tensor)
            slope = 0.0
            if func in LEAKY:
                found = args[1] if len(args) > 1 else given.get("negative_slope", 0.01)
                assert isinstance(found, float | int)
                slope = float(found)
            return self._act(h, slope)
        if func in _OTHERS:
            self.others.add(getattr(func, "__name__", str(func)))
        return func(*args, **given)


class GatedNetwork(nn.Module):
    """The weights of ``values`` with the ReLU masks of ``gates``: ``h ↦ σ(h_gates) · h_values`` at every ReLU.

    Make it with :func:`frozen_masks` or :func:`masks_only`. Every call of a ReLU (or leaky ReLU) is met, in modules and
    in functions; masks are matched by the order of the calls. Max pooling and other kinks keep deciding by the values
    network; ``other_gates`` names those that were met, and a warning does so once.

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
        if train not in ("values", "gates"):
            raise InputError(f'train must be "values" or "gates", got {train!r}.')
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
        masks = self.masks(*args, **kwargs)
        left = iter(masks)

        def gate(h: Tensor, slope: float) -> Tensor:
            mask = next(left, None)
            if mask is None or mask.shape != h.shape:
                got = "no more masks" if mask is None else f"a mask of shape {tuple(mask.shape)}"
                raise InputError(
                    f"values and gates must call their ReLUs in one order and with one shape, but for a ReLU on shape "
                    f"{tuple(h.shape)} the gates have {got}. Use two copies of one model."
                )
            return (mask.to(h.dtype) * (1 - slope) + slope) * h

        with _ReluCalls(gate) as met:
            out = self.values(*args, **kwargs)
        if next(left, None) is not None:
            raise InputError(
                "values must call as many ReLUs as gates, but masks are left over. Use copies of one model."
            )
        self._name_others(met.others)
        return out

    def masks(self, *args: object, **kwargs: object) -> list[Tensor]:
        """The masks of the gates network, one for each call of a ReLU; bool, or 0 and 1 with a graph."""
        found: list[Tensor] = []

        def note(h: Tensor, slope: float) -> Tensor:
            found.append(h > 0 if self.trained == "values" else _step(h, self.sharpness))
            return F.leaky_relu(h, slope) if slope else F.relu(h)

        with _ReluCalls(note), torch.set_grad_enabled(self.trained == "gates" and torch.is_grad_enabled()):
            self.gates(*args, **kwargs)
        if not found:
            raise UnsupportedError(
                "the model must call a ReLU (nn.ReLU, F.relu, leaky_relu) to have masks, but it called none. Smooth "
                "activations such as GELU have no masks to freeze."
            )
        return found

    def _name_others(self, others: set[str]) -> None:
        fresh = sorted(others - set(self.other_gates))
        if fresh:
            self.other_gates = tuple(sorted({*self.other_gates, *fresh}))
            warn(
                f"the model has other kinks than ReLU ({', '.join(fresh)}), which are not frozen: they go on deciding "
                "by the values network. Replace them (average pooling) for a control of masks alone."
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
        reference: whose weights carry the signal; by default a copy of the model as it stands.
        sharpness: β of the surrogate sigmoid.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> control = masks_only(net)
        >>> control(torch.randn(5, 3)).square().sum().backward()
        >>> net[0].weight.grad is not None, net[2].weight.grad is None
        (True, True)
    """
    return GatedNetwork(model if reference is None else reference, model, train="gates", sharpness=sharpness)
