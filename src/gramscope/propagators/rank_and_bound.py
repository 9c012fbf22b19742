"""The rank of a global kernel beside the bound that its structure sets."""

from dataclasses import dataclass

import torch

from gramscope.base.effective_rank import effective_rank, participation_ratio
from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.base.rounding import Rounding, singular_floor
from gramscope.propagators.activity import structural_rank_bound
from gramscope.propagators.global_ntk import GlobalNTK, check_global
from gramscope.propagators.measures import EXACT


@dataclass(frozen=True, repr=False)
class KernelRank(Result, shown=("rank", "bound", "size", "effective_rank", "participation_ratio")):
    """``rank <= bound <= size``: of NTK_S, of ``Σ_j rank(V_j) n_out,j`` and of the states.

    ``effective_rank`` and ``participation_ratio`` count the directions by weight.
    """

    size: int
    bound: int
    rank: int
    effective_rank: float
    participation_ratio: float

    @property
    def tightness(self) -> float:
        """``rank / bound``: 1 where the bound is met."""
        return self.rank / self.bound


@torch.no_grad()
def kernel_rank(g: GlobalNTK) -> KernelRank:
    """The rank of ``NTK_S`` measured against its structural bound, exactly, for up to 4,096 states.

    P is invertible, so ``rank NTK_S = rank K <= Σ_j rank(V_j) n_out,j``. In self-attention q, k and v read the same
    inputs V of rank d at most (d + 1 with biases), however many tokens there are: of 4 n T d states at most
    ``4 d (d + 1)`` directions can move. Singular values of the Jacobian ``P J`` above rounding are counted, which are
    the roots of the kernel's eigenvalues.

    Reference: arXiv:2605.08746 (the structural bottleneck; self-attention).

    Example:
        >>> class SelfAttention(torch.nn.MultiheadAttention):
        ...     def forward(self, x):
        ...         return super().forward(x, x, x, need_weights=False)[0]
        >>> _ = torch.manual_seed(0)
        >>> model, x = SelfAttention(4, 2, batch_first=True).double(), torch.randn(3, 12, 4).double()
        >>> found = kernel_rank(GlobalNTK(model, x))
        >>> found.size, found.bound, found.rank
        (576, 80, 80)
    """
    check_global(g)
    n = g.axes.size
    if n > EXACT:
        raise InputError(
            f"a rank of {n:,} states needs their whole Jacobian, for up to {EXACT:,}. Take fewer examples or tokens; "
            "structural_rank_bound(g) and participation_ratio(g.operator, products=32) do without."
        )
    J = g.jacobian.dense()
    sizes = torch.linalg.svdvals(J.double())
    rank = int((sizes > singular_floor(J.double(), Rounding.of(J))).sum())
    squares = sizes.square()
    return KernelRank(n, structural_rank_bound(g), rank, effective_rank(squares), participation_ratio(squares))
