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

Method = Literal["rows", "positions", "half", "factored"]
# Operations that matrix products get through while one signal is compared with its product (a few passes over it), and
# while sites are looked at in the first place: on an H200 that took 3 to 15 ms, a dozen launches and a wait for each.
COMPARED = 400
LOOKED_AT = {"cpu": 10**7, "cuda": 10**12}


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


def split_pays(shape: Shape, device: str) -> bool:
    """Would signals that split save more than it takes to compare each with its product?"""
    single = replace(shape, k=1)  # what a trace comes to, once the outputs are summed
    split = flops(single, cheapest(single)) if shape.trace else flops(shape, "factored")
    signals = shape.n * shape.k * shape.T * shape.g * shape.o
    return flops(shape, cheapest(shape)) - split > COMPARED * signals + LOOKED_AT.get(device, LOOKED_AT["cuda"])
