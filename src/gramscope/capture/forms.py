"""Forms: how a weight made the output of an operation, for those who push changes of weights through a network."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Form:
    """Base of all forms; ``rule`` is the name that results carry."""

    rule: str = ""


@dataclass(frozen=True, eq=False)
class Outer(Form):
    """``u = W v``. ``inputs(rows)`` gives (M, T, g, i); ``arrange`` brings signals (k, *u.shape) to (k, M, T, g, o)."""

    inputs: Callable[[slice], Tensor] = None  # type: ignore[assignment]
    arrange: Callable[[Tensor], Tensor] = None  # type: ignore[assignment]
    fan_in: int = 1
    axes: tuple[int, ...] = ()
    order: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Lookup(Form):
    """``u = W[ids]``; rows whose id is ``ignored`` get no gradient."""

    ids: Tensor = None  # type: ignore[assignment]
    table: int = 0
    ignored: int | None = None


@dataclass(frozen=True, eq=False)
class Gain(Form):
    """``u = op(data, W)`` entry by entry, W broadcast as ``shape`` against u.

    ``factor()`` gives ∂u/∂W for each entry of u (None: one everywhere).
    """

    shape: tuple[int, ...] = ()
    factor: Callable[[], Tensor] | None = None
    output_shape: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Tap(Form):
    """The weight itself, where it enters an operation of which nothing else is known."""

    rule: str = "expanded"
    shape: tuple[int, ...] = ()
    copies: frozenset[int] = frozenset()


def elementwise_factor(func: Callable[..., Any], args: Any, kwargs: Any, place: int, shape: torch.Size) -> Tensor:
    """∂u/∂W entry by entry for ``u = func(*args)`` with the weight at ``args[place]``, by autograd on W expanded."""
    with torch.enable_grad():
        detached = [a.detach() if isinstance(a, Tensor) else a for a in args]
        # With complex data the factor is complex, whatever the weight; a real weight takes the real part at the end.
        mixed = torch.result_type(
            detached[place], next((a for a in detached if torch.is_tensor(a) and a.is_complex()), 0)
        )
        wide = detached[place].to(mixed).expand(shape).requires_grad_()
        detached[place] = wide
        output = func(*detached, **kwargs)
        return torch.autograd.grad(output, wide, torch.ones_like(output))[0]
