"""What a diagnosis rests on: signals by depth, ranks, classes, modes, what the optimiser holds and what it is given."""

import torch

from gramscope.capture.network import count_examples, evaluate, named_parameters, prepare_input
from gramscope.capture.side_effects import in_modes, plain_execution, untouched
from gramscope.record.judge import IGNORED
from gramscope.record.moment import Moment
from gramscope.record.probe_facts import probe_facts
from gramscope.record.readings import Reading, reader
from gramscope.record.signals import depends_on_mode
from gramscope.record.subject import layer_of

MOST_CLASSES = 32  # with a series for each


def _chosen(moment: Moment, prefix: str, found: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/{layer}": value for layer, value in found.items() if moment.subject.layers(layer)}


@reader(
    "signals",
    "Root mean square of each layer's outputs; share of tanh and sigmoid units that are saturated; share of the "
    "variance of tokens that lies between tokens of one example.",
    needs_targets=False,
)
def read_signals(moment: Moment) -> Reading:
    units = moment.units
    found = _chosen(moment, "signal", units.sizes()) | _chosen(moment, "saturated_units", units.saturated())
    return Reading(found | _chosen(moment, "token_variance", units.token_variance()))


@reader(
    "feature_rank",
    "Effective rank of each layer's outputs over examples and positions, centred: tr(C)² / tr(C²).",
    needs_targets=False,
)
def read_feature_rank(moment: Moment) -> Reading:
    return Reading(_chosen(moment, "feature_rank", moment.units.ranks()))


@reader("classes", "Share of each class that the network names right, and share of the probe that it calls so.")
def read_classes(moment: Moment) -> Reading:
    y, judge = moment.labels_or_values, moment.subject.judge
    if judge.kind != "classes" or moment.condensed is not None or judge.count > MOST_CLASSES:
        return Reading()
    labels = y.reshape(-1).cpu()
    counted = labels != IGNORED
    labels, named = labels[counted], judge.by_class(moment.f).argmax(1).cpu()[counted]
    found = {f"class_predicted/{c}": float((named == c).double().mean()) for c in range(judge.count)}
    for c in labels.unique().tolist():
        found[f"class_recall/{c}"] = float((named[labels == c] == c).double().mean())
    return Reading(found)


@reader(
    "setup",
    "How training is set up: frozen parameters, parameters that the optimiser does not hold, learning rate, weight "
    "decay, momentum, precision, share of dropout and batch norm in training mode.",
    needs_targets=False,
    weights_only=True,
)
def read_setup(moment: Moment) -> Reading:
    named = named_parameters(moment.subject.model)
    found = _chosen(moment, "frozen", _share_by_layer(named, {n for n, p in named.items() if not p.requires_grad}))
    if moment.share_in_training is not None:
        found["training_mode"] = moment.share_in_training
    floats = [p.dtype for p in named.values() if p.is_floating_point()]
    if floats:
        found["precision"] = max(torch.finfo(dtype).eps for dtype in floats)
    optimizer = moment.subject.optimizer
    if optimizer is None:
        return Reading(found)
    groups = optimizer.param_groups
    held = {id(p) for group in groups for p in group["params"]}
    left = {n for n, p in named.items() if p.requires_grad and id(p) not in held}
    found |= _chosen(moment, "not_optimized", _share_by_layer(named, left))
    rates = [float(group["lr"]) for group in groups if group["params"] and "lr" in group]
    if rates:
        found |= {"optimizer/lr": max(rates), "optimizer/lowest_lr": min(rates)}
    found["optimizer/weight_decay"] = max((float(g.get("weight_decay", 0.0)) for g in groups), default=0.0)
    found["optimizer/momentum"] = max((_momentum(group) for group in groups), default=0.0)
    found["optimizer/adaptive"] = float(any("eps" in group for group in groups))
    found["optimizer/decoupled"] = float(_decoupled(optimizer))
    return Reading(found)


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


@reader(
    "given_gradients",
    "The gradients that the optimiser is given: cosine of two in a row, share of entries that are exactly zero.",
    needs_targets=False,
    ready=lambda subject: subject.given is not None,
    weights_only=True,
)
def read_given_gradients(moment: Moment) -> Reading:
    given = moment.subject.given
    assert given is not None
    return Reading(given.take())


@reader(
    "probe_facts", "The probe before any training: scale of its inputs, doubled examples, chance.", needs_targets=False
)
def read_probe_facts(moment: Moment) -> Reading:
    if moment.memory.probe_told or moment.memory.resumed:
        return Reading()
    moment.memory.probe_told = True
    subject = moment.subject
    return Reading(probe_facts(subject.x, subject.y, subject.judge))


@reader("train_mode", "Loss and accuracy on the probe in training mode, where dropout or batch norm tell it apart.")
def read_train_mode(moment: Moment) -> Reading:
    subject, y = moment.subject, moment.labels_or_values
    if moment.share_in_training is None or moment.condensed is not None:
        return Reading()
    x = prepare_input(subject.x)
    modes = [(module, True) for module in subject.model.modules() if depends_on_mode(module)]
    with untouched(subject.model, throughout=False) as written, plain_execution(), in_modes(modes), torch.no_grad():
        with written:
            f = evaluate(subject.model, x, count_examples(x), subject.outputs)
        found = {"train_mode/loss": float(subject.judge.loss(f, y.to(f.device)))}
        accuracy = subject.judge.accuracy(f, y.to(f.device))
    return Reading(found if accuracy is None else found | {"train_mode/accuracy": accuracy})
