"""The empirical neural tangent kernel, site by site, without a Jacobian."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Literal, TypedDict, overload

import torch
from torch import Tensor, nn

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.errors import InputError
from gramscope.base.memory_budget import Memory
from gramscope.base.nested import ModelInput
from gramscope.base.progress_bar import progress
from gramscope.base.user_warnings import SlowPathWarning, warn
from gramscope.capture import Snapshot
from gramscope.capture.backward_graph import UNLIMITED
from gramscope.capture.capturing import Coupled, ForwardOptions, Opened, opened, outputs_of
from gramscope.capture.network import Outputs, Precision, join_examples, same_outputs, slice_examples
from gramscope.capture.weight_sites import may_route_by_data
from gramscope.kernels.accumulate import Accumulator, Sites, as_matrix, kernel_dtype, mirror
from gramscope.kernels.contractions import strips
from gramscope.kernels.memory import FEW, Block, Plan, check_blocks, check_room, make_plan

LONG = 1.0  # seconds after which a user wants to know
Reduce = Literal["none", "trace"]


class PassOptions(TypedDict, total=False):
    """Arguments of :func:`ntk` that say how it is computed."""

    memory: Memory
    precision: Precision | Literal["split"]
    frozen: bool
    coupled: Coupled


class NTKOptions(PassOptions, total=False):
    """The same, and of which outputs."""

    outputs: Outputs


@overload
def ntk(
    model: nn.Module, x: ModelInput, x2: ModelInput = ..., reduce: Reduce = ..., by_site: Literal[False] = ...,
    outputs: Outputs = ..., memory: Memory = ..., precision: Precision | Literal["split"] = ..., frozen: bool = ...,
    coupled: Coupled = ...,
) -> Tensor: ...  # fmt: skip


@overload
def ntk(
    model: nn.Module, x: ModelInput, x2: ModelInput = ..., reduce: Reduce = ..., *, by_site: Literal[True],
    outputs: Outputs = ..., memory: Memory = ..., precision: Precision | Literal["split"] = ..., frozen: bool = ...,
    coupled: Coupled = ...,
) -> dict[str, Tensor]: ...  # fmt: skip


def ntk(
    model: nn.Module,
    x: ModelInput,
    x2: ModelInput = None,
    reduce: Reduce = "none",
    by_site: bool = False,
    outputs: Outputs = None,
    memory: Memory = None,
    precision: Precision | Literal["split"] = None,
    frozen: bool = False,
    coupled: Coupled = "refuse",
) -> Tensor | dict[str, Tensor]:
    """The neural tangent kernel ``K_{μc,νd} = Σ_θ ∂f_c(x_μ)/∂θ · ∂f_d(x_ν)/∂θ``, in memory.

    Arguments are those of :func:`gramscope.ntk`, which can write the kernel to disk as well (``out=``, ``tile=``).
    """
    if reduce not in ("none", "trace"):
        raise InputError(f'reduce must be "none" or "trace", got {reduce!r}.')
    split, own = precision == "split", None if precision == "split" else precision
    options: ForwardOptions = {"outputs": outputs, "frozen": frozen, "precision": own}
    trace = reduce == "trace"
    with torch.no_grad(), exact_arithmetic(tf32=precision == "tf32"):
        make = partial(make_plan, model, x, x2, trace=trace, blocked=coupled == "refuse", memory=memory, **options)
        plan, run = make(), partial(outputs_of, model, **options)
        separate = x2 is not None and not (coupled == "refuse" and _joinable(x, x2, plan, run))
        if separate:
            plan = make(separate=True)
        check_blocks(plan, run, x, x2)
        open_ = partial(
            opened, model, coupled=coupled, room=plan.signals, large=plan.large, known=plan.known, **options
        )
        job = _Job(open_, plan, memory, trace, by_site, split)
        begun = time.perf_counter()
        kernels = job.separate(x, x2) if separate else job.joined(x, x if x2 is None else x2)
        _name_slow(job.slow, time.perf_counter() - begun)
    return kernels if by_site else kernels[""]


def _joinable(x: ModelInput, x2: ModelInput, plan: Plan, run: Callable[..., Tensor]) -> bool:
    """Do examples of both kinds give the same outputs in one batch as by themselves?

    A few of each tell. Where the values of data may decide what goes where (experts that take so many tokens of a
    batch), all blocks do.
    """

    def joined(rows: slice, columns: slice) -> Tensor | None:
        """The outputs of both kinds in one batch; None where they are others there."""
        one, other = slice_examples(x, plan.n, rows), slice_examples(x2, plan.m, columns)
        both = join_examples(one, other)
        if both is None:
            return None
        try:
            alone, apart, together = run(one), run(other), run(both, graph=True)
        except Exception:  # of a model that takes batches of one size; what else is wrong, both sides alone will say
            return None
        if alone.shape[1] != apart.shape[1]:
            return None
        same = same_outputs(together.detach(), torch.cat([alone, apart]), strict=True)
        return together if same else None

    few = joined(slice(FEW), slice(FEW))
    if few is None or not may_route_by_data(few):
        return few is not None
    # Blocks of the same examples differ in their outputs.
    rows, columns = ({block.examples.start: block.examples for block in side} for side in (plan.rows, plan.columns))
    return all(joined(*pair) is not None for pair in product(rows.values(), columns.values()))


def _name_slow(slow: dict[str, float], total: float) -> None:
    """Say which parameters went one example at a time, if that took long."""
    taken = sum(slow.values())
    if taken > LONG:
        names = ", ".join(sorted(slow, key=slow.__getitem__, reverse=True)[:3]) + (", ..." if len(slow) > 3 else "")
        warn(
            f"gramscope knows no rule for how {len(slow)} parameters ({names}) enter the model. Their gradients were "
            f"taken exactly, one example at a time: {taken:.1f} of {total:.1f} seconds. The docs page Extending says "
            "how to add a rule.",
            SlowPathWarning,
        )


@dataclass
class _Job:
    """Opens blocks of examples and adds up the kernels of their sites."""

    open: Callable[[ModelInput], AbstractContextManager[Opened]]
    plan: Plan
    memory: Memory
    trace: bool
    by_site: bool
    split: bool
    kernels: dict[str, Tensor] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)  # seconds of parameters that went one example at a time

    def joined(self, x: ModelInput, x2: ModelInput) -> dict[str, Tensor]:
        """The kernel of examples with others or with themselves (x2 is x): two blocks in each forward pass."""
        rows, columns = self.plan.rows, self.plan.columns
        pairs = [(mine, theirs) for place, mine in enumerate(rows) for theirs in columns[place if x2 is x else 0 :]]
        with progress("kernel, pair of blocks", len(pairs)) as advance:
            for mine, theirs in pairs:
                self._add_pair(x, x2, mine, theirs)
                advance()
        for kernel in self.kernels.values() if x2 is x and len(pairs) > 1 else ():
            mirror(as_matrix(kernel))
        return self.kernels

    def separate(self, x: ModelInput, x2: ModelInput) -> dict[str, Tensor]:
        """The same from a forward pass for each: inputs of other shapes, outputs that depend on their batch."""
        for mine in self.plan.rows:
            for some in self._together(mine.outputs) if self.trace else [mine.outputs]:
                left = self._captured(x, self.plan.n, mine, some)
                for theirs in self.plan.columns:
                    right = self._captured(x2, self.plan.m, theirs, some if self.trace else theirs.outputs, left)
                    accumulator = self._accumulator(mine, theirs, symmetric=False)
                    accumulator.add(left.by_parameter(), right.by_parameter())
                    accumulator.finish()
        return self.kernels

    def _captured(self, x: ModelInput, n: int, block: Block, outputs: slice, other: Snapshot | None = None) -> Snapshot:
        """The signals of some outputs of a block of examples, to be contracted with those of the other side."""
        with self._opened(slice_examples(x, n, block.examples)) as network:
            width = network.f.shape[1]
            if other is not None and other.outputs.shape[1] != width:
                raise InputError(
                    f"x and x2 must give the same number of outputs, got {other.outputs.shape[1]} and {width}. Choose "
                    "outputs that both have, or use gs.ntk_operator, which takes different numbers."
                )
            return network.snapshot(network.cotangents(some=outputs))

    def _together(self, outputs: slice, f: Tensor | None = None) -> Iterator[slice]:
        """The outputs of a trace that are contracted together. Where the plan leaves it open, their cotangents fit."""
        start, stop, passes = outputs.start, outputs.stop, self.plan.passes
        if not passes and f is not None:
            stop, passes = f.shape[1], max(1, self.plan.signals // max(1, f.nbytes))
        if not passes:
            return iter([outputs])
        return (slice(start + low, start + high) for low, high in strips(stop - start, passes))

    def _add_pair(self, x: ModelInput, x2: ModelInput, mine: Block, theirs: Block) -> None:
        """A function of its own, so that nothing of one pair is held while the next passes through the network."""
        same = x2 is x and mine.examples == theirs.examples
        symmetric = same and mine.outputs == theirs.outputs
        examples, count = slice_examples(x, self.plan.n, mine.examples), mine.examples.stop - mine.examples.start
        if not same:
            examples = join_examples(examples, slice_examples(x2, self.plan.m, theirs.examples))
        left, right = slice(0, count), slice(0 if same else count, None)
        with self._opened(examples) as network:
            accumulator = self._accumulator(mine, theirs, symmetric)
            for cotangents, first, second in self._directions(network, mine, theirs):
                for group in network.sites(cotangents, self.plan.signals):
                    if symmetric:
                        accumulator.add(group, group)
                    else:
                        accumulator.add(_part(group, left, first), _part(group, right, second))
                    del group  # or its signals would be held while the next are computed
            accumulator.finish()

    def _directions(self, network: Opened, mine: Block, theirs: Block) -> Iterator[tuple[Tensor, slice, slice]]:
        """Cotangents, and which of them belong to the rows and to the columns: some at a time for a trace."""
        if self.trace:
            for some in self._together(mine.outputs, network.f):
                yield network.cotangents(some=some), slice(None), slice(None)
            return
        own = network.cotangents(some=mine.outputs)
        if mine.outputs == theirs.outputs:
            yield own, slice(None), slice(None)
        else:
            others = network.cotangents(some=theirs.outputs)
            yield torch.cat([own, others]), slice(0, len(own)), slice(len(own), None)

    @contextmanager
    def _opened(self, examples: ModelInput) -> Iterator[Opened]:
        """A forward pass; the first one makes room for the kernel."""
        with self.open(examples) as network:
            if not self.kernels:
                self._allocate(network)
            yield network
            for name, seconds in network.weight_sites.slow.items():
                self.slow[name] = self.slow.get(name, 0.0) + seconds

    def _allocate(self, network: Opened) -> None:
        n, m, width = self.plan.n, self.plan.m, network.f.shape[1]
        dtype = kernel_dtype((network.f, *network.parameters.values()))
        shape = (n, m) if self.trace else (n, width, m, width)
        names = list(network.parameters) if self.by_site else [""]
        need = math.prod(shape) * dtype.itemsize
        check_room(need, f"a kernel of shape {shape}", self.plan.budget, self.memory, network.f.device)
        self.kernels = {name: torch.zeros(shape, dtype=dtype, device=network.f.device) for name in names}

    def _accumulator(self, mine: Block, theirs: Block, symmetric: bool) -> Accumulator:
        tiles = {name: _tile(kernel, mine, theirs) for name, kernel in self.kernels.items()}
        return Accumulator(tiles, self.trace, symmetric, self.plan.chunk, self.split)


def _part(group: Sites, examples: slice, directions: slice) -> Sites:
    return {name: tuple(site.part(examples, directions) for site in sites) for name, sites in group.items()}


def _tile(kernel: Tensor, mine: Block, theirs: Block) -> Tensor:
    if kernel.dim() == 2:
        return kernel[mine.examples, theirs.examples]
    return kernel[mine.examples, mine.outputs, theirs.examples, theirs.outputs]


def kernel_of_pass(network: Opened, cotangents: Tensor, reduce: Reduce = "trace", room: int = UNLIMITED) -> Tensor:
    """The kernel of the directions given, (n, k, n, k) or its trace, of an open forward pass.

    ``room`` bytes of signals are held at once.
    """
    n, k = len(network.f), len(cotangents)
    dtype = kernel_dtype((network.f, *network.parameters.values()))
    kernel = torch.zeros((n, n) if reduce == "trace" else (n, k) * 2, dtype=dtype, device=network.f.device)
    with torch.no_grad():
        accumulator = Accumulator({"": kernel}, reduce == "trace", symmetric=True)
        for group in network.sites(cotangents, room):
            accumulator.add(group, group)
        accumulator.finish()
    return kernel
