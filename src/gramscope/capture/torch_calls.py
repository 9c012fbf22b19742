"""Types of what a torch function mode is given: any function of torch, with any arguments."""

from collections.abc import Callable
from typing import Any, TypeAlias

# Torch's operations share no signature. What is called with these is called as the model called it.
TorchFunction: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
