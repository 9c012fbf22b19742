"""``gs.ntk``: the kernel in memory, or with ``out=`` on disk, where any number of processes fill it together.

It stands here, above ``gramscope.kernels``, which computes a kernel and knows nothing of disks.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor, nn

from gramscope.base.errors import UnsupportedError
from gramscope.base.memory_budget import Memory
from gramscope.base.nested import ModelInput
from gramscope.capture.capturing import Coupled
from gramscope.capture.network import Outputs, Precision
from gramscope.kernels.empirical_ntk import Reduce
from gramscope.kernels.empirical_ntk import ntk as ntk_in_memory

if TYPE_CHECKING:
    from gramscope.scale.tile_plan import TilePlan
    from gramscope.scale.tiled_kernel import TiledKernel

Folder = str | os.PathLike[str]


@overload
def ntk(
    model: nn.Module, x: ModelInput, x2: ModelInput = ..., reduce: Reduce = ..., by_site: Literal[False] = ...,
    outputs: Outputs = ..., memory: Memory = ..., precision: Precision | Literal["split"] = ..., frozen: bool = ...,
    coupled: Coupled = ..., *, out: None = ..., tile: None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def ntk(
    model: nn.Module, x: ModelInput, x2: ModelInput = ..., reduce: Reduce = ..., *, by_site: Literal[True],
    outputs: Outputs = ..., memory: Memory = ..., precision: Precision | Literal["split"] = ..., frozen: bool = ...,
    coupled: Coupled = ..., out: None = ..., tile: None = ...,
) -> dict[str, Tensor]: ...  # fmt: skip


@overload
def ntk(
    model: nn.Module, x: ModelInput, x2: ModelInput = ..., reduce: Reduce = ..., by_site: Literal[False] = ...,
    outputs: Outputs = ..., memory: Memory = ..., precision: Precision | Literal["split"] = ..., frozen: bool = ...,
    coupled: Coupled = ..., *, out: Folder, tile: int | None = ...,
) -> "TiledKernel": ...  # fmt: skip


def ntk(
    model: nn.Module, x: ModelInput, x2: ModelInput = None, reduce: Reduce = "none", by_site: bool = False,
    outputs: Outputs = None, memory: Memory = None, precision: Precision | Literal["split"] = None,
    frozen: bool = False, coupled: Coupled = "refuse", *, out: Folder | None = None, tile: int | None = None,
) -> "Tensor | dict[str, Tensor] | TiledKernel":  # fmt: skip
    """The neural tangent kernel ``K_{μc,νd} = Σ_θ ∂f_c(x_μ)/∂θ · ∂f_d(x_ν)/∂θ``, in memory or on disk.

    Each weight site ``u = W v`` contributes ``Σ_pq (v_μp · v_νq)(s_μcp · s_νdq)`` with ``s = ∂f/∂u``, evaluated in the
    cheapest order (``kernels/contractions.py``); one backward pass for each output, whatever the number of examples.

    Args:
        model: any module.
        x: examples of the rows; a tensor, a tuple or a dict.
        x2: examples of the columns; None takes those of the rows.
        reduce: "none" gives (n, C, m, C); "trace" sums over equal outputs and gives (n, m).
        by_site: a dict parameter name -> kernel of that parameter alone; they sum to the total.
        outputs: columns of the flattened output, or a function of (model, x) that returns (n, ...).
        memory: bytes to stay within, as a number or a size such as "2GB"; half of what is free if None. It changes
            results by rounding only. Coupled examples (``coupled="exact"``) are taken together whatever it says.
        precision: as for ``gramscope.capture``, or "split": float32 products of gradients on the fp16 tensor cores of
            a GPU, each number as two halves, at about float32's accuracy.
        frozen, coupled: as for ``gramscope.capture``.
        out: a folder to write the kernel to, tile by tile, as a zarr group. The same call in any number of processes
            (torchrun, Slurm, several jobs) shares the work; after a kill it goes on where it was. The examples may lie
            on the CPU while the model is on a GPU. Returns when all tiles are there.
        tile: examples of a tile on either side; chosen by memory and number of processes if None.

    Returns a tensor; with ``by_site`` a dict of tensors; with ``out`` a :class:`gramscope.scale.TiledKernel`.

    References: Jacot et al. 2018 (arXiv:1806.07572); by layers, arXiv:2606.09744: ``K = Σ_ℓ Q^{ℓ-1} ∘ G^ℓ``.

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> x = torch.eye(3)
        >>> gs.ntk(model, x, reduce="trace")
        tensor([[2., 0., 0.],
                [0., 2., 0.],
                [0., 0., 2.]])
    """
    if out is None:
        if tile is not None:
            raise UnsupportedError('tile= is for kernels on disk. Pass out="folder" with it, or use memory= alone.')
        given: Any = (by_site, outputs, memory, precision, frozen, coupled)
        return ntk_in_memory(model, x, x2, reduce, *given)
    if by_site or coupled != "refuse":
        what = "by_site=True" if by_site else f"coupled={coupled!r}"
        raise UnsupportedError(
            f"a kernel on disk is the total of all parameters between independent examples, got {what}. Leave it out, "
            "or leave out= out."
        )
    from gramscope.scale.fill_tiles import fill_tiles
    from gramscope.scale.kernel_job import KernelJob
    from gramscope.scale.tiled_kernel import open_kernel

    job = KernelJob(model, x, x2, reduce, outputs, precision, frozen)
    fill_tiles(job, Path(out), memory, tile)
    return open_kernel(out)


def plan_kernel(
    model: nn.Module, x: ModelInput, x2: ModelInput = None, reduce: Reduce = "none", outputs: Outputs = None,
    memory: Memory = None, precision: Precision | Literal["split"] = None, frozen: bool = False,
    tile: int | None = None,
) -> "TilePlan":  # fmt: skip
    """The plan by which :func:`gramscope.ntk` with ``out=`` would cut this kernel; arguments as there.

    Example:
        >>> import torch, gramscope as gs
        >>> plan = gs.scale.plan_kernel(torch.nn.Linear(3, 2), torch.ones(10, 3), reduce="trace", tile=4, memory="1GB")
        >>> print(plan)
        Kernel 10 x 10, float32, 576 bytes on disk.
        6 tiles of 4 x 4 examples to compute, 9 to write, those below the diagonal as mirror images.
        1 GB of memory for each process.
        Each example goes through the network 3.0 times: activations are computed again for each tile.
    """
    from gramscope.scale.kernel_job import KernelJob

    return KernelJob(model, x, x2, reduce, outputs, precision, frozen).plan(memory, tile)
