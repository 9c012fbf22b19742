"""What each way of contracting a weight site costs, and which is cheapest.

For one pair of examples with k directions, T positions, g groups, fan-in i and fan-out o (multiply-adds):

===========  =======================================  ==========================================
method       full kernel                              trace over outputs
===========  =======================================  ==========================================
rows         k²·g·o·i                                 k·g·o·i
positions    T²·g·i + k²·T²·g·o                       T²·g·i + k·T²·g·o
half         T²·g·i + k·T²·g·o + k²·T·g·o             (as positions)
factored     g·o·i + k²·g·o                           g·o·i
===========  =======================================  ==========================================

``rows`` forms each example's gradient first, which costs k·T·g·o·i once an example; it wins where positions are many.
``half`` contracts the input Gram matrix with one side's signals before it meets the other side. ``factored`` is for
signals that split (see ``gramscope.kernels.factored``); its rows cost T·g·o·i an example.
"""

from dataclasses import dataclass, replace
from typing import Literal

# Operations that matrix products get through while one entry of a kernel is put from its pair of outputs to its places,
# and while one signal is weighted for a pair.
PLACED, WEIGHTED = 300, 40

Method = Literal["rows", "positions", "half", "factored"]


@dataclass(frozen=True)
class Shape:
    """Sizes of one contraction: n and m examples, k directions, T positions, g groups, fan-in i, fan-out o."""

    n: int
    m: int
    k: int
    T: int
    g: int
    i: int
    o: int
    symmetric: bool
    trace: bool


def flops(shape: Shape, method: Method) -> int:
    """Floating-point operations of the matrix products, two for each multiply-add; the pairs halved if symmetric."""
    pairs = shape.n * (shape.n + 1) // 2 if shape.symmetric else shape.n * shape.m
    k, T, g, i, o = shape.k, shape.T, shape.g, shape.i, shape.o
    outputs = k if shape.trace else k * k
    examples = shape.n if shape.symmetric else shape.n + shape.m
    if method == "rows":
        return 2 * (pairs * outputs * g * o * i + examples * k * T * g * o * i)
    if method == "factored":
        return 2 * (pairs * (g * o * i + (0 if shape.trace else outputs * g * o)) + examples * T * g * o * i)
    if method == "positions":
        return 2 * pairs * T * T * g * (i + outputs * o)
    return 2 * pairs * (T * T * g * i + k * T * T * g * o + outputs * T * g * o)


def cheapest(shape: Shape) -> Method:
    """The method with the fewest operations; ties go to the simplest. For signals of which nothing is known."""
    if shape.T == 1:
        return "rows" if flops(shape, "rows") < flops(shape, "positions") else "positions"
    rival: Method = "positions" if shape.trace else "half"
    return "rows" if flops(shape, "rows") <= flops(shape, rival) else rival


def split_pays(shape: Shape) -> bool:
    """Do signals that split save operations?"""
    single = replace(shape, k=1)  # what a trace comes to, once the outputs are summed
    split = flops(single, cheapest(single)) if shape.trace else flops(shape, "factored")
    return split < flops(shape, cheapest(shape))


def pairing_pays(shape: Shape) -> bool:
    """One position, signals that split: is it worth taking pairs of outputs once, and putting each in two places?"""
    if shape.trace or shape.T > 1:
        return False
    k, o = shape.k, shape.o
    examples = shape.n * (shape.n + 1) // 2 if shape.symmetric else shape.n * shape.m
    saved, placed = k * (k - 1) * o, PLACED * k * k
    return examples * (saved - placed) > WEIGHTED * shape.n * o * k * (k + 1) // 2
