"""What the watcher can read off a measurement, by name; scalars and arrays carry the names of the store."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gramscope import measures, spectra
from gramscope.base.effective_rank import ratio_of_traces
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.base.shares import shares
from gramscope.capture.network import count_examples, evaluate, named_parameters
from gramscope.hierarchy.explain import explain_step
from gramscope.hierarchy.explained import ExplainedStep
from gramscope.kernels.crossings import ntk_step
from gramscope.measures.eigenfunction_curves import Curves
from gramscope.measures.gram_tracker import gram_change_sizes
from gramscope.measures.lazy_or_rich import richness_and_similarity
from gramscope.measures.linear_targets import target_linearities
from gramscope.measures.weight_matrices import WeightForm
from gramscope.propagators.prediction import predict_states
from gramscope.record.condensed import passes_of_kernel, rehearses_losses
from gramscope.record.measurement import Measurement
from gramscope.record.subject import Subject, evaluating, layer_of, weight_keys
from gramscope.spectra.layouts import Layout
from gramscope.spectra.shuffled import shuffled_null_checked
from gramscope.spectra.weights import weights_of
from gramscope.store.arrays import Array
from gramscope.store.names import FINGERPRINT

_NO_START = (
    "not defined: the first measurement of this run is not in its folder, or was of another probe. A new run has it."
)
_NO_LAST = (
    "not defined: no linear layer makes one row of outputs for each example. Choose such outputs with outputs=, "
    "or leave richness out of measures=."
)
_NO_CHANGE = "not defined: the step changed nothing that the model's precision shows."
SAMPLE = 2000  # entries of predicted and true changes that are kept


@dataclass
class MeasuredValues:
    """What one measure gives at one step: numbers, arrays, and in ``missing`` the names of what it lacks, and why.

    >>> MeasuredValues({"share/0": 0.25}).scalars
    {'share/0': 0.25}
    """

    scalars: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, object] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WatchedMeasure:
    """A measure of ``gs.watch``: the function that takes it, and what a report says. See :func:`watched_measure`.

    ``needs_targets``: only for a probe with y. ``by_default``: taken, too, where measures are chosen by a glob.
    ``guess`` estimates the seconds of an expensive measure that was never taken, from the subject and the seconds of
    one shared pass; None for a cheap one, which is tried without asking. ``ready``: can it be taken of this subject
    yet? ``weights_only``: the model is not called for it. ``passes``: how many times as long as a shared pass it takes
    at least, where that is known of a subject; else 0.

    >>> WATCHED_MEASURES["loss"].how_to_read
    'Loss and accuracy on the probe, in evaluation mode.'
    """

    name: str
    take: Callable[[Measurement], MeasuredValues]
    needs_targets: bool
    how_to_read: str
    by_default: bool = True
    guess: Callable[[Subject, float], float] | None = None
    ready: Callable[[Subject], bool] = lambda subject: True
    weights_only: bool = False
    passes: Callable[[Subject], int] = lambda subject: 0


WATCHED_MEASURES: dict[str, WatchedMeasure] = {}


def seconds(passes: int = 0, eigenvalues: int = 0) -> Callable[[Subject, float], float]:
    """A guess for a measure: so many shared passes, and so often the eigenvalues of every weight.

    Of an (a, b) matrix with a ≤ b these take 10 a³ operations, and ``W Wᵀ`` before them 2 a² b, ten billion a second.
    """

    def guess(subject: Subject, one_pass: float) -> float:
        shapes = [p.shape for p in subject.model.parameters() if p.dim() >= 2] if eigenvalues else []
        work = sum(10 * min(s[:2]) ** 3 * math.prod(s[2:]) + 2 * min(s[:2]) * s.numel() for s in shapes)
        return passes * one_pass + eigenvalues * work / 1e10

    return guess


def watched_measure(
    name: str,
    how_to_read: str,
    needs_targets: bool = True,
    by_default: bool = True,
    guess: Callable[[Subject, float], float] | None = None,
    ready: Callable[[Subject], bool] = lambda subject: True,
    weights_only: bool = False,
    passes: Callable[[Subject], int] = lambda subject: 0,
) -> Callable[[Callable[[Measurement], MeasuredValues]], Callable[[Measurement], MeasuredValues]]:
    """Register a measure of ``gs.watch``: a decorator of a function of the shared pass.

    >>> @watched_measure("bias_norm", "The norm of all biases together.", needs_targets=False, by_default=False)
    ... def measure_bias_norm(measurement):
    ...     biases = [p for name, p in measurement.subject.model.named_parameters() if name.endswith("bias")]
    ...     return MeasuredValues({"bias_norm": sum(float(b.detach().square().sum()) for b in biases) ** 0.5})
    >>> WATCHED_MEASURES.pop("bias_norm").how_to_read  # gs.watch(..., measures=["bias_norm"]) takes it; removed here
    'The norm of all biases together.'
    """

    def register(take: Callable[[Measurement], MeasuredValues]) -> Callable[[Measurement], MeasuredValues]:
        WATCHED_MEASURES[name] = WatchedMeasure(
            name, take, needs_targets, how_to_read, by_default, guess, ready, weights_only, passes
        )
        return take

    return register


@watched_measure("loss", "Loss and accuracy on the probe, in evaluation mode.")
def measure_loss(measurement: Measurement) -> MeasuredValues:
    scalars = {"loss/probe": measurement.loss}
    if measurement.accuracy is not None:
        scalars["accuracy/probe"] = measurement.accuracy
    return MeasuredValues(scalars)


@watched_measure("shares", "Share of each layer in the loss decrease of a small gradient step; they sum to one.")
def measure_shares(measurement: Measurement) -> MeasuredValues:
    _ = measurement.loss  # without a loss there is nothing to share
    by_layer: dict[str, float] = {}
    for name, size in measurement.along_loss.squares.items():
        by_layer[layer_of(name)] = by_layer.get(layer_of(name), 0.0) + size
    if not any(by_layer.values()):
        return MeasuredValues()  # no error left, so that there is nothing to share
    return MeasuredValues(measurement.subject.by_layer("share", shares(by_layer)))


@watched_measure(
    "kernel",
    "Drift of the tangent kernel from the first measurement, its alignment with the targets and its rank.",
    needs_targets=False,
    passes=lambda subject: passes_of_kernel(subject.objective),
)
def measure_kernel(measurement: Measurement) -> MeasuredValues:
    measured = MeasuredValues()
    kernel = measurement.kernel.double()
    if measurement.memory.kernel is None and not measurement.memory.resumed:
        measurement.memory.kernel = _kept(measurement.kernel)
        measured.arrays |= _first_measurement(measurement, "kernel", measurement.memory.kernel)
    start, other = _comparable(measurement.memory.kernel, kernel), _other_parameters(measurement)
    if other or start is None:
        measured.missing["kernel/drift"] = other or _no_start(measurement)
    else:
        measured.scalars["kernel/drift"] = float((kernel - start).norm() / start.norm())
    order, y = torch.arange(len(kernel), device="cpu"), measurement.subject.y
    if y is not None:
        alignment = measures.kernel_target_alignment(measurement.kernel, measurement.subject.kernel_targets)
        measured.scalars["kernel/alignment"] = alignment
        if not y.is_floating_point() and y.numel() == len(y):
            labels = y.reshape(-1).cpu()
            order = torch.argsort(labels, stable=True)
            measured.arrays["kernel/labels"] = labels[order].numpy()
    if measurement.condensed is not None:
        error = measurement.estimate.standard_error.double()
        measured.scalars["kernel/standard_error"] = float(error.norm() / kernel.norm())
    measured.scalars["kernel/participation_ratio"] = float(ratio_of_traces(kernel.trace(), kernel.square().sum()))
    measured.arrays["kernel"] = kernel.cpu()[order][:, order].float().numpy()
    return measured


def _first_measurement(measurement: Measurement, name: str, values: Tensor) -> dict[str, Array]:
    """What a resumed run compares with, and by which it tells whether it may."""
    known = {} if measurement.memory.fingerprint is None else {FINGERPRINT: measurement.memory.fingerprint}
    return {f"start/{name}": _numpy(values), **known}


def _no_start(measurement: Measurement) -> str:
    if not measurement.memory.other:
        return _NO_START
    return f"not defined: the run began {measurement.memory.other}. Resume with the same, or start a new run."


def _other_parameters(measurement: Measurement) -> str:
    """Why this kernel cannot be compared with the first: it is a sum over other parameters; empty where it can."""
    now = {name: tuple(p.shape) for name, p in named_parameters(measurement.subject.model).items()}
    first = measurement.memory.parameters = measurement.memory.parameters or now
    changed = [name for name in {**first, **now} if first.get(name) != now.get(name)]
    if not changed:
        return ""
    named = ", ".join(changed[:4]) + f" and {len(changed) - 4} more" * (len(changed) > 4)
    return f"not defined: parameters were added, removed or reshaped since the first measurement ({named})."


def _kept(values: Tensor) -> Tensor:
    """As it is stored, so that a resumed run compares with the very same numbers."""
    values = values.detach().cpu()
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _comparable(start: Tensor | None, now: Tensor) -> Tensor | None:
    return None if start is None or len(start) != len(now) else start.to(now.device, torch.float64)


@watched_measure(
    "richness",
    "Distance of the last features from those of the minimal rich solution: near 0 rich, near 1 lazy.",
    needs_targets=False,
)
def measure_richness(measurement: Measurement) -> MeasuredValues:
    last = measurement.last
    if last is None:
        return MeasuredValues(missing={"richness": _NO_LAST})
    features, outputs = measurement.along_loss.features[last], measurement.output_rows
    measured, start = MeasuredValues(), measurement.memory.features
    if start is not None and len(start) == len(features):
        start = start.to(features.device)
        found = richness_and_similarity(start, features.to(start.dtype), outputs)
        measured.scalars |= dict(zip(("richness", "richness/initial_similarity"), found, strict=True))
    else:
        measured.scalars["richness"] = measures.richness(features[: len(outputs)], outputs)
        if start is None and not measurement.memory.resumed:
            measurement.memory.features = _kept(features)
            measured.arrays |= _first_measurement(measurement, "features", measurement.memory.features)
        else:
            measured.missing["richness/initial_similarity"] = _no_start(measurement)
    curves = None if measurement.subject.y is None else eigenfunction_curves(measurement, features)
    if curves is None:
        return measured
    measured.scalars["richness/effective_dimension"] = curves.effective_dimension
    named = {"quality": curves.quality, "utilisation": curves.utilisation, "intensity": curves.intensity}
    measured.arrays |= {f"richness/{name}": _numpy(curve) for name, curve in named.items() if curve is not None}
    return measured


def eigenfunction_curves(measurement: Measurement, features: Tensor) -> Curves | None:
    """Of the last features: estimated on half of the examples, and measured on the others; None where they are few.

    Then eigenfunctions cannot be told from noise.
    """
    outputs, half = measurement.output_rows, len(measurement.output_rows) // 2
    if half <= features.shape[1]:
        return None
    others = slice(half, len(outputs))
    return measures.richness_curves(features[:half], features[others], measurement.targets[others], outputs[others])


@watched_measure(
    "target_linearity", "How much of the targets a linear map reads off the input of each layer, from 0 to 1."
)
def measure_target_linearity(measurement: Measurement) -> MeasuredValues:
    keys, before = weight_keys(measurement.subject.model), measurement.memory.linearity
    # The first layer is always given the probe.
    new = {name: v for name, v in measurement.features.items() if name not in before or not _same(before[name][0], v)}
    before |= {name: (new[name], value) for name, value in target_linearities(new, measurement.targets).items()}
    found = {keys.get(name, name): before[name][1] for name in measurement.features}
    values = {f"target_linearity/{key}": value.value for key, value in found.items()}
    return MeasuredValues(values | {f"target_linearity_null/{key}": value.null for key, value in found.items()})


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


@watched_measure(
    "spectra",
    "Tail exponent of each weight, with that of the same weight shuffled.",
    needs_targets=False,
    guess=seconds(eigenvalues=2),
    weights_only=True,
)
def measure_spectra(measurement: Measurement) -> MeasuredValues:
    measured = MeasuredValues()
    stacks = {weight.name: weight for weight in weights_of(measurement.subject.model, Layout("slices", False))[0]}
    for name, values in spectra.esds(measurement.subject.model).items():
        if not measurement.subject.layers(layer_of(name)):
            continue
        measured.arrays[f"spectrum/{name}"] = _numpy(values)
        alphas = {f"alpha/{name}": float(spectra.fit_tail(values).alpha)}
        stack = stacks[name].matrices
        assert isinstance(stack, Tensor)  # a module holds no operators
        null = shuffled_null_checked(stack, values.numpy(), 1, 0, "gramscope", stacks[name].scale)
        alphas[f"alpha_null/{name}"] = float(null.alpha[0])
        # A few eigenvalues have no tail.
        measured.scalars |= {key: alpha for key, alpha in alphas.items() if math.isfinite(alpha)}
    return measured


@watched_measure(
    "step",
    "One optimiser step rehearsed on the probe: predicted and true change, second order, mask flips.",
    guess=seconds(passes=8),
    ready=lambda subject: subject.optimizer is not None or subject.lr is not None,
)
def measure_step(measurement: Measurement) -> MeasuredValues:
    step = _rehearsed(measurement)
    parts = {
        "all": "step/error", "second order": "step/second_order", "mask flips": "step/mask_flips",
        "rounding": "step/rounding",
    }  # fmt: skip
    errors = {parts[part]: error for part, error in step.errors.items()}
    measured = _relative(errors, step.measured)
    measured.scalars["step/predicted_loss_change"] = step.predicted_loss_change
    measured.scalars["step/true_loss_change"] = step.measured_loss_change
    measured.scalars |= {f"flips/{flips.name}": float(flips.flipped) for flips in step.flips}
    forms = measures.weight_forms(measurement.subject.model)
    measured.scalars |= _gram_changes(measurement, step, forms)
    chosen = torch.linspace(0, step.measured.numel() - 1, min(SAMPLE, step.measured.numel()), device="cpu").long()
    measured.arrays["step/predicted"] = _numpy(step.predicted.flatten().cpu()[chosen])
    measured.arrays["step/true"] = _numpy(step.measured.flatten().cpu()[chosen])
    measured.missing |= _without_matrix(measurement, step, forms)
    return measured


def _rehearsed(measurement: Measurement) -> ExplainedStep:
    """The step, explained by its outputs; with a vocabulary of them at every token, by the loss of each example."""
    subject, y = measurement.subject, measurement.labels_or_values
    outputs, loss = subject.outputs, subject.objective.loss
    if rehearses_losses(subject.objective):
        objective, given = subject.objective, subject.outputs

        def outputs(model: nn.Module, x: ModelInput) -> Tensor:
            return objective.losses(evaluate(model, x, count_examples(x), given), y)

        def loss(f: Tensor, y: Tensor) -> Tensor:
            return f.sum()

    return explain_step(
        subject.model, subject.x, y, lr=subject.lr if subject.optimizer is None else None, loss=loss,
        optimizer=subject.optimizer, outputs=outputs, by_example=False,
    )  # fmt: skip


def _relative(errors: Mapping[str, float], change: Tensor) -> MeasuredValues:
    """Numbers that are fractions of a true change; of no change there is none, and the first says so for all."""
    known = {name: error for name, error in errors.items() if bool(change.any()) and math.isfinite(error)}
    lost = [name for name in errors if name not in known]
    return MeasuredValues(known, missing={lost[0]: _NO_CHANGE} if lost else {})


def _without_matrix(measurement: Measurement, step: ExplainedStep, forms: Mapping[str, WeightForm]) -> dict[str, str]:
    """Weights that moved and have no Gram series, because no matrix of theirs is known to multiply the inputs.

    Of tables, which multiply nothing, nobody expects one.
    """
    named = named_parameters(measurement.subject.model)
    tables = {id(m.weight) for m in measurement.subject.model.modules() if isinstance(m, nn.Embedding)}
    left = [
        name
        for name in step.parts.change
        if name not in forms
        and named[name].dim() >= 2
        and measurement.subject.layers(layer_of(name))
        and id(named[name]) not in tables
    ]
    if not left:
        return {}
    why = "they are no weights of linear, convolution, recurrent or attention layers in their plain form"
    return {"delta_gram": f"{', '.join(left)} lack it and delta_vc: {why}."}


def _gram_changes(measurement: Measurement, step: ExplainedStep, forms: Mapping[str, WeightForm]) -> dict[str, float]:
    """ΔGram ``W'ᵀW' - WᵀW`` and ΔVC ``-2 sym(Wᵀ D g)`` of this step: sizes and cosine (arXiv:2605.06258)."""
    found: dict[str, float] = {}
    named, keys = named_parameters(measurement.subject.model), weight_keys(measurement.subject.model)
    for name, weight in forms.items():
        if name not in step.parts.change or not measurement.subject.layers(layer_of(name)):
            continue
        w, d = weight.form.matrices(named[name]), weight.form.matrices(step.parts.change[name])
        pulled = weight.form.matrices(step.parts.preconditioner[name] * step.gradients[name])
        gram, virtual, inner = gram_change_sizes(w, d, pulled)
        key = keys[name]
        found[f"delta_gram/{key}"], found[f"delta_vc/{key}"] = gram, virtual
        if gram and virtual:
            found[f"gram_vc_correlation/{key}"] = inner / (gram * virtual)
    return found


@watched_measure(
    "dntk",
    "Change of the kernel in one step: predicted by the dNTK, true, and by crossed kinks.",
    by_default=False,
    guess=seconds(passes=3),
)
def measure_dntk(measurement: Measurement) -> MeasuredValues:
    subject = measurement.subject
    with evaluating(subject.model):
        step = ntk_step(subject.model, subject.x, _loss_of(measurement), _rate(measurement), outputs=subject.outputs)
    errors = {"dntk/error": step.error, "dntk/error_with_crossings": step.error_with_crossings}
    measured = _relative(errors, step.measured)
    measured.scalars["dntk/relative_change"] = step.relative_change
    measured.scalars["dntk/crossed"] = float(step.crossings.crossed)
    return measured


@watched_measure(
    "states",
    "Change of every hidden state in one step: predicted by P K P*, against the truth.",
    by_default=False,
    guess=seconds(passes=3),
)
def measure_states(measurement: Measurement) -> MeasuredValues:
    subject = measurement.subject
    with evaluating(subject.model):
        step = predict_states(
            subject.model, subject.x, _loss_of(measurement), _rate(measurement), outputs=subject.outputs
        )
    return _relative({"states/error": step.relative_error, "states/alignment": step.alignment}, step.measured)


def _loss_of(measurement: Measurement) -> Callable[[Tensor], Tensor]:
    y, objective = measurement.labels_or_values, measurement.subject.objective
    return lambda f: objective.loss(f, y.to(f.device))


def _rate(measurement: Measurement) -> float:
    if measurement.subject.lr is not None:
        return measurement.subject.lr
    if measurement.subject.optimizer is None:
        raise InputError("this measure needs a learning rate: pass lr=, or attach an optimiser.")
    return float(measurement.subject.optimizer.param_groups[0]["lr"])


@watched_measure("norm", "Norm of all parameters.", needs_targets=False, weights_only=True)
def measure_norm(measurement: Measurement) -> MeasuredValues:
    return MeasuredValues({"norm/parameters": math.hypot(*measurement.weight_norms.values())})


def _numpy(values: Tensor | npt.ArrayLike) -> Array:
    if not isinstance(values, Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    return np.asarray(values.float() if values.dtype == torch.bfloat16 else values)
