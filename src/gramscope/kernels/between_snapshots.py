"""The kernel between two snapshots: of two batches, or of one batch at two times of training."""

from typing import Literal, overload

import torch
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.checks import check_choice
from gramscope.base.errors import InputError
from gramscope.capture.sites import Snapshot
from gramscope.kernels.accumulate import Accumulator, kernel_dtype

Reduce = Literal["none", "trace"]


@overload
def snapshot_kernel(
    a: Snapshot, b: Snapshot | None = ..., reduce: Reduce = ..., by_site: Literal[False] = ...
) -> Tensor: ...


@overload
def snapshot_kernel(
    a: Snapshot, b: Snapshot | None = ..., reduce: Reduce = ..., *, by_site: Literal[True]
) -> dict[str, Tensor]: ...


def snapshot_kernel(
    a: Snapshot, b: Snapshot | None = None, reduce: Reduce = "none", by_site: bool = False
) -> Tensor | dict[str, Tensor]:
    """``K_{μj,νl} = Σ_θ ∂f_j(x_μ; θ_a)/∂θ · ∂f_l(x_ν; θ_b)/∂θ`` between the directions of two snapshots.

    The snapshots may be of other examples, and of other values of the same parameters: of the network before and after
    training, say, whose kernel tells how far gradients have turned. No network is needed; they may come from files
    (``Snapshot.load``).

    Args:
        a, b: snapshots of the rows and of the columns; b = a if None.
        reduce: "none" gives (n, k, m, l); "trace" sums over equal directions and gives (n, m).
        by_site: a dict parameter name -> kernel of that parameter alone.

    Example:
        >>> import torch, gramscope as gs
        >>> model, x = torch.nn.Linear(3, 2), torch.ones(2, 3)
        >>> gs.snapshot_kernel(gs.capture(model, x), gs.capture(model, 2 * x), reduce="trace")
        tensor([[14., 14.],
                [14., 14.]])
    """
    b = a if b is None else b
    check_choice(reduce, "reduce", ("none", "trace"))
    _check_pair(a, b, reduce)
    trace = reduce == "trace"
    shape = (a.examples, b.examples) if trace else (a.examples, a.directions, b.examples, b.directions)
    dtype = kernel_dtype(tensor for snap in (a, b) for tensor in (snap.outputs, *(site.held for site in snap.sites)))
    names = a.parameters if by_site else [""]
    kernels = {name: torch.zeros(shape, dtype=dtype, device=a.outputs.device) for name in names}
    with torch.no_grad(), exact_arithmetic():
        left = a.by_parameter()
        accumulator = Accumulator(kernels, trace, symmetric=b is a)
        accumulator.add(left, left if b is a else b.by_parameter())
        accumulator.finish()
    return kernels if by_site else kernels[""]


def _check_pair(a: Snapshot, b: Snapshot, reduce: str) -> None:
    if a.parameters != b.parameters:
        other = set(a.parameters.items()) ^ set(b.parameters.items())
        raise InputError(
            "two snapshots must be of the same parameters, but they differ in "
            f"{', '.join(sorted({name for name, _ in other})[:3])}. Take both of networks of one architecture."
        )
    if reduce == "trace" and a.directions != b.directions:
        raise InputError(
            f"a trace needs snapshots with the same directions, got {a.directions} and {b.directions}. Take the same "
            'outputs of both, or reduce="none".'
        )
    if a.outputs.device != b.outputs.device:
        raise InputError(
            f"two snapshots must be on one device, got {a.outputs.device} and {b.outputs.device}. Load one of them "
            "with Snapshot.load(path, device=...)."
        )
