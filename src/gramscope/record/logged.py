"""Numbers of the loop's own: every one is kept, at its own step, whatever is measured."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from gramscope.base.errors import InputError
from gramscope.store.names import check_name

Numbers = tuple[list[int], list[float]]  # steps and values


class LogBuffer:
    """What ``step`` and ``log`` were given. A loop gives it at every step, so that ``keep`` must be quick."""

    def __init__(self) -> None:
        self.series: dict[str, tuple[array[int], array[float]]] = {}  # steps and values by name
        self._fresh: defaultdict[str, list[tuple[int, Tensor | float]]] = defaultdict(list)  # not yet in a series
        self._written: defaultdict[str, int] = defaultdict(int)  # how many of each series
        self._names: set[str] = set()  # names that were looked at and are allowed
        self._measured = {"overhead", "skipped"}

    def keep(self, step: int, name: str, value: object) -> None:
        if name not in self._names:
            self._check(name)
        if type(value) is Tensor and value.is_cpu and value.numel() == 1:
            value = value.item()
        self._fresh[name].append((step, value if type(value) is float else _number(name, value)))

    def reserve(self, measured: Iterable[str]) -> None:
        """Names that the watch fills itself."""
        self._measured.update(measured)
        self._names.difference_update(measured)

    def settle(self) -> None:
        """All of them as numbers; a GPU's are waited for here."""
        for name, given in self._fresh.items():
            steps, values = self.series.setdefault(name, (array("q"), array("d")))
            steps.extend(step for step, _ in given)
            values.extend(_floats([value for _, value in given]))
        self._fresh.clear()

    def at(self, step: int) -> dict[str, float]:
        """What was logged last, of each name, if that was at this step."""
        self.settle()
        return {name: values[-1] for name, (steps, values) in self.series.items() if steps[-1] == step}

    def unwritten(self) -> dict[str, Numbers]:
        self.settle()
        found = {}
        for name, (steps, values) in self.series.items():
            start = self._written[name]
            if start < len(steps):
                found[name] = list(steps[start:]), list(values[start:])
        return found

    def mark_written(self) -> None:
        self._written.update({name: len(steps) for name, (steps, _) in self.series.items()})

    def _check(self, name: str) -> None:
        check_name(name, "a number that is logged")
        if name in self._measured:
            raise InputError(f"{name} is measured by the watch and cannot be logged. Log it under another name.")
        self._names.add(name)


def _floats(values: Sequence[Tensor | float]) -> list[float]:
    """Tensors of a GPU in one transfer, where they are of one kind."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) == len(values) and len({(t.dtype, t.device) for t in tensors}) == 1:
        return [float(value) for value in torch.stack(tensors).tolist()]
    return [float(value) for value in values]


def _number(name: str, value: object) -> Tensor | float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        # Its value now. A GPU need not be waited for: there a copy is read when it is written.
        return value.item() if value.is_cpu else value.detach().clone().reshape(())
    if isinstance(value, Real) or (isinstance(value, np.ndarray) and value.shape == () and np.isrealobj(value)):
        try:
            return float(value)
        except OverflowError:
            raise InputError(
                f"{name} must be a number that a float can hold (up to 1.8e308) to be logged, got a larger one. "
                "Log its logarithm."
            ) from None
        except (TypeError, ValueError):
            pass  # an array of text or of objects
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise InputError(f"{name} must be one number to be logged, got {got}.")
