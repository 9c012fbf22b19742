"""One backward pass along the loss: how large the gradient of each weight is, and what each weight is given."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from gramscope.capture import LookupSite, OuterSite, Site
from gramscope.capture.capturing import Opened
from gramscope.capture.side_effects import checked_gradients
from gramscope.measures.norms import squared_norms
from gramscope.record.objective import IGNORED, Objective

SAMPLED_POSITIONS = 2048  # rows at most, of which features are looked at
SEED = 0
BLOCK_ENTRIES = 2**22  # of gradients of single examples that are held at once
Sizes = tuple[Float64[Tensor, ""], Float64[Tensor, " n"]]  # norm of the gradient, squared norm of each example's part


def sample_positions(y: Int64[Tensor, "n ..."]) -> Int64[Tensor, " rows"]:
    """Some of all labels that count, in random order, always the same for the same number of them."""
    counted = (y.reshape(-1).cpu() != IGNORED).nonzero()[:, 0]
    order = torch.randperm(len(counted), generator=torch.Generator("cpu").manual_seed(SEED), device="cpu")
    return counted[order[:SAMPLED_POSITIONS]]


@dataclass(eq=False)
class AlongLoss:
    """``squares``: squared norm of the gradient of the loss by parameter. ``last``: the last weight that makes outputs.

    ``example_squares``: squared norm of what each example adds to the gradient; 0 where labels belong to positions,
    since there it would cost more than the pass itself.

    ``features`` (rows, d): what each weight is given, averaged over positions and uses, in order of first use; where
    labels belong to positions, what the last weight is given at the sampled ones.
    """

    squares: dict[str, float]
    features: dict[str, Float[Tensor, "rows d"]] = field(default_factory=dict)
    last: str | None = None
    example_squares: Float64[Tensor, " n"] | float = 0.0


def pull_back(
    network: Opened,
    direction: Float[Tensor, "1 n C"],
    objective: Objective,
    places: Int64[Tensor, " rows"] | None,
    room: int,
) -> AlongLoss:
    """The backward pass, some parameters at a time; at most ``room`` bytes of signals are held at once.

    Where labels belong to positions, a plain backward pass tells the squares, and the sites are sought for the last
    weight alone.
    """
    found = AlongLoss(dict.fromkeys(network.parameters, 0.0))
    sizes = dict[str, Sizes]()  # on the device, which need not stop for them
    if places is not None:
        found.squares = plain_squares(network.f, network.parameters, direction[0], retain_graph=True)
    for group in network.sites(direction, room):
        for name, sites in group.items():
            if sites and places is None:
                sites = tuple(_held(site) for site in sites)
                sizes[name] = gradient_sizes(sites)
            outer = [site for site in sites if isinstance(site, OuterSite)]
            last = found.last is None and any(_makes_outputs(site, objective) for site in outer)
            if last:
                found.last = name
            if places is not None and last:
                inputs = next(site.inputs for site in outer if _makes_outputs(site, objective)).flatten(0, 1)
                found.features[name] = inputs[places.to(inputs.device)].flatten(1)
            elif places is None and outer:
                found.features = {name: _mean_input(outer), **found.features}  # the pass begins at the end
        if places is not None and found.last is not None:
            break
    if sizes:
        whole, by_example = (_in_one(each) for each in zip(*sizes.values(), strict=True))
        found.squares |= dict(zip(sizes, whole.square().tolist(), strict=True))
        found.example_squares = by_example.sum(0).cpu()
    return found


def _in_one(each: Sequence[Tensor]) -> Tensor:
    """Layers may lie on several devices."""
    return torch.stack(list(each) if len({one.device for one in each}) == 1 else [one.cpu() for one in each])


def plain_squares(
    value: Tensor, named: Mapping[str, Tensor], cotangent: Tensor | None = None, **options: bool
) -> dict[str, float]:
    """Squared norm of the gradient of each parameter; 0 of those that are not reached."""
    found = checked_gradients(value, list(named.values()), cotangent, **options)
    reached = {name: g for name, g in zip(named, found, strict=True) if g is not None}
    return dict.fromkeys(named, 0.0) | squared_norms(reached)


def _held(site: Site) -> Site:
    """With its inputs in memory: the patches of a convolution are made once, not at each look."""
    return replace(site, inputs_of=site.inputs.__getitem__) if isinstance(site, OuterSite) else site


def _makes_outputs(site: OuterSite, objective: Objective) -> bool:
    rows = objective.positions
    return site.positions == rows and site.groups * site.fan_out * rows == objective.size


def _mean_input(uses: Sequence[OuterSite]) -> Float[Tensor, "n d"]:
    """Over all uses of the same entries: the first of a recurrent weight sees zeros alone."""
    first = uses[0]
    same = [s for s in uses if s.frame == first.frame and s.inputs.shape[2:] == first.inputs.shape[2:]]
    if len(same) == 1:
        return first.inputs.mean(1).flatten(1)
    positions = sum(site.positions for site in same)
    return torch.stack([site.inputs.mean(1) * (site.positions / positions) for site in same]).sum(0).flatten(1)


def gradient_sizes(sites: Sequence[Site]) -> Sizes:
    """Of ``Σ_n ∂f_n/∂θ`` over all uses of a parameter, for one direction; gradients of examples where they must be."""
    site = sites[0]
    if len(sites) == 1 and isinstance(site, LookupSite):
        return _of_table(site)
    if len(sites) == 1 and isinstance(site, OuterSite) and _few_positions(site):
        return _of_product(site)
    return _of_rows(sites)


def _few_positions(site: OuterSite) -> bool:
    return site.positions * (site.fan_in + site.fan_out) <= site.fan_in * site.fan_out or site.positions == 1


def _of_product(site: OuterSite) -> Sizes:
    """``|Σ_T s_T ⊗ v_T|² = Σ_{TU} (s_T·s_U)(v_T·v_U)``, the diagonal of the layer's kernel along the loss."""
    s, v = site.signals[:, 0].transpose(1, 2), site.inputs.to(site.dtype).transpose(1, 2)  # (n, g, T, o) and i
    whole = s.transpose(0, 1).flatten(1, 2).mT @ v.transpose(0, 1).flatten(1, 2)
    same = s.square().sum(-1) * v.square().sum(-1) if site.positions == 1 else (s @ s.mT) * (v @ v.mT)
    return _norm(whole), same.double().flatten(1).sum(1)


def _of_table(site: LookupSite) -> Sizes:
    s, ids = site.signals[:, 0], site.ids
    whole = s.new_zeros(site.table, s.shape[2]).index_add_(0, ids.flatten(), s.flatten(0, 1))
    return _norm(whole), ((s @ s.mT) * (ids[:, :, None] == ids[:, None])).double().sum((1, 2))


def _of_rows(sites: Sequence[Site]) -> Sizes:
    """From the gradients of single examples, some at a time: their sum is the gradient."""
    n, entries = sites[0].examples, max(math.prod(s.frame.shape) if s.frame else s.entries for s in sites)
    size = max(1, BLOCK_ENTRIES // entries)
    total, squares = torch.zeros((), dtype=sites[0].dtype, device=sites[0].held.device), list[Tensor]()
    for block in (slice(start, start + size) for start in range(0, n, size)):
        some = sites if size >= n else [site.part(block, slice(None)) for site in sites]
        rows = sum((site.whole_rows()[:, 0] for site in some[1:]), some[0].whole_rows()[:, 0])
        total = total + rows.sum(0)
        squares.append(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square())
    return _norm(total), torch.cat(squares)


def _norm(whole: Tensor) -> Float64[Tensor, ""]:
    return torch.linalg.vector_norm(whole, dtype=torch.float64)
