"""Which operations treat every example by itself, and how signals go back through them.

Linear maps that all examples share (linear layers, convolutions, batch norm with fixed statistics, reshapes) have
their own formula, a function of one entry multiplies by its derivative, and everything else is computed again for
the examples wanted, once for each direction, with a local autograd pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.base.nested import map_tensors, tensors_in
from gramscope.base.pages import fresh_empty
from gramscope.capture.channels import after_convolution, for_convolution
from gramscope.capture.rules.convolution import backward_signal, geometry
from gramscope.capture.rules.elementwise import FUNCTIONS as ELEMENTWISE
from gramscope.capture.rules.elementwise import IN_PLACE
from gramscope.capture.rules.normalisation import fixed_slope
from gramscope.capture.tape import Draft, Places, Scaling, Tape, taped

ROOMS = (torch, F, torch.Tensor)
POINTWISE = ("tanh", "sigmoid", "logsigmoid", "gelu", "silu", "mish", "softplus", "softsign", "elu", "celu", "selu",
             "leaky_relu", "relu6", "hardtanh", "hardswish", "hardsigmoid", "tanhshrink", "softshrink", "hardshrink",
             "threshold", "exp", "expm1", "log", "log1p", "sin", "cos", "tan", "atan", "sinh", "cosh", "asinh", "sqrt",
             "rsqrt", "square", "abs", "neg", "negative", "reciprocal", "erf", "sinc", "clamp", "clamp_min",
             "clamp_max", "__neg__", "__abs__")  # fmt: skip


def named(*names: str) -> tuple[Callable[..., Any], ...]:
    """The functions of these names in torch, torch.nn.functional and torch.Tensor."""
    return tuple({getattr(room, name) for room in ROOMS for name in names if hasattr(room, name)})


# Maps that all examples share -------------------------------------------------------------------------


@taped(F.linear)
def linear(tape: Tape, output: Tensor, func: Any, input: Tensor, weight: Tensor, bias: Any = None) -> Draft | None:
    if not tape.holds(input) or input.dim() < 2 or weight.dim() != 2:
        return None
    return _product(input, weight, weight.detach())


@taped(*named("matmul", "mm", "__matmul__"))
def matmul(tape: Tape, output: Tensor, func: Any, left: Tensor, right: Tensor) -> Draft | None:
    if tape.holds(left) and tape.holds(right):
        return _replayed(func, (left, right), {}, (left, right)) if left.dim() == right.dim() >= 3 else None
    if not tape.holds(left) or left.dim() < 2 or right.dim() != 2:
        return None
    return _product(left, right, right.detach().T)


def _product(input: Tensor, weight: Tensor, matrix: Tensor) -> Draft:
    """Back through ``input @ matrix.T``."""

    def back(signal: Tensor, _: slice) -> tuple[Tensor]:
        out = fresh_empty((*signal.shape[:-1], matrix.shape[1]), signal.dtype, signal.device)
        return (torch.matmul(signal, matrix, out=out),)

    return Draft((input,), back, (weight,), uniform=True)


@taped(*named("bmm"))
def bmm(tape: Tape, output: Tensor, func: Any, left: Tensor, right: Tensor) -> Draft | None:
    both = tape.holds(left) and tape.holds(right)
    return _replayed(func, (left, right), {}, (left, right)) if both else None


@taped(*named("conv1d", "conv2d", "conv3d"))
def convolution(
    tape: Tape, output: Tensor, func: Any, input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Draft | None:  # fmt: skip
    if not tape.holds(input) or input.dim() != weight.dim():
        return None
    sizes = geometry(weight, stride, padding, dilation)
    if sizes is None:
        return _replayed(func, (input, weight, bias, stride, padding, dilation, groups), {}, (input,), uniform=True)
    kernel, shape = weight.detach().contiguous(), input.shape  # or its order of memory would be that of the signals
    places = _passed_over(input, kernel, *sizes, groups)
    if places:
        shape, sizes = output.shape, ((1,) * len(sizes[0]), *sizes[1:])

    def back(signal: Tensor, _: slice) -> tuple[Tensor]:
        images = backward_signal(for_convolution(signal.flatten(0, 1), sizes[0]), kernel, shape, *sizes, groups)
        return (after_convolution(images).unflatten(0, signal.shape[:2]),)

    return Draft((input,), back, (weight,), uniform=True, places=places)


def _passed_over(
    input: Tensor, kernel: Tensor, stride: tuple[int, ...], padding: tuple[int, ...], dilation: Any, groups: int
) -> Places:
    """The places of the image that a kernel of one entry sees, where its steps pass over others; () for all of them."""
    if input.device.type != "cpu" or groups > 1 or set(kernel.shape[2:]) != {1} or any(padding) or max(stride) == 1:
        return ()
    return (..., *(slice(None, None, step) for step in stride))


@taped(*named("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"))
def transposed_convolution(
    tape: Tape, output: Tensor, func: Any, input: Tensor, weight: Tensor, *rest: Any, **named: Any
) -> Draft | None:
    batched = tape.holds(input) and input.dim() == weight.dim()
    return _replayed(func, (input, weight, *rest), named, (input,), uniform=True) if batched else None


@taped(F.batch_norm)
def batch_norm(
    tape: Tape, output: Tensor, func: Any, input: Tensor, running_mean: Any, running_var: Any, weight: Any = None,
    bias: Any = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Draft | None:  # fmt: skip
    if training or running_var is None or not tape.holds(input) or input.dim() < 2:
        return None
    slope = fixed_slope(input, running_var, weight, eps).detach()
    return Scaling((input,), (slope,), uniform=True, factor=lambda _: slope[None])


@taped(*named("reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "clone"))
def same_order(tape: Tape, output: Tensor, func: Any, input: Tensor, *_: Any, **__: Any) -> Draft | None:
    """The entries of each example keep their order: only the shape changes."""
    if not tape.holds(input) or output.dtype != input.dtype or output.dim() == 0 or len(output) != len(input):
        return None

    def back(signal: Tensor, _: slice) -> tuple[Tensor]:
        return (signal.reshape(*signal.shape[:2], *input.shape[1:]),)

    return Draft((input,), back, uniform=True, moves=True)


@taped(*named("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
              "adaptive_avg_pool3d"))  # fmt: skip
def average_pool(tape: Tape, output: Tensor, func: Any, input: Tensor, *rest: Any, **named: Any) -> Draft | None:
    return _replayed(func, (input, *rest), named, (input,), uniform=True) if _images(tape, func, input) else None


# Functions of one entry -------------------------------------------------------------------------------


@taped(*named("relu", "relu_"))
def relu(tape: Tape, output: Tensor, func: Any, input: Tensor, *_: Any, **__: Any) -> Draft | None:
    if not tape.holds(input):
        return None

    # As numbers, not as truths: these would be turned into numbers once for each direction.
    return Scaling((input,), (output,), factor=lambda part: (output.detach()[part] > 0).to(output.dtype)[:, None])


@taped(*named(*POINTWISE))
def pointwise(tape: Tape, output: Tensor, func: Any, input: Tensor, *rest: Any, **named: Any) -> Draft | None:
    if not tape.holds(input) or output is input or tensors_in((rest, named)):
        return None

    def slope(part: slice) -> Tensor:
        with torch.enable_grad():
            leaf = input.detach()[part].requires_grad_()
            result = func(leaf, *rest, **named)
            return torch.autograd.grad(result, leaf, torch.ones_like(result))[0][:, None]

    return Scaling((input,), (input,), factor=slope)


# Additions and other broadcast operations -------------------------------------------------------------


@taped(*(f for f in ELEMENTWISE if f.__name__ not in {"where", "lerp", "addcmul", "addcdiv"}))
def broadcast(tape: Tape, output: Tensor, func: Any, *args: Any, **named: Any) -> Draft | None:
    operands = tensors_in(args)
    if tensors_in(named) or output.dtype not in {t.dtype for t in operands}:
        return None
    mine = [t for t in operands if tape.holds(t)]
    others = [t for t in operands if not tape.holds(t)]
    if not mine or any(t.dim() != output.dim() for t in mine) or any(_by_example(t, output) for t in others):
        return None
    if func.__name__ in {"add", "__add__", "__radd__"} and not named and all(t.shape == output.shape for t in mine):
        return _passed_on(*mine)
    return _replayed(func, args, named, mine)


def _passed_on(*inputs: Tensor) -> Draft:
    return Draft(inputs, lambda signal, _: (signal,) * len(inputs), uniform=True, moves=True)


@taped(*(func for func in IN_PLACE if func.__name__ in {"add_", "__iadd__"}))
def added_in_place(tape: Tape, output: Tensor, func: Any, input: Tensor, other: Any, **named: Any) -> Draft | None:
    if named or not tape.holds(input) or (isinstance(other, Tensor) and other.dtype != output.dtype):
        return None
    if not tape.holds(other):
        return None if _by_example(other, output) else _passed_on(input)
    return _passed_on(input, other) if other.shape == output.shape else None


def _by_example(operand: Any, output: Tensor) -> bool:
    """Does an operand that is not on the tape reach into the axis of examples?"""
    return isinstance(operand, Tensor) and operand.dim() == output.dim() and len(operand) != 1


# Everything else: once more for the examples wanted ---------------------------------------------------


def _replayed(
    func: Callable[..., Any], args: Any, named: Any, inputs: Sequence[Tensor], *, uniform: bool = False
) -> Draft:
    """Each example repeated for its directions, ``func`` again, and one plain backward pass."""
    mine = {id(t): place for place, t in enumerate(inputs)}
    args, named = map_tensors(lambda t: t, (args, named))  # the user may change a list of them later

    def back(signal: Tensor, part: slice) -> tuple[Tensor, ...]:
        m, k = signal.shape[:2]
        leaves: list[Tensor] = []
        for t in inputs:
            values = t.detach().new_zeros(()).expand(m, *t.shape[1:]) if uniform else t.detach()[part]
            leaf = values[:, None].expand(m, k, *t.shape[1:])
            leaves.append(leaf.reshape(m * k, *t.shape[1:]).detach().requires_grad_(t.requires_grad))

        def again(t: Tensor) -> Tensor:
            return leaves[mine[id(t)]] if id(t) in mine else t.detach()

        with torch.enable_grad():
            result = func(*map_tensors(again, args), **map_tensors(again, named))
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(torch.autograd.grad(result, wanted, signal.reshape(result.shape), allow_unused=True))
        shares = (next(found) if leaf.requires_grad else None for leaf in leaves)
        return tuple(
            (torch.zeros_like(leaf) if share is None else share).unflatten(0, (m, k))
            for leaf, share in zip(leaves, shares, strict=True)
        )

    return Draft(tuple(inputs), back, tuple(tensors_in((args, named))), uniform)


def _images(tape: Tape, func: Any, input: Tensor) -> bool:
    """A batch of images (signals, volumes), as the digit in the function's name says."""
    return tape.holds(input) and input.dim() == 2 + int(func.__name__.rstrip("d")[-1])


@taped(*named("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
              "adaptive_max_pool3d", "lp_pool1d", "lp_pool2d"))  # fmt: skip
def pool(tape: Tape, output: Tensor, func: Any, input: Tensor, *rest: Any, **named: Any) -> Draft | None:
    return _replayed(func, (input, *rest), named, (input,)) if _images(tape, func, input) else None


@taped(*named("layer_norm", "rms_norm"))
def layer_norm(tape: Tape, output: Tensor, func: Any, input: Tensor, shape: Any = None, *rest: Any, **named: Any) -> (
    Draft | None
):  # fmt: skip
    shape = named.get("normalized_shape", shape)
    if not tape.holds(input) or shape is None or len(shape) >= input.dim():
        return None
    return _replayed(func, (input, *((shape,) if "normalized_shape" not in named else ()), *rest), named, (input,))


@taped(*named("group_norm", "prelu", "interpolate"))
def by_channel(tape: Tape, output: Tensor, func: Any, input: Tensor, *rest: Any, **named: Any) -> Draft | None:
    return _replayed(func, (input, *rest), named, (input,)) if tape.holds(input) and input.dim() > 1 else None


@taped(F.embedding)
def embedding(tape: Tape, output: Tensor, func: Any, input: Tensor, *_: Any, **__: Any) -> Draft | None:
    return Draft((), lambda signal, _: ()) if tape.holds(input) and output.dim() > 1 else None


# Operations along one axis or several, with the place of that argument after the input; which are linear.
ALONG = {"softmax": 0, "log_softmax": 0, "glu": 0, "mean": 0, "sum": 0, "amax": 0, "logsumexp": 0, "cumsum": 0,
         "select": 0, "narrow": 0, "unbind": 0, "chunk": 1, "split": 1}  # fmt: skip
LINEAR_ALONG = {"mean", "sum", "cumsum", "select", "narrow", "unbind", "chunk", "split"}


@taped(*named(*ALONG))
def along(tape: Tape, output: Tensor, func: Any, input: Tensor, *rest: Any, **named: Any) -> Draft | None:
    name = func.__name__
    axes = named.get("dim", rest[ALONG[name]] if len(rest) > ALONG[name] else None)
    axes = (axes,) if isinstance(axes, int) else axes
    if not tape.holds(input) or not axes or tensors_in((rest, named)):
        return None
    if not all(isinstance(axis, int) and axis % input.dim() for axis in axes):
        return None
    return _replayed(func, (input, *rest), named, (input,), uniform=name in LINEAR_ALONG)


@taped(*named("transpose", "swapaxes", "swapdims", "permute"))
def turned(tape: Tape, output: Tensor, func: Any, input: Tensor, *axes: Any, **named: Any) -> Draft | None:
    if not tape.holds(input) or named:
        return None
    order = axes[0] if len(axes) == 1 and isinstance(axes[0], tuple | list) else axes
    first = order[0] % input.dim() == 0 if func.__name__ == "permute" else all(a % input.dim() for a in order)
    return _replayed(func, (input, *axes), {}, (input,), uniform=True) if first else None


@taped(torch.Tensor.__getitem__)
def entry(tape: Tape, output: Tensor, func: Any, input: Tensor, index: Any) -> Draft | None:
    """``x[:, ...]`` with constants."""
    whole = isinstance(index, tuple) and len(index) > 1 and isinstance(index[0], slice) and index[0] == slice(None)
    if not tape.holds(input) or not whole:
        return None
    # Two lists apart from each other would put their common axis first, before the examples.
    plain = all(entry is None or entry is Ellipsis or isinstance(entry, int | slice | list) for entry in index)
    if not plain or sum(isinstance(entry, list) for entry in index) > 1:
        return None
    return _replayed(func, (input, index), {}, (input,), uniform=True)


@taped(*named("cat", "concat", "concatenate"))
def joined(tape: Tape, output: Tensor, func: Any, tensors: Any, dim: int = 0, **named: Any) -> Draft | None:
    if named or dim % output.dim() == 0 or not all(tape.holds(t) for t in tensors):
        return None
    return _replayed(func, (tensors, dim), {}, tuple({id(t): t for t in tensors}.values()), uniform=True)


@taped(*named("pad"))
def padded(tape: Tape, output: Tensor, func: Any, input: Tensor, pad: Any, *rest: Any, **named: Any) -> Draft | None:
    inner = tape.holds(input) and isinstance(pad, tuple | list) and len(pad) // 2 < input.dim()
    return _replayed(func, (input, pad, *rest), named, (input,)) if inner else None


@taped(F.scaled_dot_product_attention)
def attention(
    tape: Tape, output: Tensor, func: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any
) -> Draft | None:
    three = tuple({id(t): t for t in (query, key, value)}.values())
    mask = named.get("attn_mask", rest[0] if rest else None)
    dropout = named.get("dropout_p", rest[1] if len(rest) > 1 else 0.0)
    if dropout or not all(tape.holds(t) and t.dim() > 2 for t in three) or _by_example(mask, output):
        return None
    return _replayed(func, (query, key, value, *rest), named, three)


@taped(F.bilinear, torch.bilinear)
def bilinear(tape: Tape, output: Tensor, func: Any, first: Tensor, second: Tensor, *rest: Any, **named: Any) -> (
    Draft | None
):  # fmt: skip
    batched = tape.holds(first) and tape.holds(second) and first.dim() > 1 and first is not second
    return _replayed(func, (first, second, *rest), named, (first, second)) if batched else None
