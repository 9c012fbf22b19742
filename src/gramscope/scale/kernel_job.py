"""One kernel to be written: the model, its examples and options, and the computation of a single tile."""

import os
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gramscope.base.checks import check_choice, check_count
from gramscope.base.errors import CoupledExamplesError, InputError
from gramscope.base.memory_budget import Memory, free_memory, memory_budget
from gramscope.base.nested import ModelInput, map_tensors
from gramscope.base.user_warnings import warn
from gramscope.capture import capture
from gramscope.capture.backward_graph import is_out_of_memory
from gramscope.capture.capturing import ForwardOptions
from gramscope.capture.network import Outputs, Precision, count_examples, slice_examples, unwrap
from gramscope.kernels.empirical_ntk import Reduce, ntk
from gramscope.scale.fingerprints import Fingerprints, fingerprint_data, fingerprint_model, fingerprint_outputs
from gramscope.scale.tile_plan import Tile, TilePlan, choose_tile

# Examples and outputs of the sample that a manifest keeps.
SAMPLE_EXAMPLES, SAMPLE_OUTPUTS = 4, 8


@dataclass(frozen=True, eq=False)
class KernelJob:
    """The kernel of ``model`` between the examples ``x`` and ``x2`` (``x`` itself if None), tile by tile.

    The examples may lie on another device than the model: those of a tile are brought to it.
    """

    model: nn.Module = field(repr=False)
    x: ModelInput = field(repr=False)
    x2: ModelInput = field(default=None, repr=False)
    reduce: Reduce = "none"
    outputs: Outputs = None
    precision: Precision | Literal["split"] = None
    frozen: bool = False

    def __post_init__(self) -> None:
        check_choice(self.reduce, "reduce", get_args(Reduce))

    @property
    def symmetric(self) -> bool:
        return self.x2 is None

    @property
    def forward(self) -> ForwardOptions:
        """How examples pass through the network; "split" is about products of gradients alone."""
        precision = None if self.precision == "split" else self.precision
        return {"outputs": self.outputs, "frozen": self.frozen, "precision": precision}

    @cached_property
    def device(self) -> torch.device:
        first = next(unwrap(self.model).parameters(), None)
        return torch.device("cpu") if first is None else first.device

    @cached_property
    def sample(self) -> Tensor:
        """The outputs of the first examples, (4, C) or fewer; refuses models whose outputs depend on the batch."""
        n = count_examples(self.x)
        few = min(SAMPLE_EXAMPLES, n)
        together = self._outputs_of(slice(0, few))
        last = together[few - 1 :]  # not the first: it may be given the same random numbers in either batch
        alone = self._outputs_of(slice(few - 1, few)) if few > 1 else last
        if float((last - alone).abs().max()) > 1e-2 * float(last.abs().max()):
            raise CoupledExamplesError(
                "each example's output must depend on that example alone, so that the tiles of a kernel fit together, "
                "but the outputs change with the batch. Is the model in training mode (dropout, batch norm)? Call "
                "model.eval()."
            )
        return together

    def plan(self, memory: Memory = None, tile: int | None = None) -> TilePlan:
        """Tiles that fit into ``memory`` bytes a process (half of what is free to it if None)."""
        n = count_examples(self.x)
        m = n if self.x2 is None else count_examples(self.x2)
        budget = memory_budget(memory, self.device)
        dtype, width = self._dtype(), self.sample.shape[1]
        open_outputs = 1 if self.reduce == "trace" else width
        size = choose_tile(
            n, m, outputs=open_outputs, itemsize=dtype.itemsize, memory=budget, processes=world_size(),
            symmetric=self.symmetric,
        )  # fmt: skip
        if tile is not None:
            tile = check_count(tile, "tile")
            size = (min(n, tile), min(m, tile))
        name = str(dtype).removeprefix("torch.")
        plan = TilePlan(n, m, width, self.reduce, self.symmetric, size, name, budget)
        if plan.tile_bytes * 4 > budget:
            raise InputError(
                f"memory must be at least {4 * plan.tile_bytes:,} bytes for tiles of {tile} examples, got {budget:,}. "
                "Give more, or take smaller tiles."
            )
        return plan

    def fingerprints(self) -> Fingerprints:
        shown = self.sample[:, :SAMPLE_OUTPUTS].double().cpu().tolist()
        return Fingerprints(
            model=fingerprint_model(self.model),
            x=fingerprint_data(self.x),
            x2=None if self.x2 is None else fingerprint_data(self.x2),
            outputs=f"{fingerprint_outputs(self.outputs)}, {self.sample.shape[1]} to an example",
            sample=tuple(tuple(row) for row in shown),
        )

    def options(self) -> dict[str, object]:
        """The other arguments that change the numbers."""
        return {"reduce": self.reduce, "precision": self.precision, "frozen": self.frozen}

    def compute(self, plan: TilePlan, tile: Tile) -> Tensor:
        """One tile, on the model's device: (a, b) or (a, C, b, C)."""
        values = self._within_memory(*self.examples_of(plan, tile), self._affordable(plan.compute_memory))
        expected = getattr(torch, plan.dtype)
        if values.dtype != expected:
            raise InputError(
                f"a tile must have dtype {expected}, as the folder's manifest says, got {values.dtype}. Was the model "
                "cast meanwhile? Give it the dtype that it had, or choose another folder."
            )
        return values

    def examples_of(self, plan: TilePlan, tile: Tile) -> tuple[ModelInput, ModelInput]:
        """The examples of a tile's rows and of its columns, None where they are the same, on the model's device."""
        i, j = tile
        rows = self._examples(self.x, plan.rows, plan.range(i, 0))
        if self.symmetric and i == j:
            return rows, None
        return rows, self._examples(self.x if self.x2 is None else self.x2, plan.cols, plan.range(j, 1))

    def _within_memory(self, rows: ModelInput, columns: ModelInput, memory: int) -> Tensor:
        """With half of the memory, and so smaller blocks, where there turns out to be less than was thought."""
        try:
            return ntk(
                self.model, rows, columns, self.reduce, outputs=self.outputs, memory=memory, precision=self.precision,
                frozen=self.frozen,
            )  # fmt: skip
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
        warn(f"a tile ran out of memory within {memory:,} bytes ({said}). It is computed again within half of that.")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return self._within_memory(rows, columns, memory // 2)

    def _affordable(self, memory: int) -> int:
        """What the plan allows, or half of what is free to this process, if that is less than the plan counts on."""
        free = free_memory(self.device)
        if memory <= free:
            return memory
        warn(
            f"the tiles were planned for {memory:,} bytes of memory, but this process has {free:,} free. It uses half "
            "of that; its tiles may differ from those of other processes by rounding."
        )
        return free // 2

    def first_examples(self, count: int) -> ModelInput:
        return self._examples(self.x, count_examples(self.x), slice(0, count))

    def _examples(self, x: ModelInput, n: int, part: slice) -> ModelInput:
        return map_tensors(lambda tensor: tensor.to(self.device), slice_examples(x, n, part))

    def _outputs_of(self, part: slice) -> Tensor:
        x = self._examples(self.x, count_examples(self.x), part)
        # One direction is enough: the outputs are wanted, not their gradients.
        return capture(self.model, x, directions=lambda f: f.real.sum(), **self.forward).outputs

    def _dtype(self) -> torch.dtype:
        """Of the kernel: half precision is contracted in float32."""
        dtypes = [self.sample.dtype]
        if self.precision not in ("float32", "float64"):
            floats = (p for p in unwrap(self.model).parameters() if p.is_floating_point() or p.is_complex())
            dtypes += [p.dtype.to_real() for p in floats if self.frozen or p.requires_grad]
        return reduce(torch.promote_types, dtypes, torch.float32)


def world_size() -> int:
    """Processes of this job, as torchrun and its like say."""
    return max(1, int(os.environ.get("WORLD_SIZE", "1")))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))
