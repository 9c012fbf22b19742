"""One forward pass on the probe for measures that need more of it, or less, than weight sites."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.capture.network import count_examples, evaluate, named_parameters, prepare_input
from gramscope.capture.side_effects import gradients_returned, plain_execution, unscale_tables, untouched
from gramscope.record.along_loss import AlongLoss, plain_squares
from gramscope.record.condensed import precision_of
from gramscope.record.signals import SignalWatch
from gramscope.record.subject import Subject, evaluating


@contextmanager
def probe_pass(
    subject: Subject,
    mode: AbstractContextManager[object] | None = None,
    large: bool = False,
    flags: AbstractContextManager[None] | None = None,
) -> Iterator[Float[Tensor, "n C"]]:
    """The outputs on the probe with their graph, in evaluation mode (or with ``flags`` set).

    The model's own code runs inside ``mode``. ``large`` passes use fused attention, which is differentiated once only,
    and on a GPU TF32.
    """
    x = prepare_input(subject.x)
    with (
        untouched(subject.model, throughout=False) as written,
        exact_arithmetic(tf32=large and precision_of(subject.model) == "tf32"),
        plain_execution(fused_attention=large),
        flags or evaluating(subject.model),
    ):
        unscale_tables(subject.model)
        with written, mode or nullcontext():
            outputs = evaluate(subject.model, x, count_examples(x), subject.outputs)
        with gradients_returned(subject.model.parameters()):
            yield outputs


@dataclass(eq=False)
class PlainPass:
    """Loss and accuracy on the probe, the gradient's sizes and the last layer's inputs, and some rows of outputs."""

    loss: float
    accuracy: float | None
    along: AlongLoss
    output_rows: Float[Tensor, "rows C"]


def plain_pass(
    subject: Subject, y: Tensor, last: str, places: Int64[Tensor, " rows"], rows: int, units: SignalWatch
) -> PlainPass:
    """One forward and one plain backward pass of the loss, where outputs are a vocabulary at every position.

    The weight sites tell more, at several times the price; of what is asked for here this gives the same numbers.
    ``last`` is the weight that makes the outputs; of the labels at ``places`` the first ``rows`` tell.
    """
    objective = subject.objective
    with probe_pass(subject, units, large=True) as f:
        y = y.to(f.device)
        loss = objective.loss(f, y)
        squares = plain_squares(
            loss, {name: p for name, p in named_parameters(subject.model).items() if p.requires_grad}
        )
        f = f.detach()
        accuracy, some = objective.accuracy(f, y), objective.by_class(f)[places[:rows].to(f.device)]
    inputs = None if units.last is None else units.last.rows
    assert inputs is not None  # as it was in the first pass, with which it was compared
    along = AlongLoss(squares, {last: inputs[places.to(inputs.device)]}, last)
    return PlainPass(float(loss.detach()), accuracy, along, some)
