"""Brute-force counting: floating-point operations and live bytes of whatever runs inside."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv"}


class CountFlops(TorchDispatchMode):
    """Two for each multiply-add of a matrix product; nothing else counts."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name in PRODUCTS:
            left = args[1] if name.startswith(("addmm", "baddbmm")) else args[0]
            self.total += 2 * output.numel() * left.shape[-1]
        return output


class LivePeak(TorchDispatchMode):
    """The most bytes of tensor memory made inside that were alive at one moment.

    Weak references of torch's own tell when memory is freed: Python's wrapper of it may come and go meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._forget_freed()
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._made:
                self._given[storage._cdata] = StorageWeakRef(storage)
        output = func(*args, **(kwargs or {}))
        for storage in _storages(output):
            if storage._cdata not in self._made and storage._cdata not in self._given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        return output

    def _forget_freed(self) -> None:
        for key in [key for key, (reference, _) in self._made.items() if reference.expired()]:
            self.live -= self._made.pop(key)[1]
        for key in [key for key, reference in self._given.items() if reference.expired()]:
            del self._given[key]


def _storages(values: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
