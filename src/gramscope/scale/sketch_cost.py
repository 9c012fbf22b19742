"""What a sketch costs, and when it is cheaper to form the gradient first.

For one example with k directions, T positions, g groups, fan-in i and fan-out o, a and b the sketched fan-in and
fan-out, ρ repeats (multiply-adds):

===========  ====================================================  ==================================
method       count                                                 wins where
===========  ====================================================  ==================================
factored     ρ·T·g·(i·a + k·o·b + k·a·b)                           layers are wide
formed       k·T·g·i·o + ρ·k·(R·C·a + R·a·b)                       positions are many, layers narrow
===========  ====================================================  ==================================

``formed`` makes the gradient (R x C, all groups) and projects it from both sides: its projection does not know T. A
dense projection of the gradient to the same a·b numbers, as TRAK takes it, costs k·T·g·i·o + ρ·k·R·C·a·b.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SketchShape:
    """Sizes of one site: k directions, T positions, g groups, fan-in i and fan-out o, and those of its sketch.

    ``rows`` x ``columns`` is the parameter as a matrix, ``b`` x ``a`` its sketch, taken ``repeats`` times.
    """

    k: int
    T: int
    g: int
    i: int
    o: int
    rows: int
    columns: int
    b: int
    a: int
    repeats: int


def factored_cost(shape: SketchShape) -> int:
    """Multiply-adds of ``Σ_T (P_o s) ⊗ (P_i v)`` for one example.

    >>> factored_cost(SketchShape(k=1, T=10, g=1, i=100, o=100, rows=100, columns=100, b=8, a=8, repeats=1))
    16640
    """
    s = shape
    return s.repeats * s.T * s.g * (s.i * s.a + s.k * s.o * s.b + s.k * s.a * s.b)


def formed_cost(shape: SketchShape) -> int:
    """Multiply-adds of ``P_o (Σ_T s ⊗ v) P_iᵀ`` for one example, the gradient made first.

    >>> formed_cost(SketchShape(k=1, T=10, g=1, i=100, o=100, rows=100, columns=100, b=8, a=8, repeats=1))
    186400
    """
    s = shape
    return s.k * s.T * s.g * s.i * s.o + s.repeats * s.k * (s.rows * s.columns * s.a + s.rows * s.a * s.b)


def formed_is_cheaper(shape: SketchShape) -> bool:
    return formed_cost(shape) < factored_cost(shape)
