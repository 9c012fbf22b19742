"""The average gradient outer product of a network, at its input and at the input of every weight."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.axes import Axes
from gramscope.base.checks import check_count, check_finite
from gramscope.base.errors import CoupledExamplesError, InputError
from gramscope.base.nested import ModelInput, map_tensors, tensors_in
from gramscope.base.progress_bar import progress
from gramscope.capture import capture
from gramscope.capture.backward_graph import batched_gradients
from gramscope.capture.linear_map import LinearMap
from gramscope.capture.network import (
    Outputs,
    Precision,
    at_precision,
    check_precision,
    count_examples,
    evaluate,
    named_parameters,
    slice_examples,
    unwrap,
)
from gramscope.capture.owners import exponents, power_of_two, regular_owner
from gramscope.capture.side_effects import plain_execution, untouched
from gramscope.linalg import LinearOperator
from gramscope.measures.by_weight import ByWeight
from gramscope.measures.feature_learning_equation import private_copy
from gramscope.measures.measure import Measure, S, V
from gramscope.measures.weight_matrices import BLOCK_ENTRIES, WeightForm, check_same_weights, weight_forms


def agop(
    model: nn.Module,
    x: ModelInput,
    *,
    outputs: Outputs = None,
    batch_size: int | None = None,
    precision: Precision = None,
) -> Float[Tensor, "d d"]:
    """The average gradient outer product at the network's input, ``(1/n) Σ_μ J_μᵀ J_μ``, ``J_μ = ∂f_μ/∂x_μ`` (C, d).

    Its top eigenvectors are the input directions to which the outputs react most. Jacobians are made a few outputs at a
    time and added up in float64; only (d, d) is kept.

    Args:
        model: any module whose examples do not mix; it is left as it was.
        x: examples first; the first floating tensor is what the outputs are differentiated by, flattened to d entries.
        outputs: columns of the flattened output, or a function of (model, x), as for :func:`gramscope.capture`.
        batch_size: examples taken at once; all if None.
        precision: "float64" or "float32" runs a copy in that dtype; "tf32" allows TF32 on the GPU.

    Reference: arXiv:2605.06258, AGOP; Radhakrishnan et al., Science 383 (2024) 1461.

    Example:
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> W = model.weight.detach().double()
        >>> torch.allclose(agop(model, torch.randn(5, 3)), W.T @ W)
        True
    """
    return _in_batches(AGOP(model, outputs=outputs, precision=precision), x, batch_size)


def layer_agop(
    model: nn.Module,
    x: ModelInput,
    weights: str | Sequence[str] = "*",
    *,
    outputs: Outputs = None,
    batch_size: int | None = None,
    precision: Precision = None,
) -> "LayerAGOPs":
    """The average gradient outer product at the input of every weight, ``Wᵀ K W``, K the covariance of its signals.

    Exact, and cheaper than Jacobians: ``K = (1/n) Σ_μ s_μ s_μᵀ`` with ``s = ∂f/∂u`` at the layer's output ``u = W h``.
    If several weights take one input, it is the part through this weight. For a convolution h is the unfolded patch
    and K sums over positions. Arguments are those of :func:`agop`; ``weights`` is a glob, or globs, of parameter names.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x = torch.randn(5, 3)
        >>> found = layer_agop(model, x)
        >>> {name: tuple(matrix.shape) for name, matrix in found.items()}
        {'0.weight': (1, 3, 3), '2.weight': (1, 4, 4)}
        >>> torch.allclose(found["0.weight"][0], agop(model, x), atol=1e-6)
        True
    """
    return _in_batches(LayerAGOP(model, weights, outputs=outputs, precision=precision), x, batch_size)


@dataclass(frozen=True, eq=False)
class GradientSum:
    """``Σ_μ J_μᵀ J_μ`` over n examples."""

    n: int
    total: Float[Tensor, "d d"]

    def merged(self, other: "GradientSum") -> "GradientSum":
        if self.total.shape != other.total.shape:
            raise InputError(f"inputs must have one size, got {len(self.total)} and {len(other.total)} entries.")
        return GradientSum(self.n + other.n, self.total + other.total.to(self.total))


class AGOP(Measure[GradientSum, Tensor]):
    """:func:`agop` batch by batch: ``update(x)`` takes a batch of inputs.

    >>> model, x = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh()), torch.randn(6, 3)
    >>> torch.allclose(AGOP(model).over([x[:1], x[1:]]), agop(model, x))
    True
    """

    def __init__(self, model: nn.Module, *, outputs: Outputs = None, precision: Precision = None) -> None:
        check_precision(precision)
        self.model, self.outputs, self.precision = model, outputs, precision

    def update(self, x: ModelInput) -> GradientSum:
        with _outputs_of_leaf(self.model, x, self.outputs, self.precision) as (f, leaf):
            n, width = f.shape
            _check_separate(f, leaf)
            d = leaf.numel() // n
            total = torch.zeros(d, d, dtype=torch.float64, device=leaf.device)
            some = max(1, BLOCK_ENTRIES // max(1, n * (d + width)))
            for columns in torch.arange(width, device=f.device).split(some):
                one_hot = f.new_zeros(len(columns), n, width)
                one_hot[torch.arange(len(columns), device=f.device), :, columns] = 1
                (gradients,) = batched_gradients([f], [leaf], [one_hot])
                if gradients is not None:
                    rows = gradients.detach().double().reshape(-1, d)
                    total += rows.mT @ rows
            check_finite(total, "the gradient outer product", "Look for an infinite slope (√ at 0), or for overflow.")
        return GradientSum(n, total)

    def compute(self, state: GradientSum) -> Float[Tensor, "d d"]:
        return state.total / state.n


@dataclass(frozen=True, eq=False)
class SignalSums:
    """Sums of ``s sᵀ`` (g, o, o) over n examples, by weight, with the weights (g, o, i) that they belong to."""

    n: int
    totals: dict[str, Tensor]
    weights: dict[str, Tensor]
    left_out: dict[str, str]

    def merged(self, other: "SignalSums") -> "SignalSums":
        check_same_weights(self.weights, other.weights)
        totals = {name: total + other.totals[name].to(total) for name, total in self.totals.items()}
        return SignalSums(self.n + other.n, totals, self.weights, self.left_out)


@dataclass(frozen=True, eq=False, repr=False)
class LayerAGOPs(ByWeight[Tensor]):
    """AGOP (g, i, i) by weight name; ``left_out`` names every other parameter and says why.

    ``signal_covariances`` are K (g, o, o), ``grams`` are WᵀW (g, i, i).
    """

    grams: dict[str, Tensor]
    signal_covariances: dict[str, Tensor]


class LayerAGOP(Measure[SignalSums, LayerAGOPs]):
    """:func:`layer_agop` batch by batch: ``update(x)`` takes a batch of inputs.

    >>> model, x = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh()), torch.randn(6, 3)
    >>> torch.allclose(LayerAGOP(model).over([x[:1], x[1:]])["0.weight"], layer_agop(model, x)["0.weight"])
    True
    """

    def __init__(
        self,
        model: nn.Module,
        weights: str | Sequence[str] = "*",
        *,
        outputs: Outputs = None,
        precision: Precision = None,
    ) -> None:
        check_precision(precision)
        self.model, self.globs, self.outputs, self.precision = model, weights, outputs, precision

    def update(self, x: ModelInput) -> SignalSums:
        # A frozen weight passes gradients on like any other.
        snapshot = capture(self.model, x, outputs=self.outputs, frozen=True, precision=self.precision)
        forms = weight_forms(snapshot).chosen(self.globs)
        parameters = named_parameters(unwrap(self.model))
        totals = {name: _signal_sum(use) for name, use in forms.items()}
        weights = {name: use.form.matrices(parameters[use.parameter]) for name, use in forms.items()}
        return SignalSums(snapshot.examples, totals, weights, forms.left_out)

    def compute(self, state: SignalSums) -> LayerAGOPs:
        covariances = {name: total / state.n for name, total in state.totals.items()}
        grams = {name: w.mT @ w for name, w in state.weights.items()}
        matrices = {name: w.mT @ covariances[name] @ w for name, w in state.weights.items()}
        return LayerAGOPs(matrices, state.left_out, grams, covariances)


def _signal_sum(use: WeightForm) -> Float[Tensor, "g o o"]:
    total: Tensor | None = None
    for _, signals in use.rows():
        flat = signals.flatten(1, 2)
        total = flat.mT @ flat if total is None else total + flat.mT @ flat
    assert total is not None
    return total


class AGOPOperator(LinearOperator):
    """``v ↦ (1/n) Σ_μ J_μᵀ J_μ v`` by two passes through the network's graph; no (d, d) matrix is formed."""

    def __init__(self, f: Float[Tensor, "n C"], leaf: Tensor) -> None:
        self._map, self._examples = LinearMap([f], [leaf]), len(f)
        axes = Axes(input=leaf.numel() // len(f))
        dtype = torch.promote_types(f.dtype, torch.float32)
        super().__init__(axes, axes, dtype=dtype, device=f.device, symmetric=True)

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        n, count, shape = self._examples, x.shape[1], self._map.inputs[0].shape
        if count == 0:
            return x
        tangents = x.T[:, None].expand(count, n, -1).reshape(count, *shape)
        (back,) = self._map.vjp(self._map.jvp([tangents], count))
        if back is None:  # the outputs do not depend on the input
            return torch.zeros_like(x)
        return back.reshape(count, n, -1).sum(1).T.to(self.dtype) / n


def agop_operator(
    model: nn.Module, x: ModelInput, *, outputs: Outputs = None, precision: Precision = None
) -> AGOPOperator:
    """The AGOP at the input as an operator, for inputs too large for a (d, d) matrix; arguments as for :func:`agop`.

    The model is copied: later training does not change the operator.

    Example:
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh()), torch.randn(6, 3)
        >>> torch.allclose(agop_operator(model, x).dense().double(), agop(model, x), atol=1e-6)
        True
    """
    check_precision(precision)
    with _outputs_of_leaf(*private_copy(model, x, precision), outputs, precision) as (f, leaf):
        _check_separate(f, leaf)
        return AGOPOperator(f, leaf)


@contextmanager
def _outputs_of_leaf(
    model: nn.Module, x: ModelInput, outputs: Outputs, precision: Precision
) -> Iterator[tuple[Float[Tensor, "n C"], Tensor]]:
    """Outputs with a graph to the first floating tensor of x; the model is left as it was."""
    n = count_examples(x)
    model, x = at_precision(model, x, precision)
    leaf = next((t for t in tensors_in(x) if t.is_floating_point() and t.shape[:1] == (n,)), None)
    if leaf is None:
        raise InputError(
            "x must hold a floating tensor to differentiate by, but it has only integers (token ids?). "
            "Take the AGOP at the layers' inputs instead: layer_agop(model, x)."
        )
    with untouched(model), exact_arithmetic(tf32=precision == "tf32"), plain_execution():
        leaf.requires_grad_()
        # A copy, not a view: a first layer may work in place, which no leaf allows.
        f = evaluate(model, map_tensors(lambda t: t.clone() if t is leaf else t, x), n, outputs)
        check_finite(f.detach(), "the model's output", "Look for NaN in x or the parameters, or for overflow.")
        if not f.requires_grad:
            raise InputError("the model's output must depend on x, but it carries no gradient. Is it detached?")
        yield f, leaf


def _check_separate(f: Float[Tensor, "n C"], leaf: Tensor) -> None:
    """Raise where the gradient of example μ's outputs reaches another example: scaled rows must come back scaled."""
    n = len(f)
    if n == 1:
        return
    mixture = torch.randn(f.shape[1], generator=torch.Generator().manual_seed(0), device="cpu").to(f).expand(n, -1)
    weights = power_of_two(exponents(n, f.dtype, f.device)[0], f.dtype)
    plain, scaled = (
        torch.autograd.grad(f, leaf, cotangent, retain_graph=True, allow_unused=True)[0]
        for cotangent in (mixture, weights[:, None] * mixture)
    )
    if plain is None or scaled is None:
        return
    owner = regular_owner(plain, scaled, weights)
    if owner is None or owner.axis != 0:
        raise CoupledExamplesError(
            "each example's output must depend on that example alone, but gradients at the input mix the examples. Put "
            "layers that mix a batch (batch norm) into eval mode: model.eval()."
        )


def _in_batches(measure: Measure[S, V], x: ModelInput, batch_size: int | None) -> V:
    n = count_examples(x)
    size = n if batch_size is None else check_count(batch_size, "batch_size")
    with progress(type(measure).__name__, -(-n // size)) as step:

        def parts() -> Iterator[tuple[ModelInput]]:
            for start in range(0, n, size):
                yield (slice_examples(x, n, slice(start, start + size)),)
                step()

        return measure.over(parts())
