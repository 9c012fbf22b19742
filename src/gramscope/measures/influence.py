"""Influence of training examples on test examples over checkpoints (TracIn)."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from gramscope.base.charts import heat_map
from gramscope.base.checks import check_count, check_finite, check_lr, check_tensor
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.base.pyplot import Axes, Figure
from gramscope.base.results import TableResult, as_column
from gramscope.capture.model_function import ModelFunction
from gramscope.capture.network import Outputs, count_examples, join_examples, slice_examples
from gramscope.hierarchy.losses import loss_function
from gramscope.kernels.gradients import gradient_gram


@dataclass(frozen=True, eq=False, repr=False)
class Influence(TableResult):
    """``scores[i, j]``: how far training example i lowered the loss of test example j, to first order.

    Positive: a proponent, whose steps lowered the test loss. Negative: an opponent. ``checkpoints`` is their number.
    """

    scores: Float64[Tensor, "n m"] = field(repr=False)
    checkpoints: int

    def proponents(self, test: int, k: int = 5) -> list[int]:
        """The ``k`` training examples that lowered the loss of a test example most, first the strongest."""
        return self.scores[:, test].argsort(descending=True, stable=True)[: check_count(k, "k")].tolist()

    def opponents(self, test: int, k: int = 5) -> list[int]:
        """The ``k`` training examples that raised it most."""
        return self.scores[:, test].argsort(stable=True)[: check_count(k, "k")].tolist()

    def _table(self) -> tuple[object, None]:
        """The scores, training examples in rows and test examples in columns."""
        return as_column(self.scores), None

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """The scores as a heat map, red for proponents; a figure."""
        top = float(self.scores.abs().max()) or 1.0
        names = ("training example", "test example")
        return heat_map(self.scores, "Influence", *names, axes=axes, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")

    def __repr__(self) -> str:
        n, m = self.scores.shape
        return f"Influence({n} training on {m} test examples, {self.checkpoints} checkpoints)"


def tracin(
    model: nn.Module,
    x: ModelInput,
    y: Tensor,
    x_test: ModelInput,
    y_test: Tensor,
    *,
    checkpoints: Iterable[Mapping[str, Tensor]] | None = None,
    lr: float | Sequence[float] = 1.0,
    loss: object = "cross_entropy",
    outputs: Outputs = None,
    batch_size: int = 256,
) -> Influence:
    """TracIn: ``I_ij = Σ_t η_t ∇ℓ(z_i; θ_t) · ∇ℓ(z'_j; θ_t) = Σ_t η_t e_i · K_t(x_i, x'_j) · e'_j`` over checkpoints t.

    ``e = ∂ℓ/∂f`` of each example's own loss and K the tangent kernel: the gradients themselves are not formed. Pruthi
    et al. 2020 (arXiv:2002.08484), eq. 1 (TracInCP).

    Args:
        model: the network; it is left as it was.
        x, y: training examples.
        x_test, y_test: test examples.
        checkpoints: state dicts of the run; None takes the model as it is, as the only one.
        lr: learning rate between checkpoints, one number or one for each.
        loss: a name ("mse", "half_squared", "cross_entropy") or a function (outputs, y) -> number; it is called with
            one example at a time, so a mean and a sum over the batch are the same. The outputs have their own shape
            (columns that are chosen by ``outputs``: (n, k)).
        batch_size: training examples in one pass, which bounds memory.

    Returns:
        :class:`Influence` with ``scores`` (n, m) in float64.

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> x, y = torch.eye(2), torch.ones(2, 1)
        >>> gs.measures.tracin(model, x, y, x[:1], y[:1], loss="half_squared").scores.tolist()
        [[1.0], [0.0]]
    """
    states = [None] if checkpoints is None else list(checkpoints)
    if not states or not all(state is None or isinstance(state, Mapping) for state in states):
        raise InputError(
            "checkpoints must be state dicts, one at least. Load files with torch.load; pass one as [state]."
        )
    rates = _rates(lr, len(states))
    n = count_examples(x)
    if len(check_tensor(y, "y")) != n or len(check_tensor(y_test, "y_test")) != count_examples(x_test):
        raise InputError(f"y must have one row for each example: got {len(y)} for {n} and {len(y_test)} test rows.")
    check_count(batch_size, "batch_size")
    total = torch.zeros(n, len(y_test), dtype=torch.float64, device=y.device)
    at = model if checkpoints is None else deepcopy(model)
    for state, rate in zip(states, rates, strict=True):
        if state is not None:
            at.load_state_dict(state)
        test = _loss_slopes(at, x_test, y_test, loss, outputs)
        for start in range(0, n, batch_size):
            some = slice(start, min(start + batch_size, n))
            part = slice_examples(x, n, some)
            train = _loss_slopes(at, part, y[some], loss, outputs)
            both = join_examples(part, x_test)
            if both is None:
                raise InputError("x and x_test must be of one kind: as many tensors, with equal shapes and dtypes.")
            grams = gradient_gram(at, both, torch.cat([train, test]), outputs=outputs)
            block = sum(gram[: len(train), len(train) :].double() for gram in grams.values())
            total[some] += rate * torch.as_tensor(block, device=total.device).to(total)
    check_finite(total, "the influence", "Look at the checkpoint where training diverged.")
    return Influence(total, len(states))


def _loss_slopes(model: nn.Module, x: ModelInput, y: Tensor, loss: object, outputs: Outputs) -> Tensor:
    """``∂ℓ_i/∂f_i`` of each example's own loss, (n, C)."""
    function = ModelFunction(model, x, outputs, False, None)
    with torch.no_grad(), function.context():
        f = function.at(list(function.parameters.values()), function.loss_input)
    f = f.detach().clone().requires_grad_()
    loss_of = loss_function(loss)
    with torch.enable_grad():
        value = torch.stack([loss_of(f[i : i + 1], y[i : i + 1]) for i in range(len(f))]).sum()
        (slope,) = torch.autograd.grad(value, f)
    return slope.reshape(len(f), -1)


def _rates(lr: float | Sequence[float], count: int) -> list[float]:
    rates = [*lr] if isinstance(lr, Sequence) else [lr] * count
    if len(rates) != count:
        raise InputError(f"lr must be one number, or one for each of the {count} checkpoints, got {lr!r}.")
    return [check_lr(rate) for rate in rates]
