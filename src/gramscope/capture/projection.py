"""A few random mixtures of many outputs, for networks with too many outputs to measure each of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import SupportsIndex

import numpy as np
import torch
from jaxtyping import Float, Real, UInt8
from torch import Tensor, nn

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.checks import check_count
from gramscope.base.nested import ModelInput
from gramscope.base.rng import child_seed
from gramscope.capture.network import Outputs, count_examples, evaluate
from gramscope.ops.torch_calls import transforms

MAX_SIGNS_BYTES = 2**28  # of a matrix of signs that is made whole, and held for the backward pass
CHUNK_BYTES = 2**26  # of the part of a larger one that is made at a time
BITS = 64  # of one random number


def project(k: SupportsIndex, seed: SupportsIndex = 0, of: Outputs = None) -> "Projection":
    """k random mixtures of all outputs, as ``outputs=gs.project(16)`` in everything that takes ``outputs``.

    The outputs f (n, C), flattened as for ``outputs=None``, become ``f̃ = f S / √k`` (n, k) with fixed random signs S
    (C, k). A kernel then takes k backward passes instead of C, and its trace over outputs is right on average:

        Σ_j K̃_{μj,νj} = (1/k) Σ_j Σ_cd S_cj S_dj K_{μc,νd}    and    E[S_cj S_dj] = δ_cd,

    so ``E[Σ_j K̃_{μj,νj}] = Σ_c K_{μc,νc}``.

    Its variance is ``(2/k) Σ_{c≠d} A_cd²``, A the symmetric part of the C x C matrix ``K_{μ·,ν·}``: there is no error
    where outputs do not interact. :func:`gramscope.kernels.projected_trace` estimates it along with the kernel. Only
    the trace is kept: ``K̃_{μi,νj}`` with i ≠ j is zero on average, whatever K is.

    Args:
        k: number of random outputs. From k = C on, all outputs are as cheap, and exact.
        seed: of the signs. They depend on it alone: not on the device, the dtype or the global random streams. The
            signs of fewer outputs, or of a smaller k, are the first of these.
        of: which outputs to mix, as for ``outputs=``: columns, a name, or a function of (model, x). All if None.

    References: Hutchinson, Commun. Stat. Simul. 18 (1989). The pseudo-NTK of Mohamadi, Bae & Sutherland 2023
    (arXiv:2206.12543) is one mixture, with all signs equal.

    Example:
        >>> import torch, gramscope as gs
        >>> model, x = torch.nn.Linear(3, 1000, bias=False), torch.eye(3)
        >>> gs.ntk(model, x, outputs=gs.project(8)).shape
        torch.Size([3, 8, 3, 8])
        >>> gs.ntk(model, x, outputs=gs.project(8), reduce="trace").diagonal().round()  # no interaction: exact
        tensor([1000., 1000., 1000.])
    """
    return Projection(check_count(k, "k"), check_count(seed, "seed", 0), of)


@dataclass(frozen=True, eq=False)
class Projection:
    """A function of (model, x) that returns k random mixtures (n, k) of the model's outputs; see :func:`project`."""

    k: int
    seed: int
    of: Outputs = field(default=None)

    def __call__(self, model: nn.Module, x: ModelInput) -> Float[Tensor, "n k"]:
        return self.mix(evaluate(model, x, count_examples(x), self.of))

    def mix(self, table: Float[Tensor, "n C"]) -> Float[Tensor, "n k"]:
        """``f S / √k``; half precision is mixed in float32, since sums of many outputs need it."""
        table = table.to(torch.promote_types(table.dtype, torch.float32))
        width = table.shape[1]
        with exact_arithmetic():
            if width * self.k * table.dtype.itemsize <= MAX_SIGNS_BYTES:
                return table @ self.signs(0, width, table) / self.k**0.5
            ranges = list(self.chunks(width, table.dtype.itemsize))
            parts = table.split([stop - start for start, stop in ranges], dim=1)
            mixed = torch.stack([self._product(*one) for one in zip(parts, ranges, strict=True)]).sum(0)
        return mixed / self.k**0.5

    def _product(self, part: Float[Tensor, "n rows"], outputs: tuple[int, int]) -> Float[Tensor, "n k"]:
        """``f S`` for some of the outputs. The graph does not hold their signs: it has them made anew."""
        like, signs = part.new_empty(0), self.signs(*outputs, part)
        if transforms():  # torch.func knows no hooks; there the graph holds the signs
            return part @ signs
        shape, place = signs.shape, signs.data_ptr()  # the hooks must not hold the signs either
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda kept: None if kept.shape == shape and kept.data_ptr() == place else kept,
            lambda kept: self.signs(*outputs, like) if kept is None else kept,
        )
        with hooks:
            return part @ signs

    def signs(self, start: int, stop: int, like: Tensor) -> Real[Tensor, "rows k"]:
        """Rows ``start`` to ``stop`` of S, in the dtype and on the device of ``like``."""
        bits = np.stack([self._bits(mixture, start, stop) for mixture in range(self.k)])
        return (1 - 2 * torch.from_numpy(bits).to(like.device).to(like.dtype)).T

    def chunks(self, width: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """Ranges of outputs whose signs take no more than CHUNK_BYTES."""
        rows = max(1, CHUNK_BYTES // (self.k * itemsize))
        return ((start, min(start + rows, width)) for start in range(0, width, rows))

    def _bits(self, mixture: int, start: int, stop: int) -> UInt8[np.ndarray, " rows"]:
        """Random bits of some outputs for one mixture, each of which has a stream of its own.

        From numpy's generator, which can begin anywhere in its stream. torch's own cannot, and refuses to draw in a
        backward pass of many directions at once (vmap).
        """
        first, last = start // BITS, -(-stop // BITS)
        numbers = np.random.PCG64(child_seed(self.seed, "project", mixture)).advance(first).random_raw(last - first)
        octets = numbers.astype("<u8", copy=False).view(np.uint8)
        return np.unpackbits(octets, bitorder="little")[start - first * BITS : stop - first * BITS]
