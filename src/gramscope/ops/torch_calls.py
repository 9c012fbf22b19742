"""What a torch function mode is given: any function of torch, with any arguments."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

# Torch's operations share no signature. What is called with these is called as the model called it.
TorchFunction: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


def transforms() -> Sequence[Any]:
    """The transforms of torch.func that are being run, outermost first."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return ()
    return torch._C._functorch.get_interpreter_stack() or ()


def inside_vmap(depth: int = 0) -> bool:
    """Whether torch.vmap is run, inside of ``depth`` transforms. Tensors seen there are of no use when it has ended."""
    vmap = torch._C._functorch.TransformType.Vmap
    return any(level.key() == vmap for level in transforms()[depth:])


def spellings(name: str, places: tuple[object, ...] = (torch, Tensor, F)) -> Iterator[TorchFunction]:
    """The functions of a name, and those of the same name that work in place."""
    for place in places:
        for spelling in (name, f"{name}_"):
            if hasattr(place, spelling):
                yield getattr(place, spelling)


RELUS = frozenset(spellings("relu"))


@cache
def writes(func: TorchFunction) -> bool:
    """An operation that overwrites its first argument, by its name."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return (
        in_place
        or name == "__setitem__"
        or (name.startswith("__i") and name not in {"__invert__", "__index__", "__int__"})
    )
