"""``explain_step``: what one optimiser step does, by layer and by example, and whether theory predicted it."""

import warnings

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from gramscope.base.arithmetic import autocast_in_force, exact_arithmetic, users_autocast
from gramscope.base.checks import check_finite, shape_or_type
from gramscope.base.complex_numbers import with_precision_of
from gramscope.base.errors import CoupledExamplesError, GramscopeError, InputError
from gramscope.base.nested import ModelInput
from gramscope.base.rng import generator, rademacher
from gramscope.base.streams import streams_put_back
from gramscope.base.user_warnings import RandomOutputsWarning
from gramscope.capture.network import (
    Outputs,
    Precision,
    check_model,
    copied,
    count_examples,
    loss_input,
    named_parameters,
    prepare_input,
    unwrap_with_input,
)
from gramscope.capture.side_effects import checked_gradients, plain_execution, untouched
from gramscope.hierarchy.explained import ExplainedStep, Flips
from gramscope.hierarchy.losses import Loss, Targets, loss_function
from gramscope.hierarchy.optimizer_step import (
    Memo,
    OptimizerLike,
    StepParts,
    autocast_uncached,
    dense,
    inner_optimizer,
    prepare,
    take,
    to_float64,
)
from gramscope.kernels.gradients import gradient_gram
from gramscope.kernels.jacobian import linearize
from gramscope.ops.kinks import FixedSides, Sides

TF32_ROUNDING = 2.0**-10
_NOT_BY_EXAMPLE = "Shares by example were not asked for (by_example=False)."


def explain_step(
    model: nn.Module,
    x: ModelInput,
    y: Targets,
    *,
    lr: float | None = None,
    loss: str | Loss = "mse",
    optimizer: OptimizerLike = None,
    outputs: Outputs = None,
    precision: Precision = None,
    by_example: bool = True,
) -> ExplainedStep:
    """What would this optimiser step do? Shares by layer and example, predicted against true change, mask flips.

    The step is taken on a copy; model and optimiser are left as they are. To first order ``Δf = J Δθ = -J D Jᵀ e +
    ...`` with ``e = ∂loss/∂f`` and D the step's own preconditioner; the true change has two more parts, exactly: what
    a finite step adds while every ReLU stays on its side (second order), and what the ReLUs that crossed zero add.

    Args:
        model: any module, in the mode in which it is trained.
        x: examples; a tensor, a tuple of positional or a dict of keyword arguments.
        y: targets, of the shape that the loss asks for beside the outputs that were chosen.
        lr: learning rate; may be left out with an optimiser of your own (given, it overrides the optimiser's).
        loss: "mse" (torch's mean squared error), "half_squared" (``½ Σ (f - y)²``, the papers'), "cross_entropy"
            (torch's; outputs (n, T, V) with labels (n, T) count as n · T tokens, outputs (n, V, T) as torch has them;
            where T = V, write the loss out), or any function (output, y) -> number.
        optimizer: a torch optimiser in use (copied with its momenta), a class or function that makes one, or "sgd"
            (plain, the default), "adam", "adamw". As after ``zero_grad()``, a parameter that gets no gradient has None
            and is left alone.
        outputs: as for ``gs.capture``; the loss sees these outputs alone, (n, k) where columns are chosen.
        precision: as for ``gs.capture``; precision="float64" rehearses in float64.
        by_example: False spares ``influence`` and what follows from it, about a third of the time.

    Reference: arXiv:2606.09744, residual dynamics ``Δe = -η Σ_ℓ K^ℓ e``.

    Example:
        >>> import torch, gramscope as gs
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).double()
        >>> step = gs.explain_step(net, torch.ones(2, 3).double(), torch.zeros(2, 1).double(), lr=0.01)
        >>> sorted(step.shares)
        ['0', '2']
        >>> bool(step.measured_loss_change < 0)
        True
    """
    model, x = unwrap_with_input(model, x)
    n = count_examples(x)
    ignored = _not_followed(model, optimizer)
    with warnings.catch_warnings(), streams_put_back(), torch.inference_mode(False), autocast_uncached():
        # A step is taken in training mode, with one draw of the dropout masks for all its parts.
        warnings.simplefilter("ignore", RandomOutputsWarning)
        rehearsal = _Rehearsal(model, x, y, n, loss_function(loss), outputs, precision)
        return rehearsal.explain(optimizer, lr, ignored, by_example)


class _Rehearsal:
    """The step on copies: ``before`` stays at θ, ``after`` is stepped."""

    def __init__(
        self, model: nn.Module, x: ModelInput, y: Targets, n: int, loss: Loss, outputs: Outputs, precision: Precision
    ) -> None:
        self.n, self.loss, self.outputs, self.precision = n, loss, outputs, precision
        self.memo: Memo = {}
        self.before, self.after = copied(model), copied(model, self.memo)
        dtype = None
        if precision == "float64":
            dtype = torch.float64
            with torch.no_grad():
                for copy in (self.before, self.after):
                    copy._apply(lambda tensor: with_precision_of(tensor, torch.float64))
        self.x = prepare_input(x, dtype)
        self.y = prepare_input(y, None)
        with untouched(model):  # the same random streams for every pass: dropout draws the same masks
            self.parameters = check_model(self.after, self.x, frozen=False)

    def explain(self, optimizer: OptimizerLike, lr: float | None, ignored: str, by_example: bool) -> ExplainedStep:
        twin = prepare(optimizer, lr, self.parameters, self.memo)
        if self.precision == "float64":
            to_float64(twin)
        sides, crossed = Sides(), Sides()
        value, residual, found, start = self._gradients(sides)
        sizes = {name: float(p.detach().norm()) for name, p in self.parameters.items()}
        parts = take(twin, self.parameters, found, self._closure)
        gradients = {name: dense(found[name], p) for name, p in self.parameters.items()}
        end = self._run(self.after, crossed)
        check_finite(end, "the output after the step", "The step blew the network up: lower the learning rate.")
        held, unsplit = self._held(sides) if sides.sides else (end - start, "")  # without kinks there is one part
        influence, coupled = self._influence(residual, parts) if by_example else (None, _NOT_BY_EXAMPLE)
        predicted, slow = self._predict(parts)
        rounding = self._rounding(start)
        return ExplainedStep(
            outputs_before=start,
            predicted=predicted,
            held=held,
            measured=end - start,
            rounding=rounding,
            residual=residual,
            loss_before=float(value),
            loss_after=self._value(end),
            parameter_decrease={name: -float((gradients[name] * moved).sum()) for name, moved in parts.change.items()},
            sizes={name: (float(moved.norm()), sizes[name]) for name, moved in parts.change.items()},
            parts=parts,
            gradients=gradients,
            influence=influence,
            flips=_flips(sides, crossed) if held is not None else (),
            notes=tuple(n for n in (ignored, unsplit, coupled, slow, _nonsmooth(sides.nonsmooth_ops)) if n),
        )

    def _run(self, model: nn.Module, ramps: Sides | FixedSides) -> Float[Tensor, "n C"]:
        """The outputs, with the sides of all kinks noted or held."""
        # Gradients stay on: outputs may be derivatives themselves (a PDE residual).
        with untouched(model), exact_arithmetic(self.precision == "tf32"), plain_execution(), ramps:
            return self._outputs(model).detach().reshape(self.n, -1)

    def _outputs(self, model: nn.Module) -> Tensor:
        return loss_input(model, prepare_input(self.x), self.n, self.outputs)

    def _gradients(
        self, sides: Sides
    ) -> tuple[Tensor, Float[Tensor, "n C"], dict[str, Tensor | None], Float[Tensor, "n C"]]:
        """The loss, its gradients at the outputs and by parameter (None where it does not depend on it, as after
        ``backward()``), and the outputs, with the sides of all kinks noted."""
        model = self.after
        with untouched(model), exact_arithmetic(self.precision == "tf32"), plain_execution():
            with sides:
                f = self._outputs(model)
            self._shape = f.shape
            if not f.requires_grad:
                raise InputError("the model's output must depend on its parameters, but it carries no gradient.")
            value = self._checked_loss(f)
            residual, *found = checked_gradients(value, (f, *self.parameters.values()))
        sides.heights.clear()  # they hold the graph
        if residual is None:
            raise _independent_loss()
        check_finite(residual, "the loss's gradient at the outputs", "The loss is: look for a root or a norm at zero.")
        # A model may cast its parameters in the forward pass (routers of experts, to float32); they are put back.
        gradients: dict[str, Tensor | None] = {
            name: None if gradient is None else gradient.to(parameter.dtype)
            for (name, parameter), gradient in zip(self.parameters.items(), found, strict=True)
        }
        return value.detach(), residual.detach().reshape(self.n, -1), gradients, f.detach().reshape(self.n, -1)

    def _checked_loss(self, f: Tensor) -> Tensor:
        with users_autocast():
            value = self.loss(f, self.y)
        if not isinstance(value, Tensor) or value.dim() != 0:
            got = shape_or_type(value)
            raise InputError(f"loss must return one number for (output, y), got {got}. Average or sum over examples.")
        check_finite(value.detach(), "the loss", "Look for NaN in x or y.")
        if not value.requires_grad:
            raise _independent_loss()
        return value

    def _value(self, f: Float[Tensor, "n C"]) -> float:
        with torch.no_grad():
            return float(self.loss(f.reshape(self._shape), self.y))

    def _closure(self) -> Tensor:
        value, _, gradients, _ = self._gradients(Sides())
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name]
        return value

    def _predict(self, parts: StepParts) -> tuple[Float[Tensor, "n C"], str]:
        """``J Δθ``, matrix-free, and the slow path it took, if it took one."""
        linear = linearize(self.before, self.x, outputs=self.outputs)
        return linear.change(parts.change), linear.jacobian.slow

    def _rounding(self, start: Float[Tensor, "n C"]) -> float:
        """How far rounding may move the outputs' change, in their norm.

        Measured: every parameter is moved by one rounding, up or down at random, and the outputs by as much as the
        roundings inside the forward pass move them (the zoo of the tests, float32 and bfloat16: 0.4 to 25 times,
        median 2 to 4, where the outputs' own rounding alone may be short by six digits). Twice that, to be safe.
        """
        eps, rng = self._unit_roundoff(start), generator(0)
        with torch.no_grad():
            for parameter in self.before.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    signs = rademacher(parameter.numel(), 1, rng=rng, dtype=torch.float32, device="cpu")
                    parameter.mul_((1 + eps * signs.double().reshape(parameter.shape)).to(parameter))
        moved = self._run(self.before, Sides())
        return 2 * max(float((moved - start).double().norm()), eps * float(start.double().norm()))

    def _unit_roundoff(self, start: Tensor) -> float:
        """That of the coarsest of the dtypes in which the network computes."""
        dtypes = {start.dtype, *(p.dtype for p in self.before.parameters() if p.is_floating_point())}
        dtypes |= {dtype for device, dtype in autocast_in_force().items() if device == start.device.type}
        return max(TF32_ROUNDING if self.precision == "tf32" else 0.0, *(torch.finfo(d).eps for d in dtypes))

    def _held(self, sides: Sides) -> tuple[Float[Tensor, "n C"] | None, str]:
        """The change of the outputs with every kink on the side it had before, and why not where that fails."""
        try:
            moved = self._run(self.after, FixedSides(sides.sides))
            return moved - self._run(self.before, FixedSides(sides.sides)), ""
        except GramscopeError as error:
            return None, f"The error was not split: {error}"

    def _influence(self, residual: Tensor, parts: StepParts) -> tuple[Float[Tensor, "n n"] | None, str]:
        """``I_{μν} = -⟨∂ℓ_μ, D ∂ℓ_ν⟩``."""
        if not bool(residual.any()):
            return residual.new_zeros(self.n, self.n), ""
        try:
            grams = gradient_gram(
                self.before, self.x, residual, metric=parts.preconditioner, outputs=self.outputs,
                precision="tf32" if self.precision == "tf32" else None,
            )  # fmt: skip
        except CoupledExamplesError as error:
            return None, f"Shares by example are not defined here: {error}"
        return -torch.stack(list(grams.values())).sum(0), ""


def _independent_loss() -> InputError:
    return InputError(
        "loss must depend on the outputs through differentiable operations, but its value carries no gradient to them. "
        "Write it in torch operations on its first argument; item(), detach() and numpy break the link."
    )


def _flips(before: Sides, after: Sides) -> tuple[Flips, ...]:
    """One entry for each use of an operation with kinks, in the order of the forward pass."""
    uses: dict[str, int] = {}
    found = []
    for then, now in zip(before.sides, after.sides, strict=True):
        uses[then.name] = uses.get(then.name, 0) + 1
        flipped = int((then.place != now.place).sum())
        found.append(Flips(f"{then.name} {uses[then.name]}", flipped, then.place.numel()))
    return tuple(found)


def _not_followed(model: nn.Module, optimizer: OptimizerLike) -> str:
    """What the user's own step does and the rehearsal does not: hooks on parameters and on the optimiser's step."""
    optimizer = inner_optimizer(optimizer) or optimizer
    listed = [f"gradient hooks of parameter {name!r}" for name, p in named_parameters(model).items() if _has_hooks(p)]
    if isinstance(optimizer, Optimizer) and (
        optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    ):
        listed.append("step hooks of the optimiser")
    if not listed:
        return ""
    shown = [*listed[:5], f"{len(listed) - 5} more"] if len(listed) > 6 else listed
    return f"Not followed in this rehearsal: {', '.join(shown)}. The step you take may differ."


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _nonsmooth(names: list[str]) -> str:
    if not names:
        return ""
    listed = ", ".join(dict.fromkeys(names))
    return f"Crossings of {listed} are not followed; they count as second order."
