"""Brute-force counting: floating-point operations and live bytes of whatever runs inside."""

import weakref
from typing import Any

import torch
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
    """The most bytes of tensor memory made inside that were alive at one moment."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self._register(leaf.untyped_storage())
        return output

    def _register(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size
