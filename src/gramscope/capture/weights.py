"""Weights as they enter an operation: a parameter, a view or cast of one, or a function of several."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

Strided = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride, offset
# Operations that change the type or the memory of a tensor but not its entries.
KEEPS_ENTRIES = {"to", "type", "float", "double", "half", "bfloat16", "contiguous", "clone", "alias"}


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor that depends on parameters and on no data.

    ``roots`` are the parameters it was made from. Where its entries *are* entries of one root (the root
    itself, a view, a cast), ``frame`` holds (size, stride, offset) of that view in the root's storage;
    otherwise it is None and gradients are pulled back through the tensor's own autograd graph.
    ``repeated`` are axes along which Tensor.repeat made copies.
    """

    tensor: Tensor
    roots: tuple[Tensor, ...]
    frame: Strided | None
    repeated: frozenset[int] = frozenset()

    @property
    def copies(self) -> frozenset[int]:
        """Axes along which every slice is the same function of the roots."""
        expanded = (
            a
            for a, (size, step) in enumerate(zip(self.tensor.shape, self.tensor.stride(), strict=True))
            if step == 0 and size > 1
        )
        return self.repeated | frozenset(expanded)

    def slice(self, axis: int) -> "Weight":
        """One slice along an axis of copies."""
        with torch.enable_grad():
            return Weight(self.tensor.select(axis, 0), self.roots, None)

    @classmethod
    def of_parameter(cls, parameter: Tensor) -> "Weight":
        return cls(parameter, (parameter,), _frame(parameter))

    def derive(self, tensor: Tensor, others: tuple["Weight", ...], operation: str) -> "Weight":
        """The weight that an operation made of this one (and of ``others``)."""
        roots = tuple({id(r): r for weight in (self, *others) for r in weight.roots}.values())
        if operation == "repeat":
            return Weight(tensor, roots, None, _repeated(self.tensor.shape, tensor.shape))
        if self.frame is None or len(roots) > 1:
            return Weight(tensor, roots, None)
        if operation in KEEPS_ENTRIES and tensor.shape == self.tensor.shape:
            return Weight(tensor, roots, self.frame)
        root = roots[0]
        shares = tensor.untyped_storage().data_ptr() == root.untyped_storage().data_ptr()
        overlaps = any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        if shares and tensor.dtype == root.dtype and not overlaps and _injective(tensor):
            return Weight(tensor, roots, _frame(tensor))
        return Weight(tensor, roots, None)

    def placement(self) -> Int[Tensor, " p"] | None:
        """For each entry of this weight, the entry of the flattened root; None for all of them in their own order."""
        root = self.roots[0]
        assert self.frame is not None
        if self.frame == _frame(root):
            return None
        memory = torch.arange(root.untyped_storage().nbytes() // root.element_size(), device="cpu")
        where = torch.full_like(memory, -1)
        own = torch.as_strided(memory, *_frame(root)).reshape(-1)
        where[own] = torch.arange(len(own), device="cpu")
        return where[torch.as_strided(memory, *self.frame).reshape(-1)]


def _frame(tensor: Tensor) -> Strided:
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def _injective(tensor: Tensor) -> bool:
    """No two entries share memory: sorted by stride, each stride clears the extent of the smaller ones."""
    extent = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step < extent:
                return False
            extent += step * (size - 1)
    return True


def _repeated(source: torch.Size, target: torch.Size) -> frozenset[int]:
    sizes = (1,) * (len(target) - len(source)) + tuple(source)
    return frozenset(a for a, (old, new) in enumerate(zip(sizes, target, strict=True)) if old == 1 and new > 1)
