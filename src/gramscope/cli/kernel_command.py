"""``gramscope kernel``: the tangent kernel of a model and a data set to disk; the same command in every process."""

import os
from pathlib import Path
from typing import cast, get_args

import torch
from rich.console import Console
from torch import nn

from gramscope.base.checks import check_choice
from gramscope.base.errors import InputError
from gramscope.base.json_values import JSONObject
from gramscope.base.nested import ModelInput, tensors_in
from gramscope.capture.network import Precision, count_examples, slice_examples
from gramscope.cli.checkpoint import read_checkpoint
from gramscope.cli.config import build
from gramscope.cli.verify_command import load
from gramscope.kernels.between_snapshots import Reduce
from gramscope.scale.fill_tiles import fill_tiles
from gramscope.scale.kernel_job import KernelJob, rank, world_size
from gramscope.scale.tile_costs import product_rate, tile_cost
from gramscope.scale.tile_plan import TilePlan, size_in_words
from gramscope.scale.tiled_kernel import open_kernel

PRECISIONS = ("float64", "float32", "tf32", "split")
BUS = 50e9  # bytes a second from a GPU to the memory of the CPU, or back


def write_kernel(
    source: str, out: Path, *, changes: list[str], weights: Path | None, reduce: str, examples: int | None,
    memory: str | None, tile: int | None, device: str | None, precision: str | None, quiet: bool,
) -> JSONObject:  # fmt: skip
    """Fill ``out``; returns what is there now. ``source`` is a TOML file, or ``file.py:callable``."""
    check_choice(reduce, "--reduce", get_args(Reduce))
    check_choice(precision, "--precision", (None, *PRECISIONS))
    model, x = _model_and_examples(source, changes)
    if weights is not None:
        _load_weights(model, weights)
    n = count_examples(x)
    if examples is not None and examples > n:
        raise InputError(f"--examples must be at most {n}, the number of examples there are, got {examples}.")
    x = slice_examples(x, n, slice(0, examples or n))
    model = model.to(_device(device, tensors_in(x)[0].device)).eval()
    console = Console(quiet=quiet or rank() > 0, stderr=True)
    job = KernelJob(model, x, reduce=cast(Reduce, reduce), precision=cast(Precision, precision))
    if not (out / "manifest.json").exists() and not console.quiet:
        plan = job.plan(memory, tile)
        console.print(f"{plan}\n{_told_cost(job, plan)}", markup=False, highlight=False, soft_wrap=True)
    fill_tiles(job, out, memory, tile)
    kernel = open_kernel(out)
    console.print(f"Kernel: {out}", markup=False)
    return {
        "kernel": str(out),
        "shape": list(kernel.shape),
        "tiles": len(kernel.plan.tiles),
        "bytes": kernel.plan.bytes,
    }


def _told_cost(job: KernelJob, plan: TilePlan) -> str:
    device, processes, cost = job.device, world_size(), tile_cost(job, plan)
    fast = job.precision in ("tf32", "split")
    rate = product_rate(device, plan.dtype, tf32=fast)
    told = (
        f"{cost}\nAt {rate:.3g} operations a second, as {device} multiplies {'tf32' if fast else plan.dtype} now, that "
        f"is at least {cost.seconds(rate, processes):,.3g} s with {processes} process{'es' if processes > 1 else ''}."
    )
    if cost.again > 1 and device.type == "cuda":
        again, moved = cost.repeated / rate / processes, cost.moved / BUS / processes
        told += (
            f"\nComputing activations again takes {again:,.3g} s of that. Moving them to the CPU and back instead "
            f"(not done) would take at least {moved:,.3g} s and {size_in_words(cost.away)} of the CPU's memory."
        )
    return told


def _model_and_examples(source: str, changes: list[str]) -> tuple[nn.Module, ModelInput]:
    if ":" in source and not Path(source).exists():
        if changes:
            raise InputError("--set changes keys of a TOML file, but a Python callable was given. Leave --set out.")
        return load(source)
    model, task = build(Path(source), changes)
    return model, task.x


def _device(wanted: str | None, data: torch.device) -> torch.device:
    """As asked for; else a GPU for each process of a machine, if there is one; else where the data is."""
    if wanted is not None:
        try:
            return torch.empty(0, device=wanted).device
        except (RuntimeError, AssertionError) as error:
            raise InputError(f"--device must be a device of this machine, got {wanted!r}: {error}.") from error
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return data


def _load_weights(model: nn.Module, path: Path) -> None:
    found = read_checkpoint(path).tensors
    try:
        model.load_state_dict(found)
    except RuntimeError as error:
        raise InputError(f"{path} must hold weights that fit the model: {error}") from error
