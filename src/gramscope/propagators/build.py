"""From a model and its data to linearised states."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.axes import Axes
from gramscope.base.checks import check_finite
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput, T, map_tensors, tensors_in
from gramscope.capture.backward_graph import leaves_below
from gramscope.capture.linear_map import LinearMap
from gramscope.capture.network import Outputs, check_model, copied, count_examples, evaluate, prepare_input
from gramscope.capture.side_effects import plain_execution, unscale_tables, untouched
from gramscope.propagators.layout import StateLayout, StateSite
from gramscope.propagators.network_states import NetworkStates
from gramscope.propagators.neural_ode import NeuralODE, take_exact_route
from gramscope.propagators.recurrent import valid_steps
from gramscope.propagators.state_recorder import Node, StateRecorder


def private_copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of the model, so that training on does not disturb the operators; half precision becomes float32."""
    with torch.inference_mode(False):
        twin = copied(model)
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in twin.parameters())
    target = dtype or (torch.float32 if half else None)
    take_exact_route(twin)
    return twin if target is None else twin.to(target)


def cast_input(x: T, model: nn.Module, dtype: torch.dtype | None) -> T:
    """x as fresh tensors; half precision becomes float32 like the model."""
    fresh: T = prepare_input(x, dtype)
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    halves = (torch.float16, torch.bfloat16)
    return map_tensors(lambda t: t.to(own) if t.dtype in halves and own is not None else t, fresh)


def network_states(
    model: nn.Module, x: ModelInput, outputs: Outputs, frozen: bool, dtype: torch.dtype | None
) -> NetworkStates:
    """States of a network that is called once, ``model(x)``: every weight site and every recurrent layer."""
    n = count_examples(x)
    model = private_copy(model, dtype)
    x = cast_input(x, model, dtype)
    before = private_copy(model, None) if model.training else model
    parameters = _parameters(model, x, frozen)
    nodes, f = _watched(model, x, n, outputs, parameters)
    if not nodes:
        raise InputError(
            "the model must use a measured parameter on its way to the output, but no state depends on one."
        )
    check_finite(f, "the model's output", "Look for NaN in x or in the parameters, or for overflow.")
    trials = _trial_axes(before, x, n, outputs, frozen, nodes)
    sites = _sites(nodes, trials, parameters)
    axes = Axes(trial=n, output=f.shape[1])
    return NetworkStates(nodes, StateLayout.of(sites), f, axes, parameters)


def _parameters(model: nn.Module, x: ModelInput, frozen: bool) -> dict[str, nn.Parameter]:
    parameters = check_model(model, x, frozen)
    for parameter in parameters.values():
        parameter.requires_grad_()
    return parameters


def _watched(
    model: nn.Module, x: ModelInput, n: int, outputs: Outputs, parameters: dict[str, nn.Parameter]
) -> tuple[list[Node], Tensor]:
    """One watched run: its nodes and its outputs (n, C)."""
    x = prepare_input(x)
    unscale_tables(model)
    with untouched(nn.Module()), exact_arithmetic(), plain_execution():  # the model is ours: keep the streams alone
        watch = StateRecorder(parameters.values(), n)
        watch.mark_data(x)
        with watch:
            f = evaluate(model, x, n, outputs)
        watch.check_intact()
        if watch.depends_on_parameters(f):
            f = watch.cut(f, "output")  # a parameter reaches the output without passing a real site
    return watch.nodes, f


Seen = tuple[tuple[int, ...], int | None]  # the shape in which the trials have an axis of their own, and that axis


def _trial_axes(
    model: nn.Module,
    x: ModelInput,
    n: int,
    outputs: Outputs,
    frozen: bool,
    nodes: Sequence[Node],
) -> list[Seen]:
    """For each state the axis of its trials, found out by changing the first example and looking what moves."""
    leaves = [leaf for node in nodes for leaf in node.leaves]
    unknown: list[Seen] = [(tuple(leaf.shape), None) for leaf in leaves]
    if n == 1:
        return [_single(leaf) for leaf in leaves]
    changed = map_tensors(lambda t: _other_first(t, n), x)
    twin = private_copy(model, None)  # another run would update statistics that the first one's graph holds
    try:
        again, _ = _watched(twin, changed, n, outputs, _parameters(twin, changed, frozen))
    except (RuntimeError, ValueError, IndexError):  # the change is not a legal input: leave the axes unnamed
        return unknown
    others = [leaf for node in again for leaf in node.leaves]
    if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in others]:
        return unknown
    return [_moved_axis(a.detach(), b.detach(), n) for a, b in zip(leaves, others, strict=True)]


def _single(leaf: Tensor) -> Seen:
    shape = tuple(leaf.shape)
    return (shape, 0) if shape and shape[0] == 1 else ((1, *shape), 0)


def _other_first(tensor: Tensor, n: int) -> Tensor:
    """The tensor with another first example: shifted numbers, or those of the example after it."""
    if tensor.dim() == 0 or tensor.shape[0] != n or tensor.dtype == torch.bool:
        return tensor
    tensor = tensor.clone()
    if tensor.is_floating_point():
        wave = torch.arange(tensor[0].numel(), device=tensor.device).to(tensor.dtype).cos().reshape(tensor[0].shape)
        tensor[0] += 0.3 * wave + 0.1
    else:
        other = next((i for i in range(1, n) if not torch.equal(tensor[i], tensor[0])), 0)
        tensor[0] = tensor[other]
    return tensor


def _moved_axis(before: Tensor, after: Tensor, n: int) -> Seen:
    """Trials on the first axis, on the second, or folded into the first with the time outside or inside."""
    shape = tuple(before.shape)
    tries: list[Seen] = [(shape, axis) for axis in (0, 1) if before.dim() > axis and shape[axis] == n]
    if before.dim() and shape[0] > n and shape[0] % n == 0:
        folds = shape[0] // n
        tries += [((folds, n, *shape[1:]), 1), ((n, folds, *shape[1:]), 0)]
    for seen, axis in tries:
        moved = (before != after).reshape(seen)
        assert axis is not None
        if not bool(moved.transpose(0, axis)[1:].any()):
            return seen, axis
    return shape, None


def _sites(nodes: Sequence[Node], trials: Sequence[Seen], parameters: dict[str, nn.Parameter]) -> list[StateSite]:
    sites: list[StateSite] = []
    taken: dict[str, int] = {}
    for node in nodes:
        made_of = leaves_below(node.outputs if node.named_after is None else [node.named_after]).values()
        used = {id(leaf) for leaf in made_of}
        first = next((name for name, parameter in parameters.items() if id(parameter) in used), None)
        base = node.operation if first is None else _module_of(first)
        if node.operation.endswith("scan"):
            base = "h" if first is None or "." not in first else f"{_module_of(first)}.h"
        for _ in node.leaves:
            taken[base] = taken.get(base, 0) + 1
            name = base if taken[base] == 1 else f"{base}#{taken[base]}"
            shape, trial = trials[len(sites)]
            sites.append(StateSite(name, _site_axes(shape, trial, node.operation), trial))
    return sites


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0] or parameter


def _site_axes(shape: Sequence[int], trial: int | None, operation: str) -> Axes:
    """Names for the axes of a state: trial, token or time, unit; channels are the units of a convolution."""
    if not shape:
        return Axes(unit=1)
    if operation == "recurrent":
        names = ["fold", "trial", "time", "site", "unit"][-len(shape) :]
        if len(shape) < 5 and trial != 0:
            names[0] = "row"
        elif len(shape) == 5 and trial == 0:  # several rows of one trial, side by side
            names[:2] = "trial", "fold"
    elif operation.endswith("scan") and trial == 0:
        whole = ["trial", "time", "unit", "mode", *(f"mode_{i}" for i in range(2, len(shape)))]
        names = [*whole[: len(shape) - 1], "part" if operation == "complex scan" else whole[len(shape) - 1]]
    else:
        names = [""] * len(shape)
        if trial is not None:
            names[trial] = "trial"
        free = [axis for axis, name in enumerate(names) if not name]
        convolved = "conv" in operation and len(free) > 1
        if free:
            names[free.pop(0) if convolved else free.pop()] = "unit"
        inner = {1: ["token"], 2: ["row", "column"], 3: ["depth", "row", "column"]}.get(len(free))
        inner = inner or [f"token_{i}" for i in range(len(free))]
        for axis, name in zip(free, ["position"] if convolved and len(free) == 1 else inner, strict=True):
            names[axis] = name
    return Axes(**dict(zip(names, shape, strict=True)))


def cell_states(
    cell: nn.Module, x: ModelInput, h0: ModelInput, mask: Tensor | None, frozen: bool, dtype: torch.dtype | None
) -> NetworkStates:
    """States of any ``cell(x_t, h) -> h`` run over a sequence (trial, time, ...): its h at each step."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise InputError("x must be a tensor with axes (trial, time, ...) for a cell, whose h0 was given.")
    n, steps = x.shape[:2]
    if not n or not steps:
        raise InputError(f"x must have at least one trial and one time step, got {n} and {steps}.")
    cell = private_copy(cell, dtype)
    x, h0 = cast_input(x, cell, dtype), cast_input(h0, cell, dtype)
    _check_initial(h0, n)
    parameters = _parameters(cell, x, frozen)
    valid = None if mask is None else valid_steps(mask, n, steps).to(x.device)
    convolved = any(isinstance(module, nn.modules.conv._ConvNd) for module in cell.modules())

    def step(t: int, now: Tensor | None, state: ModelInput) -> ModelInput:
        try:
            new: ModelInput = cell(now, state)
        except TypeError as error:
            raise InputError(
                f"a cell given with h0 must take (x_t, h), but it said: {error}. For a whole network that takes an "
                "initial state, leave h0 out and pass x=(x, h0)."
            ) from error
        return new

    return _stepwise(step, x, h0, steps, parameters, valid, convolved)


def ode_states(ode: NeuralODE, x: ModelInput, frozen: bool, dtype: torch.dtype | None) -> NetworkStates:
    """States of a neural ODE: h at the times of its grid. x is what it is called with, h0 or (h0, inputs)."""
    given = tuple(x) if isinstance(x, tuple | list) else (x,)
    if not 1 <= len(given) <= 2 or not all(isinstance(part, Tensor) for part in given):
        raise InputError("x must be what the neural ODE is called with, h0 or (h0, inputs).")
    ode = cast(NeuralODE, private_copy(ode, dtype))
    h0, inputs = (*cast_input(given, ode, dtype), None)[:2]
    ode.check_inputs(h0, inputs)
    _check_initial(h0, len(h0))
    parameters = _parameters(ode, h0, frozen)
    convolved = any(isinstance(module, nn.modules.conv._ConvNd) for module in ode.modules())

    def step(t: int, now: Tensor | None, h: ModelInput) -> ModelInput:
        assert isinstance(h, Tensor)
        return ode.step(t, h, now)

    return _stepwise(step, inputs, h0, ode.steps, parameters, None, convolved)


def _check_initial(h0: ModelInput, n: int) -> None:
    shapes = [shape for shape, _ in _described(h0)]
    if any(not shape or shape[0] != n for shape in shapes) or not shapes:
        raise InputError(f"h0 must have {n} trials on the first axis of each of its tensors, got shapes {shapes}.")
    if not any(part.is_floating_point() for part in tensors_in(h0)):
        raise InputError("h0 must hold a floating-point tensor, since states are differentiated, but it has none.")


def _stepwise(
    step: Callable[[int, Tensor | None, ModelInput], ModelInput],
    x: Tensor | None,
    h0: ModelInput,
    steps: int,
    parameters: dict[str, nn.Parameter],
    valid: Tensor | None,
    convolved: bool,
) -> NetworkStates:
    """The states that ``step(t, x_t, state)`` makes, one after another from ``h0``."""
    n, expected = len(tensors_in(h0)[0]), _described(h0)
    starts = [part for part in tensors_in(h0) if part.is_floating_point()]
    with untouched(nn.Module()), exact_arithmetic(), plain_execution():
        watch = StateRecorder(parameters.values(), n, inside=True)
        watch.mark_data(x)
        for part in starts:
            part.requires_grad_()
        state = h0
        for t in range(steps):
            now = None if x is None else x[:, t]
            watch.mark_data((now, state))
            with watch:
                new = step(t, now, state)
            _check_step(new, expected)
            if valid is not None:
                new = map_tensors(partial(_kept, alive=valid[t]), new)
            state = watch.cut(new, "cell")
        watch.check_intact()
    leaves = [leaf for node in watch.nodes for leaf in node.leaves]
    check_finite(
        torch.cat([leaf.detach().flatten() for leaf in leaves]), "the states", "Look for overflow or NaN in x."
    )
    layout = _cell_layout(leaves, n, steps, convolved)
    first = torch.stack([_alias(node.leaves[0]) for node in watch.nodes], dim=1)
    axes = Axes(trial=n, time=steps, output=first[0, 0].numel())
    initial = LinearMap(watch.nodes[0].outputs, starts)
    return NetworkStates(watch.nodes, layout, first, axes, parameters, initial, valid)


def _alias(leaf: Tensor) -> Tensor:
    with torch.enable_grad():
        return leaf.reshape(len(leaf), -1)


def _kept(part: Tensor, alive: Tensor) -> Tensor:
    return torch.where(alive.reshape(-1, *([1] * (part.dim() - 1))), part, torch.zeros_like(part))


def _described(states: ModelInput) -> list[tuple[tuple[int, ...], str]]:
    kinds = {True: "floating", False: "not floating"}
    return [(tuple(part.shape), kinds[part.is_floating_point()]) for part in tensors_in(states)]


def _check_step(new: ModelInput, expected: list[tuple[tuple[int, ...], str]]) -> None:
    got = _described(new)
    if got != expected:
        raise InputError(
            f"a cell given with h0 must return states like h0, {expected}, got {got}. For a whole network that takes "
            "an initial state, leave h0 out and pass x=(x, h0)."
        )


def _cell_layout(leaves: Sequence[Tensor], n: int, steps: int, convolved: bool) -> StateLayout:
    """Time is an axis of its own: (trial, time, site, ...) where all states have one shape, else (trial, time, state).

    Each trial's states lie together, step after step, in both.
    """
    count = len(leaves) // steps
    names = [f"h{part if count > 1 else ''}[{t}]" for t in range(steps) for part in range(count)]
    kind = "cell of convolutions" if convolved else "cell"
    axes = [Axes(trial=n, unit=1) if leaf.dim() == 1 else _site_axes(leaf.shape, 0, kind) for leaf in leaves]
    sites = tuple(StateSite(name, own) for name, own in zip(names, axes, strict=True))
    if len(set(axes)) == 1:
        inner = {name: size for name, size in axes[0].items() if name != "trial"}
        return StateLayout(sites, Axes(trial=n, time=steps, site=count, **inner), "stacked", 1)
    total = sum(own.size for own in axes)
    return StateLayout(sites, Axes(trial=n, time=steps, state=total // (n * steps)), "by trial")
