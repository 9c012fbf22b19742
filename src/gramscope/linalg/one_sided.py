"""Traces of ``J Jᵀ`` from one side of J alone."""

from typing import Literal

import torch

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.checks import check_counts
from gramscope.base.errors import InputError
from gramscope.base.rng import Distribution
from gramscope.linalg.arguments import require_operator, stream
from gramscope.linalg.intervals import rounding_unit
from gramscope.linalg.operator import LinearOperator, require_finite
from gramscope.linalg.orthogonal import norms
from gramscope.linalg.traces import TraceEstimate, draw_probes, mean_and_error, require_budget

Side = Literal["reverse", "forward"]


@torch.no_grad()
@exact_arithmetic()
def one_sided_trace(
    jacobian: LinearOperator,
    products: int,
    *,
    side: Side = "reverse",
    distribution: Distribution = "rademacher",
    seed: int = 0,
    block: int = 64,
) -> TraceEstimate:
    """``tr(J Jᵀ) = E ‖Jᵀ v‖²`` (reverse products only) ``= E ‖J w‖²`` (forward only), E over ``E[v vᵀ] = 1``.

    Half the work of Hutchinson on ``J Jᵀ`` for the same samples, and it needs one mode of differentiation. Both are
    unbiased; the variance is ``2 Σ_{i≠j} (J Jᵀ)_ij²`` for random signs on the reverse side, that of ``Jᵀ J`` on the
    forward side. Hazelden 2025 (arXiv:2511.10796).

    >>> from gramscope.linalg import Dense
    >>> J = Dense(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]))
    >>> print(one_sided_trace(J, products=4))      # exact but for rounding
    25 ± 6e-06 (reverse, 4 products)
    """
    _require_side(jacobian, side, block)
    require_budget(products, 2, "one_sided_trace")
    op = jacobian.adjoint() if side == "reverse" else jacobian
    rng, squares = stream(seed, "one_sided", side), []
    for start in range(0, products, block):
        image = op.matmat(draw_probes(op, min(block, products - start), distribution, rng))
        require_finite(image, op)
        squares.append(norms(image) ** 2)
    value, error = mean_and_error(torch.cat(squares))
    error = max(error, rounding_unit(op.dtype, max(op.shape)) * value)
    return TraceEstimate(value, error, products, seed, side, distribution, op.dtype, op.device)


def _require_side(jacobian: LinearOperator, side: str, block: int) -> None:
    require_operator(jacobian, "one_sided_trace")
    check_counts(1, block=block)
    if side not in ("reverse", "forward"):
        raise InputError(f"side must be 'reverse' or 'forward', got {side!r}.")
