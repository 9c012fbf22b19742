"""E[sgn z₁ sgn z₂ sgn z₃ sgn z₄] where two of the four are almost one, in decimals.

z_p is moved to the nearest other variable z_q along w = z_q + τ (z_p - z_q). At τ = 0 two signs cancel; on the way
dE/dτ = 2 E[δ(w) y sgn z_q sgn z_j sgn z_k], y = z_p - z_q, which Stein's lemma makes a sum of arcsines. All is written
in y, so that nothing cancels at τ -> 0, and the term in which z_q is at zero does not depend on where w is.
"""

from collections.abc import Callable
from decimal import Decimal
from itertools import combinations, pairwise

from gramscope.theory.decimal_arithmetic import Decimals, Number, unit_nodes

Rows = list[list[Number]]
_LEVELS = 8


def four_close_signs(correlation: Rows, numbers: Decimals) -> Number:
    """For a correlation matrix of decimals, to the digits that ``numbers`` asks for."""
    # Of four variables in less than four dimensions nothing may be left where two are held at zero. E moves by less
    # than 6 δ/ε if every correlation moves by δ, and so it may be taken a little aside.
    aside = 1 - Decimal(10) ** (-numbers.target - numbers.lost - 3)
    correlation = [[v if i == m else aside * v for m, v in enumerate(row)] for i, row in enumerate(correlation)]
    p, q = max(combinations(range(4), 2), key=lambda pair: abs(correlation[pair[0]][pair[1]]))
    j, k = (i for i in range(4) if i not in (p, q))
    turn = 1 if correlation[p][q] > 0 else -1
    rows = [[v * (turn if i == p else 1) * (turn if m == p else 1) for m, v in enumerate(row)]
            for i, row in enumerate(correlation)]  # fmt: skip
    arc = _Arc([[rows[i][m] for m in (p, q, j, k)] for i in (p, q, j, k)], numbers)
    return turn * arc.signs()


class _Arc:
    """The covariance of y = z_p - z_q, z_q, z_j, z_k, in this order."""

    def __init__(self, rows: Rows, numbers: Decimals) -> None:
        self._numbers, self._rho = numbers, rows[0][1]
        rows = [[a - b for a, b in zip(rows[0], rows[1], strict=True)], *rows[1:]]
        self._c = [[row[0] - row[1], *row[1:]] for row in rows]

    def signs(self) -> Number:
        numbers, c = self._numbers, self._c
        angle = numbers.arcsin(((1 - self._rho) * (1 + self._rho)).sqrt())
        # Held at zero: z_p and z_q, which is y and z_q.
        at_pair = numbers.arcsin(self._correlation(c, 0, 1, 2, 3))
        first = 2 / numbers.pi * numbers.arcsin(c[2][3])
        moved = -angle * at_pair - self._integral(lambda tau: self._slope(tau, 2, 3) + self._slope(tau, 3, 2))
        return first + 4 / numbers.pi**2 * moved

    def _slope(self, tau: Number, j: int, k: int) -> Number:
        c = self._c
        on_way = [c[1][m] + tau * c[0][m] for m in range(4)]
        variance = on_way[1] + tau * on_way[0]
        held = variance * c[j][j] - on_way[j] ** 2
        if held <= 0:
            return Decimal(0)
        # Variables y, w, z_j, z_k in the places 0, 1, 2, 3.
        rows = [
            [c[0][0], on_way[0], c[0][j], c[0][k]],
            [on_way[0], variance, on_way[j], on_way[k]],
            [c[0][j], on_way[j], c[j][j], c[j][k]],
            [c[0][k], on_way[k], c[j][k], c[k][k]],
        ]
        pull = c[0][j] - on_way[0] * on_way[j] / variance
        return pull / held.sqrt() * self._numbers.arcsin(self._correlation(rows, 1, 2, 0, 3))

    def _correlation(self, c: Rows, g: int, h: int, a: int, b: int) -> Number:
        """The correlation of a and b given that g and h are 0; 0 where one of them has no variance left."""
        det = c[g][g] * c[h][h] - c[g][h] ** 2
        if det <= 0:
            return Decimal(0)

        def left(i: int, m: int) -> Number:
            by_g, by_h = c[h][h] * c[m][g] - c[g][h] * c[m][h], c[g][g] * c[m][h] - c[g][h] * c[m][g]
            return c[i][m] - (c[i][g] * by_g + c[i][h] * by_h) / det

        product = left(a, a) * left(b, b)
        return left(a, b) / product.sqrt() if product > 0 else Decimal(0)

    def _integral(self, slope: Callable[[Number], Number]) -> Number:
        """∫₀¹ dτ, in two parts where w passes closest by the plane of z_j and z_k: there the arcsines turn over."""
        c = self._c
        det = c[2][2] * c[3][3] - c[2][3] ** 2

        def off_plane(m: int) -> Number:
            by_j, by_k = c[3][3] * c[m][2] - c[2][3] * c[m][3], c[2][2] * c[m][3] - c[2][3] * c[m][2]
            return c[0][m] * det - c[0][2] * by_j - c[0][3] * by_k

        speed = off_plane(0)
        nearest = -off_plane(1) / speed if speed > 0 else Decimal(0)
        ends = [Decimal(0), nearest, Decimal(1)] if 0 < nearest < 1 else [Decimal(0), Decimal(1)]
        return sum(self._panel(slope, a, b) for a, b in pairwise(ends))

    def _panel(self, slope: Callable[[Number], Number], start: Number, end: Number) -> Number:
        target, length = self._numbers.target, end - start
        total, before = Decimal(0), Decimal(0)
        for level in range(_LEVELS):
            total += sum((w * slope(start + length * t) for t, w in unit_nodes(level, target)), Decimal(0))
            value = total * length / (4 * 2**level)
            # Each level doubles the digits, or nearly so.
            if level and abs(value - before) <= Decimal(10) ** (-5 * target // 8):
                break
            before = value
        return value
