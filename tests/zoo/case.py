"""What a case is, how it is registered, and how its inputs are drawn."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class Case:
    """A small network with its inputs; nothing is built before `build` is called."""

    name: str
    model: Callable[[], nn.Module]
    x: Callable[[int], Any]
    n: int = 3
    n2: int = 2
    train: bool = False
    outputs: Any = None
    # What may be computed by the exact but slow autograd fallback: nothing (plain layers have rules),
    # everything (True), or the parameters named.
    fallback_ok: bool | tuple[str, ...] = False
    inner_float32: bool = False  # True: the model itself rounds to float32 inside, whatever its dtype
    needs: str | None = None  # package the case cannot be built without

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any, Any]:
        """The model, x (n examples) and x2 (n2 examples), the same every time for one seed and dtype."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model()._apply(lambda t: _in_precision(t, dtype)).train(self.train)
            _jitter(model)
            return model, cast(self.x(self.n), dtype), cast(self.x(self.n2), dtype)


def _jitter(model: nn.Module) -> None:
    # Ones and zeros at initialisation hide a forgotten gain or bias, and weights drawn in float32 hide a
    # rounding to float32; parameters moved in their own dtype hide neither.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)


def cast(x: Any, dtype: torch.dtype) -> Any:
    """x with its floating tensors in `dtype`, and every tensor a copy."""
    return tree_map_only(Tensor, lambda t: _in_precision(t.clone(), dtype), x)


def _in_precision(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        return tensor.to({torch.float64: torch.complex128, torch.float32: torch.complex64}[dtype])
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def registry() -> tuple[dict[str, Case], Callable[..., Any]]:
    """An empty registry and the decorator that adds the decorated model builder to it."""
    cases: dict[str, Case] = {}

    def case(x: Callable[[int], Any], **options: Any) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
        def add(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
            name = build.__name__
            if name in cases:
                raise ValueError(f"Case names must be unique, got {name!r} twice. Rename one.")
            cases[name] = Case(name=name, model=build, x=x, **options)
            return build

        return add

    return cases, case


def normal(*shape: int) -> Callable[[int], Tensor]:
    """n examples of standard normal numbers, each of the given shape."""
    return lambda n: torch.randn(n, *shape)


def ids(vocabulary: int, *shape: int) -> Callable[[int], Tensor]:
    """n examples of token ids, each of the given shape."""
    return lambda n: torch.randint(vocabulary, (n, *shape))


def several(*parts: Callable[[int], Any]) -> Callable[[int], tuple[Any, ...]]:
    """n examples for a model of several positional arguments."""
    return lambda n: tuple(part(n) for part in parts)


def keywords(**parts: Callable[[int], Any]) -> Callable[[int], dict[str, Any]]:
    """n examples for a model of keyword arguments."""
    return lambda n: {name: part(n) for name, part in parts.items()}


class Call(nn.Module):
    """A module whose forward is the function `run(module, *args)`, so that a case is a few lines.

    The keyword arguments become submodules, parameters, buffers or plain attributes.
    """

    def __init__(self, run: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.run = run
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def weight(*shape: int) -> nn.Parameter:
    """A bare parameter of moderate size."""
    return nn.Parameter(torch.randn(shape) * 0.5)
