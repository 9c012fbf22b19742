"""Contractions of data with one weight: linear, matmul, einsum and their relatives.

All are read as one einsum. An axis of the weight is *in* if only the data has it, *out* if only the result
has it, a *group* if both have it; the axes that data and result share without the weight are the rows.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.capture.forms import Gain, Outer
from gramscope.capture.recorder import Recorder, rule

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def outer_form(
    name: str, data: Tensor, data_axes: str, weight: Tensor, weight_axes: str, result_axes: str
) -> Outer | None:
    """The form of ``einsum(f"{data_axes},{weight_axes}->{result_axes}", data, weight)``.

    None for traces, broadcasts and weight axes that are summed alone: no site inputs exist there.
    """
    lettered = (data_axes, weight_axes, result_axes)
    if any(len(set(axes)) != len(axes) for axes in lettered) or not set(weight_axes) <= set(data_axes + result_axes):
        return None
    sizes = dict(zip(data_axes, data.shape, strict=True)) | dict(zip(weight_axes, weight.shape, strict=True))
    if any(size != sizes[a] for a, size in zip(data_axes, data.shape, strict=True)):
        return None
    shared = [a for a in weight_axes if a in data_axes and a in result_axes]
    fan_in = [a for a in weight_axes if a in data_axes and a not in result_axes]
    fan_out = [a for a in weight_axes if a not in data_axes]
    rows = [a for a in result_axes if a not in weight_axes]
    if not set(rows) <= set(data_axes):
        return None
    alone = [a for a in data_axes if a not in result_axes and a not in weight_axes]
    # The gradient of a complex product carries the conjugate of the other factor.
    data = data.detach().conj().resolve_conj() if data.is_complex() else data.detach()

    def inputs(part: slice) -> Tensor:
        wanted = [*rows, *shared, *fan_in]
        kept = data.sum(dim=[data_axes.index(a) for a in alone]) if alone else data
        axes = [a for a in data_axes if a not in alone]
        arranged = kept.permute([axes.index(a) for a in wanted])
        return arranged.reshape(_size(rows, sizes), 1, _size(shared, sizes), _size(fan_in, sizes))[part]

    def arrange(signals: Tensor) -> Tensor:
        arranged = signals.permute(0, *(1 + result_axes.index(a) for a in [*rows, *shared, *fan_out]))
        count = math.prod(arranged.shape[1 : 1 + len(rows)])
        return arranged.reshape(len(signals), count, 1, _size(shared, sizes), _size(fan_out, sizes))

    own = [*shared, *fan_out, *fan_in]
    order = tuple(own.index(a) for a in weight_axes)
    return Outer(name, inputs, arrange, _size(fan_in, sizes), tuple(sizes[a] for a in own), order)


def _size(axes: list[str], sizes: dict[str, int]) -> int:
    return math.prod(sizes[a] for a in axes)


@rule(F.linear)
def linear(
    recorder: Recorder, func: Callable[..., Any], input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Any:
    if not recorder.is_data(input) or recorder.is_data([weight, bias]):
        return recorder.tap(func, (input, weight, bias), {})
    leaf, bias_leaf = recorder.stand_in(weight), recorder.stand_in(bias)
    output = recorder.settle(func(input, leaf, bias_leaf))
    rows = LETTERS[: input.dim() - 1]
    if weight.dim() == 2:
        form = outer_form("linear", input, rows + "y", weight, "zy", rows + "z")
    else:
        form = outer_form("linear", input, rows + "y", weight, "y", rows)
    assert form is not None
    recorder.note(weight, leaf, output, form)
    if bias is not None:
        recorder.note(bias, bias_leaf, output, Gain("bias", tuple(bias.shape), None, tuple(output.shape)))
    return output


@rule(
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.mv,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.Tensor.bmm,
    torch.Tensor.mv,
    torch.Tensor.__matmul__,
)
def matmul(recorder: Recorder, func: Callable[..., Any], input: Tensor, other: Tensor) -> Any:
    left, right, result = _matmul_axes(input.dim(), other.dim())
    return _contract(recorder, "matmul", func, (input, other), (left, right), result)


@rule(torch.Tensor.__rmatmul__)
def rmatmul(recorder: Recorder, func: Callable[..., Any], input: Tensor, other: Tensor) -> Any:
    return matmul(recorder, torch.matmul, other, input)


@rule(torch.einsum, torch.functional.einsum)
def einsum(recorder: Recorder, func: Callable[..., Any], equation: Any, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    axes = _einsum_axes(equation, operands)
    if axes is None:
        return recorder.tap(func, (equation, *operands), {})
    return _contract(recorder, "einsum", lambda *both: func(equation, *both), operands, axes[:2], axes[2])


@rule(torch.addmm, torch.Tensor.addmm, torch.baddbmm, torch.Tensor.baddbmm)
def addmm(
    recorder: Recorder,
    func: Callable[..., Any],
    input: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> Any:
    if beta != 1 or alpha != 1:
        return recorder.tap(func, (input, left, right), {"beta": beta, "alpha": alpha})
    axes = _matmul_axes(left.dim(), right.dim())
    which = _which_weight(recorder, (left, right))
    if which is None and recorder.weight(input) is None:
        return recorder.tap(func, (input, left, right), {})
    leaves = [recorder.stand_in(t) for t in (input, left, right)]
    output = recorder.settle(func(*leaves))
    if which is not None:
        both = (left, right)
        form = outer_form("matmul", both[1 - which], axes[1 - which], both[which], axes[which], axes[2])
        assert form is not None
        recorder.note(both[which], leaves[1 + which], output, form)
    recorder.note(input, leaves[0], output, Gain("bias", tuple(input.shape), None, tuple(output.shape)))
    return output


def _contract(
    recorder: Recorder,
    name: str,
    func: Callable[..., Any],
    operands: tuple[Any, ...],
    axes: tuple[str, ...],
    result: str,
) -> Any:
    """One weight and one data operand: a site. Anything else: the gradient at the weight itself."""
    which = _which_weight(recorder, operands)
    if which is None:
        return recorder.tap(func, operands, {})
    weight = recorder.weight(operands[which])
    assert weight is not None
    own_axes = axes[which]
    # Along an axis of copies that the data has too (W expanded to the batch), the axis belongs to the rows.
    for axis in sorted(weight.copies, reverse=True):
        if own_axes[axis] in axes[1 - which] and own_axes[axis] in result:
            weight, own_axes = weight.slice(axis), own_axes[:axis] + own_axes[axis + 1 :]
    form = outer_form(name, operands[1 - which], axes[1 - which], weight.tensor, own_axes, result)
    if form is None:
        return recorder.tap(func, operands, {})
    leaves = [recorder.stand_in(operand) for operand in operands]
    output = recorder.settle(func(*leaves))
    recorder.note(weight, leaves[which], output, form)
    return output


def _which_weight(recorder: Recorder, operands: tuple[Any, ...]) -> int | None:
    found = [place for place, operand in enumerate(operands) if recorder.weight(operand) is not None]
    data = [place for place, operand in enumerate(operands) if recorder.is_data(operand)]
    return found[0] if len(operands) == 2 and len(found) == 1 and len(data) == 1 else None


def _matmul_axes(left: int, right: int) -> tuple[str, str, str]:
    """Letters of both operands and of the result, under matmul's rules for 1-D operands and batch axes."""
    batch = LETTERS[: max(left, right, 2) - 2]
    first = "y" if left == 1 else batch[len(batch) - (left - 2) :] + "xy" if left > 2 else "xy"
    second = "y" if right == 1 else batch[len(batch) - (right - 2) :] + "yz" if right > 2 else "yz"
    result = batch + ("x" if left > 1 else "") + ("z" if right > 1 else "")
    return first, second, result


def _einsum_axes(equation: Any, operands: tuple[Any, ...]) -> tuple[str, str, str] | None:
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    equation = equation.replace(" ", "")
    terms, arrow, result = equation.partition("->")
    parts = terms.split(",")
    if len(parts) != 2:
        return None
    if not arrow:
        letters = terms.replace(",", "").replace("...", "")
        result = ("..." if "..." in terms else "") + "".join(sorted(a for a in set(letters) if letters.count(a) == 1))
    spare = [a for a in LETTERS if a not in equation]
    widths = [o.dim() - len(p.replace("...", "")) for o, p in zip(operands, parts, strict=True) if "..." in p]
    dots = "".join(spare[: max(widths, default=0)])

    def expand(part: str, rank: int | None) -> str:
        width = len(dots) if rank is None else rank - len(part.replace("...", ""))
        return part.replace("...", dots[len(dots) - width :] if width else "")

    first, second = (expand(p, o.dim()) for p, o in zip(parts, operands, strict=True))
    return first, second, expand(result, None)


@rule(F.bilinear, torch.bilinear)
def bilinear(recorder: Recorder, func: Any, first: Tensor, second: Tensor, weight: Tensor, bias: Any = None) -> Any:
    """``u_o = x₁ᵀ W_o x₂``: a contraction of the outer product of the two inputs."""
    if not (recorder.is_data(first) and recorder.is_data(second)) or recorder.is_data([weight, bias]):
        return recorder.tap(func, (first, second, weight, bias), {})
    leaf, bias_leaf = recorder.stand_in(weight), recorder.stand_in(bias)
    output = recorder.settle(func(first, second, leaf, bias_leaf))
    one, two = first.detach(), second.detach()

    def inputs(part: slice) -> Tensor:
        both = one.reshape(-1, one.shape[-1])[part], two.reshape(-1, two.shape[-1])[part]
        return torch.einsum("Mi,Mj->Mij", *both).reshape(len(both[0]), 1, 1, -1)

    def arrange(signals: Tensor) -> Tensor:
        return signals.reshape(len(signals), -1, 1, 1, weight.shape[0])

    fan_in = weight.shape[1] * weight.shape[2]
    recorder.note(
        weight,
        leaf,
        output,
        Outer("bilinear", inputs, arrange, fan_in, (1, weight.shape[0], fan_in), (0, 1, 2)),
    )
    if bias is not None:
        recorder.note(bias, bias_leaf, output, Gain("bias", tuple(bias.shape), None, tuple(output.shape)))
    return output
