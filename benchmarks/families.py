"""gramscope's NTK beside torch.func's on families of Hugging Face models, at the sizes of quick work.

    python benchmarks/families.py                            every family, CPU, one thread
    python benchmarks/families.py --family bert gpt2 --n 16
    python benchmarks/families.py --device cuda --repeat 9
    python benchmarks/families.py --tiny                     does everything run?

Both compute the full kernel of k outputs in float32, in turns, in one process. torch.func is the kernel of
PyTorch's tutorial: vmap(jacrev(functional_call)), contracted parameter by parameter. It runs each model in the way
that is fastest for it: with the model's own attention or with eager attention, and for mixtures of experts also with
one batched product.

Columns: milliseconds are medians. `ratio` is torch.func's time over ours: above 1, we are faster. `fallback` counts
the parameters that gramscope computes by its exact but slow autograd fallback. `difference` is the distance of the
two kernels relative to their norm.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import timing
from ntk import header, relative, tf32
from peers import load_gramscope
from zoo.families import BUILDERS, TINY, Inputs, Outputs, Size, build, run_experts

QUICK = Size(hidden=96, layers=3, heads=4, vocabulary=512, tokens=24, image=32, patch=4, outputs=10)
JITTER = 0.02  # the usual standard deviation of initial weights


@dataclass
class Row:
    """One family's line of the table; seconds of the timed calls."""

    family: str
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    fallback: str = "-"
    difference: float | None = None
    note: str = ""


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    if options.busy:
        timing.use_cpu_time()
    warnings.simplefilter("ignore")  # vmap names each operator that it runs in a loop
    size = replace(TINY if options.tiny else QUICK, outputs=options.k)
    print(header(device))
    print(f"N = {options.n}, k = {options.k}, full kernel, float32, median of {options.repeat}; {size}")
    print(f"{'family':<11}{'ours ms':>10}{'func ms':>10}{'ratio':>8}{'fallback':>10}{'difference':>12}  torch.func ran")
    with tf32(False):
        for name in options.family:
            print(line(measure(name, size, device, options)), flush=True)
            gc.collect()
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", nargs="+", default=list(BUILDERS), choices=list(BUILDERS), metavar="FAMILY")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--n", type=int, default=8, help="number of examples")
    parser.add_argument("--k", type=int, default=10, help="number of outputs")
    parser.add_argument("--repeat", type=int, default=5, help="timed calls; the median is printed")
    parser.add_argument("--busy", action="store_true", help="CPU time, for a machine in use by others")
    parser.add_argument("--tiny", action="store_true", help="the sizes of the tests")
    return parser.parse_args(argv)


def measure(name: str, size: Size, device: torch.device, options: argparse.Namespace) -> Row:
    model, x, outputs = on_device(name, size, options.n, device)
    gs = load_gramscope()
    row = Row(name)

    def ours() -> Tensor:
        return gs.ntk(model, x, outputs=outputs)

    fallback = gs.capture(model, x, outputs=outputs).fallback
    row.fallback = f"{len(fallback)}/{sum(1 for _ in model.parameters())}"
    kernel = ours()
    theirs, row.note = fastest_torch_func(model, x, outputs, device)
    if theirs is not None:
        row.difference = relative(theirs(), kernel)
    for _ in range(options.repeat):
        row.ours.append(timing.seconds(ours, device))
        if theirs is not None:
            row.theirs.append(timing.seconds(theirs, device))
    return row


def on_device(name: str, size: Size, n: int, device: torch.device) -> tuple[nn.Module, Inputs, Outputs]:
    model, x, outputs = build(name, size, n, torch.float32, JITTER)
    # All texts are equally long here. With a mask, or a padding token and no mask, transformers looks at the values
    # to see whether there is padding, and vmap forbids that.
    x.pop("attention_mask", None)
    model.config.pad_token_id = None
    return model.to(device), {key: value.to(device) for key, value in x.items()}, outputs


def line(row: Row) -> str:
    ours = statistics.median(row.ours)
    start = f"{row.family:<11}{1e3 * ours:>10.1f}"
    if not row.theirs:
        return f"{start}{'-':>10}{'-':>8}{row.fallback:>10}{'-':>12}  {row.note}"
    theirs = statistics.median(row.theirs)
    return f"{start}{1e3 * theirs:>10.1f}{theirs / ours:>8.2f}{row.fallback:>10}{row.difference:>12.1e}  {row.note}"


# --- torch.func

Call = Callable[[], Tensor]


def fastest_torch_func(
    model: nn.Module, x: Inputs, outputs: Outputs, device: torch.device
) -> tuple[Call, str] | tuple[None, str]:
    """The variant that runs and took least in its second call, with its name; or None and why none runs."""
    found: list[tuple[float, str, Call]] = []
    failure = ""
    for name, variant in variants(model):
        call = torch_func(variant, x, outputs)
        try:
            call()
            found.append((timing.seconds(call, device), name, call))
        except Exception as error:  # that torch.func cannot run a model is a finding
            failure = failure or f"cannot run it: {type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
    if not found:
        return None, failure
    _, name, call = min(found, key=lambda entry: entry[0])
    return call, name


def variants(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model itself, and copies that compute the same by other operators."""
    yield "as it is", model
    eager = copy.deepcopy(model)
    if hasattr(model, "set_attn_implementation"):
        eager.set_attn_implementation("eager")
        yield "eager attention", eager
    if hasattr(model, "_can_set_experts_implementation") and model._can_set_experts_implementation():
        batched = copy.deepcopy(eager)
        run_experts(batched, "batched_mm")
        yield "eager attention, batched experts", batched


class Selected(nn.Module):
    """The model with its outputs selected, as one module: functional_call calls forward."""

    def __init__(self, model: nn.Module, outputs: Outputs) -> None:
        super().__init__()
        self.model = model
        self.outputs = outputs

    def forward(self, x: Inputs) -> Tensor:
        return self.outputs(self.model, x)


def torch_func(model: nn.Module, x: Inputs, outputs: Outputs) -> Call:
    """The kernel from the Jacobian of every example, contracted parameter by parameter."""
    selected = Selected(model, outputs)
    params = {name: p.detach() for name, p in selected.named_parameters() if p.requires_grad}

    def single(params: dict[str, Tensor], example: Inputs) -> Tensor:
        return functional_call(selected, params, ({key: value[None] for key, value in example.items()},))[0]

    def kernel() -> Tensor:
        jacobian: dict[str, Any] = vmap(jacrev(single), (None, 0), randomness="different")(params, x)
        total = 0
        for rows in jacobian.values():
            flat = rows.reshape(*rows.shape[:2], -1)
            total = total + torch.einsum("icp,jdp->icjd", flat, flat)
        return total

    return kernel


if __name__ == "__main__":
    sys.exit(main())
