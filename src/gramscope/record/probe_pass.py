"""One forward pass on the probe for measures that need more of it than weight sites: a graph, or every operation."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from jaxtyping import Float
from torch import Tensor

from gramscope.capture.network import count_examples, evaluate, prepare_input
from gramscope.capture.side_effects import plain_execution, untouched
from gramscope.record.moment import Subject, evaluating


@contextmanager
def probe_pass(subject: Subject, mode: AbstractContextManager[Any] | None = None) -> Iterator[Float[Tensor, "n C"]]:
    """The outputs on the probe with their graph, in evaluation mode, the model's own code inside ``mode``."""
    x = prepare_input(subject.x)
    with untouched(subject.model, throughout=False) as written, plain_execution(), evaluating(subject.model):
        with written, mode or nullcontext():
            outputs = evaluate(subject.model, x, count_examples(x), subject.outputs)
        yield outputs
