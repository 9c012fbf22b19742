"""Numbers for the closed forms of kinks: doubles, or decimals with as many digits as a small angle asks for.

Two samples at a small angle ε make expectations whose differences are of order ε⁴ while they are themselves of order 1,
and A divides these differences by ε². Sixteen digits hold that down to ε of about 10⁻², and so the same formulas run in
decimals below.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Context, Decimal, getcontext, localcontext
from functools import lru_cache
from typing import Any, TypeAlias

Number: TypeAlias = Any  # float or Decimal, which do not mix: one formula serves both
NARROW = 1e-2  # the sine below which doubles do not do


class Doubles:
    """Plain floats, and what counts as nothing among them."""

    pi: Number = math.pi
    collinear: Number = 1e-12  # of 1 - ρ²
    collapsed: Number = 1e-13  # a variance that conditioning has brought below this part of what it was is zero
    noise: Number = 1e-14
    target: int = 16  # digits of an integral

    def number(self, value: Number) -> Number:
        return float(value)

    def sqrt(self, value: Number) -> Number:
        return math.sqrt(value)

    def arcsin(self, value: Number) -> Number:
        return math.asin(max(-1.0, min(1.0, value)))

    def nodes(self, level: int) -> list[tuple[Number, Number, Number]]:
        """Nodes t in (0, 1), 1 - t and weights that a level of the tanh-sinh rule, of step ¼/2^level, adds.

        The rule takes singular ends in its stride; each level about doubles the digits.
        """
        return _nodes_of_doubles(level, self.target)


class Decimals(Doubles):
    """Decimals for sines down to ``sine``.

    >>> numbers = Decimals(1e-3)
    >>> with numbers.context():
    ...     print(f"{numbers.arcsin(Decimal('0.5')) * 6:.25f}")
    3.1415926535897932384626434
    """

    def __init__(self, sine: Number) -> None:
        self.lost = max(2, math.ceil(-Decimal(sine).log10()))
        # A divides four signs by ε²; these lose 2 log 1/ε digits to each variable that is held at zero.
        self.target = 20 + 3 * self.lost
        self.digits = 50 + 9 * self.lost
        with self.context():
            self.pi = pi()
        self.noise = Decimal(10) ** (4 - self.digits)
        self.collinear = Decimal(10) ** (-self.digits // 2)
        self.collapsed = Decimal(10) ** (-7 * self.digits // 10)

    @contextmanager
    def context(self) -> Iterator[None]:
        with localcontext(Context(prec=self.digits)):
            yield

    def number(self, value: Number) -> Number:
        return Decimal(value)

    def sqrt(self, value: Number) -> Number:
        return value.sqrt()

    def arcsin(self, value: Number) -> Number:
        across = (1 - value) * (1 + value)
        if across <= 0:
            return self.pi / 2 if value > 0 else -self.pi / 2
        return arctan(value / across.sqrt())

    def nodes(self, level: int) -> list[tuple[Number, Number, Number]]:
        return _nodes(level, self.target, self.digits)


def arctan(x: Decimal) -> Decimal:
    """To the digits of the context: by halving the angle, then by its series.

    >>> print(f"{arctan(Decimal(1)) * 4:.24f}")
    3.141592653589793238462643
    """
    if x < 0:
        return -arctan(-x)
    if x > 1:
        return pi() / 2 - arctan(1 / x)
    doubled = 1
    while x > Decimal("0.05"):
        x, doubled = x / (1 + (1 + x * x).sqrt()), 2 * doubled
    return doubled * _arctan_series(x)


def _arctan_series(x: Decimal) -> Decimal:
    total, power, square, least = x, x, -x * x, x.scaleb(-getcontext().prec - 2)
    for odd in range(3, 10**6, 2):
        power *= square
        if abs(power) <= least:
            break
        total += power / odd
    return total


def pi() -> Decimal:
    """π to the digits of the context."""
    return +_pi(getcontext().prec)


@lru_cache(maxsize=8)
def _pi(digits: int) -> Decimal:
    with localcontext(Context(prec=digits + 5)):
        return 16 * _arctan_series(1 / Decimal(5)) - 4 * _arctan_series(1 / Decimal(239))


@lru_cache(maxsize=64)
def _nodes(level: int, target: int, digits: int) -> list[tuple[Decimal, Decimal, Decimal]]:
    with localcontext(Context(prec=digits)):
        step = Decimal(1) / (4 * 2**level)
        found = [(Decimal("0.5"), Decimal("0.5"), pi() / 4)] if level == 0 else []
        least = Decimal(10) ** (-target - 5)
        for k in range(1, 10**6, 2 if level else 1):
            grown = (k * step).exp()
            small = (-pi() * (grown - 1 / grown) / 2).exp()
            right, left = 1 / (1 + small), small / (1 + small)
            weight = pi() * (grown + 1 / grown) / 2 * right * left
            if weight < least:
                break
            found += [(right, left, weight), (left, right, weight)]
        return found


@lru_cache(maxsize=16)
def _nodes_of_doubles(level: int, target: int) -> list[tuple[float, float, float]]:
    return [(float(t), float(left), float(weight)) for t, left, weight in _nodes(level, target, 30)]
