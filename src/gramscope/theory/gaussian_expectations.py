"""The Gaussian expectations that one step of the recursions needs, for all samples at once."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from gramscope.base.checks import check_number, check_symmetric, check_tensor
from gramscope.base.errors import InputError
from gramscope.theory.activation_functions import Activation, Kinked, Real, resolve
from gramscope.theory.families import PAIRS, QUADS, GaussianMoments, from_multisets, multisets
from gramscope.theory.kinked import kinked_moments
from gramscope.theory.quadrature import Integrand, expectation

Kernel: TypeAlias = Float[Tensor, "n n"]

_FIRST_LEVEL = 12
_GROWTH = 1.5
_LAST_LEVEL = 4000


def check_kernel(kernel: Tensor, what: str = "kernel", slack: float = 1e-9) -> None:
    """Raise unless ``kernel`` is a square, finite, symmetric, positive semi-definite matrix."""
    if kernel.ndim != 2:
        raise InputError(f"{what} must be a square matrix of at least one sample, got shape {tuple(kernel.shape)}.")
    check_symmetric(kernel, what, tol=1e-9, remedy="Pass (K + K.T) / 2.")
    scale = float(kernel.abs().max())
    smallest = float(torch.linalg.eigvalsh(kernel)[0])
    if smallest < -slack * scale:
        raise InputError(
            f"{what} must be positive semi-definite (a covariance), but its smallest eigenvalue is {smallest:.3g}. "
            "Pass a matrix of inner products, or remove the negative part."
        )


def gaussian_moments(
    activation: str | Activation | Callable[[Tensor], Tensor], kernel: Shaped[Tensor, "..."], tol: Real = 1e-10
) -> GaussianMoments:
    """<s⁽ⁱ⁾_a s⁽ʲ⁾_b> and the four-sample expectations of the finite-width recursions over z ~ N(0, K).

    Piecewise linear activations in closed form; all others by adaptive tensor Gauss-Hermite quadrature, refined until
    the error, as estimated from two successive levels, is below ``tol`` times the root mean squares of the factors.
    Theory: recursions of PDLT chapters 4, 8, 11 in the derivative (Stein) form; K may be singular.

    >>> moments = gaussian_moments("sin", torch.ones(1, 1, dtype=torch.float64))
    >>> round(float(moments.p00), 9) == round((1 - math.exp(-2)) / 2, 9)
    True
    """
    found = resolve(activation)
    kernel, tol = check_tensor(kernel, "kernel").to(torch.float64), check_number(tol, "tol")
    # The kernel of a layer carries the error of the layer below, which may make it indefinite by as much.
    check_kernel(kernel, slack=max(1e-9, 10 * tol))
    if isinstance(found, Kinked):
        return kinked_moments(found, kernel)
    return smooth_moments(found, kernel, tol)


def smooth_moments(activation: Activation, kernel: Kernel, tol: Real = 1e-10) -> GaussianMoments:
    """The moments by quadrature, whatever the activation."""
    if not 1e-13 <= tol < 1:
        raise InputError(f"tol must lie between 1e-13 and 1, got {tol}. The default is 1e-10.")
    n = kernel.shape[0]
    quadrature = _Adaptive(activation, kernel, tol)
    spread = torch.stack([quadrature.root_mean_squares(a) for a in range(n)])
    pairs = from_multisets(n, 2, PAIRS, [quadrature(samples, PAIRS, spread) for samples in multisets(n, 2)])
    quads = from_multisets(n, 4, QUADS, [quadrature(samples, QUADS, spread) for samples in multisets(n, 4)])
    return GaussianMoments(**pairs, **quads)


@dataclass
class _Adaptive:
    """Refines the order of each expectation until it settles, starting where the last one of its kind settled."""

    activation: Activation
    kernel: Tensor
    tol: Real

    def __post_init__(self) -> None:
        self._hints: dict[tuple[int, ...], int] = {}
        self._odd = self.activation.is_odd()
        self._negligible = 1e-45 if self.activation.is_steep() else 1e-6 * self.tol
        # Two grids that both miss a bend agree, and are both wrong: the first must see it already.
        self._first = max(_FIRST_LEVEL, math.ceil((math.pi / 2 / self.activation.bend_width()) ** 2))
        if self._first > _LAST_LEVEL / _GROWTH:
            raise InputError(
                f"Gaussian expectations of {self.activation.name!r} must converge, but it has bends of a width of "
                f"about {self.activation.bend_width():.2g}, too sharp for quadrature. Use "
                "Kinked(a_plus, a_minus) for a kink."
            )

    def root_mean_squares(self, a: int) -> Tensor:
        """√<s⁽ᵏ⁾ s⁽ᵏ⁾> of sample a for k = 0..3, to a few digits: the scale against which an error is small."""
        variance = self.kernel[a, a].reshape(1, 1).expand(2, 2)
        level = 4 * self._first
        integrand = Integrand(self.activation.jets)
        found = expectation(integrand, variance, (0, 0), level).diagonal()
        while level < _LAST_LEVEL:
            level = math.ceil(level * _GROWTH)
            before, found = found, expectation(integrand, variance, (0, 0), level).diagonal()
            if bool(((found - before).abs() <= 1e-3 * found).all()):
                break
        return found.clamp(min=0).sqrt()

    def __call__(self, samples: tuple[int, ...], families: dict[str, tuple[int, ...]], spread: Tensor) -> Tensor:
        index = torch.tensor(samples, device=self.kernel.device)
        covariance = self.kernel[index][:, index]
        top = max(max(orders) for orders in families.values()) + 1
        needed, scale = _needed(samples, families, spread)

        integrand = Integrand(lambda z: self.activation.jets(z)[:top], self._odd, self._negligible)

        def at(level: int) -> Tensor:
            return expectation(integrand, covariance, samples, level)

        kind = tuple(samples.count(a) for a in samples)
        level = self._hints.get(kind, self._first)
        coarse = at(level)
        while level < _LAST_LEVEL:
            finer_level = math.ceil(level * _GROWTH)
            fine = at(finer_level)
            gap = ((fine - coarse).abs()[needed] / scale).max()
            # The error falls as exp(-c √level) or faster, so that of the finer value is at most gap^√growth.
            if float(gap) ** 1.2 <= self.tol:
                self._hints[kind] = level
                return fine
            level, coarse = finer_level, fine
        raise InputError(
            f"Gaussian expectations of {self.activation.name!r} must converge to the tol {self.tol:g}, but "
            f"samples {samples} with variances {covariance.diagonal().tolist()} still change by {float(gap):.1g} "
            "at the highest order. Pass a larger tol, or inputs and C_W that give a smaller kernel."
        )


def _needed(
    samples: tuple[int, ...], families: dict[str, tuple[int, ...]], spread: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Indices of the derivative orders that are used, and the product of the root mean squares of their factors."""
    used = sorted({orders for family in families.values() for orders in itertools.permutations(family)})
    orders = torch.tensor(used, device=spread.device)
    scale = torch.stack([spread[a, orders[:, slot]] for slot, a in enumerate(samples)]).prod(0)
    return tuple(orders.T), scale.clamp(min=1e-300)
