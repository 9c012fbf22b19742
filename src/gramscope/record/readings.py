"""What the watcher can read off a moment, by name; scalars and arrays carry the names of the store."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gramscope import measures, spectra
from gramscope.base.effective_rank import ratio_of_traces
from gramscope.base.errors import InputError
from gramscope.base.shares import shares
from gramscope.capture.network import count_examples, evaluate, named_parameters
from gramscope.hierarchy.explain import explain_step
from gramscope.hierarchy.explained import ExplainedStep
from gramscope.kernels.crossings import ntk_step
from gramscope.measures.gram_tracker import gram_change_sizes
from gramscope.propagators.prediction import predict_states
from gramscope.record.condensed import rehearses_losses
from gramscope.record.moment import Moment
from gramscope.record.subject import Subject, evaluating, layer_of
from gramscope.spectra.layouts import Layout
from gramscope.spectra.shuffled import shuffled_null_checked
from gramscope.spectra.weights import weights_of
from gramscope.store.names import FINGERPRINT

_NO_START = (
    "not defined: the first moment of this run is not in its folder, or was of another probe. A new run will have it."
)
_NO_LAST = (
    "not defined: no linear layer makes one row of outputs for each example. Choose such outputs with outputs=, "
    "or leave richness out of measures=."
)
_NO_CHANGE = "not defined: the step changed nothing that the model's precision shows."
SAMPLE = 2000  # entries of predicted and true changes that are kept


@dataclass
class Reading:
    """Numbers and arrays of one measure at one moment; ``missing``: names of what is not there, and why."""

    scalars: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reader:
    """A reading with what a report says about it.

    ``needs_targets``: only for a probe with y. ``by_default``: also read where measures are chosen by a glob. ``guess``
    estimates the seconds of an expensive measure that was never taken, from the subject and the seconds of one shared
    pass; None for a cheap one, which is tried without asking. ``ready``: can it be read off this subject yet?
    ``weights_only``: the model is not called for it.
    """

    name: str
    read: Callable[[Moment], Reading]
    needs_targets: bool
    how_to_read: str
    by_default: bool = True
    guess: Callable[[Subject, float], float] | None = None
    ready: Callable[[Subject], bool] = lambda subject: True
    weights_only: bool = False


READERS: dict[str, Reader] = {}


def seconds(passes: int = 0, eigenvalues: int = 0) -> Callable[[Subject, float], float]:
    """A guess for a reader: so many shared passes, and so often the eigenvalues of every weight.

    Of an (a, b) matrix with a ≤ b these take 10 a³ operations, and ``W Wᵀ`` before them 2 a² b, ten billion a second.
    """

    def guess(subject: Subject, one_pass: float) -> float:
        shapes = [p.shape for p in subject.model.parameters() if p.dim() >= 2] if eigenvalues else []
        work = sum(10 * min(s[:2]) ** 3 * math.prod(s[2:]) + 2 * min(s[:2]) * s.numel() for s in shapes)
        return passes * one_pass + eigenvalues * work / 1e10

    return guess


def reader(
    name: str,
    how_to_read: str,
    needs_targets: bool = True,
    by_default: bool = True,
    guess: Callable[[Subject, float], float] | None = None,
    ready: Callable[[Subject], bool] = lambda subject: True,
    weights_only: bool = False,
) -> Callable[[Callable[[Moment], Reading]], Callable[[Moment], Reading]]:
    """Register a measure of ``gs.watch``: a decorator of a function of the shared pass."""

    def register(read: Callable[[Moment], Reading]) -> Callable[[Moment], Reading]:
        READERS[name] = Reader(name, read, needs_targets, how_to_read, by_default, guess, ready, weights_only)
        return read

    return register


@reader("loss", "Loss and accuracy on the probe, in evaluation mode.")
def read_loss(moment: Moment) -> Reading:
    scalars = {"loss/probe": moment.loss}
    if moment.accuracy is not None:
        scalars["accuracy/probe"] = moment.accuracy
    return Reading(scalars)


@reader("shares", "Share of each layer in the loss decrease of a small gradient step; they sum to one.")
def read_shares(moment: Moment) -> Reading:
    _ = moment.loss  # without a loss there is nothing to share
    by_layer: dict[str, float] = {}
    for name, size in moment.along_loss.squares.items():
        by_layer[layer_of(name)] = by_layer.get(layer_of(name), 0.0) + size
    if not any(by_layer.values()):
        return Reading()  # no error left, so that there is nothing to share
    parts = shares(by_layer)
    return Reading({f"share/{layer}": part for layer, part in parts.items() if moment.subject.layers(layer)})


@reader(
    "kernel",
    "Drift of the tangent kernel from the first moment, its alignment with the targets and its rank.",
    needs_targets=False,
)
def read_kernel(moment: Moment) -> Reading:
    reading = Reading()
    kernel = moment.kernel.double()
    if moment.memory.kernel is None and not moment.memory.resumed:
        moment.memory.kernel = _kept(moment.kernel)
        reading.arrays |= _first_moment(moment, "kernel", moment.memory.kernel)
    start = _comparable(moment.memory.kernel, kernel)
    if start is None:
        reading.missing["kernel/drift"] = _no_start(moment)
    else:
        reading.scalars["kernel/drift"] = float((kernel - start).norm() / start.norm())
    order, y = torch.arange(len(kernel), device="cpu"), moment.subject.y
    if y is not None:
        targets = moment.subject.judge.few_rows(y).to(kernel.device)
        reading.scalars["kernel/alignment"] = measures.kernel_target_alignment(kernel, targets)
        if not y.is_floating_point() and y.numel() == len(y):
            order = torch.argsort(y.reshape(-1).cpu(), stable=True)
            reading.arrays["kernel/labels"] = y.reshape(-1).cpu()[order].numpy()
    if moment.condensed is not None:
        error = moment.estimate.standard_error.double()
        reading.scalars["kernel/standard_error"] = float(error.norm() / kernel.norm())
    reading.scalars["kernel/participation_ratio"] = float(ratio_of_traces(kernel.trace(), kernel.square().sum()))
    reading.arrays["kernel"] = kernel.cpu()[order][:, order].float().numpy()
    return reading


def _first_moment(moment: Moment, name: str, values: Tensor) -> dict[str, Any]:
    """What a resumed run compares with, and by which it tells whether it may."""
    known = {} if moment.memory.fingerprint is None else {FINGERPRINT: moment.memory.fingerprint}
    return {f"start/{name}": _numpy(values), **known}


def _no_start(moment: Moment) -> str:
    if not moment.memory.other:
        return _NO_START
    return f"not defined: the run began {moment.memory.other}. Resume with the same, or start a new run."


def _kept(values: Tensor) -> Tensor:
    """As it is stored, so that a resumed run compares with the very same numbers."""
    values = values.detach().cpu()
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _comparable(start: Tensor | None, now: Tensor) -> Tensor | None:
    return None if start is None or len(start) != len(now) else start.to(now.device, torch.float64)


@reader(
    "richness",
    "Distance of the last features from those of the minimal rich solution: near 0 rich, near 1 lazy.",
    needs_targets=False,
)
def read_richness(moment: Moment) -> Reading:
    last = moment.last
    if last is None:
        return Reading(missing={"richness": _NO_LAST})
    features, outputs = moment.along_loss.features[last], moment.output_rows
    reading = Reading({"richness": measures.richness(features[: len(outputs)], outputs)})
    if moment.memory.features is None and not moment.memory.resumed:
        moment.memory.features = _kept(features)
        reading.arrays |= _first_moment(moment, "features", moment.memory.features)
    elif moment.memory.features is None or len(moment.memory.features) != len(features):
        reading.missing["richness/initial_similarity"] = _no_start(moment)
    else:
        start = moment.memory.features.to(features.device)
        reading.scalars["richness/initial_similarity"] = measures.initial_similarity(start, features.to(start.dtype))
    half = len(outputs) // 2
    if half <= features.shape[1] or moment.subject.y is None:  # too few examples to tell eigenfunctions from noise
        return reading
    some = slice(half, len(outputs))
    curves = measures.richness_curves(features[:half], features[some], moment.targets[some], outputs[some])
    reading.scalars["richness/effective_dimension"] = curves.effective_dimension
    named = {"quality": curves.quality, "utilisation": curves.utilisation, "intensity": curves.intensity}
    reading.arrays |= {f"richness/{name}": _numpy(curve) for name, curve in named.items() if curve is not None}
    return reading


@reader("target_linearity", "How much of the targets a linear map reads off the input of each layer, from 0 to 1.")
def read_target_linearity(moment: Moment) -> Reading:
    keys = _keys(moment)
    found = {
        f"target_linearity/{keys.get(name, name)}": float(measures.target_linearity(features, moment.targets))
        for name, features in moment.features.items()
    }
    return Reading(found)


def _keys(moment: Moment) -> dict[str, str]:
    """Weights by name: the layer's name where the layer has one weight, else the weight's own, so that none is hidden.

    Counted over all parameters, frozen ones too: a series keeps its name when a weight is frozen or set free.
    """
    weights = [name for name, p in named_parameters(moment.subject.model).items() if p.dim() >= 2]
    of_layer = Counter(layer_of(name) for name in weights)
    return {name: layer_of(name) if of_layer[layer_of(name)] == 1 else name for name in weights}


@reader(
    "spectra",
    "Tail exponent of each weight, with that of the same weight shuffled.",
    needs_targets=False,
    guess=seconds(eigenvalues=2),
    weights_only=True,
)
def read_spectra(moment: Moment) -> Reading:
    reading = Reading()
    stacks = {weight.name: weight for weight in weights_of(moment.subject.model, Layout("slices", False))[0]}
    for name, values in spectra.esds(moment.subject.model).items():
        if not moment.subject.layers(layer_of(name)):
            continue
        reading.arrays[f"spectrum/{name}"] = _numpy(values)
        reading.scalars[f"alpha/{name}"] = float(spectra.fit_tail(values).alpha)
        stack = stacks[name].matrices
        assert isinstance(stack, Tensor)  # a module holds no operators
        null = shuffled_null_checked(stack, values.numpy(), 1, 0, "gramscope", stacks[name].scale)
        reading.scalars[f"alpha_null/{name}"] = float(null.alpha[0])
    return reading


@reader(
    "step",
    "One optimiser step rehearsed on the probe: foretold and true change, second order, mask flips.",
    guess=seconds(passes=8),
    ready=lambda subject: subject.optimizer is not None or subject.lr is not None,
)
def read_step(moment: Moment) -> Reading:
    step = _rehearsed(moment)
    parts = {
        "all": "step/error", "second order": "step/second_order", "mask flips": "step/mask_flips",
        "rounding": "step/rounding",
    }  # fmt: skip
    errors = {parts[part]: error for part, error in step.errors.items()}
    reading = _relative(errors, step.measured)
    reading.scalars["step/predicted_loss_change"] = step.predicted_loss_change
    reading.scalars["step/true_loss_change"] = step.measured_loss_change
    reading.scalars |= {f"flips/{flips.name}": float(flips.flipped) for flips in step.flips}
    forms = measures.weight_forms(moment.subject.model)
    reading.scalars |= _gram_changes(moment, step, forms)
    chosen = torch.linspace(0, step.measured.numel() - 1, min(SAMPLE, step.measured.numel()), device="cpu").long()
    reading.arrays["step/predicted"] = _numpy(step.predicted.flatten().cpu()[chosen])
    reading.arrays["step/true"] = _numpy(step.measured.flatten().cpu()[chosen])
    reading.missing |= _without_matrix(moment, step, forms)
    return reading


def _rehearsed(moment: Moment) -> ExplainedStep:
    """The step, explained by its outputs; with a vocabulary of them at every token, by the loss of each example."""
    subject, y = moment.subject, moment.labels_or_values
    outputs, loss = subject.outputs, subject.judge.loss
    if rehearses_losses(subject.judge):
        judge, given = subject.judge, subject.outputs

        def outputs(model: nn.Module, x: Any) -> Tensor:
            return judge.losses(evaluate(model, x, count_examples(x), given), y)

        def loss(f: Tensor, y: Tensor) -> Tensor:
            return f.sum()

    return explain_step(
        subject.model, subject.x, y, lr=subject.lr if subject.optimizer is None else None, loss=loss,
        optimizer=subject.optimizer, outputs=outputs, by_example=False,
    )  # fmt: skip


def _relative(errors: Mapping[str, float], change: Tensor) -> Reading:
    """Numbers that are fractions of a true change; of no change there is none, and the first says so for all."""
    known = {name: error for name, error in errors.items() if bool(change.any()) and math.isfinite(error)}
    lost = [name for name in errors if name not in known]
    return Reading(known, missing={lost[0]: _NO_CHANGE} if lost else {})


def _without_matrix(moment: Moment, step: ExplainedStep, forms: Mapping[str, Any]) -> dict[str, str]:
    """Weights that moved and have no Gram series, because no matrix of theirs is known to multiply the inputs."""
    named = named_parameters(moment.subject.model)
    left = [
        name
        for name in step.parts.change
        if name not in forms and named[name].dim() >= 2 and moment.subject.layers(layer_of(name))
    ]
    if not left:
        return {}
    why = "they are no weights of linear, convolution, recurrent or attention layers in their plain form"
    return {"delta_gram": f"{', '.join(left)} lack it and delta_vc: {why}."}


def _gram_changes(moment: Moment, step: ExplainedStep, forms: Mapping[str, Any]) -> dict[str, float]:
    """ΔGram ``W'ᵀW' - WᵀW`` and ΔVC ``-2 sym(Wᵀ D g)`` of this step: sizes and cosine (arXiv:2605.06258)."""
    found: dict[str, float] = {}
    named, keys = named_parameters(moment.subject.model), _keys(moment)
    for name, weight in forms.items():
        if name not in step.parts.change or not moment.subject.layers(layer_of(name)):
            continue
        w, d = weight.form.matrices(named[name]), weight.form.matrices(step.parts.change[name])
        pulled = weight.form.matrices(step.parts.preconditioner[name] * step.gradients[name])
        gram, virtual, inner = gram_change_sizes(w, d, pulled)
        key = keys[name]
        found[f"delta_gram/{key}"], found[f"delta_vc/{key}"] = gram, virtual
        if gram and virtual:
            found[f"gram_vc_correlation/{key}"] = inner / (gram * virtual)
    return found


@reader(
    "dntk",
    "Change of the kernel in one step: foretold by the dNTK, true, and by crossed kinks.",
    by_default=False,
    guess=seconds(passes=3),
)
def read_dntk(moment: Moment) -> Reading:
    subject = moment.subject
    with evaluating(subject.model):
        step = ntk_step(subject.model, subject.x, _loss_of(moment), _rate(moment), outputs=subject.outputs)
    errors = {"dntk/error": step.error, "dntk/error_with_crossings": step.error_with_crossings}
    reading = _relative(errors, step.measured)
    reading.scalars["dntk/relative_change"] = step.relative_change
    reading.scalars["dntk/crossed"] = float(step.crossings.crossed)
    return reading


@reader(
    "states",
    "Change of every hidden state in one step: foretold by P K P*, against the truth.",
    by_default=False,
    guess=seconds(passes=3),
)
def read_states(moment: Moment) -> Reading:
    subject = moment.subject
    with evaluating(subject.model):
        step = predict_states(subject.model, subject.x, _loss_of(moment), _rate(moment), outputs=subject.outputs)
    return _relative({"states/error": step.relative_error, "states/alignment": step.alignment}, step.measured)


def _loss_of(moment: Moment) -> Callable[[Tensor], Tensor]:
    y, judge = moment.labels_or_values, moment.subject.judge
    return lambda f: judge.loss(f, y.to(f.device))


def _rate(moment: Moment) -> float:
    if moment.subject.lr is not None:
        return moment.subject.lr
    if moment.subject.optimizer is None:
        raise InputError("this measure needs a learning rate: pass lr=, or attach an optimiser.")
    return float(moment.subject.optimizer.param_groups[0]["lr"])


@reader("norm", "Norm of all parameters.", needs_targets=False, weights_only=True)
def read_norm(moment: Moment) -> Reading:
    return Reading({"norm/parameters": measures.parameter_norm(moment.subject.model)})


def _numpy(values: Any) -> Any:
    if not isinstance(values, Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    return np.asarray(values.float() if values.dtype == torch.bfloat16 else values)
