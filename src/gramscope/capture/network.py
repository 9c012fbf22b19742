"""The user's side: unwrapping a model, calling it on x, choosing its outputs, and saying what is wrong with either."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gramscope.base.arithmetic import users_autocast
from gramscope.base.checks import check_choice, check_one_device, check_plain, is_distributed, loaded
from gramscope.base.complex_numbers import with_precision_of
from gramscope.base.errors import GramscopeError, InputError, UnsupportedError
from gramscope.base.nested import ModelInput, map_tensors, tensors_in
from gramscope.base.streams import RandomStreams, streams_put_back
from gramscope.base.user_warnings import warn_of_random_outputs

Outputs = (
    int | np.integer | slice | Sequence[int] | Tensor | np.ndarray | str | Callable[[nn.Module, Any], Tensor] | None
)
Precision = Literal["float64", "float32", "tf32"] | None
X = TypeVar("X")  # what a model is called with
PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
# Largest difference of an example's outputs in another batch, relative to the largest output: the rounding of kernels
# that are chosen by batch size. Float64 networks may round to float32 inside; TF32 rounds to 11 bits.
SAME, SAME_IN_TF32, SAME_IN_HALF = {torch.float64: 1e-5, torch.float32: 1e-3}, 2e-2, 5e-2
STRICT = 1e-10  # in float64 alone


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch.compile, DistributedDataParallel and DataParallel wrappers."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"model must be a torch.nn.Module, got {type(model).__name__}. Wrap a plain function in a module that "
            "holds its parameters."
        )
    while isinstance(model, PARALLEL) or hasattr(model, "_orig_mod"):
        model = cast(nn.Module, model.module if isinstance(model, PARALLEL) else model._orig_mod)
    return model


def unwrap_with_input(model: nn.Module, x: X) -> tuple[nn.Module, X]:
    """The same, with x where the wrapper would bring it: data-parallel ones move their inputs to the model's device."""
    inner = unwrap(model)
    first = next(inner.parameters(), None)
    if first is None or not isinstance(model, PARALLEL):
        return inner, x
    return inner, map_tensors(lambda t: t.to(first.device), x)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Each parameter once, under its first name."""
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}


def plain_name(name: str) -> str:
    """The name of a module or parameter without the prefixes that compiling adds."""
    return name.replace("_orig_mod.", "")


def check_whole(model: nn.Module) -> None:
    """Raise for a model whose parameters are spread over processes."""
    sharded = tuple(loaded("torch.distributed.fsdp", name) for name in ("FSDPModule", "FullyShardedDataParallel"))
    spread = any(isinstance(module, sharded) for module in model.modules())
    if spread or any(map(is_distributed, model.parameters())):
        raise UnsupportedError(
            "the model must hold whole parameters, but they are spread over processes (fully_shard, tensor parallel). "
            "Gather them (full_tensor()) and load them into a plain copy of the model. gs.watch does so by itself."
        )


def copied(model: nn.Module, memo: dict[Any, object] | None = None) -> nn.Module:
    """A copy that shares nothing with the user's model; ``memo`` is deepcopy's, for what goes along with it."""
    check_whole(model)
    # deepcopy refuses results of operations, which modules keep as attributes, in lists (weight norm of an LSTM)
    # or as buffers; they are made anew.
    memo = {} if memo is None else memo
    kept = chain.from_iterable(tensors_in(list(vars(module).values())) for module in model.modules())
    memo |= {id(value): value.detach().clone() for value in kept if not value.is_leaf}
    try:
        with torch.no_grad():  # TorchScript copies with gradients on are no leaves, and lose their flags
            twin = copy.deepcopy(model, memo)
        for parameter, original in zip(twin.parameters(), model.parameters(), strict=True):
            parameter.requires_grad_(original.requires_grad)
            # TorchScript's copies of parameters are plain tensors, and are not in the memo.
            parameter._is_param = True
            memo[id(original)] = parameter
        return twin
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(
            f"this needs a copy of the model, which cannot be copied: {error}. Give the class a __deepcopy__, or move "
            "what cannot be copied out of the model."
        ) from error


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy in ``dtype``; the user's model is not touched."""
    try:
        with torch.no_grad():
            return copied(model)._apply(lambda tensor: with_precision_of(tensor, dtype))
    except UnsupportedError as error:
        name = str(dtype).removeprefix("torch.")
        raise UnsupportedError(
            f"precision={name!r}: {error} Or build the model in {name} yourself (model.to({dtype})) and leave "
            "precision out."
        ) from error


def prepare_input(x: X, dtype: torch.dtype | None = None) -> X:
    """x as fresh tensor objects that share no autograd history with the user's, floats cast to ``dtype`` if given."""

    def fresh(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().clone()  # a model may overwrite its input
        return tensor if dtype is None else with_precision_of(tensor, dtype)

    with torch.inference_mode(False), torch.no_grad():
        return map_tensors(fresh, x)


def check_precision(precision: str | None) -> None:
    check_choice(precision, "precision", (None, "float64", "float32", "tf32"))


def at_precision(model: nn.Module, x: X, precision: Precision) -> tuple[nn.Module, X]:
    """The model without its wrappers and x as fresh tensors, in the dtype asked for: copies, where that is another."""
    model, x = unwrap_with_input(model, x)
    dtype = {"float64": torch.float64, "float32": torch.float32}.get(precision or "")
    tensors = chain(model.parameters(), model.buffers())
    if dtype is not None and any(with_precision_of(t, dtype).dtype != t.dtype for t in tensors):
        model = in_dtype(model, dtype)
    return model, prepare_input(x, dtype)


def count_examples(x: ModelInput) -> int:
    """Number of examples: the length of axis 0 of the first tensor of x."""
    first = next(iter(tensors_in(x)), None)
    if first is None:
        raise InputError(
            f"x must be a tensor, a tuple of positional arguments or a dict of keyword arguments with at least one "
            f"tensor, got {type(x).__name__}."
        )
    for tensor in tensors_in(x):
        check_plain(tensor, "x", complex_numbers=True)
    if first.dim() == 0 or first.shape[0] == 0:
        raise InputError(
            f"x must have at least one example on its first axis, got shape {tuple(first.shape)}. "
            "Pass a non-empty batch."
        )
    return int(first.shape[0])


def slice_examples(x: X, n: int, examples: slice) -> X:
    """Some examples of x; tensors without n rows are passed whole."""
    return map_tensors(lambda t: t[examples] if t.dim() and t.shape[0] == n else t, x)


def join_examples(x: X, x2: ModelInput) -> X | None:
    """The examples of both in one batch; None where their shapes differ, or what all of them share."""
    n, m = count_examples(x), count_examples(x2)
    first, second = tensors_in(x), tensors_in(x2)
    if len(first) != len(second):
        return None
    both = []
    for a, b in zip(first, second, strict=True):
        examples = bool(a.dim() and b.dim()) and len(a) == n and len(b) == m
        if a.dtype != b.dtype or a.shape[examples:] != b.shape[examples:] or not (examples or torch.equal(a, b)):
            return None
        both.append(torch.cat([a, b]) if examples else a)
    joined = iter(both)
    return map_tensors(lambda _: next(joined), x)


def check_model(model: nn.Module, x: ModelInput, frozen: bool) -> dict[str, nn.Parameter]:
    """The parameters to be measured; raises where they, or x, cannot be."""
    check_whole(model)
    named = named_parameters(model)
    for name, parameter in named.items():
        if is_lazy(parameter):
            raise InputError(
                f"parameter {name!r} must have a shape, but it is lazy and not initialised. Call model(x) once first."
            )
        check_plain(parameter, f"parameter {name!r}", complex_numbers=True)
    for name, tensor in chain(named.items(), model.named_buffers()):
        if tensor.is_inference():
            raise InputError(
                f"parameters and buffers must be made outside inference mode, which allows no gradients, but {name!r} "
                "was made inside. Build or load the model outside torch.inference_mode(), or copy.deepcopy it there."
            )
    inexact = {name: p for name, p in named.items() if p.is_floating_point() or p.is_complex()}
    chosen = {name: p for name, p in inexact.items() if frozen or p.requires_grad}
    if not chosen:
        reason = "all its parameters are frozen" if named else "it has no parameters"
        advice = (
            "Unfreeze some, or pass frozen=True where the call takes it." if named else "Pass a model with weights."
        )
        raise InputError(f"the model must have a parameter with requires_grad, but {reason}. {advice}")
    devices = {p.device for p in named.values()}
    if len(devices) == 1:
        inputs = ((f"x[{i}]" if i else "x", t) for i, t in enumerate(tensors_in(x)))
        check_one_device(inputs, devices.pop(), "the model")
    return chosen


def call(model: nn.Module, x: ModelInput) -> object:
    """``model(x)``; a tuple is positional arguments, a dict keyword arguments."""
    if isinstance(x, Mapping):
        return model(**x)
    if isinstance(x, tuple | list):
        return model(*x)
    return model(x)


def loss_input(model: nn.Module, x: ModelInput, n: int, outputs: Outputs) -> Tensor:
    """What a loss is given: a whole output in its own shape, or the chosen columns of the flattened one (n, k)."""
    whole = outputs is None or isinstance(outputs, str) or callable(outputs)
    return (_output_tensor if whole else evaluate)(model, x, n, outputs)


def evaluate(model: nn.Module, x: ModelInput, n: int, outputs: Outputs) -> Float[Tensor, "n C"]:
    """The chosen outputs as (n, C), with every failure explained."""
    tensor = _output_tensor(model, x, n, outputs)
    table = tensor.reshape(n, -1)
    if table.shape[1] == 0:
        raise InputError(f"the model's output must have at least one entry, got shape {tuple(tensor.shape)}.")
    return table if callable(outputs) or outputs is None or isinstance(outputs, str) else _select(table, outputs)


def _output_tensor(model: nn.Module, x: ModelInput, n: int, outputs: Outputs) -> Tensor:
    """The output tensor in its own shape, examples first. A warning says so where it is random."""
    streams = RandomStreams()
    try:
        with users_autocast():
            raw = outputs(model, x) if callable(outputs) else call(model, x)
    except GramscopeError:  # of a function of outputs, which says what is wrong itself
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        explained = _explain(error, model, x)
        if explained is None:
            raise
        raise explained from error
    if streams.moved():
        warn_of_random_outputs()
    tensor = _named(raw, outputs) if isinstance(outputs, str) else _choose(raw)
    if tensor.dim() == 0 or tensor.shape[0] != n:
        raise InputError(
            f"the model's output must have one row for each of the {n} examples of x, got shape {tuple(tensor.shape)}. "
            "Choose or reshape it with outputs=lambda model, x: ...; examples come first."
        )
    return tensor


def loss_gradient(loss: Callable[[Tensor], Tensor], outputs: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """A loss of the outputs, given as the argument ``name``, and its gradient; random streams are put back."""
    with streams_put_back(), torch.inference_mode(False), torch.enable_grad():
        values = outputs.detach().clone().requires_grad_()
        loss_value = loss(values)
        if not isinstance(loss_value, Tensor) or loss_value.dim() != 0 or not loss_value.requires_grad:
            shape = f" of shape {tuple(loss_value.shape)}" if isinstance(loss_value, Tensor) else ""
            raise InputError(
                f"{name}: a loss must return one differentiable number for outputs {tuple(outputs.shape)}, got "
                f"{type(loss_value).__name__}{shape}. Write it in terms of its argument."
            )
        (gradient,) = torch.autograd.grad(loss_value, values, allow_unused=True)
    if gradient is None:
        raise InputError(
            f"{name}: a loss must depend on the outputs, but it does not. Write it in terms of its argument."
        )
    return loss_value.detach(), gradient


def same_outputs(some: Tensor, others: Tensor, strict: bool = False) -> bool:
    """The same numbers, to the rounding of kernels that are chosen by batch size.

    ``strict`` where it is no harm to take the same for different: float64 networks may round to nothing less.
    """
    gap, scale = (some - others).abs().max(), others.abs().max()
    tf32 = others.is_cuda and others.dtype == torch.float32 and torch.backends.cudnn.allow_tf32
    within = SAME_IN_TF32 if tf32 else SAME.get(others.dtype, SAME_IN_HALF)
    return bool(gap <= (STRICT if strict and others.dtype == torch.float64 else within) * scale)


def depends_on_others(
    run: Callable[[ModelInput], Float[Tensor, "n C"]], x: ModelInput, f: Float[Tensor, "n C"]
) -> bool:
    """Do the outputs of the first or of the last example change when it takes the places of all the others?

    A difference proves that the examples are coupled. The batch keeps its size, so that dropout masks stay the same.
    """
    n = len(f)
    for example in (0, n - 1):
        batch = map_tensors(partial(_filled_with, n, example), x)
        if not same_outputs(run(batch)[example], f[example]):
            return True
    return False


def _filled_with(n: int, example: int, tensor: Tensor) -> Tensor:
    """One example n times; tensors without n rows are passed whole."""
    rows = tensor.dim() and len(tensor) == n
    return tensor[example : example + 1].expand_as(tensor).clone() if rows else tensor


def _named(raw: object, name: str) -> Tensor:
    """One entry of an output that is a mapping or an object with fields."""
    found = raw.get(name) if isinstance(raw, Mapping) else getattr(raw, name, None)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        names = list(raw) if isinstance(raw, Mapping) else type(raw).__name__
        raise InputError(f"outputs={name!r} must name a floating tensor of the model's output, which has {names}.")
    return found


def main_tensor(value: object) -> Tensor | None:
    """The logits of a mapping or an output object; else its first floating tensor, single numbers last."""
    plain = isinstance(value, Tensor | Mapping | tuple | list) or not hasattr(value, "__dict__")
    fields = value if plain else vars(value)
    if isinstance(fields, Mapping) and isinstance(fields.get("logits"), Tensor):
        return fields["logits"]
    inexact = [tensor for tensor in tensors_in(fields) if tensor.is_floating_point() or tensor.is_complex()]
    return min(inexact, key=lambda tensor: tensor.dim() == 0, default=None)  # a loss may come first


def _choose(raw: object) -> Tensor:
    tensor = main_tensor(raw)
    for one in tensors_in(raw) if tensor is None else [tensor]:
        check_plain(one, "the model's output")
    if tensor is not None:
        return tensor
    dtypes = [f"tensors of dtype {one.dtype}" for one in tensors_in(raw)] or [type(raw).__name__]
    raise InputError(
        "the model must return a floating tensor (or a tuple, dict or output object with one), got "
        f"{dtypes[0]}. Choose what to differentiate with outputs=lambda model, x: ..."
    )


def _select(table: Float[Tensor, "n C"], outputs: Any) -> Float[Tensor, "n k"]:
    """Columns by number, by numbers (of Python, torch or numpy), or by a mask over all of them."""
    width = table.shape[1]
    plain = outputs.tolist() if hasattr(outputs, "tolist") else outputs
    plain = list(plain) if isinstance(plain, Sequence) else plain
    mixed = isinstance(plain, list) and len({isinstance(place, bool) for place in plain}) > 1
    try:
        own = np.arange(width)[plain].reshape(-1).tolist()
    except (IndexError, TypeError, ValueError):
        own = []
    if not own or mixed or isinstance(plain, bool):
        raise InputError(
            f"outputs must name columns between 0 and {width - 1} of the flattened output (an int, a slice, a sequence "
            f"of ints, or a mask with an entry for each of the {width}), or be a name or a function of (model, x), got "
            f"{outputs!r}."
        )
    step = own[1] - own[0] if len(own) > 1 else 1
    if step > 0 and own == list(range(own[0], own[-1] + 1, step)):
        return table[:, own[0] : own[-1] + 1 : step]  # a slice moves nothing by an index, which the search would ask
    return table[:, own]


def _explain(error: Exception, model: nn.Module, x: ModelInput) -> InputError | None:
    """An error that says what is wrong with x, where the reason can be seen; None otherwise."""
    reason = _reason(error, str(error), model, x)
    return None if reason is None else InputError(f"{reason} The model said: {error}")


def _reason(error: Exception, message: str, model: nn.Module, x: ModelInput) -> str | None:
    def mentions(*words: str) -> bool:
        return any(word in message for word in words)

    if isinstance(error, TypeError):
        kind = "tuple of positional arguments" if isinstance(x, tuple | list) else type(x).__name__
        return f"x must hold the arguments that the model takes, got a {kind}." if mentions("argument") else None
    if mentions("same device"):
        return (
            "the model must keep all its tensors on one device, but it mixes devices on the way (a tensor made in its "
            "forward pass, or a buffer that was not registered?)."
        )
    if mentions("dtype", "type", "Float", "Double"):
        floats = sorted({str(p.dtype) for p in model.parameters() if p.is_floating_point()})
        if len(floats) > 1:
            return (
                f"the model's parameters must share one dtype, got {' and '.join(floats)}. Cast the model first, e.g. "
                "model.float()."
            )
        others = [t.dtype for t in tensors_in(x) if floats and str(t.dtype) != floats[0]]
        if others:
            return (
                f"x must have the model's dtype {floats[0]}, got {others[0]}. Call x.to({floats[0]}), or pass "
                "precision='float64' to run a float64 copy of the model."
            )
        if len(set(re.findall(r"\b(bfloat16|half|float|double)\b", message.lower()))) > 1:
            return (
                f"the model must compute in the dtype of its parameters, {floats[0] if floats else 'one'}, but its "
                "forward pass makes tensors of another (x.float(), say). If you gave precision=, leave it out; or cast "
                "to the parameters' dtype."
            )
    if mentions("shape", "size", "dimension", "Expected", "expected", "elements"):
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors_in(x))
        return f"x must have a shape that the model takes, examples first, got {shapes}."
    return None
