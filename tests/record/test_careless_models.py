"""Models that keep state of their own in the forward pass train under watch as they do alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs


class Careless(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind, self.count = nn.Linear(4, 3), kind, 0
        self.generator = torch.Generator().manual_seed(5)
        self.trail = torch.zeros(4)

    def forward(self, x):
        if self.kind == "normalised":
            with torch.no_grad():
                self.layer.weight.div_(self.layer.weight.norm(dim=1, keepdim=True))
        if self.kind == "counter":
            self.count += 1
            x = x * (1 + 0.01 * self.count)
        if self.kind == "generator":
            x = x + 0.1 * torch.randn(x.shape, generator=self.generator)
        if self.kind == "trail":
            self.trail.mul_(0.9).add_(x.mean(0))
            x = x + self.trail
        return self.layer(x)


def trained(kind, watched):
    torch.manual_seed(0)
    model, x, y = Careless(kind), torch.randn(20, 4), torch.arange(20) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = gs.watch(model, (x[:8], y[:8]), None, every=1, overhead=None) if watched else None
    if scope is not None:
        scope.use(optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if scope is not None:
            scope.step()
    return [*model.parameters(), model.trail, torch.tensor(model.count), model.generator.get_state()]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["normalised", "counter", "generator", "trail"])
def test_training_is_the_same_to_the_last_bit(kind):
    for alone, watched in zip(trained(kind, watched=False), trained(kind, watched=True), strict=True):
        assert torch.equal(alone, watched)
