"""What a network's own activity says about where it will learn: self-referential bias and the structural rank bound."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from gramscope.base.checks import check_count, check_finite, shape_or_type
from gramscope.base.complex_numbers import real_view
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.results import TableResult
from gramscope.base.rounding import Rounding, numerical_rank, singular_floor
from gramscope.capture.backward_graph import BackwardGraph
from gramscope.capture.sites import OuterSite, Site
from gramscope.capture.weight_sites import WeightSites
from gramscope.propagators.global_ntk import GlobalNTK, check_global
from gramscope.propagators.measures import random_modes, rayleigh
from gramscope.propagators.network_states import NetworkStates, Place
from gramscope.propagators.recurrent import RecurrentStates
from gramscope.propagators.recurrent_layer import ROLES
from gramscope.propagators.stack import Stack


@dataclass(frozen=True, repr=False)
class SelfReferentialBias(TableResult, shown=("ratio", "activity", "random", "target"), columns=("activity", "random")):
    """Rayleigh quotients of ``NTK_S``: on the network's own leading modes, on random ones, on the targets' modes.

    ``ratio`` is the first of the activity's over the mean of the random ones: how much faster gradient descent moves
    the states along what they already do.
    """

    activity: Float64[Tensor, " k"]
    random: Float64[Tensor, " k"]
    target: Float64[Tensor, " t"] | None

    @property
    def ratio(self) -> float:
        return float(self.activity[0] / self.random.mean())


def activity_modes(g: GlobalNTK, k: int) -> Float[Tensor, "N k"]:
    """The leading modes of the joint hidden and input activity, spread over the states' units.

    With ``Z`` the matrix of site inputs ``[h_{t-1}, x_t]`` (rows are trials and times) and ``Z = U Σ Vᵀ``, mode i is
    ``u_i`` over trials and times, the same in every unit of every site: the shape that one row of a weight can make.
    """
    joint = _joint_activity(g)
    check_count(k, "k", most=min(joint.shape))
    return _spread(torch.linalg.svd(joint, full_matrices=False).U[:, :k], g)


def _joint_activity(g: GlobalNTK) -> Float[Tensor, "trial_time v"]:
    check_global(g)
    states = g.states
    if not isinstance(states, RecurrentStates):
        raise UnsupportedError(
            "modes of hidden and input activity need a recurrent module (nn.RNN, nn.GRU, nn.LSTM or a cell of torch). "
            "For other networks pass modes of your own to rayleigh."
        )
    recurrent_layer = states.stack.recurrent_layers[0]
    return torch.cat([recurrent_layer.before, recurrent_layer.inputs], dim=2).transpose(0, 1).flatten(0, 1)


def self_referential_bias(
    g: GlobalNTK, k: int | None = None, targets: Float[Tensor, "trial time d"] | None = None, seed: int = 0
) -> SelfReferentialBias:
    """Rayleigh quotients of ``NTK_S`` on modes of activity, random modes and target modes (arXiv:2605.08746).

    Target modes are the leading left singular vectors of the targets (trial, time, d), spread over the units like those
    of :func:`activity_modes`. Gradient descent is biased towards its own activity where the first are far above the
    others; components of a target with a small quotient are learnt last. ``k`` is the number of modes, by default 5 or
    as many as the activity has.

    >>> _ = torch.manual_seed(0)
    >>> g = GlobalNTK(torch.nn.RNN(2, 16, batch_first=True), torch.randn(4, 10, 2))
    >>> self_referential_bias(g, k=2).ratio > 3
    True
    """
    k = min(5, *_joint_activity(g).shape) if k is None else k
    own = rayleigh(g.operator, activity_modes(g, k))
    # Random over trials and times and the same in every unit, like the others: only the shape in time differs.
    n, steps = g.axes.shape[:2]
    noise = random_modes(n * steps, min(k, n * steps), seed=seed, dtype=g.values.dtype, device=g.values.device)
    random = rayleigh(g.operator, _spread(noise, g))
    target = None
    if targets is not None:
        if not isinstance(targets, Tensor) or tuple(targets.shape[:2]) != (n, steps):
            raise InputError(f"targets must be a tensor of shape ({n}, {steps}, d), got {shape_or_type(targets)}.")
        check_finite(targets, "targets", "They have no modes otherwise: clean the data first.")
        given = targets.detach().reshape(n * steps, -1)
        flat = given.to(g.values)
        left, sizes, _ = torch.linalg.svd(flat, full_matrices=False)
        keep = int((sizes > singular_floor(flat, Rounding.of(given))).sum())
        if keep == 0:
            raise InputError("targets must not be all zero: they have no modes.")
        target = rayleigh(g.operator, _spread(left[:, : min(k, keep)], g))
    return SelfReferentialBias(own, random, target)


def _spread(modes: Tensor, g: GlobalNTK) -> Tensor:
    """Modes over trials and times, the same in every unit of every site."""
    (n, steps, *_), k = g.axes.shape, modes.shape[1]
    spread = modes.reshape(n, steps, 1, 1, k).expand(*g.axes.shape, k).reshape(-1, k)
    return spread / spread.norm(dim=0)


@torch.no_grad()
def structural_rank_bound(g: GlobalNTK) -> int:
    """``rank NTK_S = rank K <= Σ_j rank(V_j) · n_out,j``: the bottleneck that the sites' inputs set, whatever the loss.

    V_j holds the inputs of all uses of weight j; the sum is over weights, each bounded by its own number of entries,
    and the whole by the number of states.

    >>> model = torch.nn.Linear(3, 4, bias=False)
    >>> structural_rank_bound(GlobalNTK(model, torch.ones(10, 3)))          # ten equal inputs: rank 1, times 4 units
    4
    """
    check_global(g)
    states = g.states
    if isinstance(states, RecurrentStates):
        return min(_recurrent_bound(g, states), g.axes.size)
    return min(_network_bound(states), g.axes.size)


def _recurrent_bound(g: GlobalNTK, states: RecurrentStates) -> int:
    total = 0
    for recurrent_layer in states.stack.recurrent_layers:
        for side, data in ((0, recurrent_layer.inputs), (1, recurrent_layer.before)):
            names = [name in g.parameters for name in recurrent_layer.weights.names[side::2]]
            rows = data.flatten(0, 1)
            if any(names):
                parts = [rows] if names[0] else []
                parts += [rows.new_ones(len(rows), 1)] if len(names) > 1 and names[1] else []
                gates = getattr(recurrent_layer.weights, ROLES[side]).shape[0]
                total += numerical_rank(torch.cat(parts, dim=1)) * gates
    return total


def _network_bound(states: NetworkStates) -> int:
    """Where a weight acts in another way than as ``W v``, or only a part of it does, all entries in use count."""
    ranks: defaultdict[str, int] = defaultdict(int)
    inputs: defaultdict[tuple[str, tuple[int, ...], int, int, int], list[Tensor]] = defaultdict(list)
    entries: dict[str, int] = {}
    for place in states.places:
        links = (place.direct, *place.stacked.values())
        used = {name: parameter for link in links for name, parameter in link.parameters.items()}
        entries |= {name: real_view(parameter).numel() for name, parameter in used.items()}
        if isinstance(place.node.recurrence, Stack):
            ranks |= {name: entries[name] for name in used}
            continue
        for site in _sites(place):
            if isinstance(site, OuterSite) and site.frame is None:
                # Uses of a weight and of its transpose have inputs of different kinds.
                key = site.name, site.order, site.groups, site.fan_in, site.fan_out
                inputs[key].append(site.inputs[0].transpose(0, 1))  # (g, T, i)
            else:
                ranks[site.name] += site.entries
    for (name, *_, fan_out), blocks in inputs.items():
        ranks[name] += sum(map(numerical_rank, torch.cat(blocks, dim=1))) * fan_out
    return sum(min(rank, entries[name]) for name, rank in ranks.items())


def _sites(place: Place) -> Iterator[Site]:
    """The weight sites of one place, all trials taken as one example."""
    for output in place.node.outputs:
        if place.direct.parameters and output.requires_grad:
            with torch.enable_grad():
                graph = BackwardGraph(output.reshape(1, -1), place.direct.parameters)
            sites = WeightSites(graph, lambda names: None)
            for found in sites.sites(torch.ones_like(graph.f.detach())[None]):
                yield from (site for same in found.values() for site in same)
