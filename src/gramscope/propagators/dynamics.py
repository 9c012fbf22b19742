"""Tangent dynamics in time: responses that may explode, and Lyapunov exponents."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from gramscope.base.charts import line_chart
from gramscope.base.checks import check_count, check_finite, check_tensor
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.pyplot import Axes, Figure
from gramscope.base.results import Result
from gramscope.capture.backward_graph import leaves_below
from gramscope.propagators.global_ntk import GlobalNTK, check_global
from gramscope.propagators.network_states import NetworkStates
from gramscope.propagators.recurrent import RecurrentStates

# (t, states before, push at t or None), each (k, B, S, H), -> states at t (k, B, S, H)
Advance = Callable[[int, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, repr=False)
class ScaledResponse(Result):
    """``P q`` as ``exp(log_scale) · values``; entries of ``values`` stay within one, however far the dynamics explode.

    ``values`` has the axes of the states with (trial, time) first, ``log_scale`` one number for each trial and time.
    """

    values: Float[Tensor, "trial time *state"]
    log_scale: Float64[Tensor, "trial time"]

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """``log ‖(P q)_t‖`` of each trial over time; a figure."""
        trials = {f"trial {place}": row for place, row in enumerate(self.log_norm())}
        return line_chart(range(self.log_scale.shape[1]), trials, "Size of the response, logarithm", "time", axes=axes)

    def log_norm(self) -> Float64[Tensor, "trial time"]:
        """``log ‖(P q)_t‖`` of each trial; -inf where nothing has arrived."""
        return self.log_scale + self.values.double().flatten(2).norm(dim=2).log()


def _advance(g: GlobalNTK, purpose: str) -> tuple[Advance, tuple[int, int, int, int]]:
    """The one-step map of a recurrent module or cell, and the sizes (trial, time, site, unit).

    The states of a custom cell may have any shapes: they count as one site with all entries of a step as its units.
    """
    check_global(g)
    states = g.states
    if isinstance(states, RecurrentStates):
        if states.stack.ways == 2:
            raise UnsupportedError(
                f"{purpose} needs states that follow one direction of time, but the module is bidirectional. Measure "
                "its two directions as modules of their own."
            )
        n, steps, sites, width = g.axes.shape
        return states.stack.advance, (n, steps, sites, width)
    if states.initial is not None:
        n, steps = g.axes["trial"], len(states.places)
        return _cell_advance(states, n, purpose), (n, steps, 1, g.axes.size // (n * steps))
    raise UnsupportedError(
        f"{purpose} needs a recurrent module, or a cell given with its h0, got a whole network whose states have axes "
        f"{g.axes!r}. Pass the recurrent module in it with the inputs that it receives, or its cell and an h0."
    )


def _cell_advance(states: NetworkStates, n: int, purpose: str) -> Advance:
    initial = states.initial
    assert initial is not None
    shapes = [leaf.shape[1:] for leaf in states.places[0].node.leaves]
    sizes = [shape.numel() for shape in shapes]
    starts = {id(start) for start in initial.inputs}
    for t, place in enumerate(states.places):
        first = t > 0 and any(id(leaf) in starts for leaf in leaves_below(place.node.outputs).values())
        if first or any(ancestor // len(shapes) != t - 1 for ancestor in place.ancestors):
            raise UnsupportedError(
                f"{purpose} needs a cell whose state holds all that it remembers, but step {t} uses states from before "
                "the last step. Return what it keeps as part of its state."
            )

    def advance(t: int, before: Tensor, own: Tensor | None) -> Tensor:
        # A cell makes all its states of a step at once, from those before: none of them sees another's push.
        parts = before[:, :, 0].split(sizes, dim=2)
        tangents = [part.reshape(-1, n, *shape) for part, shape in zip(parts, shapes, strict=True)]
        if t == 0:
            moved = initial.jvp(tangents, len(before))
        else:
            place = states.places[t]
            moved = place.flow.jvp([tangents[a % len(shapes)] for a in place.ancestors], len(before))
        after = torch.cat([part.reshape(len(before), n, -1) for part in moved], dim=2)[:, :, None].to(before.dtype)
        return after if own is None else after + own

    return advance


@torch.no_grad()
def scaled_response(g: GlobalNTK, q: Float[Tensor, " N"]) -> ScaledResponse:
    """``P q`` for dynamics that explode: at each step of each trial the size is taken out and its logarithm kept.

    ``(P q)_t = E_t (q_t + D_t (P q)_{t-1})``, carried as ``exp(ℓ_t) ŷ_t`` with ``max |ŷ_t| = 1``. D_t takes each layer
    from its own states one step earlier, ``E_t = (1 - ∂f_t/∂s_t)^-1`` a push on one layer up to those above it at the
    same t; with a single layer E_t is the identity.

    >>> model = torch.nn.RNN(1, 1, nonlinearity="relu", bias=False, batch_first=True)
    >>> _ = torch.nn.init.constant_(model.weight_hh_l0, 10.0), torch.nn.init.constant_(model.weight_ih_l0, 1.0)
    >>> g = GlobalNTK(model, torch.cat([torch.full((1, 1, 1), 1e-30), torch.zeros(1, 59, 1)], dim=1))
    >>> q = torch.zeros(60); q[0] = 1.0
    >>> round(float(scaled_response(g, q).log_norm()[0, -1]) / 2.302585, 3)          # 10^59, in float32
    59.0
    """
    advance, (n, steps, sites, width) = _advance(g, "a scaled response")
    if check_tensor(q, "q").shape != (g.axes.size,):
        raise InputError(f"q must have shape ({g.axes.size},) to match {g.axes!r}, got {tuple(q.shape)}.")
    check_finite(q, "q", "A push has finite entries; its response may be as large as it likes.")
    q = q.to(g.values)
    pushes = q.reshape(n, steps, sites, width)
    now = pushes.new_zeros(n, sites, width)
    scale = torch.full((n,), -torch.inf, dtype=torch.float64, device=q.device)
    values, scales = [], []
    for t in range(steps):
        size = pushes[:, t].double().abs().amax((1, 2)).log()
        reference = torch.maximum(scale, size)
        reference = torch.where(torch.isfinite(reference), reference, 0.0)
        kept = (scale - reference).exp().to(q.dtype)[:, None, None]
        fresh = (pushes[:, t].double() * (-reference).exp()[:, None, None]).to(q.dtype)
        total = advance(t, (now * kept)[None], fresh[None])[0]
        largest = total.double().abs().amax((1, 2))
        safe = torch.where(largest > 0, largest, 1.0)
        now = (total.double() / safe[:, None, None]).to(q.dtype)
        scale = torch.where(largest > 0, reference + safe.log(), -torch.inf)
        values.append(now)
        scales.append(scale)
    return ScaledResponse(torch.stack(values, dim=1).reshape(g.axes.shape), torch.stack(scales, dim=1))


@torch.no_grad()
def finite_time_exponent(g: GlobalNTK) -> Float64[Tensor, " trial"]:
    """``log σ_max(∂s_T/∂s_0) / T`` of each trial: the fastest growth of a push over the run, per step.

    Positive: pushes grow, and gradients through time explode; negative: they die out. s_0 is the initial state, so T
    steps are counted. The product of Jacobians is formed column by column and rescaled, which neither overflows nor
    needs more than (S H)² numbers a trial. Bidirectional modules are refused.

    >>> model = torch.nn.RNN(1, 2, nonlinearity="relu", bias=False, batch_first=True).double()
    >>> with torch.no_grad():
    ...     _ = model.weight_hh_l0.copy_(torch.diag(torch.tensor([2.0, 0.5]))), model.weight_ih_l0.fill_(1.0)
    >>> g = GlobalNTK(model, torch.ones(1, 30, 1, dtype=torch.float64))
    >>> round(float(finite_time_exponent(g).exp()), 6)
    2.0
    """
    advance, (n, steps, sites, width) = _advance(g, "a Lyapunov exponent")
    basis, runs = _identity(g, n, sites, width), _valid(g, steps, n)
    log_size = torch.zeros(n, dtype=torch.float64, device=g.values.device)
    for t in range(steps):
        basis = torch.where(runs[t][:, None, None], advance(t, basis, None), basis)
        size = basis.abs().amax((0, 2, 3)).double()
        log_size += size.log()  # -inf for good where everything was erased
        basis = basis / torch.where(size > 0, size, 1.0).to(basis.dtype)[:, None, None]
    matrix = basis.flatten(2).permute(1, 2, 0).double()
    return (torch.linalg.matrix_norm(matrix, ord=2).log() + log_size) / runs.sum(0)


@torch.no_grad()
def lyapunov_spectrum(g: GlobalNTK, k: int | None = None) -> Float64[Tensor, "trial k"]:
    """The ``k`` greatest finite-time Lyapunov exponents of each trial, greatest first, by repeated QR.

    ``Q_t R_t = A_t Q_{t-1}``; exponent i is the mean of ``log |R_t|_ii`` over the run (Benettin et al., Meccanica 15,
    1980). Q_0 is the identity: a short run depends on it, and in the long-time limit they are the logarithms of the
    singular values. A direction that a step erases, to rounding, gives -inf.

    Which directions grow fastest is known only at the end, so all S H of them are followed whatever ``k`` is: T
    steps of (S H)³ operations, and (S H)² numbers, for each trial.

    >>> model = torch.nn.RNN(1, 2, nonlinearity="relu", bias=False, batch_first=True).double()
    >>> with torch.no_grad():
    ...     _ = model.weight_hh_l0.copy_(torch.diag(torch.tensor([2.0, 0.5]))), model.weight_ih_l0.fill_(1.0)
    >>> g = GlobalNTK(model, torch.ones(1, 30, 1, dtype=torch.float64))
    >>> lyapunov_spectrum(g).exp().round(decimals=6).tolist()
    [[2.0, 0.5]]
    """
    advance, (n, steps, sites, width) = _advance(g, "a Lyapunov spectrum")
    whole = sites * width
    k = whole if k is None else k
    check_count(k, "k", most=whole, why="the number of states of one step")
    basis, runs = _identity(g, n, sites, width), _valid(g, steps, n)
    sums = torch.zeros(n, whole, dtype=torch.float64, device=g.values.device)
    for t in range(steps):
        moved = advance(t, basis, None).flatten(2).permute(1, 2, 0)
        q, r = torch.linalg.qr(moved)
        size = r.diagonal(dim1=1, dim2=2).abs()
        erased = size <= 4 * whole**0.5 * torch.finfo(size.dtype).eps * moved.norm(
            dim=1
        )  # QR leaves its rounding there
        growth = size.masked_fill(erased, 0.0).double().log()
        sums += torch.where(runs[t][:, None], growth, 0.0)
        turned = q.permute(2, 0, 1).reshape(whole, n, sites, width)
        basis = torch.where(runs[t][:, None, None], turned, basis)
    return (sums / runs.sum(0)[:, None]).sort(dim=1, descending=True).values[:, :k]


def _valid(g: GlobalNTK, steps: int, n: int) -> Bool[Tensor, "time trial"]:
    """Which steps exist; exponents are per step of a trial's own run."""
    valid = g.states.valid
    return torch.ones(steps, n, dtype=torch.bool, device=g.values.device) if valid is None else valid


def _identity(g: GlobalNTK, n: int, sites: int, width: int) -> Float[Tensor, "k B S H"]:
    whole = sites * width
    eye = torch.eye(whole, dtype=g.values.dtype, device=g.values.device)
    return eye.reshape(whole, 1, sites, width).expand(whole, n, sites, width)
