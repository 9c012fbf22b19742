"""Which expectations the recursions use, and how those of a set of samples become tensors over all samples."""

import itertools
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.results import Result

# Derivative orders of the factors, by sample: p02[a, b] = <s_a s''_b>, q2110[a, b, c, d] = <s''_a s'_b s'_c s_d>.
PAIRS: dict[str, tuple[int, ...]] = {"p00": (0, 0), "p11": (1, 1), "p02": (0, 2), "p22": (2, 2), "p13": (1, 3)}
QUADS: dict[str, tuple[int, ...]] = {
    "q0000": (0, 0, 0, 0), "q0011": (0, 0, 1, 1), "q1111": (1, 1, 1, 1), "q2110": (2, 1, 1, 0),
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class GaussianMoments(Result):
    """Gaussian expectations over z ~ N(0, K); the digits of a name are derivative orders, sample by sample."""

    p00: Float[Tensor, "n n"]
    p11: Float[Tensor, "n n"]
    p02: Float[Tensor, "n n"]
    p22: Float[Tensor, "n n"]
    p13: Float[Tensor, "n n"]
    q0000: Float[Tensor, "n n n n"]
    q0011: Float[Tensor, "n n n n"]
    q1111: Float[Tensor, "n n n n"]
    q2110: Float[Tensor, "n n n n"]


def multisets(n: int, slots: int) -> list[tuple[int, ...]]:
    """Samples of the slots up to their order: an expectation of a product knows no order."""
    return list(itertools.combinations_with_replacement(range(n), slots))


def from_multisets(n: int, slots: int, families: dict[str, tuple[int, ...]], values: list[Tensor]) -> dict[str, Tensor]:
    """Tensors (n,) * slots from the expectations of each multiset; its ``values[i]`` has an axis of orders a slot."""
    samples = torch.tensor(multisets(n, slots), device=values[0].device)
    stacked = torch.stack(values)
    result = {}
    for name, orders in families.items():
        tensor = stacked.new_empty((n,) * slots)
        for places in itertools.permutations(range(slots)):
            # Slot places[k] of the multiset takes the k-th order of the family, and the k-th index of the tensor.
            at: list[int | slice] = [slice(None), *orders]
            for k, place in enumerate(places):
                at[place + 1] = orders[k]
            tensor[tuple(samples[:, place] for place in places)] = stacked[tuple(at)]
        result[name] = tensor
    return result
