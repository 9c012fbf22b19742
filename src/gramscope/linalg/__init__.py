"""Linear operators, their algebra, Krylov methods and trace estimates; no networks, no data."""

from typing import TYPE_CHECKING

from gramscope.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from gramscope.linalg.algebra import Adjoint as Adjoint
    from gramscope.linalg.algebra import Composition as Composition
    from gramscope.linalg.algebra import Scaled as Scaled
    from gramscope.linalg.algebra import Sum as Sum
    from gramscope.linalg.contraction import contract as contract
    from gramscope.linalg.eigen import RitzPairs as RitzPairs
    from gramscope.linalg.eigen import eigenvalues_top as eigenvalues_top
    from gramscope.linalg.elementary import Dense as Dense
    from gramscope.linalg.elementary import Diagonal as Diagonal
    from gramscope.linalg.elementary import Function as Function
    from gramscope.linalg.elementary import Identity as Identity
    from gramscope.linalg.elementary import LowRank as LowRank
    from gramscope.linalg.elementary import as_operator as as_operator
    from gramscope.linalg.exchangeable_trace import xtrace as xtrace
    from gramscope.linalg.hadamard import HadamardGram as HadamardGram
    from gramscope.linalg.kronecker import Kronecker as Kronecker
    from gramscope.linalg.linear_solve import Solution as Solution
    from gramscope.linalg.linear_solve import conjugate_gradient as conjugate_gradient
    from gramscope.linalg.operator import LinearOperator as LinearOperator
    from gramscope.linalg.traces import TraceEstimate as TraceEstimate
    from gramscope.linalg.traces import hutchinson as hutchinson
    from gramscope.linalg.traces import hutchpp as hutchpp
    from gramscope.linalg.traces import one_sided_trace as one_sided_trace

if not TYPE_CHECKING:  # so that a type checker knows every name and no other
    __getattr__, __dir__, __all__ = lazy_names(__name__)
