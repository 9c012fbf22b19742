"""Slow and obvious finite-width theory: plain tensor quadrature, loops over samples, dNTKs from their definition."""

import itertools

import mpmath
import numpy as np
import torch

TENSORS = ("K", "Theta", "V", "D", "F", "A", "B", "P", "Q")


class Brackets:
    """<s⁽ⁱ⁾_a s⁽ʲ⁾_b ...> for z ~ N(0, K), on a full tensor grid of an eigen-square-root of K over all samples."""

    def __init__(self, jets, K, order):
        nodes, weights = np.polynomial.hermite_e.hermegauss(order)
        values, vectors = torch.linalg.eigh(K)
        kept = values > 1e-13 * values.max()
        root = vectors[:, kept] * values[kept].sqrt()
        n = root.shape[1]
        grid = torch.cartesian_prod(*[torch.tensor(nodes)] * n).reshape(-1, n)
        self.weight = torch.cartesian_prod(*[torch.tensor(weights / weights.sum())] * n).reshape(-1, n).prod(-1)
        self.jets = jets(grid @ root.T)

    def __call__(self, *factors):
        """factors: (sample, order of derivative)."""
        value = self.weight
        for sample, order in factors:
            value = value * self.jets[order, :, sample]
        return value.sum()


def reference_step(layer, jets, C_b, C_W, lambda_b, lambda_W, r, order=200):
    """The recursions of PDLT (arXiv:2106.10165), chapters 4, 8 and 11, one component at a time; ``layer``: tensors."""
    m = Brackets(jets, layer["K"], order)
    return reference_loops(
        layer, m, C_b, C_W, lambda_b, lambda_W, r, zeros=lambda shape: torch.zeros(shape, dtype=torch.float64)
    )


def reference_loops(layer, m, C_b, C_W, lambda_b, lambda_W, r, zeros):
    """:func:`reference_step` with brackets ``m`` of any kind of number; ``zeros(shape)`` makes an array for them."""
    K, Th, V, D, F, A, B, P, Q = (layer[name] for name in TENSORS)
    n = K.shape[0]
    pair = {orders: zeros((n, n)) for orders in ((0, 0), (1, 1), (0, 2), (2, 0), (2, 2), (1, 3), (3, 1))}
    for (i, j), table in pair.items():
        for a, b in itertools.product(range(n), repeat=2):
            table[a, b] = m((a, i), (b, j))

    def ss_DD(a, b, T):
        return pair[2, 0][a, b] * T[a, a] + 2 * pair[1, 1][a, b] * T[a, b] + pair[0, 2][a, b] * T[b, b]

    def w_DD(a, b, T):
        slopes = pair[3, 1][a, b] * T[a, a] + 2 * pair[2, 2][a, b] * T[a, b] + pair[1, 3][a, b] * T[b, b]
        return lambda_W * ss_DD(a, b, T) + C_W * Th[a, b] * slopes

    def of_pairs(outer, c, d, inner, T):
        table = zeros((n, n))
        for p, q in itertools.product(range(n), repeat=2):
            table[p, q] = inner(c, d, T[p, q])
        return lambda a, b: outer(a, b, table)

    new = {name: zeros(layer[name].shape) for name in TENSORS}
    mean_w = lambda_W * pair[0, 0] + C_W * Th * pair[1, 1]
    new["K"] = C_b + C_W * pair[0, 0]
    new["Theta"] = lambda_b + lambda_W * pair[0, 0] + C_W * pair[1, 1] * Th
    for a, b, c, d in itertools.product(range(n), repeat=4):
        at = (a, b, c, d)
        ssss = m((a, 0), (b, 0), (c, 0), (d, 0))
        ss_slopes = m((a, 0), (b, 0), (c, 1), (d, 1))
        slopes_ss = m((a, 1), (b, 1), (c, 0), (d, 0))
        slopes = m((a, 1), (b, 1), (c, 1), (d, 1))
        V2 = of_pairs(ss_DD, c, d, ss_DD, V)(a, b)
        new["V"][at] = C_W**2 * (ssss - pair[0, 0][a, b] * pair[0, 0][c, d]) + r * C_W**2 / 4 * V2
        ssw = lambda_W * ssss + C_W * Th[c, d] * ss_slopes
        carried = of_pairs(ss_DD, c, d, w_DD, V)(a, b) / 4
        carried = carried + C_W / 2 * pair[1, 1][c, d] * ss_DD(a, b, D[:, :, c, d])
        new["D"][at] = C_W * (ssw - pair[0, 0][a, b] * mean_w[c, d]) + r * C_W * carried
        f = {"a": pair[1, 1][a, b], "b": pair[0, 2][a, b]}
        g = {"c": pair[1, 1][c, d], "d": pair[0, 2][c, d]}
        samples = {"a": a, "b": b, "c": c, "d": d}
        carried = sum(f[p] * g[q] * F[samples[p], b, samples[q], d] for p in "ab" for q in "cd")
        new["F"][at] = C_W**2 * (m((a, 0), (c, 0), (b, 1), (d, 1)) * Th[b, d] + r * carried)
        new["B"][at] = C_W**2 * (slopes * Th[a, c] * Th[b, d] + r * pair[1, 1][a, b] * pair[1, 1][c, d] * B[at])
        ww = lambda_W**2 * ssss + lambda_W * C_W * (Th[c, d] * ss_slopes + Th[a, b] * slopes_ss)
        ww = ww + C_W**2 * Th[a, b] * Th[c, d] * slopes
        carried = of_pairs(w_DD, c, d, w_DD, V)(a, b) / 4
        carried = carried + C_W / 2 * pair[1, 1][c, d] * w_DD(a, b, D[:, :, c, d])
        carried = carried + C_W / 2 * pair[1, 1][a, b] * w_DD(c, d, D[:, :, a, b])
        carried = carried + C_W**2 * pair[1, 1][a, b] * pair[1, 1][c, d] * A[at]
        new["A"][at] = ww - mean_w[a, b] * mean_w[c, d] + r * carried
    for i, j, k, o in itertools.product(range(n), repeat=4):  # samples 0 1 2 3
        at = (i, j, k, o)
        source = C_W**2 * m((i, 2), (j, 1), (k, 1), (o, 0)) * Th[i, j] * Th[i, k]
        inner = pair[2, 0][i, o] * (P[i, j, k, i] + B[i, i, j, k]) + pair[1, 1][i, o] * P[at]
        new["P"][at] = source + r * C_W**2 * pair[1, 1][j, k] * inner
        inner = pair[2, 0][k, o] * Q[i, j, k, k] + pair[1, 1][k, o] * Q[at]
        u = {i: pair[3, 1][i, j]}, {j: pair[2, 2][i, j]}
        v = {k: pair[2, 0][k, o]}, {o: pair[1, 1][k, o]}
        through = sum(up * vq * F[p, i, q, k] for uu in u for p, up in uu.items() for vv in v for q, vq in vv.items())
        new["Q"][at] = (
            source
            + lambda_W / C_W * new["F"][j, i, o, k]
            + r * C_W**2 * (pair[1, 1][i, j] * inner + Th[i, j] * through)
        )
    return new


class PlaneBrackets:
    """Brackets of a piecewise linear s for samples z_a = v_a·g with g in the plane, in mpmath's digits.

    With polar coordinates of g all comes down to trigonometric polynomials on the arcs between the kinks; a δ(z_a)
    leaves a line of g, on which every factor is a power. No covariance is formed, so no small angle is lost.
    """

    def __init__(self, a_plus, a_minus, vectors):
        self.slopes = mpmath.mpf(a_plus), mpmath.mpf(a_minus)
        self.lengths = [mpmath.hypot(*v) for v in vectors]
        self.angles = [mpmath.atan2(v[1], v[0]) for v in vectors]
        self.seen = {}

    def __call__(self, *factors):
        factors = tuple(sorted(factors))
        if factors not in self.seen:
            self.seen[factors] = self.bracket(factors)
        return self.seen[factors]

    def bracket(self, factors):
        orders = sorted(order for _, order in factors)
        if orders[-1] <= 1:
            return self.over_arcs(factors)
        if orders in ([2, 2], [1, 3]):
            (i, _), (j, _) = sorted(factors, key=lambda f: -f[1])
            # Two δ of one sample: infinite, and cancel in every use.
            return mpmath.mpf(0) if i == j else self.two_kinks(i, j, orders)
        return self.on_line(factors)

    def slope(self, z):
        return self.slopes[0] if z > 0 else self.slopes[1]

    def over_arcs(self, factors):
        powers = sum(order == 0 for _, order in factors)
        turn = 2 * mpmath.pi
        kinks = sorted({(self.angles[a] + q * mpmath.pi / 2) % turn for a, _ in factors for q in (1, 3)})
        total = mpmath.mpf(0)
        for left, right in itertools.pairwise([*kinks, kinks[0] + turn]):
            middle = (left + right) / 2
            weight = mpmath.fprod(self.slope(mpmath.cos(middle - self.angles[a])) for a, _ in factors)
            if weight:
                total += weight * self.cosines([self.angles[a] for a, o in factors if o == 0], left, right)
        sizes = mpmath.fprod(self.lengths[a] for a, order in factors if order == 0)
        return total / turn * sizes * 2 ** (mpmath.mpf(powers) / 2) * mpmath.gamma(1 + mpmath.mpf(powers) / 2)

    @staticmethod
    def cosines(angles, left, right):
        """∫ ∏ cos(t - φ) dt, the product being a mean of cosines of sums."""
        total = mpmath.mpf(0)
        for signs in itertools.product((1, -1), repeat=len(angles)):
            times, phase = sum(signs), mpmath.fdot(signs, angles) if angles else mpmath.mpf(0)
            if times:
                total += (mpmath.sin(times * right - phase) - mpmath.sin(times * left - phase)) / times
            else:
                total += (right - left) * mpmath.cos(phase)
        return total / 2 ** len(angles)

    def on_line(self, factors):
        (i,) = (a for a, order in factors if order == 2)
        same = [order for a, order in factors if a == i and order < 2]
        if 0 in same:
            return mpmath.mpf(0)
        m, (up, down) = len(same), self.slopes
        weight = (up ** (m + 1) - down ** (m + 1)) / (m + 1) / (mpmath.sqrt(2 * mpmath.pi) * self.lengths[i])
        total = mpmath.mpf(0)
        others = [(self.lengths[a] * mpmath.sin(self.angles[a] - self.angles[i]), o) for a, o in factors if a != i]
        powers = sum(order == 0 for _, order in others)
        for side in (1, -1):
            total += mpmath.fprod(self.slope(side * t) * (side * t if o == 0 else 1) for t, o in others) / 2
        moment = 2 ** (mpmath.mpf(powers) / 2) * mpmath.gamma((mpmath.mpf(powers) + 1) / 2) / mpmath.sqrt(mpmath.pi)
        return weight * total * moment

    def two_kinks(self, i, j, orders):
        """<s''_i s''_j>, or <s'''_i s'_j> = -J d/dz_i E[s'_j | z_i] p(z_i) at 0, J = a₊ - a₋."""
        jump = self.slopes[0] - self.slopes[1]
        sine = abs(mpmath.sin(self.angles[i] - self.angles[j]))
        density = jump**2 / (2 * mpmath.pi * self.lengths[i] * self.lengths[j] * sine)
        if orders == [2, 2]:
            return density
        return -density * mpmath.cos(self.angles[i] - self.angles[j]) * self.lengths[j] / self.lengths[i]


def plane_flow(x, a_plus, a_minus, widths, C_b, C_W, lambda_b, lambda_W):
    """Layers of two inputs, or layer 2 of several in the plane with C_b = 0, in mpmath's digits."""
    exact = np.array([[mpmath.mpf(v) for v in row] for row in x.tolist()], dtype=object)
    gram = exact @ exact.T / x.shape[1]

    def zeros(shape):
        return np.full(shape, mpmath.mpf(0), dtype=object)

    n = len(exact)
    layers = [{"K": C_b + C_W * gram, "Theta": lambda_b + lambda_W * gram} | {t: zeros((n,) * 4) for t in TENSORS[2:]}]
    vectors = [[mpmath.sqrt(C_W / mpmath.mpf(2)) * v for v in row] for row in exact]
    for place in range(1, len(widths) - 1):
        K = layers[-1]["K"]
        if n == 2:
            long, other = mpmath.sqrt(K[0, 0]), K[0, 1] / mpmath.sqrt(K[0, 0])
            vectors = [(long, mpmath.mpf(0)), (other, mpmath.sqrt(K[1, 1] - other**2))]
        m = PlaneBrackets(a_plus, a_minus, vectors)
        r = mpmath.mpf(widths[place]) / widths[place - 1] if place > 1 else 1
        layers.append(reference_loops(layers[-1], m, C_b, C_W, lambda_b, lambda_W, r, zeros))
    return layers


def forward(weights, x, function):
    """z^(L) (samples, n_L) of a list of (W, b)."""
    z = x @ weights[0][0].T + weights[0][1]
    for W, b in weights[1:]:
        z = function(z) @ W.T + b
    return z


def dense_ntk_and_dntk(weights, x, function, lambda_b, lambda_W):
    """H (a, i, b, j) and dH (a, i, b, j, c, k) by their definitions: Jacobian, Hessian and learning rates (11.8)."""
    parts = [part for layer in weights for part in layer]
    flat = torch.cat([part.reshape(-1) for part in parts])
    rates = torch.cat(
        [
            part
            for (W, b), lb, lw in zip(weights, lambda_b, lambda_W, strict=True)
            for part in (W.new_full((W.numel(),), lw / W.shape[1]), b.new_full((b.numel(),), float(lb)))
        ]
    )

    def outputs(theta):
        sizes = [part.numel() for part in parts]
        pieces = [piece.view_as(part) for piece, part in zip(theta.split(sizes), parts, strict=True)]
        return forward(list(zip(pieces[::2], pieces[1::2], strict=True)), x, function)

    J = torch.autograd.functional.jacobian(outputs, flat)
    hessian = torch.func.hessian(outputs)(flat)
    H = torch.einsum("aim,m,bjm->aibj", J, rates, J)
    scaled = J * rates
    return H, torch.einsum("aimn,bjm,ckn->aibjck", hessian, scaled, scaled)
