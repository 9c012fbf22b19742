"""One backward pass along the loss: how large the gradient of each weight is, and what each weight is given."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from gramscope.capture import OuterSite, Site
from gramscope.capture.capturing import Opened
from gramscope.capture.sites import HeldInputs
from gramscope.measures.norms import squared_norms
from gramscope.record.loss_gradient import gradient_and_example_squares
from gramscope.record.objective import IGNORED, Objective

SAMPLED_POSITIONS = 2048  # rows at most, of which features are looked at
SEED = 0


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
    squares, by_example = dict[str, Tensor](), list[Tensor]()  # on the device, which need not stop for them
    if places is not None:
        found.squares |= _plain_squares(network, direction[0])
    for group in network.sites(direction, room):
        for name, sites in group.items():
            if sites and places is None:
                sites = tuple(_held(site) for site in sites)
                whole, examples = gradient_and_example_squares(sites)
                squares[name] = whole.double().square().sum()
                by_example.append(examples)
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
    found.squares |= {name: float(square) for name, square in squares.items()}
    if by_example:  # layers may lie on several devices
        found.example_squares = torch.stack([each.cpu() for each in by_example]).sum(0)
    return found


def _plain_squares(network: Opened, direction: Float[Tensor, "n C"]) -> dict[str, float]:
    """Squared norm of the gradient of each parameter that is reached."""
    named = network.parameters
    found = torch.autograd.grad(network.f, list(named.values()), direction, retain_graph=True, allow_unused=True)
    return squared_norms({name: g for name, g in zip(named, found, strict=True) if g is not None})


def _held(site: Site) -> Site:
    """With its inputs in memory: the patches of a convolution are made once, not at each look."""
    return replace(site, make_inputs=HeldInputs(site.inputs)) if isinstance(site, OuterSite) else site


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
