"""Gated controls against a sum over paths, and what they leave alone."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gramscope.base.errors import InputError, UnsupportedError
from gramscope.hierarchy import Fields, GatedNetwork, frozen_masks, masks_only
from references.gated import path_sum


def chain(seed, widths=(3, 4, 3, 2)):
    rng = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(a, b, bias=False).double() for a, b in pairwise(widths)]
    for layer in layers:
        layer.weight.data = torch.randn(layer.weight.shape, generator=rng).double()
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(inplace=True), layers[2])


def weights(model):
    return [p.detach() for p in model.parameters()]


X = torch.randn(6, 3, generator=torch.Generator().manual_seed(9)).double()


def test_outputs_are_a_sum_over_paths_switched_by_the_gates():
    values, gates = chain(0), chain(1)
    expected = path_sum(weights(values), weights(gates), X)
    torch.testing.assert_close(frozen_masks(values, gates)(X), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(masks_only(gates, values)(X), expected, rtol=0, atol=1e-12)


def test_training_with_frozen_masks_flips_none_and_trains_the_model_itself():
    model = chain(0)
    control, start = frozen_masks(model), [w.clone() for w in weights(model)]
    before = [m.clone() for m in control.masks(X)]
    optimizer = torch.optim.SGD([p for p in control.parameters() if p.requires_grad], lr=0.05)
    y = torch.randn(6, 2, generator=torch.Generator().manual_seed(4)).double()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(control(X), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(a, b) for a, b in zip(before, control.masks(X), strict=True))
    torch.testing.assert_close(control(X), path_sum(weights(model), start, X), rtol=0, atol=1e-11)
    assert not torch.allclose(control(X), model(X))  # the model's own masks did change


def test_a_small_step_with_frozen_masks_is_the_step_that_the_fields_hold():
    model = chain(2)
    fields = Fields.from_module(model, X)
    residual = fields.outputs - 1.0
    held = fields.compare_step(residual, 0.3).held.outputs
    control = frozen_masks(model)
    (control(X) - 1.0).square().sum().div(2).backward()
    with torch.no_grad():
        for layer in (0, 2):  # the readout is fixed
            model[layer].weight -= 0.3 * model[layer].weight.grad
        torch.testing.assert_close(control(X) - fields.outputs, held, rtol=0, atol=1e-12)


def test_masks_only_trains_gates_by_the_surrogate_and_holds_the_values():
    model = chain(0)
    control = masks_only(model, sharpness=3.0)
    held = [w.clone() for w in weights(control.values)]
    control(X)[:, 0].sum().backward()
    # The first gate's gradient, written out: ∂f/∂mask times β s (1 - s).
    h = X @ held[0].T
    h2 = h.relu() @ held[1].T
    s1, s2 = (torch.sigmoid(3.0 * t) for t in (h, h2))
    up = (h2 > 0) * held[2][0]
    direct = (up @ held[1]) * h * 3.0 * s1 * (1 - s1)
    through = ((held[2][0] * h2 * 3.0 * s2 * (1 - s2)) @ held[1]) * (h > 0)  # the second gate also reads this layer
    torch.testing.assert_close(model[0].weight.grad, (direct + through).T @ X, rtol=0, atol=1e-11)
    assert model[4].weight.grad is None
    optimizer = torch.optim.SGD([p for p in control.parameters() if p.requires_grad], lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        control(X).square().mean().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(held, weights(control.values), strict=True))
    torch.testing.assert_close(control(X), path_sum(held, weights(model), X), rtol=0, atol=1e-11)


class Strange(nn.Module):
    """A block that is used twice, functional and leaky ReLUs, batch norm, max pooling."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for _ in range(2):
            x = x + F.leaky_relu(self.norm(self.conv(x)), 0.1)
        return self.head(torch.relu(F.max_pool1d(x, 2)).flatten(1))


def test_strange_models_and_modes():
    model, x = Strange(), torch.randn(5, 2, 4)
    model.eval()
    wanted = model(x)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    control = frozen_masks(model)
    torch.testing.assert_close(control(x), wanted)
    assert control.other_gates == ()
    assert len(control.masks(x)) == 4  # the third are the places of the max pooling
    control.train()
    assert control.values.training
    assert not control.gates.training
    gates = {k: v.clone() for k, v in control.gates.state_dict().items()}
    control(x)
    assert all(torch.equal(v, gates[k]) for k, v in control.gates.state_dict().items())  # no statistics moved
    assert not torch.equal(model.norm.running_mean, state["norm.running_mean"])  # the values network does train
    assert all(p.requires_grad for p in model.parameters())


class Pooled(nn.Module):
    """A jump beside the kinks that can be held."""

    def __init__(self, jump):
        super().__init__()
        self.first, self.last, self.jump = nn.Linear(3, 6).double(), nn.Linear(3, 1).double(), jump

    def forward(self, x):
        pooled = F.max_pool1d(torch.relu(self.first(x))[:, None], 2)[:, 0]
        return self.last(pooled * torch.sign(pooled - 0.1) if self.jump else pooled)


@pytest.mark.parametrize("control_of", [frozen_masks, masks_only])
def test_max_pooling_takes_the_places_of_the_gates(control_of):
    values, gates = Pooled(False), Pooled(False)
    pre = gates.first(X)
    places = pre.relu().reshape(6, 3, 2).argmax(2)
    kept = ((pre > 0) * values.first(X)).reshape(6, 3, 2).gather(2, places[:, :, None])[:, :, 0]
    control = frozen_masks(values, gates) if control_of is frozen_masks else masks_only(gates, values)
    torch.testing.assert_close(control(X), values.last(kept), rtol=0, atol=1e-12)
    control(X).sum().backward()
    trained = values if control_of is frozen_masks else gates
    assert float(trained.first.weight.grad.norm()) > 0


def test_what_cannot_be_frozen_is_named():
    control = frozen_masks(Pooled(True))
    with pytest.warns(UserWarning, match="sign"):
        control(X)
    assert control.other_gates == ("sign",)


def test_bad_input():
    with pytest.raises(UnsupportedError, match="must call a ReLU"):
        frozen_masks(nn.Sequential(nn.Linear(3, 2), nn.GELU()))(torch.randn(2, 3))
    with pytest.raises(InputError, match="one order and with one shape"):
        frozen_masks(chain(0), chain(0, (3, 5, 3, 2)))(X)
    with pytest.raises(InputError, match="masks are left"):
        frozen_masks(nn.Sequential(nn.Linear(3, 4).double(), nn.ReLU()), chain(0))(X)
    with pytest.raises(InputError, match="sharpness must be"):
        masks_only(chain(0), sharpness=0.0)
    with pytest.raises(InputError, match="train must be"):
        GatedNetwork(chain(0), chain(0), train="both")
