"""What a diagnosis rests on: signals by depth, ranks, classes, modes, what the optimiser holds and what it is given."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramscope.capture.network import named_parameters
from gramscope.capture.side_effects import in_modes
from gramscope.record.measurement import Measurement
from gramscope.record.objective import IGNORED
from gramscope.record.probe_facts import are_probabilities, not_affine, probe_facts, zero_or_one
from gramscope.record.probe_pass import probe_pass
from gramscope.record.relu_units import left_out
from gramscope.record.signals import depends_on_mode
from gramscope.record.subject import layer_of
from gramscope.record.watched_measures import MeasuredValues, watched_measure

MOST_CLASSES = 32  # with a series for each


@watched_measure(
    "signals",
    "Root mean square of each layer's outputs; share of tanh and sigmoid units that are saturated, and of the gates of "
    "recurrent layers at the start; share of the variance of tokens that lies between tokens of one example.",
    needs_targets=False,
)
def measure_signals(measurement: Measurement) -> MeasuredValues:
    units, by_layer = measurement.units, measurement.subject.by_layer
    found = by_layer("signal", units.sizes()) | by_layer("saturated_units", units.saturated())
    found |= by_layer("saturated_gates", units.saturated_gates())
    found |= by_layer("token_variance", units.token_variance())
    return MeasuredValues(found, missing=left_out("signal", units.unseen))


@watched_measure(
    "feature_rank",
    "Effective rank of each layer's outputs over examples and positions, centred: tr(C)² / tr(C²).",
    needs_targets=False,
)
def measure_feature_rank(measurement: Measurement) -> MeasuredValues:
    return MeasuredValues(measurement.subject.by_layer("feature_rank", measurement.units.ranks()))


@watched_measure(
    "classes",
    "Share of each class that the network names right, and share of the probe that it calls so; whether the outputs "
    "are probabilities already, and the loss if they went through one more softmax; binary cross-entropy, where the "
    "targets are the numbers 0 and 1.",
)
def measure_classes(measurement: Measurement) -> MeasuredValues:
    y, objective = measurement.labels_or_values, measurement.subject.objective
    if measurement.condensed is not None or (objective.kind == "classes" and objective.count > MOST_CLASSES):
        return MeasuredValues()
    f, probabilities = measurement.f, are_probabilities(measurement.f, objective)
    found = {} if probabilities is None else {"outputs/probabilities": float(probabilities)}
    if objective.kind == "classes":
        labels = y.reshape(-1)
        counted = (labels != IGNORED).to(f.device)
        rows, labels, count = objective.by_class(f)[counted], labels.to(f.device)[counted], objective.count
        named, behind = rows.argmax(1), F.cross_entropy(rows.float().softmax(1), labels.long())
    elif objective.own is None and zero_or_one(y):
        flat, labels, count = f.reshape(-1), y.reshape(-1).to(f.device), 2
        named, behind = (flat > 0).long(), F.binary_cross_entropy_with_logits(flat.float().sigmoid(), labels.float())
        if objective.kind == "numbers":  # which binary cross-entropy takes as well
            found["yes_or_no/loss"] = float(F.binary_cross_entropy_with_logits(flat.float(), labels.float()))
            found["yes_or_no/accuracy"] = float((named == labels).double().mean())
    else:
        return MeasuredValues(found)
    if objective.own is None and len(labels):
        found["outputs/behind_softmax"] = float(behind)
    return MeasuredValues(found | _by_class(named.cpu(), labels.long().cpu(), count))


def _by_class(named: Tensor, labels: Tensor, count: int) -> dict[str, float]:
    if not len(labels):
        return {}
    sets = (named, labels, labels[named == labels])
    called, there, right = (torch.bincount(some, minlength=count).tolist() for some in sets)
    found = {f"class_predicted/{c}": number / len(labels) for c, number in enumerate(called)}
    return found | {f"class_recall/{c}": right[c] / number for c, number in enumerate(there) if number}


@watched_measure(
    "setup",
    "How training is set up: frozen parameters, parameters that the optimiser does not hold, learning rate, weight "
    "decay, momentum, precision, greatest share of dropout, share of dropout and batch norm in training mode.",
    needs_targets=False,
    weights_only=True,
)
def measure_setup(measurement: Measurement) -> MeasuredValues:
    named = named_parameters(measurement.subject.model)
    frozen = {name for name, parameter in named.items() if not parameter.requires_grad}
    found = measurement.subject.by_layer("frozen", _share_by_layer(named, frozen))
    if measurement.share_in_training is not None:
        updates = measurement.subject.updates  # a loop may evaluate between the optimiser's step and the watch's
        stepped = None if updates is None else updates.training
        mode = measurement.share_in_training if stepped is None else stepped
        found |= {"training_mode": mode, "dropout": _dropout(measurement.subject.model)}
    floats = [p.dtype for p in named.values() if p.is_floating_point()]
    if floats:
        found["precision"] = max(torch.finfo(dtype).eps for dtype in floats)
    optimizers = measurement.subject.optimizers
    if not optimizers:
        return MeasuredValues(found)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = {id(p) for group in groups for p in group["params"]}
    left = {n for n, p in named.items() if p.requires_grad and id(p) not in held}
    found |= measurement.subject.by_layer("not_optimized", _share_by_layer(named, left))
    rates = [float(group["lr"]) for group in groups if group["params"] and "lr" in group]
    if rates:
        found |= {"optimizer/lr": max(rates), "optimizer/lowest_lr": min(rates)}
    found["optimizer/weight_decay"] = max((float(g.get("weight_decay", 0.0)) for g in groups), default=0.0)
    found["optimizer/momentum"] = max((_momentum(group) for group in groups), default=0.0)
    found["optimizer/adaptive"] = float(any("eps" in group for group in groups))
    found["optimizer/decoupled"] = float(any(map(_decoupled, optimizers)))
    return MeasuredValues(found)


def _dropout(model: nn.Module) -> float:
    """The greatest share of units that a module of the network leaves out."""
    modules = [m for m in model.modules() if not isinstance(m, nn.modules.batchnorm._NormBase)]
    shares = [getattr(m, "p" if isinstance(m, nn.modules.dropout._DropoutNd) else "dropout", 0.0) for m in modules]
    return max((float(share) for share in shares if isinstance(share, int | float)), default=0.0)


def _momentum(group: dict[str, object]) -> float:
    betas = group.get("betas")
    own = betas[0] if isinstance(betas, tuple | list) else group.get("momentum", 0.0)
    return float(own) if isinstance(own, int | float) else 0.0


def _decoupled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether weight decay acts on the weights, not through the gradient."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def _share_by_layer(named: dict[str, torch.nn.Parameter], marked: set[str]) -> dict[str, float]:
    """Share of the entries of each layer that belong to marked parameters; layers without any are left out."""
    sizes: dict[str, list[int]] = {}
    for name, parameter in named.items():
        own = sizes.setdefault(layer_of(name), [0, 0])
        own[0] += parameter.numel()
        own[1] += parameter.numel() if name in marked else 0
    return {layer: part / whole for layer, (whole, part) in sizes.items() if part}


@watched_measure(
    "given_gradients",
    "The gradients that the optimiser is given: cosine of two in a row, share of entries that are exactly zero.",
    needs_targets=False,
    ready=lambda subject: subject.updates is not None,
    weights_only=True,
)
def measure_given_gradients(measurement: Measurement) -> MeasuredValues:
    watched = measurement.subject.updates
    assert watched is not None
    return MeasuredValues(watched.gradients())


@watched_measure(
    "probe_facts",
    "The probe before any training: scale of its inputs and targets, doubled examples, chance; size of the outputs, "
    "and whether they are affine in the inputs.",
    needs_targets=False,
)
def measure_probe_facts(measurement: Measurement) -> MeasuredValues:
    if not measurement.memory.at_start:
        return MeasuredValues()
    measurement.memory.probe_told = True
    subject = measurement.subject
    found = probe_facts(subject.x, subject.y, subject.objective)
    found["outputs/not_affine"] = not_affine(subject)
    if measurement.condensed is None:
        found["outputs/rms"] = float(measurement.f.double().square().mean().sqrt())
    return MeasuredValues({name: value for name, value in found.items() if math.isfinite(value)})


@watched_measure(
    "train_mode", "Loss and accuracy on the probe in training mode, where dropout or batch norm tell it apart."
)
def measure_train_mode(measurement: Measurement) -> MeasuredValues:
    subject, y = measurement.subject, measurement.labels_or_values
    if measurement.share_in_training is None or measurement.condensed is not None:
        return MeasuredValues()
    training = in_modes([(module, True) for module in subject.model.modules() if depends_on_mode(module)])
    with torch.no_grad(), probe_pass(subject, flags=training) as f:
        found = {"train_mode/loss": float(subject.objective.loss(f, y.to(f.device)))}
        accuracy = subject.objective.accuracy(f, y.to(f.device))
    return MeasuredValues(found if accuracy is None else found | {"train_mode/accuracy": accuracy})
