"""What a kernel on disk will cost, before it is begun: operations by the shapes of its weight sites."""

import time
from dataclasses import dataclass
from typing import ClassVar

import torch

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.results import Result
from gramscope.capture import OuterSite, capture
from gramscope.capture.capturing import survey
from gramscope.kernels.memory import make_plan
from gramscope.scale.kernel_job import KernelJob
from gramscope.scale.tile_plan import TilePlan, size_in_words


@dataclass(frozen=True, repr=False)
class TileCost(Result):
    """Operations of matrix products, two for each multiply-add: the fewest that the kernel takes.

    ``by_example`` goes with each example that passes through the network, ``by_pair`` with each pair of examples whose
    kernel is computed. ``again`` is how often an example passes for one tile: once, or more where the memory holds
    some of the tile's examples at a time; ``activations`` are the bytes that the forward pass of one example keeps.
    Not in them: elementwise work, gains and biases, lookups, attention's own products.
    """

    shown: ClassVar[tuple[str, ...]] = ("total", "passes", "contractions")

    by_example: float
    by_pair: float
    plan: TilePlan
    again: float = 1.0
    activations: int = 0

    @property
    def passes(self) -> float:
        """Operations of all forward and backward passes, and of forming gradients."""
        return self.by_example * self.plan.passes * self.again

    @property
    def contractions(self) -> float:
        """Operations of the products between examples."""
        return self.by_pair * self.plan.pairs

    @property
    def total(self) -> float:
        return self.passes + self.contractions

    def seconds(self, rate: float, processes: int = 1, disk: float | None = None) -> float:
        """Time at ``rate`` operations a second for each process; ``disk`` is what all of them write in a second."""
        computed = self.total / (rate * processes)
        return computed if disk is None else max(computed, self.plan.bytes / disk)

    @property
    def repeated(self) -> float:
        """Operations of the passes that would not be made, if the activations of all of a tile's examples were kept."""
        return self.by_example * self.plan.passes * (self.again - 1)

    @property
    def moved(self) -> int:
        """Bytes that would be moved instead: activations go to the CPU once and come back for each output."""
        return self.activations * self.plan.passes * (1 + self.plan.outputs)

    @property
    def away(self) -> int:
        """Bytes on the CPU at once, if the activations of all of a tile's examples were there."""
        return self.activations * sum(self.plan.tile)

    def __str__(self) -> str:
        blocks = (
            f"Within the memory an example passes {self.again:.1f} times for each tile: its activations "
            f"({size_in_words(self.activations)}) are computed again.\n"
        )
        return (blocks if self.again > 1 else "") + (
            f"At least {self.total:.3g} operations of matrix products: {self.passes / self.total:.0%} for passes "
            f"through the network, {self.contractions / self.total:.0%} for pairs of examples."
        )


def tile_cost(job: KernelJob, plan: TilePlan) -> TileCost:
    """Operations of the kernel, from one example's weight sites.

    A site with T positions, fan-in i, fan-out o in g groups takes ``T g i o`` multiply-adds in a forward pass and as
    many for each of the k outputs in the backward passes. A pair of examples takes the cheaper of ``k g i o`` (``k²``
    if outputs are not traced), after ``k T g i o`` for each example, and ``T² g (i + k o)``.
    """
    x = job.first_examples(1)
    found = capture(job.model, x, directions=lambda f: f.sum(), **job.forward)
    by_example = by_pair = 0.0
    for site in (site for site in found.sites if isinstance(site, OuterSite)):
        example, pair = _multiply_adds(site, plan.outputs, plan.reduce == "trace")
        by_example, by_pair = by_example + example, by_pair + pair
    held = survey(job.model, x, **job.forward).held
    return TileCost(2 * by_example, 2 * by_pair, plan, _passes_for_a_tile(job, plan), held)


def _passes_for_a_tile(job: KernelJob, plan: TilePlan) -> float:
    """How often an example goes through the network for one tile, by the blocks that the memory allows."""
    rows, columns = job.examples_of(plan, plan.tiles[min(1, len(plan.tiles) - 1)])
    inner = make_plan(
        job.model, rows, columns, trace=plan.reduce == "trace", blocked=True, memory=plan.compute_memory, **job.forward
    )
    if columns is None:
        return float(len(inner.rows))
    passed = sum(
        mine.examples.stop - mine.examples.start + theirs.examples.stop - theirs.examples.start
        for mine in inner.rows
        for theirs in inner.columns
    )
    return passed / (inner.n + inner.m)


def product_rate(device: torch.device, dtype: str, tf32: bool = False) -> float:
    """Operations a second of large products on a device, the best of three."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.ones(size, size, device=device, dtype=getattr(torch, dtype))
    best = 0.0
    with exact_arithmetic(tf32=tf32):
        for _ in range(3):
            begun = time.perf_counter()
            float((a @ a)[0, 0])  # waits for the GPU
            best = max(best, 2.0 * size**3 / (time.perf_counter() - begun))
    return best


def _multiply_adds(site: OuterSite, k: int, trace: bool) -> tuple[float, float]:
    """Of each example and of each pair."""
    entries = k if trace else k * k
    T, weights = site.positions, site.groups * site.fan_in * site.fan_out
    passes = float((1 + k) * T * weights)
    rows = float(entries * weights)
    positions = float(T * T * site.groups * (site.fan_in + entries * site.fan_out))
    return (passes + (k * T * weights if T > 1 else 0), rows) if rows < positions else (passes, positions)
