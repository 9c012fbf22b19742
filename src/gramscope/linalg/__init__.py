"""Linear operators, their algebra, Krylov methods and trace estimates; no networks, no data."""

from gramscope.linalg.algebra import Adjoint, Composition, Scaled, Sum
from gramscope.linalg.block import Block, BlockDiagonal
from gramscope.linalg.conjugate_gradient import Solution, conjugate_gradient
from gramscope.linalg.contraction import contract
from gramscope.linalg.eigen import eigenvalues_top
from gramscope.linalg.elementary import Dense, Diagonal, Function, Identity, LowRank, Zero, as_operator
from gramscope.linalg.hadamard import HadamardGram
from gramscope.linalg.kronecker import Kronecker
from gramscope.linalg.lanczos import RitzPairs, Tridiagonal, lanczos, tridiagonalise
from gramscope.linalg.one_sided import TraceEstimate, one_sided_trace, one_sided_trace_to, trace_to
from gramscope.linalg.operator import LinearOperator
from gramscope.linalg.randomised import SingularTriplets, randomised_svd
from gramscope.linalg.traces import DiagonalEstimate, Estimate, hutchinson, hutchinson_diagonal, hutchpp
from gramscope.linalg.xtrace import xtrace

__all__ = [
    "Adjoint",
    "Block",
    "BlockDiagonal",
    "Composition",
    "Dense",
    "Diagonal",
    "DiagonalEstimate",
    "Estimate",
    "Function",
    "HadamardGram",
    "Identity",
    "Kronecker",
    "LinearOperator",
    "LowRank",
    "RitzPairs",
    "Scaled",
    "SingularTriplets",
    "Solution",
    "Sum",
    "TraceEstimate",
    "Tridiagonal",
    "Zero",
    "as_operator",
    "conjugate_gradient",
    "contract",
    "eigenvalues_top",
    "hutchinson",
    "hutchinson_diagonal",
    "hutchpp",
    "lanczos",
    "one_sided_trace",
    "one_sided_trace_to",
    "randomised_svd",
    "trace_to",
    "tridiagonalise",
    "xtrace",
]
