"""What is watched, checked before training starts: the model, the probe, and the names of measures and layers."""

import difflib
import fnmatch
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gramscope.base.errors import GramscopeError, InputError
from gramscope.base.nested import ModelInput, tensors_in
from gramscope.base.streams import streams_put_back
from gramscope.capture.network import (
    Outputs,
    count_examples,
    loss_input,
    named_parameters,
    prepare_input,
)
from gramscope.capture.side_effects import CopyOnWrite, untouched
from gramscope.hierarchy.losses import Loss
from gramscope.hierarchy.optimizer_step import autocast_uncached
from gramscope.record.along_loss import sample_positions
from gramscope.record.condensed import SEED, has_many_outputs, mixing, precision_of, rehearses_losses
from gramscope.record.objective import IGNORED, Objective, objective_of, plain_labels, unknown_objective
from gramscope.record.subject import Subject, evaluating, layer_of
from gramscope.record.watch_options import globs
from gramscope.record.watched_measures import WATCHED_MEASURES


def check_model(model: nn.Module) -> None:
    named = dict(model.named_parameters())
    if not named:
        raise InputError(
            f"the model must have parameters to be watched, but {type(model).__name__} has none. "
            "Pass the module that holds the weights."
        )
    lazy = [name for name, parameter in named.items() if is_lazy(parameter)]
    if lazy:
        raise InputError(
            f"parameter {lazy[0]!r} must have a shape, but it is lazy and not initialised. Call model(x) once first."
        )


def split(probe: object, model: nn.Module) -> tuple[ModelInput, Tensor | None]:
    """(x, y) with x in the model's precision; a batch of a DataLoader is a list."""
    x, y = probe if isinstance(probe, tuple | list) and len(probe) == 2 else (probe, None)
    n = count_examples(x)
    if y is not None and (not isinstance(y, Tensor) or y.dim() == 0 or len(y) != n):
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise InputError(f"probe must be (x, y) with one target for each of the {n} examples, got y of {got}.")
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return prepare_input(x, dtype), None if y is None else prepare_input(plain_labels(y))


def objective(
    model: nn.Module,
    x: ModelInput,
    y: Tensor | None,
    outputs: Outputs,
    loss: str | Loss | None,
    weights_only: bool = False,
) -> Objective:
    """How the outputs are judged, from one forward pass.

    A probe that the model refuses, or that gives NaN for a NaN of its own, is refused here, unless the model will not
    be called (``weights_only``); so is a loss that does not take the outputs. Outputs that only the measures cannot use
    are left to them to report.
    """
    n = count_examples(x)
    try:
        # Gradients are on, and x is a copy: outputs may be derivatives with respect to x (a PDE residual).
        with context(model) as written, written, evaluating(model), torch.enable_grad():
            found = loss_input(model, prepare_input(x), n, outputs).detach()
    except Exception as error:
        if weights_only or _ours(error, model):
            return unknown_objective(y, loss)
        several = _several(x) if y is None else ""
        if isinstance(error, InputError):
            if several:
                raise InputError(f"{error} {several}") from error
            raise
        raise InputError(
            f"the probe must go through the model, but the forward pass failed with {type(error).__name__}: {error}. "
            f"Pass x as the model is called with it, got {_shapes(x)}. {several}".rstrip()
        ) from error
    if not weights_only and bool(found.isnan().any()) and any(bool(t.isnan().any()) for t in tensors_in(x)):
        raise InputError(
            "the probe must hold numbers, but x has NaN in it, and so have the outputs. Leave out such examples."
        )
    # Labels are looked at where that takes no kernels of a GPU, each of which is loaded at its first use.
    made = objective_of(None if y is None else y.cpu(), tuple(found.shape[1:]) or (1,), loss)
    if made.own is not None and y is not None and not weights_only:
        _try(made.own, found.reshape(n, *made.shape), y.to(found.device))
    return made


def _try(loss: Loss, found: Tensor, y: Tensor) -> None:
    try:
        with streams_put_back():
            value: object = loss(found, y)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"loss must take the outputs of the probe and its y, but it failed with {type(error).__name__}: {error}. "
            f"It was given tensors of {tuple(found.shape)} and {tuple(y.shape)}."
        ) from error
    if not isinstance(value, Tensor) or value.dim() != 0:
        got = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"loss must return one number for (outputs, y), as a tensor, got {got}. Average or sum it.")


def _ours(error: Exception, model: nn.Module) -> bool:
    """Whether the model itself may be sound: its outputs are what we cannot use, or it needs the user's autocast."""
    mixed = len({p.dtype for p in model.parameters() if p.is_floating_point()}) > 1
    return mixed or (isinstance(error, GramscopeError) and error.__cause__ is None)


def _several(x: ModelInput) -> str:
    """What a probe such as (x, y, y) was taken for."""
    if not isinstance(x, tuple | list) or len(x) < 3:
        return ""
    return (
        f"A probe of {len(x)} entries is taken for {len(x)} arguments of the model, without targets: pass (x, y), with "
        "x a tuple where the model takes several."
    )


def _shapes(x: ModelInput) -> str:
    return ", ".join(f"{tuple(t.shape)} of {t.dtype}" for t in tensors_in(x))


@contextmanager
def context(model: nn.Module) -> Iterator[CopyOnWrite]:
    """Nothing of the user's is changed inside; nor are the user's autocast and inference mode in force.

    What is given is entered around the model's own code, where the measures do not do so themselves.
    """
    with ExitStack() as stack:
        written = stack.enter_context(untouched(model, throughout=False))
        stack.enter_context(torch.inference_mode(False))
        if "torch._dynamo" in sys.modules:  # model.compile() has no wrapper: its code would be compiled for our pass
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for kind in dict.fromkeys(("cpu", next(model.parameters()).device.type)):
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_parameter_hooks_set_aside(model))
        stack.enter_context(autocast_uncached())  # where the model has an autocast of its own
        yield written


@contextmanager
def _parameter_hooks_set_aside(model: nn.Module) -> Iterator[None]:
    """Hooks that the user put on parameters do not run: they may change gradients, or count steps."""
    held = [(parameter, parameter._backward_hooks) for parameter in model.parameters() if parameter._backward_hooks]
    try:
        for parameter, _ in held:
            parameter._backward_hooks = None
        yield
    finally:
        for parameter, hooks in held:
            parameter._backward_hooks = hooks


def facts(subject: Subject, taken: str) -> dict[str, object]:
    """What is said of the probe: its size, where it was taken from, and what stands for outputs that are very many."""
    objective, y = subject.objective, subject.y
    found: dict[str, object] = {"examples": count_examples(subject.x)} | ({"taken": taken} if taken else {})
    if y is not None and not y.is_floating_point():
        found["classes"] = int(y.max()) + 1
    if has_many_outputs(objective):
        count = mixing(objective).k
        found["kernel"] = f"estimated from {count} random mixtures of {objective.size} outputs, seed {SEED}"
        if precision_of(subject.model) == "tf32":
            found["precision"] = "products in TF32 (relative error 1e-3)"
    if y is not None and objective.by_position:
        rows = len(sample_positions(y))
        found["features"] = f"of the last layer, at {rows} of {int((y != IGNORED).sum())} labelled positions, seed 0"
    if rehearses_losses(objective):
        found["step"] = "changes of the loss of each example, not of its outputs"
    return found


def meta(
    subject: Subject, chosen_measures: Sequence[str], name: str, config: Mapping[str, object] | None, taken: str = ""
) -> dict[str, object]:
    """What ``meta.json`` says of a run."""
    parameters = named_parameters(subject.model)
    return {
        "name": name,
        "model": type(subject.model).__name__,
        "parameters": {n: list(p.shape) for n, p in parameters.items()},
        "layers": list(dict.fromkeys(layer_of(n) for n in parameters)),
        "measures": list(chosen_measures),
        "facts": {n: {"how_to_read": WATCHED_MEASURES[n].how_to_read} for n in chosen_measures},
        "probe": facts(subject, taken),
        "config": dict(config or {}),
    }


def chosen(measures: object, y: Tensor | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The measures to read, and those asked for by name that need targets which the probe has not."""
    patterns = globs(measures, "measures")
    found: list[str] = []
    for pattern in patterns:
        known = [name for name, measure in WATCHED_MEASURES.items() if measure.by_default or name == pattern]
        matched = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise InputError(f"measures must name some of {', '.join(WATCHED_MEASURES)}, got {pattern!r}.")
        found += matched
    names = tuple(n for n in dict.fromkeys(found) if y is not None or not WATCHED_MEASURES[n].needs_targets)
    return names, tuple(n for n in dict.fromkeys(patterns) if n in WATCHED_MEASURES and n not in names)


def matcher(layers: object, model: nn.Module) -> Callable[[str], bool]:
    patterns = globs(layers, "layers")
    known = list(dict.fromkeys(layer_of(name) for name, _ in model.named_parameters(remove_duplicate=False)))
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            # Beginnings too: of "blok*" the letters before the star are what was mistyped.
            stems = {name[: len(pattern)]: name for name in reversed(known)} | {name: name for name in known}
            close = [stems[stem] for stem in difflib.get_close_matches(pattern, stems, n=8, cutoff=0.5)]
            names = ", ".join(dict.fromkeys(close or known[:8]))
            raise InputError(
                f"layers must name layers that hold weights, but {pattern!r} matches none. There are {names}."
            )
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
