"""Which ReLU units are on, for which examples, named by the layer whose weights came last before the ReLU."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gramscope.ops.torch_calls import RELUS, inside_vmap

DYING = RELUS | {F.relu6}
Operation: TypeAlias = Callable[..., object]  # a function of torch, as a mode meets it
UNITS_SECOND = ("conv", "batch_norm", "instance_norm", "group_norm")  # operations that have channels on axis 1


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a ReLU: which units are on, at each example and position (rows), or at any of them (one row)."""

    layer: str
    on: Bool[Tensor, "rows units"]


class ReluUnits(TorchFunctionMode):
    """Notes every ReLU of a forward pass in ``uses``; unless ``by_example``, in one row: on anywhere.

    ``layers``: the layer of each parameter, by its id.
    """

    def __init__(self, layers: Mapping[int, str], by_example: bool = False) -> None:
        super().__init__()
        self.uses: list[Use] = []
        self._layers, self._by_example = layers, by_example
        self._layer, self._axis = "input", -1
        self.unseen: dict[str, None] = {}  # layers whose operations run inside torch.vmap
        self.unseen_relus: dict[str, None] = {}

    def __torch_function__(
        self, func: Operation, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) or type(result) is tuple:  # and no size, say
            given = (*args, *(kwargs or {}).values())
            with torch._C.DisableTorchFunction():  # what is noted here is nothing for the other modes to look at
                if inside_vmap():
                    self._pass_by(func, given)
                else:
                    self._look_at(func, given, result)
        return result

    def _look_at(self, func: Operation, given: tuple[object, ...], result: object) -> None:
        layer = self._layer_among(given)
        if _cuts_at_zero(func, given) and isinstance(result, Tensor):
            if layer is None and result.dim():  # of a parameter, or of a single number, it is no unit
                self._note(result.detach())
            return
        if layer is not None and isinstance(result, Tensor):
            name = getattr(func, "__name__", "")
            self._layer, self._axis = layer, 1 if any(part in name for part in UNITS_SECOND) else -1
        self._saw(func, layer, given, result)

    def _pass_by(self, func: Operation, given: tuple[object, ...]) -> None:
        layer = self._layer_among(given)
        if layer is not None:
            self._layer, self._axis = layer, -1
            self.unseen[layer] = None
        elif _cuts_at_zero(func, given):
            self.unseen_relus[self._layer] = None

    def _saw(self, func: Operation, layer: str | None, given: tuple[object, ...], result: object) -> None:
        """An operation that is no ReLU, and the layer whose parameters it was given; for what else is to be noted."""

    def _layer_among(self, given: Iterable[object]) -> str | None:
        """The layer of the first parameter among the arguments of an operation, or in a list of them."""
        for one in given:
            layer = self._layer_among(one) if isinstance(one, list | tuple) else self._layers.get(id(one))
            if layer is not None:
                return layer
        return None

    def _note(self, activations: Tensor) -> None:
        if activations.dim() == 1:  # one unit
            activations = activations[:, None]
        axis = self._axis if activations.dim() > 2 else -1
        on = (activations > 0).movedim(axis, -1).flatten(0, -2)
        self.uses.append(Use(self._layer, on if self._by_example else on.any(0, keepdim=True)))

    def on_by_layer(self) -> dict[str, list[Tensor]]:
        """Masks of each layer; uses of the same width together (a weight that is used at several times)."""
        found: dict[tuple[str, int], list[Tensor]] = {}
        for use in self.uses:
            found.setdefault((use.layer, use.on.shape[1]), []).append(use.on)
        by_layer: dict[str, list[Tensor]] = {}
        for (layer, _), masks in found.items():
            by_layer.setdefault(layer, []).append(torch.cat(masks))
        return by_layer


def _cuts_at_zero(func: Operation, given: tuple[object, ...]) -> bool:
    """Whether units pass nothing below zero; ``nn.ReLU6`` is a hard tanh from 0 to 6."""
    return func in DYING or (func is F.hardtanh and len(given) > 1 and given[1] == 0)


def dead_share(masks: list[Tensor]) -> float:
    """Share of units that are on at no row."""
    units = sum(mask.shape[1] for mask in masks)
    return sum(int((~mask.any(0)).sum()) for mask in masks) / units if units else math.nan


def left_out(name: str, layers: Iterable[str]) -> dict[str, str]:
    """What a measure lacks, and why, if these layers run inside torch.vmap."""
    listed = ", ".join(layers)
    return {name: f"what runs inside torch.vmap cannot be seen from outside: {listed}."} if listed else {}
