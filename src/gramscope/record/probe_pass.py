"""One forward pass on the probe for measures that need more of it than weight sites: a graph, or every operation."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from jaxtyping import Float
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.capture.network import count_examples, evaluate, prepare_input
from gramscope.capture.side_effects import plain_execution, untouched
from gramscope.record.condensed import precision_of
from gramscope.record.subject import Subject, evaluating


@contextmanager
def probe_pass(
    subject: Subject, mode: AbstractContextManager[object] | None = None, large: bool = False
) -> Iterator[Float[Tensor, "n C"]]:
    """The outputs on the probe with their graph, in evaluation mode, the model's own code inside ``mode``.

    ``large`` passes use fused attention, which is differentiated once only, and on a GPU TF32.
    """
    x = prepare_input(subject.x)
    with (
        untouched(subject.model, throughout=False) as written,
        exact_arithmetic(tf32=large and precision_of(subject.model) == "tf32"),
        plain_execution(fused_attention=large),
        evaluating(subject.model),
    ):
        with written, mode or nullcontext():
            outputs = evaluate(subject.model, x, count_examples(x), subject.outputs)
        yield outputs
