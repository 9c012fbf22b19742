"""Kink crossings of a real step, and the one-step change of the tangent kernel: predicted, measured, and by crossings.

A step of a piecewise-linear network changes its kernel in two ways. On fixed sides of all kinks the network is a
polynomial of its parameters and the dNTK (with σ'' = 0, as autograd has it) is its slope. And some kinks are crossed:
of n units about n·n^(-1/2), each with a share 1/n of the kernel, so O(n^(-1/2)) in all, which no derivative at θ has.
Comparing with the same step on the old sides separates the two exactly.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.agreement import ratio_of_norms
from gramscope.base.charts import agreement_chart
from gramscope.base.checks import check_lr
from gramscope.base.errors import InputError
from gramscope.base.memory_budget import Memory
from gramscope.base.nested import ModelInput
from gramscope.base.pyplot import Axes, Figure
from gramscope.base.results import Result, TableResult
from gramscope.kernels.dense import dense_kernel, dense_velocity
from gramscope.kernels.derivatives import derivative, in_forward_mode
from gramscope.kernels.expansion import Expansion, ExpansionOptions
from gramscope.kernels.kernel_velocity import Residual, read_step
from gramscope.ops.kinks import Sides, TwiceDifferentiable


@dataclass(frozen=True, repr=False)
class SiteCrossings(Result):
    """The kinks of one operation: how many there are, how many a step crossed upwards, downwards, or was to cross.

    ``expected`` counts the kinks that the first-order displacement of their preactivations crosses (None for maxima,
    where a crossing is a change of the largest entry and has no direction: ``up`` and ``down`` are zero there).
    """

    name: str
    kinks: int
    crossed: int
    up: int
    down: int
    expected: int | None

    @property
    def fraction(self) -> float:
        return self.crossed / self.kinks if self.kinks else 0.0


@dataclass(frozen=True, repr=False)
class KinkCrossings(TableResult, shown=("crossed", "kinks")):
    """Crossings of one step, operation by operation in the order in which the network runs them.

    ``nonsmooth_ops`` names operations that may have kinks or jumps which are not followed.
    """

    rows_from: ClassVar[str] = "sites"
    plotted: ClassVar[tuple[str, ...]] = ("kinks", "crossed")

    sites: tuple[SiteCrossings, ...]
    nonsmooth_ops: tuple[str, ...]

    @property
    def kinks(self) -> int:
        return sum(site.kinks for site in self.sites)

    @property
    def crossed(self) -> int:
        return sum(site.crossed for site in self.sites)

    @property
    def fraction(self) -> float:
        return self.crossed / self.kinks if self.kinks else 0.0

    def __str__(self) -> str:
        lines = [f"{self.crossed} of {self.kinks} kinks crossed ({100 * self.fraction:.3g} %)"]
        for site in self.sites:
            predicted = "" if site.expected is None else f", {site.expected} predicted"
            lines.append(f"  {site.name}: {site.crossed} of {site.kinks} (up {site.up}, down {site.down}{predicted})")
        if self.nonsmooth_ops:
            lines.append(f"  not followed: {', '.join(self.nonsmooth_ops)}")
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class NTKStep(Result, shown=("error", "lr", "predicted")):
    """One gradient step of size ``lr``: the change of kernel and outputs, predicted at θ and measured.

    ``predicted`` is ``lr·velocity`` (the dNTK), ``measured`` is ``K(θ - lr v) - K(θ)`` and ``crossing`` the part of it
    that is due to crossed kinks: ``measured - crossing`` is the change on fixed sides. Kernels are (n, C, n, C),
    outputs (n, C); ``outputs_linear`` is ``-lr K ε``, ``outputs_quadratic`` adds ``lr²·curvature``.
    """

    lr: float
    kernel: Tensor
    predicted: Tensor
    measured: Tensor
    crossing: Tensor
    outputs_linear: Tensor
    outputs_quadratic: Tensor
    outputs_measured: Tensor
    crossings: KinkCrossings

    @property
    def error(self) -> float:
        """``‖measured - predicted‖/‖measured‖``: what the dNTK alone leaves unexplained; 0 where nothing changed."""
        return ratio_of_norms(self.measured - self.predicted, self.measured)

    @property
    def error_with_crossings(self) -> float:
        """The same with the crossing part added to the prediction."""
        return ratio_of_norms(self.measured - self.predicted - self.crossing, self.measured)

    @property
    def relative_change(self) -> float:
        """``‖measured‖/‖K‖``: how far one step moves the kernel; near 0 in lazy training."""
        return ratio_of_norms(self.measured, self.kernel)

    @property
    def outputs_error(self) -> tuple[float, float]:
        """Relative error of the outputs' change to first and to second order."""
        first, second = (
            ratio_of_norms(self.outputs_measured - predicted, self.outputs_measured)
            for predicted in (self.outputs_linear, self.outputs_quadratic)
        )
        return first, second

    def __str__(self) -> str:
        first, second = self.outputs_error
        return (
            f"kernel moved by {self.relative_change:.3g} of its norm; the dNTK misses {self.error:.3g} of that, with "
            f"crossings {self.error_with_crossings:.3g}\n"
            f"outputs: first order misses {first:.3g}, second order {second:.3g}\n{self.crossings}"
        )

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """The change of each entry of the kernel, predicted by the dNTK and measured; a figure."""
        return agreement_chart(self.predicted, self.measured, f"Change of the kernel, lr {self.lr:g}", axes=axes)


@torch.inference_mode(False)
def kink_crossings(
    model: nn.Module, x: ModelInput, residual: Residual, lr: float, *, probe: ModelInput = None,
    **options: Unpack[ExpansionOptions],
) -> KinkCrossings:  # fmt: skip
    """How many kinks a gradient step crosses: signs of preactivations before and after ``θ ← θ - lr λ Jᵀ ε``.

    These kinks are followed, as operations, modules or inside recurrent networks: ReLU and its variants (leaky,
    parametric, 6, SELU, ELU with alpha, hard tanh, hard sigmoid and swish, soft shrinkage); clamps and absolute values;
    maxima and minima of two tensors, over axes (``max``, ``amax``) and in pools.

    ``nonsmooth_ops`` names what is not followed: comparisons, sorting, rounding, norms of order 1. A kink made
    of smooth operations (``sqrt(z * z)``) is invisible. Arguments are those of ``dntk_velocity``.

    Reference: PDLT (arXiv:2106.10165) section 11.3 treats σ'' = 0; see the page on the dNTK for what that leaves out.

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.ReLU())
        >>> _ = torch.nn.init.ones_(model[0].weight)
        >>> print(gs.kernels.kink_crossings(model, torch.ones(1, 1), torch.ones(1, 1), lr=1.5))  # 1 -> -0.5
        1 of 1 kinks crossed (100 %)
          relu: 1 of 1 (up 0, down 1, 1 predicted)
    """
    check_lr(lr)
    watched, direction = read_step(model, x, residual, probe, options)
    return _crossings(watched, watched.at(-lr * direction), direction, lr)


@torch.inference_mode(False)
def ntk_step(
    model: nn.Module, x: ModelInput, residual: Residual, lr: float, *, probe: ModelInput = None,
    memory: Memory = None, **options: Unpack[ExpansionOptions],
) -> NTKStep:  # fmt: skip
    """One step's change of the tangent kernel as the dNTK predicts it, as it is, and the part that kinks make.

    ``K(lr) - K = lr·velocity + crossing + O(lr²)``, with ``crossing = K(θ') - K(θ' on the sides of θ)``. The step is
    taken on copies. Arguments are those of ``dntk_velocity``; kink="distributional" predicts with σ'' smoothed, and the
    measured change is then that of the network as it is.

    Reference: PDLT (arXiv:2106.10165) equations (11.9), (11.10).

    Example:
        >>> import torch, gramscope as gs
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        >>> x, y = torch.randn(4, 2).double(), torch.randn(4, 1).double()
        >>> step = gs.kernels.ntk_step(model, x, lambda f: 0.5 * (f - y).square().sum(), lr=1e-3)
        >>> step.error < 0.05, step.crossings.kinks
        (True, 0)
    """
    check_lr(lr)
    watched, direction = read_step(model, x, residual, probe, options)
    tangent = watched.tangent(direction)
    velocity = dense_velocity(tangent, memory)
    linear = -lr * (watched @ direction).reshape(watched.rows.shape)
    curvature = 0.5 * derivative(tangent, direction)
    real = watched.with_kinks()
    after = real.at(-lr * direction)
    before, kernel_after = dense_kernel(real, memory), dense_kernel(after, memory)
    crossings = _crossings(real, after, direction, lr)
    crossing = torch.zeros_like(kernel_after)
    if crossings.crossed:
        crossing = kernel_after - dense_kernel(real.at(-lr * direction, keep_sides=True), memory)
    shape = (*watched.rows.shape, *watched.rows.shape)
    return NTKStep(
        lr=lr,
        kernel=before.reshape(shape),
        predicted=(-lr * velocity).reshape(shape),
        measured=(kernel_after - before).reshape(shape),
        crossing=crossing.reshape(shape),
        outputs_linear=linear,
        outputs_quadratic=linear + lr**2 * curvature,
        outputs_measured=(after.f - real.f).detach().to(watched.dtype),
        crossings=crossings,
    )


def _crossings(before: Expansion, after: Expansion, direction: Float[Tensor, " p"], lr: float) -> KinkCrossings:
    old, new = before.sides(), after.sides()
    if [(s.name, s.place.shape) for s in old.sides] != [(s.name, s.place.shape) for s in new.sides]:
        raise InputError(
            "the network must run the same operations before and after the step, but its control flow depends on its "
            "parameters. Crossings cannot be counted."
        )
    predicted: Sequence[Tensor | None] = _predicted_sides(before, direction, lr) or [None] * len(old.sides)
    names, sites = Counter(side.name for side in old.sides), []
    uses: Counter[str] = Counter()
    for a, b, estimated in zip(old.sides, new.sides, predicted, strict=True):
        uses[a.name] += 1
        changed, binary = a.place != b.place, a.place.dtype == torch.bool
        sites.append(
            SiteCrossings(
                name=a.name if names[a.name] == 1 else f"{a.name} {uses[a.name]}",
                kinks=a.place.numel(),
                crossed=int(changed.sum()),
                up=int((changed & b.place).sum()) if binary else 0,
                down=int((changed & a.place).sum()) if binary else 0,
                expected=int((estimated != a.place).sum()) if binary and estimated is not None else None,
            )
        )
    return KinkCrossings(tuple(sites), tuple(dict.fromkeys(old.nonsmooth_ops)))


def _predicted_sides(at: Expansion, direction: Float[Tensor, " p"], lr: float) -> list[Tensor] | None:
    """Sides after the first-order displacement ``z - lr ż``; None where forward mode is not to be had."""

    def heights(*parameters: Tensor) -> tuple[Tensor, ...]:
        with TwiceDifferentiable(), Sides() as watched:
            at.call(parameters)
        return tuple(watched.heights)

    both: Any = in_forward_mode(at, lambda: torch.func.jvp(heights, at.point, at.split(direction)))
    return None if both is None else [z - lr * slope > 0 for z, slope in zip(*both, strict=True)]
