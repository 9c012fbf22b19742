"""What each way of contracting a weight site costs, and which is cheapest.

For one pair of examples with k directions, T positions, g groups, fan-in i and fan-out o (multiply-adds):

===========  =======================================  ==========================================
method       full kernel                              trace over outputs
===========  =======================================  ==========================================
rows         k²·g·o·i                                 k·g·o·i
positions    T²·g·i + k²·T²·g·o                       T²·g·i + k·T²·g·o
half         T²·g·i + k·T²·g·o + k²·T·g·o             (as positions)
===========  =======================================  ==========================================

``rows`` forms each example's gradient first, which costs k·T·g·o·i once an example; it wins where positions are many.
``half`` contracts the input Gram matrix with one side's signals before it meets the other side.
"""

from dataclasses import dataclass
from typing import Literal

# Positions below which the products of ``half``, which sum over T terms each, take longer than their count: they move
# more than they compute. Measured on transformers of 16 to 200 positions on a CPU.
FEW_POSITIONS = {"cpu": 64, "cuda": 16}

Method = Literal["rows", "positions", "half"]


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
    if method == "positions":
        return 2 * pairs * T * T * g * (i + outputs * o)
    return 2 * pairs * (T * T * g * i + k * T * T * g * o + outputs * T * g * o)


def price(shape: Shape, method: Method, device: str = "cpu") -> float:
    """Time in units of operations of large products."""
    few = FEW_POSITIONS.get(device, FEW_POSITIONS["cuda"])
    return flops(shape, method) * (1.0 + few / shape.T if method == "half" else 1.0)


def cheapest(shape: Shape, device: str = "cpu") -> Method:
    """The method that takes the least time by these counts; ties go to the simplest."""
    rival: Method = "positions" if shape.trace or shape.T == 1 else "half"
    rows, other = price(shape, "rows", device), price(shape, rival, device)
    return "rows" if rows < other or (rows == other and shape.T > 1) else rival
