"""Controls for masks on digits: both trained, masks frozen at the start or taken from the end, masks only.

Also what section 10.3 of arXiv:2606.09744 expects: do the classes share units, and does the change of the weights pile
up where co-activation is? Run from the repository root: python docs/gallery/masks.py. A minute on one core.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gramscope.hierarchy import AccumulatedFlow, coactivation_subspace, frozen_masks, masks_only, shared_activation
from gramscope.tasks import digits, mlp

Flows = dict[str, tuple[AccumulatedFlow, AccumulatedFlow]]
WIDTHS, EPOCHS, SEEDS = (64, 64, 64, 10), 20, (0, 1, 2)


def masks(model: nn.Sequential, x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"0": model[0](x) > 0, "2": model[:3](x) > 0}


def fit(network: nn.Module, seed: int, flows: Flows | None = None) -> float:
    """Train, and return the test accuracy; the flow of a plain network is added up once an epoch."""
    task = digits()
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=1e-3)
    rng = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        before = {name: network.get_submodule(name).weight.detach().clone() for name in flows or {}}
        seen = masks(network, task.x[:300]) if isinstance(network, nn.Sequential) else {}
        for rows in torch.randperm(len(task.x), generator=rng).split(64):
            optimizer.zero_grad()
            cross_entropy(network(task.x[rows]), task.y[rows]).backward()
            optimizer.step()
        for name, (flow, control) in (flows or {}).items():
            change = network.get_submodule(name).weight - before[name]
            space = coactivation_subspace(before[name], seen[name])
            flow.add(change, space)
            # As many directions, of WᵀW alone.
            control.add(change, coactivation_subspace(before[name], torch.ones_like(seen[name]), k=space.k))
    with torch.no_grad():
        return float((network(task.x_test).argmax(1) == task.y_test).double().mean())


def main() -> None:
    torch.set_num_threads(1)
    task, rows = digits(), dict[str, list[float]]()
    for seed in SEEDS:
        start = mlp(WIDTHS, seed=seed)
        model = copy.deepcopy(start)
        flows: Flows = {name: (AccumulatedFlow(), AccumulatedFlow()) for name in ("0", "2")}
        results = {"weights and masks": fit(model, seed, flows)}
        results["masks frozen at the start"] = fit(frozen_masks(copy.deepcopy(start)), seed)
        results["masks of the trained network"] = fit(frozen_masks(copy.deepcopy(start), model), seed)
        results["masks only (straight through)"] = fit(masks_only(copy.deepcopy(start)), seed)
        with torch.no_grad():
            results["untrained"] = float((start(task.x_test).argmax(1) == task.y_test).double().mean())
        for name, value in results.items():
            rows.setdefault(name, []).append(value)
        if seed == 0:
            for name in ("0", "2"):
                shared = [shared_activation(masks(net, task.x_test)[name], task.y_test) for net in (start, model)]
                text = ", ".join(f"within {s.within:.3f} between {s.between:.3f} z {s.z:.0f}" for s in shared)
                print(f"layer {name}: before and after: {text}")
                flow, control = (each.share() for each in flows[name])
                numbers = f"{flow.path_share:.3f}, with all masks on {control.path_share:.3f}"
                print(f"layer {name}: flow {numbers}, chance {flow.baseline:.3f}")
    for name, values in rows.items():
        v = torch.tensor(values)
        print(f"| {name} | {100 * float(v.mean()):.1f} ± {100 * float(v.std()):.1f} % |")


if __name__ == "__main__":
    main()
