"""A network in training beside its linearisations: the kernel of time t, held, against features that go on moving.

arXiv:2605.06258 contrasts the "moving-target linearisation" of a trained network with the fixed kernel of the lazy
regime. Here both are run: the network by full-batch gradient descent, and at chosen times t a linearised twin, whose
outputs follow the kernel of that time, ``f ← f - η Θ_t ∂L/∂f``. That is gradient descent on
``f(θ_t) + J_t (θ - θ_t)``, exactly, for any loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.agreement import ratio_of_norms
from gramscope.base.charts import line_chart
from gramscope.base.checks import check_count, check_lr
from gramscope.base.errors import InputError
from gramscope.base.moments import check_paired
from gramscope.base.progress_bar import progress
from gramscope.base.pyplot import Axes, Figure
from gramscope.base.results import TableResult
from gramscope.capture.network import copied
from gramscope.capture.side_effects import checked_gradients, untouched
from gramscope.hierarchy.losses import Loss, loss_function
from gramscope.kernels.empirical_ntk import ntk


@dataclass(frozen=True, eq=False, repr=False)
class LinearizedRun(TableResult, columns=("train_loss", "test_loss")):
    """The network linearised at step ``start`` and trained on: its losses at steps ``start``..S, and last outputs."""

    start: int
    train_loss: Float[Tensor, " steps"]
    test_loss: Float[Tensor, " steps"] | None
    outputs: Float[Tensor, "rows C"]


@dataclass(frozen=True, eq=False, repr=False)
class MovingTarget(TableResult, shown=("gaps", "steps", "final_loss"), columns=("train_loss", "test_loss")):
    """The network's own run and those of its linearisations.

    ``train_loss`` and ``test_loss`` (S+1,) are the network's; ``outputs`` its last ones on training and then test
    examples; ``before[t]`` those at the starts.
    """

    train_loss: Float[Tensor, " steps"]
    test_loss: Float[Tensor, " steps"] | None
    outputs: Float[Tensor, "rows C"]
    before: dict[int, Float[Tensor, "rows C"]]
    runs: dict[int, LinearizedRun]

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """The training loss of the network, and of each linearisation from its start on."""
        lines = {"network": self.train_loss}
        for start, run in self.runs.items():
            before = torch.full_like(self.train_loss[:start], torch.nan)
            lines[f"linearised at {start}"] = torch.cat([before, run.train_loss])
        steps = range(len(self.train_loss))
        return line_chart(steps, lines, "The network and its linearisations", "step", axes=axes, ylabel="training loss")

    @property
    def gaps(self) -> dict[int, float]:
        """:meth:`gap` of every start."""
        return {start: self.gap(start) for start in self.runs}

    @property
    def steps(self) -> int:
        return len(self.train_loss) - 1

    @property
    def final_loss(self) -> float:
        """The network's training loss at the end."""
        return float(self.train_loss[-1])

    def gap(self, start: int) -> float:
        """``|f_linearised - f| / |f - f_start|`` at the end: 0 where the kernel of ``start`` explains the rest."""
        return ratio_of_norms(self.runs[start].outputs - self.outputs, self.outputs - self.before[start])


def moving_target(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: object,
    *,
    lr: float,
    steps: int,
    starts: Sequence[int] = (0,),
    test: tuple[Tensor, Tensor] | None = None,
) -> MovingTarget:
    """Train a network and, from chosen times on, its linearisation; full-batch gradient descent for both.

    Args:
        model: a module with outputs (n, C); a copy is trained, in the modes that it has.
        x, y: training examples and targets.
        loss: (outputs, targets) -> number; or a name, as for ``explain_step``.
        lr, steps: of gradient descent.
        starts: times at which the network is linearised, each below ``steps``; 0 is the fixed kernel of the start.
        test: further examples and targets; their outputs move along.

    The kernel of a start is held as a matrix, (n + m) C × n C. Reference: arXiv:2605.06258, moving-target
    linearisation.

    Example:
        >>> net, x = nn.Linear(3, 1).double(), torch.randn(6, 3).double()
        >>> found = moving_target(net, x, x[:, :1], torch.nn.functional.mse_loss, lr=0.1, steps=20)
        >>> found.gap(0) < 1e-10      # a linear network is its own linearisation
        True
    """
    times, loss = _checked(lr, steps, starts), loss_function(loss)
    check_paired(x, y, "x", "y")
    if test is not None:
        check_paired(*test, "the test inputs", "their targets")
    network = copied(model)
    free = [p for p in network.parameters() if p.requires_grad]
    every = x if test is None else torch.cat([x, test[0]])
    runs: dict[int, _Twin] = {}
    before: dict[int, Tensor] = {}
    losses: list[tuple[float, float | None]] = []
    targets = y, None if test is None else test[1]
    # The copy is trained; random streams that its dropout draws from are put back.
    with untouched(nn.Identity()), progress("steps of the network and its linearisations", steps) as advance:
        for step in range(steps + 1):
            with torch.no_grad():
                outputs = network(every).detach()
            losses.append(_losses(loss, outputs, targets))
            if step in times:
                _check_outputs(outputs, len(every))
                before[step] = outputs
                runs[step] = _Twin(step, ntk(network, every, x).flatten(2).flatten(0, 1), outputs, [])
            for twin in runs.values():
                twin.note(loss, targets, lr, last=step == steps)
            if step < steps:
                _descend(network, free, loss, x, y, lr)
            advance()
    train, held = _curves(losses)
    return MovingTarget(train, held, outputs, before, {t: twin.run() for t, twin in runs.items()})


@dataclass(eq=False)
class _Twin:
    """A linearised run as it goes: its kernel (rows of all examples, columns of the training ones) and outputs."""

    start: int
    kernel: Tensor
    outputs: Tensor
    losses: list[tuple[float, float | None]]

    def note(self, loss: Loss, targets: tuple[Tensor, Tensor | None], lr: float, last: bool) -> None:
        self.losses.append(_losses(loss, self.outputs, targets))
        if last:
            return
        f = self.outputs[: len(targets[0])].detach().requires_grad_()
        (residual,) = torch.autograd.grad(loss(f, targets[0]), f)
        self.outputs = self.outputs - lr * (self.kernel @ residual.flatten()).reshape(self.outputs.shape)

    def run(self) -> LinearizedRun:
        return LinearizedRun(self.start, *_curves(self.losses), self.outputs)


def _losses(loss: Loss, outputs: Tensor, targets: tuple[Tensor, Tensor | None]) -> tuple[float, float | None]:
    train, held = targets
    n = len(train)
    return float(loss(outputs[:n], train)), None if held is None else float(loss(outputs[n:], held))


def _curves(losses: list[tuple[float, float | None]]) -> tuple[Tensor, Tensor | None]:
    train = torch.tensor([a for a, _ in losses], dtype=torch.float64, device="cpu")
    held = [b for _, b in losses if b is not None]
    return train, torch.tensor(held, dtype=torch.float64, device="cpu") if held else None


def _descend(network: nn.Module, free: list[nn.Parameter], loss: Loss, x: Tensor, y: Tensor, lr: float) -> None:
    gradients = checked_gradients(loss(network(x), y), free)
    with torch.no_grad():
        for parameter, gradient in zip(free, gradients, strict=True):
            if gradient is not None:
                parameter.sub_(lr * gradient)


def _check_outputs(outputs: Tensor, n: int) -> None:
    if outputs.dim() != 2 or len(outputs) != n:
        raise InputError(f"the model must return outputs of shape (n, C), here ({n}, C), got {tuple(outputs.shape)}.")
    if not bool(outputs.isfinite().all()):
        raise InputError("the outputs must be finite, but training has diverged. Lower lr.")


def _checked(lr: float, steps: int, starts: Sequence[int]) -> set[int]:
    check_lr(lr)
    check_count(steps, "steps")
    if not isinstance(starts, Sequence) or not starts:
        raise InputError(f"starts must be a list of whole numbers from 0 to {steps - 1}, got {starts!r}.")
    return {check_count(t, "each of starts", 0, steps - 1) for t in starts}
