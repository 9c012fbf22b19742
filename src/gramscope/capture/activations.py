"""Inputs or outputs of named modules in a forward pass that leaves the model as it was."""

import difflib
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gramscope.base.arithmetic import exact_arithmetic, users_autocast
from gramscope.base.checks import check_choice, check_plain
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.nested import ModelInput
from gramscope.capture.network import call, count_examples, main_tensor, plain_name, prepare_input, unwrap_with_input
from gramscope.capture.side_effects import eager_execution, in_modes, untouched

At = Literal["output", "input"]
Mode = Literal["eval", "train", "as_is"]
Layers = str | Sequence[str]
Chosen = dict[str, tuple[nn.Module, int | None]]  # by name; the number of the call alone that is asked for, if any


@dataclass(frozen=True)
class Visit:
    """One call of a chosen module: its name, the module, and which call of this forward pass it is (from 1)."""

    name: str
    module: nn.Module
    call: int
    examples: int


Reader = Callable[[Tensor, Visit], Tensor]


def activations(
    model: nn.Module,
    x: ModelInput,
    layers: Layers = "*",
    *,
    at: At | Mapping[str, At] = "output",
    mode: Mode = "eval",
    reader: Reader | None = None,
    missing: Literal["raise", "skip"] = "raise",
) -> dict[str, Tensor]:
    """Outputs (or inputs) of the modules named by ``layers`` in one forward pass on ``x``, in the order of the calls.

    A module called once appears under its name, one called several times as ``name@1``, ``name@2``, ... ; the model
    itself has the name ``""``. Of an output object the logits count, of a tuple or dict the first floating tensor. What
    comes back is a copy, so later in-place operations do not show. The model, its flags, buffers and hooks and all
    random streams are left as they were.

    Args:
        model: any module; compiled and data-parallel wrappers are opened.
        x: a tensor with examples first, a tuple of positional arguments, or a dict of keyword arguments.
        layers: names or globs (``"blocks.*.mlp"``, where ``*`` also crosses dots), or a list of them; ``"!name"`` in a
            list leaves layers out. A glob takes the layers that run: not a container whose children the model calls.
        at: what the module returns, or what it is given; or a dict by layer name (the rest: output).
        mode: run in evaluation mode, in training mode, or as the flags of the model stand.
        reader: reduces a tensor as soon as it is seen, so that large ones need not be kept; see ``measures.features``.
        missing: what to do with a name, or a glob, of which no layer runs: raise, or skip it.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 2))
        >>> found = activations(model, torch.randn(5, 3), ["0", "2"])
        >>> {name: tuple(value.shape) for name, value in found.items()}
        {'0': (5, 4), '2': (5, 2)}
    """
    for side in [at] if isinstance(at, str) else at.values():
        check_choice(side, "at", ("output", "input"))
    check_choice(mode, "mode", ("eval", "train", "as_is"))
    model, x = unwrap_with_input(model, x)
    chosen = choose_layers(model, layers)
    watched = _WatchedCalls(chosen, count_examples(x), at, reader)
    try:
        watched.run(model, prepare_input(x), mode, gradients=False)
    except RuntimeError as error:
        # Models that differentiate inside their forward pass (energies and forces) need a graph.
        if "does not require grad" not in str(error):
            raise
        watched = _WatchedCalls(chosen, count_examples(x), at, reader)
        watched.run(model, prepare_input(x), mode, gradients=True)
    if missing == "raise":
        watched.require_runs([layers] if isinstance(layers, str) else layers)
    return watched.by_name()


def choose_layers(model: nn.Module, layers: Layers) -> Chosen:
    """Modules by name for names and globs; ``name@k`` asks for the k-th call alone. Raises where nothing matches."""
    named = {plain_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    asked = [layers] if isinstance(layers, str) else list(layers)
    if not all(isinstance(pattern, str) for pattern in asked) or not any(not p.startswith("!") for p in asked):
        raise InputError(f"layers must be a name, a glob or a list of them, got {layers!r}.")
    patterns = [pattern for pattern in asked if not pattern.startswith("!")]
    unwanted = {name for pattern in asked if pattern.startswith("!") for name, _ in _matches(pattern[1:], named)}
    found: dict[tuple[nn.Module, int | None], str] = {}
    for pattern in patterns:
        for name, number in _matches(pattern, named):
            if name not in unwanted:  # a module under two names is one module
                found.setdefault((named[_without_number(name, number)], number), name)
    if not found:
        raise InputError(f"layers must leave at least one module, got {layers!r}, which leaves none.")
    return {name: numbered for numbered, name in found.items()}


def _matches(pattern: str, named: dict[str, nn.Module]) -> list[tuple[str, int | None]]:
    if pattern in named:
        return [(pattern, None)]
    numbered = re.fullmatch(r"(.*)@(\d+)", pattern)
    if numbered and numbered[1] in named:
        return [(pattern, int(numbered[2]))]
    found = [name for name in named if name and fnmatch.fnmatchcase(name, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, list(named), n=3, cutoff=0.4) or [name for name in named if name][:5]
        raise InputError(
            f"layers must name modules of the model, but nothing matches {pattern!r}. Close names: {', '.join(near)}. "
            "Globs use * and ?; model.named_modules() lists all names."
        )
    return [(name, None) for name in found]


class _WatchedCalls:
    """The calls of chosen modules in one forward pass, and what they were given or gave."""

    def __init__(self, chosen: Chosen, n: int, at: At | Mapping[str, At], reader: Reader | None) -> None:
        self.chosen, self.n, self.at, self.reader = chosen, n, at, reader
        self.visits: list[tuple[Visit, Tensor]] = []
        self.names = {module: _without_number(name, number) for name, (module, number) in chosen.items()}
        self.calls = dict.fromkeys(self.names.values(), 0)

    def run(self, model: nn.Module, x: ModelInput, mode: Mode, *, gradients: bool) -> None:
        """One hooked forward pass; hooks and flags are gone after it, whatever happens."""
        with ExitStack() as stack:
            if mode != "as_is":
                stack.enter_context(in_modes([(module, mode == "train") for module in model.modules()]))
            stack.enter_context(untouched(model))
            stack.enter_context(exact_arithmetic())
            stack.enter_context(eager_execution())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(gradients))
            for module, name in self.names.items():
                if isinstance(module, torch.jit.ScriptModule):
                    raise UnsupportedError(
                        f"layer {name!r} must be a Python module to have its activations measured, but TorchScript "
                        "compiled it. Measure the model before scripting or tracing it."
                    )
                side = self.at if isinstance(self.at, str) else self.at.get(name, "output")
                hook = module.register_forward_pre_hook if side == "input" else module.register_forward_hook
                stack.callback(hook(self._hook(side), with_kwargs=True).remove)
            with users_autocast():
                call(model, x)

    def _hook(self, side: At) -> Callable[..., None]:
        """Called with (module, arguments, keyword arguments), and with the output where there is one."""

        def hook(module: nn.Module, *values: object) -> None:
            name = self.names[module]
            self.calls[name] += 1
            numbers = {number for other, number in self.chosen.values() if other is module}
            if None not in numbers and self.calls[name] not in numbers:
                return
            visit = Visit(name, module, self.calls[name], self.n)
            value = values[-1] if side == "output" else values
            tensor = main_tensor(value)
            if tensor is None:
                raise InputError(
                    f"the {side} of layer {name!r} must hold a floating tensor, got {type(value).__name__}. Leave this "
                    "layer out, or choose the other side with at='input' or at='output'."
                )
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                raise UnsupportedError(
                    f"the {side} of layer {name!r} must be known outside the model, but it is inside a transform of "
                    "torch.func (vmap, jvp, grad). Choose a layer that runs outside it."
                )
            check_plain(tensor, f"the {side} of layer {name!r}")
            tensor = tensor.detach()
            kept = tensor if self.reader is None else self.reader(tensor, visit)
            # A view of what the network goes on working with would change under in-place operations.
            shares = kept.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            self.visits.append((visit, kept.clone() if shares else kept))

        return hook

    def by_name(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for visit, tensor in self.visits:
            numbered = f"{visit.name}@{visit.call}"
            asked = self.chosen.get(numbered, (None, None))[1] is not None
            found[numbered if asked or self.calls[visit.name] > 1 else visit.name] = tensor
        return found

    def require_runs(self, patterns: Sequence[str]) -> None:
        """Raise if no layer of a name or glob was called, or not as often as its number says."""
        for pattern in patterns:
            names = [pattern] if pattern in self.chosen else fnmatch.filter(self.chosen, pattern)
            numbers = [self.chosen[name][1] for name in names]
            counts = [self.calls[_without_number(*named)] for named in zip(names, numbers, strict=True)]
            if names and all(count < (number or 1) for count, number in zip(counts, numbers, strict=True)):
                again = f"was called {counts[0]} times" if counts[0] else "was not called"
                raise InputError(
                    f"layer {names[0]!r} ({type(self.chosen[names[0]][0]).__name__}) must run in the forward pass on "
                    f"x, but it {again}. Its weights may be used by a parent (as in nn.MultiheadAttention) or by "
                    "compiled code; name that parent, or the children if the model calls them one by one."
                )


def _without_number(name: str, number: int | None) -> str:
    return name if number is None else name.rpartition("@")[0]
