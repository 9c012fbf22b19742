"""gramscope's NTK on networks of usual size on one GPU: time, peak memory, and time over the FLOP floor.

    python benchmarks/large.py                            every row, CUDA
    python benchmarks/large.py --row vit_trace gpt2_loss  some rows
    python benchmarks/large.py --tiny                     tiny versions of the rows on the CPU: does the script run?

Weights are random; nothing is downloaded. `seconds` is the best of the runs. `peak GB` is what one run adds to the
memory in use. `error` is the distance to a float64 kernel of two examples, relative to its norm: from plain
autograd.grad, and of two outputs only if the kernel is full.

The floor is the time of the fewest operations at 51 TFLOP/s, the rate of large float32 products on an H200.
Two FLOP a multiply-add; for n examples, k outputs, and sites with T positions, F inputs and O outputs a position:

    forward      n (Σ_sites T F O + A)                   A = 2 T² hidden a layer, the two products of attention
    signals      n k (Σ_sites T F O + 2 A)               without the first site on data and without the last site
    layer        Σ_sites of the cheapest of              pairs = n (n + 1) / 2; entries = n k (n k + 1) / 2,
    kernels        rows n k T F O + entries F O          or k pairs for the trace
                   two ways in position space            (`contraction_macs` in floor.py)

The last site's signals are the identity. Not counted: elementwise work, norms, embedding tables.
The rows with tf32 and split use the tensor cores, so their time may be below this floor.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import models
import timing
from families import fastest_torch_func
from floor import Floor, Site, contraction_macs, flop_floor
from ntk import header, relative, tf32
from peers import load_gramscope

RATE = 51e12  # FLOP/s of float32 products without tensor cores, measured on an H200
SLOW = 90.0  # seconds of runs after which a row is not repeated

Outputs = Callable[[nn.Module, Any], Tensor]
Contestant = tuple[str, Callable[[], Tensor] | str, str | None]


@dataclass(frozen=True)
class Problem:
    """A network, its examples and the outputs to take."""

    model: nn.Module
    x: Tensor
    outputs: Outputs
    last: str | None = None  # the module whose outputs are the network's
    attention: float = 0.0  # multiply-adds of attention's two products in one example's forward pass

    @property
    def count(self) -> int:
        """Number of outputs an example."""
        with torch.no_grad():
            return self.outputs(self.model, self.x[:1]).numel()


@dataclass(frozen=True)
class Row:
    """One line of the table, or several: each precision, and torch.func if asked for."""

    title: str
    build: Callable[[int, bool], Problem]  # examples, tiny
    n: int
    reduce: str = "none"
    precisions: tuple[str | None, ...] = (None,)
    torch_func: bool = False


# --- the networks


def vit(n: int, tiny: bool) -> Problem:
    from transformers import ViTConfig, ViTForImageClassification

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = ViTConfig(num_labels=10, **({**small, "image_size": 32} if tiny else {}))
    tokens = (config.image_size // config.patch_size) ** 2 + 1
    x = torch.randn(n, 3, config.image_size, config.image_size)
    attention = 2.0 * config.num_hidden_layers * tokens**2 * config.hidden_size
    return Problem(ViTForImageClassification(config), x, lambda model, x: model(x).logits, "classifier", attention)


def gpt2(n: int, tiny: bool, outputs: Outputs, last: str | None) -> Problem:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(use_cache=False, **(small if tiny else {}))
    tokens = 8 if tiny else 128
    x = torch.randint(config.vocab_size, (n, tokens))
    attention = 2.0 * config.n_layer * tokens**2 * config.n_embd
    return Problem(GPT2LMHeadModel(config), x, outputs, last, attention)


def gpt2_logits(n: int, tiny: bool) -> Problem:
    """The first 32 logits of the last token."""
    return gpt2(n, tiny, lambda model, x: model(x, logits_to_keep=1).logits[:, -1, :32], "lm_head")


def gpt2_loss(n: int, tiny: bool) -> Problem:
    """Each text's own loss: the mean over its tokens."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        logits = model(x).logits[:, :-1]
        each = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none")
        return each.unflatten(0, (len(x), -1)).mean(1, keepdim=True)

    return gpt2(n, tiny, loss, None)


def resnet18(n: int, tiny: bool) -> Problem:
    model, x = models.build("resnet8" if tiny else "resnet18", n, torch.device("cpu"))
    return Problem(model, x, lambda model, x: model(x))


ROWS = {
    "vit_trace": Row("ViT-B/16 at 224, trace, k = 10", vit, 128, "trace"),
    "vit_full": Row("ViT-B/16 at 224, full, k = 10", vit, 32),
    "gpt2_logits": Row("GPT-2 small, T = 128, full, 32 logits of the last token", gpt2_logits, 16),
    "gpt2_loss": Row("GPT-2 small, T = 128, loss kernel, k = 1", gpt2_loss, 64, torch_func=True),
    "resnet18_trace": Row("ResNet-18 at 32, trace, k = 10", resnet18, 4096, "trace", (None, "tf32", "split")),
}


# --- the floor


def floor_of(problem: Problem, row: Row) -> Floor:
    """Operations by part, from the shapes of one example's forward pass."""
    n, count = len(problem.x), problem.count
    if isinstance(problem.model, nn.Sequential):
        return flop_floor(problem.model, problem.x, count, row.reduce)
    found = sites(problem)
    forward = n * (sum(site.macs for site in found) + problem.attention)
    below = sum(site.macs for site in found if not (site.first or site.last))
    signals = n * count * (below + 2 * problem.attention)
    costs = {site.name: contraction_macs(site, n, count, row.reduce) for site in found}
    method = {name: min(cost, key=cost.__getitem__) for name, cost in costs.items()}
    grams = sum(cost[method[name]] for name, cost in costs.items())
    return Floor(2.0 * forward, 2.0 * signals, 2.0 * grams, method)


def sites(problem: Problem) -> list[Site]:
    """The dense layers and convolutions that one example passes."""
    found: list[Site] = []

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def record(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            fan_in, fan_out = fans(module)
            first, last = not args[0].requires_grad, name == problem.last
            bias = module.bias is not None
            found.append(Site(name, out.numel() // fan_out, fan_in, fan_out, bias=bias, first=first, last=last))

        return record

    dense = [(name, module) for name, module in problem.model.named_modules() if is_dense(module)]
    handles = [module.register_forward_hook(hook(name)) for name, module in dense]
    try:
        problem.outputs(problem.model, problem.x[:1])
    finally:
        for handle in handles:
            handle.remove()
    return found


def is_dense(module: nn.Module) -> bool:
    # GPT-2's layers are of transformers' Conv1D, a Linear with its weight transposed.
    return isinstance(module, nn.Linear | nn.Conv2d) or type(module).__name__ == "Conv1D"


def fans(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of one position."""
    if type(module).__name__ == "Conv1D":
        return module.weight.shape[0], module.weight.shape[1]
    return module.weight[0].numel(), len(module.weight)


# --- measurements


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if not (options.tiny or torch.cuda.is_available()):
        print("The rows need a CUDA device, and torch sees none. --tiny runs tiny versions on the CPU.")
        return 2
    device = torch.device("cpu" if options.tiny else "cuda")
    if options.tiny:
        torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # vmap names each operator that it runs in a loop
    print(header(device))
    for name in options.row:
        row = ROWS[name]
        problem = build(row, device, options.tiny)
        floor = floor_of(problem, row)
        print(heading(row, problem, floor, "tiny version of " if options.tiny else ""))
        for label, call, precision in contestants(row, problem, device):
            with tf32(precision == "tf32"):
                print(measured(label, call, problem, row, floor, device, options.repeat), flush=True)
            release()
        del problem, call
        release()
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--repeat", type=int, default=3, help="runs; the best is printed")
    parser.add_argument("--tiny", action="store_true", help="tiny networks, 4 examples, CPU: does the script run?")
    return parser.parse_args(argv)


def build(row: Row, device: torch.device, tiny: bool) -> Problem:
    torch.manual_seed(0)
    made = row.build(4 if tiny else row.n, tiny)
    model = made.model.eval().to(device)
    return Problem(model, made.x.to(device), made.outputs, made.last, made.attention)


def contestants(row: Row, problem: Problem, device: torch.device) -> Iterator[Contestant]:
    """Name, call (or why there is none) and precision; torch.func is tried only when its turn comes."""
    gs = load_gramscope()
    for precision in row.precisions:
        take = partial(gs.ntk, reduce=row.reduce, outputs=problem.outputs, precision=precision)
        yield f"gramscope {precision or 'float32'}", partial(take, problem.model, problem.x), precision
    if row.torch_func:
        # families.py holds the arguments of a call in a dict.
        by_name = {"x": problem.x}
        call, note = fastest_torch_func(problem.model, by_name, lambda m, x: problem.outputs(m, x["x"]), device)
        yield "torch.func", note if call is None else call, None


def heading(row: Row, problem: Problem, floor: Floor, size: str = "") -> str:
    parts = f"forward {floor.forward / 1e12:.3g}, signals {floor.signals / 1e12:.3g}, layers {floor.grams / 1e12:.3g}"
    columns = f"  {'':<20}{'seconds':>10}{'peak GB':>10}{'floor s':>10}{'x floor':>10}{'error':>10}"
    return f"\n{size}{row.title}, N = {len(problem.x)}\n  floor {floor.total / 1e12:.3g} TFLOP ({parts})\n{columns}"


def measured(
    label: str,
    call: Callable[[], Tensor] | str,
    problem: Problem,
    row: Row,
    floor: Floor,
    device: torch.device,
    repeat: int,
) -> str:
    """One line; a contestant that cannot run gets its reason in place of numbers."""
    if isinstance(call, str):
        return f"  {label:<20}  {call}"
    kept: list[Tensor] = []
    runs: list[float] = []

    def run() -> None:
        kept.clear()
        runs.append(timing.seconds(lambda: kept.append(call()), device))

    try:
        peak = timing.peak_bytes(run, device)
        while len(runs) < repeat and sum(runs) < SLOW:
            run()
    except Exception as error:  # out of memory, or a precision not accepted: a finding
        return f"  {label:<20}  {type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    best, least = min(runs), floor.total / RATE
    error = error_of(kept.pop(), problem, row)
    return f"  {label:<20}{best:>10.3f}{peak / 1e9:>10.2f}{least:>10.3g}{best / least:>10.3g}{error:>10.1e}"


def error_of(kernel: Tensor, problem: Problem, row: Row) -> float:
    """Against the float64 kernel of the first two examples; of their first two outputs if the kernel is full."""
    model = copy.deepcopy(problem.model).double()
    x = problem.x[:2]
    out = problem.outputs(model, x.double() if x.is_floating_point() else x).flatten(1)
    out = out if row.reduce == "trace" else out[:, :2]
    params = [p for p in model.parameters() if p.requires_grad]
    rows = [torch.autograd.grad(value, params, retain_graph=True, materialize_grads=True) for value in out.flatten()]
    jacobian = torch.stack([torch.cat([g.flatten() for g in grads]) for grads in rows]).unflatten(0, out.shape)
    if row.reduce == "trace":
        return relative(kernel[:2, :2], torch.einsum("icp,jcp->ij", jacobian, jacobian))
    return relative(kernel[:2, :2, :2, :2], torch.einsum("icp,jdp->icjd", jacobian, jacobian))


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
