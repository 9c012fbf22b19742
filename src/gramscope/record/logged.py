"""Numbers of the loop's own, kept until the next record takes them."""

from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from gramscope.base.errors import InputError
from gramscope.store.names import check_name


class Logged:
    """What ``step`` and ``log`` were given. A loop gives it at every step, so that ``keep`` must be quick."""

    def __init__(self) -> None:
        self.pending: dict[str, Any] = {}
        self.names: set[str] = set()  # names that were looked at and are allowed
        self._measured = {"overhead", "skipped"}

    def keep(self, name: str, value: Any) -> None:
        if name not in self.names:
            self._check(name)
        if type(value) is Tensor and value.is_cpu and value.numel() == 1:
            value = value.item()
        self.pending[name] = value if type(value) is float else _number(name, value)

    def reserve(self, measured: Any) -> None:
        """Names that the watch fills itself."""
        self._measured.update(measured)
        self.names.difference_update(measured)

    def take(self) -> dict[str, float]:
        """All of them as numbers; a GPU's are waited for here."""
        given = {name: float(value) for name, value in self.pending.items()}
        self.pending.clear()
        return given

    def _check(self, name: str) -> None:
        check_name(name, "a number that is logged")
        if name in self._measured:
            raise InputError(f"{name} is measured by the watch and cannot be logged. Log it under another name.")
        self.names.add(name)


def _number(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        # Its value now. A GPU need not be waited for: there a copy is read when it is written.
        return value.item() if value.is_cpu else value.detach().clone()
    if isinstance(value, Real) or (isinstance(value, np.ndarray) and value.shape == () and np.isrealobj(value)):
        try:
            return float(value)
        except OverflowError:
            raise InputError(
                f"{name} must be a number that a float can hold (up to 1.8e308) to be logged, got a greater one. "
                "Log its logarithm."
            ) from None
        except (TypeError, ValueError):
            pass  # an array of text or of objects
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise InputError(f"{name} must be one number to be logged, got {got}.")
