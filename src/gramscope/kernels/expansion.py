"""A network as a function of its parameters: products with its Jacobian, and with derivatives of that."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Literal, TypedDict, TypeVar, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.axes import Axes
from gramscope.base.checks import check_choice, check_finite, check_number
from gramscope.base.errors import GramscopeError, InputError, UnsupportedError
from gramscope.base.nested import ModelInput
from gramscope.capture.backward_graph import is_leaf, nodes_below
from gramscope.capture.capturing import check_outputs
from gramscope.capture.linear_map import LinearMap
from gramscope.capture.model_function import ModelFunction
from gramscope.capture.network import Outputs, Precision, check_precision
from gramscope.capture.node_rules import operation
from gramscope.capture.side_effects import CopyOnWrite
from gramscope.kernels.learning_rates import Rates, flat_metric, rates_by_name
from gramscope.linalg import Diagonal, LinearOperator
from gramscope.ops.kinks import FixedSides, Side, Sides, Smoothed, TwiceDifferentiable
from gramscope.ops.operations import PROVEN

R = TypeVar("R")
Kink = Literal["autograd", "distributional"]
Parameters = tuple[Tensor, ...]
INFINITE = (
    "An operation of the model has an infinite one where it stands, as a root, a norm or a power below 2 has at zero; "
    "behind a ReLU or a clamp every unit that is off stands at zero. Keep it away from zero, or take a power of 2 or "
    "more."
)


class ExpansionOptions(TypedDict, total=False):
    """Options of all that differentiates a network twice.

    ``metric``: the learning-rate tensor λ; see :func:`flat_metric`. ``outputs``: columns of the flattened output, or a
    function of (model, x). ``frozen``: count frozen parameters too. ``precision``: "float64" runs a float64 copy.
    ``kink``: what σ'' of a ReLU means, "autograd" (zero) or "distributional" (a delta function, smoothed over
    ``bandwidth``).
    """

    metric: Rates
    outputs: Outputs
    frozen: bool
    precision: Precision
    kink: Kink
    bandwidth: float | None


def check_options(options: ExpansionOptions) -> None:
    """Raise where options are unknown, or cannot be meant together."""
    known = ExpansionOptions.__annotations__
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UnsupportedError(f"there is no option {unknown[0]!r}; there are {', '.join(known)}.")
    check_precision(options.get("precision"))
    kink, bandwidth = options.get("kink", "autograd"), options.get("bandwidth")
    check_choice(kink, "kink", ("autograd", "distributional"))
    if (kink == "distributional") != (bandwidth is not None):
        raise InputError(
            "bandwidth must be given with kink='distributional' and only there, got "
            f"kink={kink!r}, bandwidth={bandwidth!r}. It is the width over which a kink is smoothed; take about the "
            "change of a preactivation in one step."
        )
    if bandwidth is not None:
        check_number(bandwidth, "bandwidth", above=0.0)


class Expansion(LinearOperator):
    """``θ ↦ f(θ)`` of a model on fixed examples, at copies of its parameters; later training does not disturb it.

    As an operator it is the Jacobian J, and ``A.times(B)`` is ``A λ Bᵀ``.

    ``f`` holds the graph of the outputs. Products with J and Jᵀ are traversals of graphs that are built once: ``Jᵀc``
    is kept as a linear function of c. The second derivatives of a ``proven`` network need no check: it is made of
    operations whose formulas are tested (``gramscope.ops.operations.PROVEN``), and has no hooks.
    """

    path: tuple[Tensor, ...] = ()  # the directions along which J was differentiated

    def __init__(self, model: nn.Module, x: ModelInput, **options: Unpack[ExpansionOptions]) -> None:
        check_options(options)
        self.function = ModelFunction(
            model, x, options.get("outputs"), options.get("frozen", False), options.get("precision")
        )
        self.bandwidth = options.get("bandwidth")  # over which kinks are smoothed, if they are
        self.examples, self.parameters = self.function.examples, self.function.parameters
        self.held: list[Side] | None = None  # the sides on which kinks are kept, if they are
        self._open()
        check_outputs(self.f, self.parameters)
        rows = Axes(example=self.f.shape[0], output=self.f.shape[1])
        cols = Axes(parameter=sum(p.numel() for p in self.parameters.values()))
        super().__init__(rows, cols, dtype=torch.promote_types(self.f.dtype, torch.float32), device=self.f.device)
        self.metric = rates_by_name(options.get("metric"), self.parameters)

    def _open(self) -> None:
        self.leaves = self.fresh_leaves()
        with self.context() as written:
            self.f: Tensor = self.run(self.leaves)
        proven = (is_leaf(node) or operation(node) in PROVEN for node in nodes_below([self.f]))
        self.proven = not written.hooked and all(proven)
        self.linear_map = LinearMap([self.f], self.leaves, proven=self.proven)

    @cached_property
    def rates(self) -> Diagonal:
        """λ."""
        flat = flat_metric(self.metric, self.parameters)
        return Diagonal(flat.to(dtype=self.dtype, device=self.device), self.cols)

    @property
    def point(self) -> Parameters:
        return tuple(self.parameters.values())

    def run(self, parameters: Parameters) -> Tensor:
        """The outputs (n, C) at other parameters, everything else as it was."""
        kinks: AbstractContextManager[object] = nullcontext()
        if self.bandwidth is not None:
            kinks = Smoothed(self.bandwidth)
        elif self.held is not None:
            kinks = FixedSides(self.held)
        with TwiceDifferentiable(), kinks:
            return self.call(parameters)

    def call(self, parameters: Parameters) -> Tensor:
        """The same, whatever a kink means."""
        return self.function.at(parameters, self.function.evaluate)

    @contextmanager
    def context(self, forward: bool = True) -> Iterator[CopyOnWrite]:
        """The model as it was when this was made; an operation that cannot be differentiated is named."""
        with self.function.context(forward) as written, naming_operations():
            yield written

    def on_graph(self, work: Callable[[], R]) -> R:
        """A backward pass may call the model again: it is to meet the parameters that the graph was made of."""
        with self.context(forward=False):
            return self.function.at(self.leaves, work)

    # Products --------------------------------------------------------------------------------------

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "p k"]:
        """``Jᵀ w`` for each column w."""
        count = x.shape[1]
        if count == 0:
            return x.new_zeros(self.cols.size, 0)
        cotangents = x.T.reshape(count, *self.f.shape)
        return self._joined(self.on_graph(lambda: self.linear_map.vjp([cotangents])), count)

    def _matmat(self, x: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"]:
        """``J v`` for each column v."""
        count = x.shape[1]
        if count == 0:
            return x.new_zeros(self.rows.size, 0)
        tangents = self._split(x)
        (found,) = self.on_graph(lambda: self.linear_map.jvp(tangents, count))
        return found.reshape(count, -1).T.to(self.dtype)

    def dense(self, *, block: int = 256) -> Float[Tensor, "rows p"]:
        """The matrix, by products with Jᵀ: mostly there are fewer outputs than parameters."""
        return LinearOperator.dense(self.T, block=block).mT

    def times(self, other: "Expansion") -> LinearOperator:
        """``J λ J₂ᵀ`` on vectors over (example, output), flattened: no rows, no matrix."""
        return self @ self.rates @ other.T

    def step(self, vector: Float[Tensor, " rows"]) -> Float[Tensor, " p"]:
        """``λ Jᵀ w``: a step of size η moves θ along ``-η`` times this, w being ``∂loss/∂f``."""
        return self.rates @ (self.T @ vector)

    def directions(self) -> Float[Tensor, "p u"]:
        """``λ Jᵀ``: the step that each output alone would make."""
        return self.rates @ self.dense().mT

    def tangent(self, direction: Float[Tensor, " p"]) -> "Tangent":
        return Tangent(self, direction)

    # The same network elsewhere ---------------------------------------------------------------------

    def at(self, vector: Float[Tensor, " p"], keep_sides: bool = False) -> "Expansion":
        """The same network at ``θ + vector``; with ``keep_sides`` every kink stays on the side it has at θ."""
        moved = zip(self.parameters.items(), self.split(vector), strict=True)
        there = {name: p + part for (name, p), part in moved}
        other = self._with(parameters=there, held=self.sides().sides if keep_sides else None)
        check_finite(other.f, "the output after the step", "The step is too large for this network: lower lr.")
        return other

    def with_kinks(self) -> "Expansion":
        """The same network with its kinks as they are."""
        return self if self.bandwidth is None else self._with(bandwidth=None)

    def _with(self, **changes: object) -> "Expansion":
        other = object.__new__(Expansion)
        vars(other).update({**vars(self), "path": (), **changes})
        other._open()
        return other

    def split(self, vector: Float[Tensor, " p"]) -> Parameters:
        """A vector over all parameters as one tensor for each."""
        return tuple(part[0] for part in self._split(vector[:, None]))

    def _split(self, vectors: Float[Tensor, "p k"]) -> list[Tensor]:
        """Columns over all parameters as one tensor (k, *shape) for each parameter."""
        pieces = torch.split(vectors.T, [p.numel() for p in self.point], dim=1)
        # Copies: some operations (view_as_complex) take no tensor that begins at an odd place of another.
        pairs = zip(pieces, self.point, strict=True)
        return [piece.reshape(len(piece), *p.shape).to(p.dtype, copy=True) for piece, p in pairs]

    def _joined(self, parts: Sequence[Tensor | None], count: int) -> Float[Tensor, "p k"]:
        """The inverse for ``count`` columns; None stands for zeros."""
        pairs = zip(parts, self.point, strict=True)
        filled = [p.new_zeros(count, *p.shape) if part is None else part for part, p in pairs]
        return torch.cat([part.reshape(count, -1) for part in filled], dim=1).T.to(self.dtype)

    def fresh_leaves(self) -> Parameters:
        return tuple(p.detach().requires_grad_() for p in self.point)

    def sides(self) -> Sides:
        """The side of every kink here."""
        with self.context(), TwiceDifferentiable(), Sides() as watched:
            self.call(self.fresh_leaves())  # with gradients, which tell what depends on parameters
        watched.heights.clear()
        return watched


class Tangent(Expansion):
    """``J̇ = D_v J`` for one direction v, in the place of J, and ``g = J v`` itself, whose graph it is.

    Along a direction the Hessian of every output becomes one matrix J̇ (U, P), the Jacobian of ``θ ↦ J v``: no Hessian
    is formed. The tangent of a tangent is ``D_u D_v J``: third derivatives of the outputs.
    """

    def __init__(self, of: Expansion, direction: Float[Tensor, " p"]) -> None:
        vars(self).update(vars(of))
        self.path = (*of.path, direction)
        self.direction = tuple(part.detach().requires_grad_() for part in self.split(direction))
        self.g: Tensor
        (self.g,) = self.on_graph(lambda: of.linear_map.along(self.direction))
        self.linear_map = LinearMap([self.g], self.leaves)

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "p k"]:
        """``J̇ᵀ w`` for each column w."""
        return _finite(super()._adjoint_matmat(x))

    def _matmat(self, x: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"]:
        """``J̇ a``, the mixed second derivative along v and a, for each column a."""
        return _finite(super()._matmat(x))


def _finite(found: Tensor) -> Tensor:
    check_finite(found, "second derivatives of the outputs", INFINITE)
    return found


# What torch says where an operation cannot be differentiated: a line that names the operation.
NOT_DIFFERENTIABLE = re.compile(
    "once_differentiable|derivative for .* is not implemented|forward AD with .* does not support|"
    r"differentiable with respect to .*Backward|function \w+Backward\w* returned|[Bb]ackward\w* is not differentiable"
)


@contextmanager
def naming_operations() -> Iterator[None]:
    """An operation that cannot be differentiated often enough is named; there is no approximation in its place."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        said = str(error)
        if isinstance(error, GramscopeError) or not NOT_DIFFERENTIABLE.search(said):
            raise
        # Attention has another form, which is chosen around the forward pass.
        fused = " (run the model within torch.nn.attention.sdpa_kernel(SDPBackend.MATH))"
        raise UnsupportedError(
            "every operation of the model must have a second derivative, but torch can compute none of one of them "
            f"({said.splitlines()[0]}). Replace it by operations that do{fused if 'scaled_dot_product' in said else ''}"
            ", or write its backward pass with differentiable operations; nothing is approximated here."
        ) from error
