"""Linear operators, their algebra, Krylov methods and trace estimates; no networks, no data."""

from gramscope.linalg.algebra import Adjoint, Composition, Scaled, Sum
from gramscope.linalg.conjugate_gradient import Solution, conjugate_gradient
from gramscope.linalg.contraction import contract
from gramscope.linalg.eigen import RitzPairs, eigenvalues_top
from gramscope.linalg.elementary import Dense, Diagonal, Function, Identity, LowRank, Zero, as_operator
from gramscope.linalg.hadamard import HadamardGram
from gramscope.linalg.kronecker import Kronecker
from gramscope.linalg.one_sided import one_sided_trace
from gramscope.linalg.operator import LinearOperator
from gramscope.linalg.traces import TraceEstimate, hutchinson, hutchpp
from gramscope.linalg.xtrace import xtrace

__all__ = [
    "Adjoint",
    "Composition",
    "Dense",
    "Diagonal",
    "Function",
    "HadamardGram",
    "Identity",
    "Kronecker",
    "LinearOperator",
    "LowRank",
    "RitzPairs",
    "Scaled",
    "Solution",
    "Sum",
    "TraceEstimate",
    "Zero",
    "as_operator",
    "conjugate_gradient",
    "contract",
    "eigenvalues_top",
    "hutchinson",
    "hutchpp",
    "one_sided_trace",
    "xtrace",
]
