"""Diagonal recurrences ``h_t = a_t ∘ h_{t-1} + b_t``: the scan itself, and its linearisation as P by a scan.

``a_t`` and ``b_t`` do not depend on h (they may on the input), as in the state-space layers S4D and Mamba. Then the
propagator of the states is the same scan, ``(P q)_t = q_t + a_t ∘ (P q)_{t-1}``, entry by entry.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from gramscope.base.errors import InputError

Coefficients = tuple[Tensor, Tensor, Tensor]  # a, b and the initial state


def diagonal_scan(a: Tensor, b: Tensor, h0: Tensor | None = None) -> Tensor:
    """``h_t = a_t ∘ h_{t-1} + b_t`` for t = 1..T, all entries by themselves; real or complex.

    :class:`GlobalNTK` knows this function: h is a state of any network that calls it, and P goes through it by a scan.

    Args:
        a: factors, of a shape that broadcasts to that of b; (unit, mode) for those that are the same at all times.
        b: what comes in, (trial, time, ...).
        h0: the state before, (trial, ...); zeros if None.

    >>> diagonal_scan(torch.tensor([0.5]), torch.ones(1, 4, 1)).flatten().tolist()
    [1.0, 1.5, 1.75, 1.875]
    """
    if has_torch_function((a, b, h0)):
        found: Tensor = handle_torch_function(diagonal_scan, (a, b, h0), a, b, h0)
        return found
    return scanned(*coefficients(a, b, h0))


def selective_scan(
    u: Float[Tensor, "trial time unit"],
    delta: Float[Tensor, "trial time unit"],
    A: Float[Tensor, "unit mode"],
    B: Float[Tensor, "trial time mode"],
    h0: Float[Tensor, "trial unit mode"] | None = None,
) -> Float[Tensor, "trial time unit mode"]:
    """The states of Mamba's scan: ``h_t = exp(Δ_t A) ∘ h_{t-1} + Δ_t u_t B_t``.

    Reference: Gu & Dao 2023 (arXiv:2312.00752), eqs. 2 and 4 and algorithm 2, with its simplified ``B̄ = Δ B``.

    >>> one = torch.ones(1, 3, 1)
    >>> selective_scan(one, 0.5 * one, torch.zeros(1, 1), one).flatten().tolist()          # A = 0: a running sum
    [0.5, 1.0, 1.5]
    """
    if has_torch_function((u, delta, A, B, h0)):
        found: Tensor = handle_torch_function(selective_scan, (u, delta, A, B, h0), u, delta, A, B, h0)
        return found
    return scanned(*selective_coefficients(u, delta, A, B, h0))


def coefficients(a: Tensor, b: Tensor, h0: Tensor | None) -> Coefficients:
    """a with as many axes as b, and h0 filled in; all complex if one is."""
    if b.dim() < 2 or 0 in b.shape[:2]:
        raise InputError(f"b must have axes (trial, time, ...) with one step at least, got shape {tuple(b.shape)}.")
    try:
        fits = torch.broadcast_shapes(a.shape, b.shape) == b.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise InputError(f"a must broadcast to the shape {tuple(b.shape)} of b, got {tuple(a.shape)}.")
    start = b.new_zeros(b[:, 0].shape) if h0 is None else h0
    if start.shape != b[:, 0].shape:
        raise InputError(f"h0 must have shape {tuple(b[:, 0].shape)}, b without its time, got {tuple(start.shape)}.")
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), start.dtype)
    a = a.reshape((1,) * (b.dim() - a.dim()) + a.shape)
    return a.to(dtype), b.to(dtype), start.to(dtype)


def selective_coefficients(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, h0: Tensor | None) -> Coefficients:
    """a and b of :func:`selective_scan`."""
    shapes = [tuple(t.shape) for t in (u, delta, A, B)]
    if u.dim() != 3 or delta.shape != u.shape or A.dim() != 2 or (len(A), *B.shape) != (
        u.shape[2], *u.shape[:2], A.shape[1]
    ):  # fmt: skip
        raise InputError(
            f"u and delta must be (trial, time, unit), A (unit, mode) and B (trial, time, mode), got {shapes}."
        )
    a = torch.exp(delta[..., None] * A)
    return coefficients(a, (delta * u)[..., None] * B[:, :, None, :], h0)


def scanned(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    """h at all times."""
    steps, now, states = a.expand_as(b).unbind(1), h0, []
    for factor, more in zip(steps, b.unbind(1), strict=True):
        now = factor * now + more
        states.append(now)
    return torch.stack(states, dim=1)


# What the recorder of states meets, and how it makes coefficients of the arguments.
SCANS: dict[Any, Callable[..., Coefficients]] = {
    diagonal_scan: lambda a, b, h0=None: coefficients(a, b, h0),
    selective_scan: lambda u, delta, A, B, h0=None: selective_coefficients(u, delta, A, B, h0),
}


@dataclass(frozen=True)
class DiagonalScan:
    """``h_t = a_t ∘ h_{t-1} + b_t`` linearised at its run: ``dh_t = a_t dh_{t-1} + da_t h_{t-1} + db_t``.

    Vectors have the number k of them in front, then the axes of the state; a complex state is real with a last axis of
    two (real, imaginary).
    """

    a: Tensor = field(repr=False)  # broadcasts to (trial, time, ...)
    before: Tensor = field(repr=False)  # h_{t-1}, (trial, time, ...)

    @classmethod
    def run(cls, a: Tensor, b: Tensor, h0: Tensor) -> tuple["DiagonalScan", Tensor]:
        """The scan, and its states."""
        with torch.no_grad():
            a, b, h0 = (t.detach() for t in (a, b, h0))
            states = scanned(a, b, h0)
            return cls(a, torch.cat([h0[:, None], states[:, :-1]], dim=1)), states

    def respond(self, own: Tensor, arrived: list[Tensor], local: bool) -> Tensor:
        """Changes of the states from pushes ``own`` on them and from changes (da, db, dh0) of what drives them.

        With ``local``, ``own`` is a frozen change of the states, of which each step sees that of the step before.
        """
        da, db, start = (self._native(part) for part in arrived)
        a, drive = self.a.expand_as(self.before), da * self.before + db
        drive[:, :, 0] += a[:, 0] * start
        own = self._native(own)
        if local:
            drive[:, :, 1:] += a[:, 1:] * own[:, :, :-1]
            return self._real(drive)
        drive += own
        for t in range(1, drive.shape[2]):
            drive[:, :, t] += a[:, t] * drive[:, :, t - 1]
        return self._real(drive)

    def respond_adjoint(self, own: Tensor, local: bool) -> tuple[Tensor, list[Tensor]]:
        """Adjoints of the states, in total or with ``local`` what they send to their own past; and of (a, b, h0)."""
        own, a = self._native(own).clone(), self.a.conj().expand_as(self.before)
        if not local:
            for t in reversed(range(own.shape[2] - 1)):
                own[:, :, t] += a[:, t + 1] * own[:, :, t + 1]
        to_a = (self.before.conj() * own).sum_to_size(len(own), *self.a.shape)
        sent = [self._real(part) for part in (to_a, own, a[:, 0] * own[:, :, 0])]
        if local:
            past = torch.zeros_like(own)
            past[:, :, :-1] = a[:, 1:] * own[:, :, 1:]
            own = past
        return self._real(own), sent

    def _native(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(x.contiguous()) if self.before.is_complex() else x

    def _real(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.resolve_conj()) if self.before.is_complex() else x
