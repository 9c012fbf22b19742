"""One forward and one plain backward pass of the loss, where outputs are a vocabulary at every position.

The weight sites tell more (each example's part of the gradient), at several times the price. Where only the gradient
of the loss and the inputs of the last layer are asked for, this pass gives the same numbers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gramscope.base.nested import tensors_in
from gramscope.capture.network import named_parameters
from gramscope.measures.norms import squared_norms
from gramscope.record.along_loss import AlongLoss
from gramscope.record.objective import Objective
from gramscope.record.probe_pass import probe_pass
from gramscope.record.relu_units import Operation, ReluUnits
from gramscope.record.subject import Subject


class LastInput(TorchFunctionMode):
    """Notes what the last operation was given that makes all outputs of ``examples`` examples: ``rows``, one a label.

    It is found by shapes alone. So it is compared once with what the weight sites say, and used only if both agree.
    """

    def __init__(self, objective: Objective, examples: int) -> None:
        super().__init__()
        self._entries, self._classes = examples * objective.size, objective.count
        self.rows: Float[Tensor, "rows d"] | None = None

    def __torch_function__(
        self, func: Operation, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():  # what is noted here is nothing for the other modes to look at
            if isinstance(result, Tensor) and result.numel() == self._entries:
                self._note(args)
        return result

    def _note(self, args: tuple[object, ...]) -> None:
        for given in tensors_in(args):
            if self._may_be_input(given):
                self.rows = given.detach().reshape(-1, given.shape[-1])
                return

    def _may_be_input(self, given: Tensor) -> bool:
        if not given.is_floating_point() or given.dim() < 2 or given.numel() == self._entries:
            return False
        return given.numel() * self._classes == self._entries * given.shape[-1]

    def agrees(self, features: Tensor | None, places: Int64[Tensor, " rows"]) -> bool:
        """Whether the rows at these places are the features that the weight sites found in the same forward pass."""
        if features is None or self.rows is None or self.rows.shape[1:] != features.shape[1:]:
            return False
        return torch.equal(self.rows[places.to(self.rows.device)].to(features.dtype), features)


@dataclass(eq=False)
class PlainPass:
    """Loss and accuracy on the probe, the gradient's sizes and the last layer's inputs, and some rows of outputs."""

    loss: float
    accuracy: float | None
    along: AlongLoss
    output_rows: Float[Tensor, "rows C"]


@contextmanager
def all_of(*modes: TorchFunctionMode) -> Iterator[None]:
    """Inside several modes at once."""
    first, *rest = modes
    with first:
        if rest:
            with all_of(*rest):
                yield
        else:
            yield


def plain_pass(
    subject: Subject, y: Tensor, last: str, places: Int64[Tensor, " rows"], rows: int, units: ReluUnits
) -> PlainPass:
    """The pass. ``last`` is the weight that makes the outputs; of the labels at ``places`` the first ``rows`` tell."""
    objective = subject.objective
    noted = LastInput(objective, len(y))
    with probe_pass(subject, all_of(units, noted), large=True) as f:
        y = y.to(f.device)
        loss = objective.loss(f, y)
        free = {name: p for name, p in named_parameters(subject.model).items() if p.requires_grad}
        found = torch.autograd.grad(loss, list(free.values()), allow_unused=True)
        f = f.detach()
        accuracy, some = objective.accuracy(f, y), objective.by_class(f)[places[:rows].to(f.device)]
    reached = {name: g for name, g in zip(free, found, strict=True) if g is not None}
    squares = dict.fromkeys(free, 0.0) | squared_norms(reached)
    assert noted.rows is not None  # as it was in the first pass, with which it was compared
    features = noted.rows[places.to(noted.rows.device)]
    return PlainPass(float(loss.detach()), accuracy, AlongLoss(squares, {last: features}, last), some)
