"""Kernels on disk: seconds, peak memory, time over the floor, and how well processes share the work.

    python benchmarks/scale.py --device cuda                 all rows of the GPU, then the ranks on the CPU
    python benchmarks/scale.py --device cuda --row mnist_mlp resnet18_20
    python benchmarks/scale.py --row ranks --ranks 1 2 4 8   processes on the CPU, two threads each (--threads)
    python benchmarks/scale.py --row predictions             what kernels and sketches that were not run would take
    python benchmarks/scale.py --row moving                  activations computed again, or moved to the CPU and back
    python benchmarks/scale.py --tiny                        tiny versions of all rows on the CPU: does the script run?

`seconds` is one whole call of gs.ntk(..., out=folder), the fingerprints and all tiles on disk included; `in memory` the
same kernel as one tensor, where it fits. `peak` is what the call adds on the device. The floor is the fewest operations
of `gramscope.scale.tile_cost` at the rate of large float32 products, measured here in between; rows with tf32 may lie
below it. MNIST's images are those of GRAMSCOPE_DATA, or random ones of the same shape where there are none.

`ranks` starts processes that wait for each other, fill one folder and end: efficiency is the time of one process over
r times the time of r processes, with the same tiles and the same number of threads for each process. Starting a process
does not count. Just before, all of them multiply plain matrices for a while: the rate of one, with r side by side, over
its rate alone is what the machine allows (cores that share an arithmetic unit, clock and memory). The rest is split:
into what each tile takes longer beside others, what processes wait for the last tile, and what they do before their
first tile and after their last (fingerprints, the manifest, checks).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gramscope as gs
import models
import timing
from gramscope.capture.capturing import Survey, opened, survey
from gramscope.kernels import memory as planning
from gramscope.kernels.empirical_ntk import kernel_of_pass
from gramscope.scale.kernel_job import KernelJob
from gramscope.scale.sketch_cost import SketchShape, factored_cost, formed_cost
from gramscope.scale.tile_costs import tile_cost
from gramscope.scale.tile_plan import TilePlan

Outputs = Callable[[nn.Module, Any], Tensor] | None


@dataclass(frozen=True)
class Problem:
    """A network on the CPU, its examples and the outputs to take."""

    model: nn.Module
    x: Tensor
    outputs: Outputs = None


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    title: str
    build: Callable[[bool], Problem]
    memory: str | None = None
    precision: str | None = None
    in_memory: bool = True  # also as one tensor, to compare
    sketched: bool = False  # also from sketches
    default: bool = True


# --- the problems


def mnist(tiny: bool) -> Tensor:
    """The 60,000 training images, (n, 784)."""
    if tiny:
        return torch.randn(96, 784, generator=torch.Generator().manual_seed(0))
    try:
        return gs.tasks.mnist("mnist").x
    except (gs.GramscopeError, OSError) as error:
        print(f"random images of MNIST's shape ({str(error)[:90]} ...)")
        return torch.rand(60_000, 784, generator=torch.Generator().manual_seed(0))


def mnist_mlp(tiny: bool) -> Problem:
    torch.manual_seed(0)
    return Problem(models.mlp((784, 64, 10) if tiny else (784, 1024, 1024, 1024, 10)), mnist(tiny))


def mnist_cnn(tiny: bool) -> Problem:
    return Problem(gs.tasks.cnn(classes=10, width=4 if tiny else 16, size=28, seed=0), mnist(tiny))


def resnet18(tiny: bool) -> Problem:
    return Problem(*models.build("resnet8" if tiny else "resnet18", 12 if tiny else 8192, torch.device("cpu")))


def gpt2(tiny: bool) -> Problem:
    """Each text's own loss: the mean over its tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    small = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(use_cache=False, **(small if tiny else {}))
    x = torch.randint(config.vocab_size, (16, 8) if tiny else (1024, 128))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        logits = model(x).logits[:, :-1]
        each = nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none")
        return each.unflatten(0, (len(x), -1)).mean(1, keepdim=True)

    return Problem(GPT2LMHeadModel(config).eval(), x, loss)


ROWS = {
    "mnist_mlp": Row("MNIST 60,000, MLP 3 x 1024, trace", mnist_mlp),
    "mnist_cnn": Row("MNIST 60,000, small CNN, trace", mnist_cnn, in_memory=False),
    "resnet18_20": Row("ResNet-18, N = 8,192, trace, 20 GiB, tf32", resnet18, "20 GiB", "tf32", in_memory=False),
    "resnet18_100": Row("ResNet-18, N = 8,192, trace, 100 GiB, tf32", resnet18, "100 GiB", "tf32", in_memory=False),
    "gpt2_loss": Row("GPT-2 small, 1,024 x 128, loss kernel", gpt2, in_memory=False, sketched=True),
    "resnet18_float32": Row(
        "ResNet-18, N = 8,192, trace, 20 GiB, float32", resnet18, "20 GiB", in_memory=False, default=False
    ),
}


# --- measurements


def measure(row: Row, problem: Problem, device: torch.device, folder: Path, rate: timing.MatmulRate) -> None:
    model = problem.model.to(device).eval()
    options: dict[str, Any] = {
        "reduce": "trace", "outputs": problem.outputs, "memory": row.memory, "precision": row.precision,
    }  # fmt: skip
    job = KernelJob(model, problem.x, None, "trace", problem.outputs, row.precision)
    plan = job.plan(row.memory)
    cost = tile_cost(job, plan)
    found: dict[str, Any] = {}

    def to_disk() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        begun = time.perf_counter()
        found["kernel"] = gs.ntk(model, problem.x, out=folder, **options)
        found["seconds"] = time.perf_counter() - begun

    own = timing.MatmulRate(device, tf32=row.precision == "tf32") if row.precision == "tf32" else rate
    own.sample()
    peak = timing.peak_bytes(to_disk, device)
    own.sample()
    floor = cost.seconds(own.best)
    print(
        f"{row.title:48s} {found['seconds']:8.1f} s   peak {peak / 2**30:6.2f} GiB   "
        f"{found['seconds'] / floor:5.2f} x floor   {len(plan.tiles)} tiles of {plan.tile[0]}, "
        f"{plan.bytes / 1e9:.2f} GB, {plan.bytes / 1e6 / found['seconds']:.0f} MB/s"
    )
    print(f"{'':48s} {cost}", flush=True)
    if row.in_memory:
        _in_memory(row, problem, device, found["kernel"], options)
    if row.sketched:
        sketched(problem, device, found["kernel"])
    shutil.rmtree(folder, ignore_errors=True)


def _in_memory(row: Row, problem: Problem, device: torch.device, kernel: Any, options: dict[str, Any]) -> None:
    """The same as one tensor, and how far the tiles are from it."""
    x, found = problem.x.to(device), {}

    def whole() -> None:
        begun = time.perf_counter()
        found["kernel"] = gs.ntk(problem.model, x, **options)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found["seconds"] = time.perf_counter() - begun

    try:
        peak = timing.peak_bytes(whole, device)
    except (gs.GramscopeError, RuntimeError) as error:
        print(f"{'  in memory':48s} {str(error)[:110]}", flush=True)
        return
    corner = torch.from_numpy(kernel.tile(0, kernel.plan.grid[1] - 1)).to(device)
    part = found["kernel"][: corner.shape[0], -corner.shape[1] :]
    error = float((part - corner).norm() / corner.norm())
    print(
        f"{'  in memory':48s} {found['seconds']:8.1f} s   peak {peak / 2**30:6.2f} GiB   a tile differs by {error:.1e}",
        flush=True,
    )


def sketched(problem: Problem, device: torch.device, kernel: Any) -> None:
    """The same kernel from sketches, and how far it is from the exact one."""
    x, found = problem.x.to(device), {}

    def estimate() -> None:
        begun = time.perf_counter()
        sketch = gs.sketch(problem.model, list(x.split(32)), size=16, repeats=2, outputs=problem.outputs)
        found["value"] = sketch.kernel().value
        found["seconds"] = time.perf_counter() - begun

    peak = timing.peak_bytes(estimate, device)
    exact = kernel.to_tensor()
    error = float((found["value"] - exact).norm() / exact.norm())
    print(
        f"{'  sketched, size 16, 2 repeats':48s} {found['seconds']:8.1f} s   peak {peak / 2**30:6.2f} GiB   "
        f"error {error:.2f} of the kernel",
        flush=True,
    )


# --- ranks

RANK_TILE = 512
CEILING_SECONDS = 1.5


def rank_problem(n: int) -> Problem:
    torch.manual_seed(0)
    return Problem(models.mlp((784, 512, 512, 10)), torch.randn(n, 784, generator=torch.Generator().manual_seed(1)))


def rank_worker(folder: Path, n: int) -> None:
    """One process: says that it is ready, waits for the others, multiplies, fills its share, says when it was done."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    problem, a = rank_problem(n), torch.randn(1024, 1024)
    gs.ntk(problem.model, problem.x[:4], reduce="trace", out=folder / f"first.{os.environ['RANK']}")  # first calls
    a @ a
    mark = folder / f"ready.{os.environ['RANK']}"
    mark.touch()
    while not (folder / "go").exists():
        time.sleep(0.005)
    begun, products = time.perf_counter(), 0
    while time.perf_counter() - begun < CEILING_SECONDS:
        a @ a
        products += 1
    rate = products * 2 * 1024**3 / (time.perf_counter() - begun)
    begun = time.time()
    gs.ntk(problem.model, problem.x, reduce="trace", out=folder / "K", tile=min(RANK_TILE, n // 4), memory="2GB")
    mark.write_text(json.dumps({"pid": os.getpid(), "begun": begun, "ended": time.time(), "rate": rate}))


def ranks(counts: list[int], threads: int, n: int, folder: Path) -> None:
    first: tuple[float, float, float] | None = None  # of one process: seconds, seconds in tiles, rate of products
    for count in counts:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = [sys.executable, __file__, "--worker", str(folder), "--examples", str(n)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "WORLD_SIZE": str(count)}
        workers = [subprocess.Popen(command, env={**environment, "RANK": str(r)}) for r in range(count)]
        while len(list(folder.glob("ready.*"))) < count:
            if any(worker.poll() for worker in workers):
                raise SystemExit("a worker failed")
            time.sleep(0.01)
        (folder / "go").touch()
        codes = [worker.wait() for worker in workers]
        if any(codes):
            raise SystemExit(f"workers ended with {codes}")
        found = [json.loads(path.read_text()) for path in folder.glob("ready.*")]
        seconds = max(one["ended"] for one in found) - min(one["begun"] for one in found)
        records = [json.loads(path.read_text()) for path in (folder / "K" / "tiles").glob("*.json")]
        computing = sum(record["seconds"] for record in records)
        own = [sum(r["seconds"] for r in records if r["process"].endswith(f" {one['pid']}")) for one in found]
        rate = sum(one["rate"] for one in found) / count
        first = first or (seconds * count, computing, rate)
        print(
            f"{f'{count} processes of {threads} threads, MLP, N = {n:,}':48s} {seconds:8.1f} s   "
            f"efficiency {first[0] / (count * seconds):.2f}, of plain products {rate / first[2]:.2f} "
            f"({count * rate / 1e9:.0f} GFLOP/s)   {len(records)} tiles, each takes {computing / first[1]:.2f} of its "
            f"time alone; waiting for the last {max(own) - sum(own) / count:.1f} s, before and after the tiles "
            f"{seconds - max(own):.1f} s",
            flush=True,
        )
    shutil.rmtree(folder, ignore_errors=True)


# --- predictions

TF32_RATE = 8 * 51e12
RATE, FACTOR, GPUS = 51e12, 1.5, 64  # float32 products of an H200 a second; measured over floor; machines


def predictions() -> None:
    """What was not run: by operations, at the rate of an H200, times what is not counted."""
    model, x = models.build("resnet18", 1, torch.device("cpu"))
    job = KernelJob(model.eval(), x.expand(1_000_000, -1, -1, -1), None, "trace")
    plan = job.plan("60 GB", tile=8192)
    cost = tile_cost(job, plan)
    hours = FACTOR * cost.seconds(RATE, GPUS) / 3600
    print(
        f"ResNet-18 at 32, trace, N = 1,000,000, tiles of 8,192: {cost.passes:.2g} operations for the passes, "
        f"{cost.contractions:.2g} for the pairs, {plan.bytes / 1e12:.1f} TB on disk, {hours:.1f} hours on {GPUS} GPUs"
    )
    _predicted_sketch(sequences=10_000, length=512, size=16, repeats=4)


def _predicted_sketch(sequences: int, length: int, size: int, repeats: int) -> None:
    """The loss sketch of a transformer of 7 B parameters: 32 blocks of width 4,096, 32,000 words, untied."""
    width, inner, blocks, words = 4096, 11008, 32, 32_000
    block = [(width, width)] * 4 + [(width, inner)] * 2 + [(inner, width)]
    layers = block * blocks + [(width, words)]
    parameters = sum(i * o for i, o in layers)
    shapes = [SketchShape(1, length, 1, i, o, rows=o, columns=i, b=size, a=size, repeats=repeats) for i, o in layers]
    passes = 4.0 * parameters * length  # one forward pass, and one backward pass that stops at the weights
    products = 2.0 * sum(min(factored_cost(shape), formed_cost(shape)) for shape in shapes)
    seconds = FACTOR * sequences * (passes + products) / RATE
    print(
        f"7 B transformer ({parameters:.2g} weights), loss, {sequences:,} texts of {length} tokens, size {size}, "
        f"{repeats} repeats: {sequences * passes:.2g} operations for the passes, "
        f"{sequences * products:.2g} for the sketch, "
        f"{4 * sequences * len(layers) * repeats * size**2 / 1e9:.1f} GB, {seconds / 3600:.1f} hours on one GPU, "
        f"{seconds / 60 / GPUS:.1f} minutes on {GPUS}"
    )


# --- moving

BUS = 50e9  # bytes a second from a GPU to the memory of the CPU, or back


def vit(tiny: bool) -> Problem:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    small = {"image_size": 32, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ViTConfig(num_labels=10, **(small if tiny else {}))
    x = torch.randn(1, 3, config.image_size, config.image_size).expand(8192, -1, -1, -1)
    return Problem(ViTForImageClassification(config).eval(), x, lambda model, x: model(x).logits)


def moving(tiny: bool) -> None:
    """By count, on a GPU: passes repeated within a tile, or activations on the CPU and so larger blocks.

    Favourable to moving: each byte crosses the bus once for each output and all passes go on meanwhile.
    """
    for title, build in (("ResNet-18", resnet18), ("ViT-B/16", vit), ("GPT-2 small", gpt2)):
        problem = build(tiny)
        model, x = problem.model.eval(), problem.x
        size = survey(model, x[: planning.FEW], outputs=problem.outputs, large=True)
        # Of the activations only the inputs and those of one layer stay.
        left = 2 * x[0].nbytes + 2 * size.largest
        job = KernelJob(model, x, None, "trace", problem.outputs)
        cost = tile_cost(job, job.plan("20 GiB"))
        print(f"{title}, an output fetches {_fetched(problem):.1f} times what its forward pass keeps", flush=True)
        for gib in (5, 10, 20):
            plan = job.plan(gib * 2**30)
            now, moved = (_block(plan, replace(size, held=held)) for held in (size.held, left))
            again, fewer = (math.ceil(plan.tile[0] / block) for block in (now, moved))
            passes = [replace(cost, plan=plan, again=times).passes for times in (again, fewer)]
            bus = cost.activations * plan.passes * fewer * (1 + plan.outputs) / BUS
            told = "; ".join(
                f"{name} {passes[0] / rate:8.0f} s or {max(passes[1] / rate, bus):8.0f} s"
                for name, rate in (("float32", RATE), ("tf32", TF32_RATE))
            )
            print(
                f"  {gib:2d} GiB: {now:5d} or {moved:5d} examples at a time, {again:3d} or {fewer:3d} passes a tile; "
                f"{told}; {2 * moved * cost.activations / 1e9:.0f} GB of the CPU's memory",
                flush=True,
            )


def _block(plan: TilePlan, size: Survey) -> int:
    """Examples of either side that a GPU holds at once, one output at a time."""
    rows, columns = plan.tile
    needs = planning._Needs(size, True, rows * columns * plan.itemsize, torch.device("cuda"))
    return needs.examples(plan.compute_memory, rows + (columns if len(plan.tiles) > 1 else 0), rows, 1)


def _fetched(problem: Problem) -> float:
    """Bytes that one output's backward pass and products read of what autograd keeps, over the bytes kept."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in problem.model.parameters()}
    kept, read = [0], [0]

    def keep(tensor: Tensor) -> tuple[Tensor, int]:
        size = 0 if tensor.untyped_storage().data_ptr() in weights else tensor.nbytes
        kept[0] += size
        return tensor.detach(), size

    def fetch(held: tuple[Tensor, int]) -> Tensor:
        read[0] += held[1]
        return held[0]

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, fetch)
    with opened(problem.model, problem.x[: planning.FEW], outputs=problem.outputs, large=True, watch=hooks) as network:
        first = network.cotangents(some=slice(0, 1))
        kernel_of_pass(network, first)  # finds the sites
        read[0] = 0
        kernel_of_pass(network, first)
    return read[0] / kept[0]


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.worker:
        rank_worker(Path(options.worker), options.examples)
        return 0
    device = torch.device(options.device)
    names = options.row or [name for name, row in ROWS.items() if row.default] + ["ranks"]
    base = Path(tempfile.mkdtemp(dir=options.folder))
    gpu = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    print(
        f"gramscope {gs.__version__}, torch {torch.__version__}, {device}{gpu}, {os.cpu_count()} CPU cores", flush=True
    )
    try:
        rate = timing.MatmulRate(device)
        for name in names:
            if name == "predictions":
                predictions()
                continue
            if name == "moving":
                moving(options.tiny)
                continue
            if name == "ranks":
                ranks(options.ranks, options.threads, 256 if options.tiny else options.examples, base / "ranks")
                continue
            problem = ROWS[name].build(options.tiny)
            measure(ROWS[name], problem, device, base / name, rate)
            release(problem, device)
        rate.sample()
        print(rate)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return 0


def release(problem: Problem, device: torch.device) -> None:
    problem.model.to("cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--row", nargs="*", choices=[*ROWS, "ranks", "predictions", "moving"])
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--threads", type=int, default=2, help="of each rank")
    parser.add_argument("--examples", type=int, default=10_240, help="of the kernel that ranks fill")
    parser.add_argument("--folder", help="where the kernels are written for a while; a temporary folder if left out")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
