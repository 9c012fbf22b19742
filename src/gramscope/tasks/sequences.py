"""Tasks in time: what all of them consist of."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class SequenceTask:
    """Trials of a task in time: inputs, wanted outputs, and where outputs count (``mask``, True where they do)."""

    x: Float[Tensor, "trial time i"]
    y: Float[Tensor, "trial time o"]
    mask: Bool[Tensor, "trial time"]

    def loss(self, outputs: Float[Tensor, "trial time o"]) -> Float[Tensor, ""]:
        """Mean squared error over the entries that count."""
        error = ((outputs - self.y.to(outputs)) ** 2).mean(dim=2)
        return (error * self.mask.to(error)).sum() / self.mask.sum()
