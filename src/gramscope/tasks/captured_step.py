"""Training steps replayed as CUDA graphs, for networks whose kernels take less time than their launch."""

from collections import Counter
from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from gramscope.base.checks import check_count
from gramscope.base.user_warnings import SlowPathWarning, warn


class CapturedStep:
    """``step(rows)``, which on a GPU is captured as a CUDA graph after ``plain`` calls and then replayed.

    There is one graph for each number of rows. A graph repeats its kernels on the memory of its capture: data,
    parameters and state of the optimizer must be changed in place, and the optimizer of ``step`` must be capturable.
    Python values, such as a learning rate, are those of the capture: call :meth:`forget` after a change. On a CPU
    ``step`` is called as it is, and so is one that cannot be captured, with a warning.

    Reference: torch's notes on CUDA semantics, "Whole-network capture".

    >>> seen = []
    >>> step = CapturedStep(lambda rows: seen.append(rows.tolist()))
    >>> step(torch.tensor([2, 0]))
    >>> seen
    [[2, 0]]
    """

    def __init__(self, step: Callable[[Int[Tensor, " n"]], object], *, plain: int = 3) -> None:
        self.step, self.plain = step, check_count(plain, "plain")
        self.calls: Counter[int] = Counter()  # by number of rows
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.side: torch.cuda.Stream | None = None
        self.capturable = True

    def __call__(self, rows: Int[Tensor, " n"]) -> None:
        count = len(rows)
        self.calls[count] += 1
        if not rows.is_cuda or not self.capturable:
            self.step(rows)
        elif self.calls[count] <= self.plain:
            self._plain(rows)
        elif count in self.graphs or self._capture(rows):
            graph, fixed = self.graphs[count]
            fixed.copy_(rows)
            graph.replay()
        else:
            self.step(rows)

    def forget(self) -> None:
        """Drop the graphs; the next call with each number of rows captures it anew."""
        if self.graphs:
            torch.cuda.synchronize()
        self.graphs.clear()

    def _plain(self, rows: Tensor) -> None:
        """A call that makes all lazy state, on the stream of the capture, which must not wait for another one."""
        here, self.side = torch.cuda.current_stream(), self.side or torch.cuda.Stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            self.step(rows)
        here.wait_stream(self.side)

    def _capture(self, rows: Tensor) -> bool:
        """Record the step without computing it; whether that was possible."""
        graph, fixed = torch.cuda.CUDAGraph(), rows.clone()
        try:
            with torch.cuda.graph(graph, stream=self.side):
                self.step(fixed)
        except RuntimeError as error:
            self.capturable = False
            self.forget()
            warn(f"the step cannot be captured as a CUDA graph and is called as it is: {error}", SlowPathWarning)
            return False
        self.graphs[len(rows)] = graph, fixed
        return True
