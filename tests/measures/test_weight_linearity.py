"""Target linearity and virtual covariance of what convolutions, attention and tied layers read, written out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.measures import weight_target_linearity
from references.linearity_training import patches, projected_share

RATE = 0.7


def one_hot(y):
    return F.one_hot(y).double()


def check(found, rows, gradients, targets):
    """Rows, gradients and targets, written out by the test; 1e-10 is rounding of float64 in another order."""
    virtual = rows - RATE * gradients
    assert float(found.inputs) == pytest.approx(projected_share(rows.numpy(), targets.numpy()), abs=1e-10)
    assert float(found.virtual) == pytest.approx(projected_share(virtual.numpy(), targets.numpy()), abs=1e-10)
    torch.testing.assert_close(found.covariance, rows.T @ rows, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.virtual_covariance, virtual.T @ virtual, rtol=1e-10, atol=1e-10)
    assert found.rows == len(rows)


@pytest.fixture(scope="module")
def images():
    rng = torch.Generator().manual_seed(0)
    return torch.randn(9, 2, 5, 5, generator=rng).double(), torch.arange(9) % 3


def test_convolutions_read_patches_and_positions_are_samples(images):
    x, y = images
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(16, 3)
    ).double()
    loss = lambda f: F.cross_entropy(f, y)  # noqa: E731
    found = weight_target_linearity(model, x, y, loss, lr=RATE)
    assert list(found) == ["0.weight", "2.weight", "4.weight"]
    assert [v.positions for v in found.values()] == [9, 4, 1]
    assert set(found.left_out) == {"0.bias", "2.bias", "4.bias"}

    first = model[0](x).detach().requires_grad_()
    hidden = F.relu(first).detach().requires_grad_()
    second = model[2](hidden).detach().requires_grad_()
    out = model[4](second.flatten(1))
    (signal,) = torch.autograd.grad(loss(out), second)
    rows = patches(hidden.detach(), 2).unflatten(2, (2, 8))  # groups: the first two channels, the last two
    weight = model[2].weight.detach().reshape(2, 2, 8)
    signals = signal.flatten(2).mT.unflatten(2, (2, 2))
    gradients = torch.einsum("ntgo,goi->ntgi", signals, weight)
    check(found["2.weight"], rows.flatten(2).flatten(0, 1), gradients.flatten(2).flatten(0, 1),
          one_hot(y).repeat_interleave(4, 0))  # fmt: skip

    (below,) = torch.autograd.grad(loss(model[2:](F.relu(first))), first)
    rows = patches(x, 3, stride=2, padding=1)
    gradients = below.flatten(2).mT @ model[0].weight.detach().flatten(1)
    check(found["0.weight"], rows.flatten(0, 1), gradients.flatten(0, 1), one_hot(y).repeat_interleave(9, 0))

    pooled = weight_target_linearity(model, x, y, loss, lr=RATE, samples="examples", weights="0.weight")["0.weight"]
    check(pooled, rows.mean(1), gradients.mean(1), one_hot(y))
    learning = gs.measures.feature_learning(model, x, loss)["0.weight"]
    torch.testing.assert_close(found["0.weight"].virtual_covariance, learning.virtual_covariance(RATE)[0])


class Attention(nn.Module):
    """One head of attention with packed projections, and a token-wise output."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


def test_attention_reads_tokens_with_targets_of_examples_or_of_positions():
    torch.manual_seed(1)
    model, x = Attention().double(), torch.randn(6, 5, 4).double()
    labels = torch.randint(3, (6, 5))
    labels[0, 3:] = -100  # padding has no target
    loss = lambda f: F.cross_entropy(f.reshape(-1, 3), labels.flatten(), ignore_index=-100)  # noqa: E731
    found = weight_target_linearity(model, x, labels, loss, lr=RATE)
    assert set(found) == {"attention.in_proj_weight", "attention.out_proj.weight", "head.weight"}
    counted = labels.flatten() >= 0
    targets = one_hot(labels.flatten()[counted])

    read = x.clone().requires_grad_()
    tokens = (x + model.attention(x, x, x, need_weights=False)[0]).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(model.head(tokens)), tokens)
    rows = [t.detach().flatten(0, 1)[counted] for t in (tokens, gradient)]
    check(found["head.weight"], *rows, targets)

    # q, k and v read the same tokens; the gradient through the packed weight does not include the residual connection.
    out = model.head(x + model.attention(read, read, read, need_weights=False)[0])
    (gradient,) = torch.autograd.grad(loss(out), read)
    rows = x.flatten(0, 1)[counted]
    check(found["attention.in_proj_weight"], rows, gradient.flatten(0, 1)[counted], targets)

    whole = weight_target_linearity(model, x, torch.arange(6) % 2, weights="head.weight")["head.weight"]
    assert whole.virtual is None
    assert whole.rows == 30
    targets = one_hot(torch.arange(6) % 2).repeat_interleave(5, 0)
    expected = projected_share(tokens.detach().flatten(0, 1).numpy(), targets.numpy())
    assert float(whole.inputs) == pytest.approx(expected, abs=1e-10)


class Tied(nn.Module):
    """One linear layer used twice: its rows are those of both uses."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


def test_a_weight_used_twice_reads_both_uses():
    torch.manual_seed(2)
    model, x, y = Tied().double(), torch.randn(7, 3).double(), torch.randn(7, 2).double()
    found = weight_target_linearity(model, x, y, lambda f: f.square().sum(), lr=RATE)["layer.weight"]
    w = model.layer.weight.detach()
    h = torch.tanh(x @ w.T)
    upper = 2 * (h @ w.T) @ w
    lower = (upper * (1 - h**2)) @ w
    order = [0, 1] if torch.allclose(found.covariance, x.T @ x + h.T @ h) else None
    assert order is not None
    check(found, torch.cat([x, h]), torch.cat([lower, upper]), torch.cat([y, y]))


def test_bad_input(images):
    x, y = images
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(36, 3))
    for call, words in (
        (lambda: weight_target_linearity(model, x, y, samples="pixels"), "samples must be"),
        (lambda: weight_target_linearity(model, x, y[:4]), "9 rows"),
        (lambda: weight_target_linearity(model, x, torch.zeros(9, 7).long()), "must have the .* positions"),
        (lambda: weight_target_linearity(model, x, torch.full((9,), -100)), "classes from 0"),
        (lambda: weight_target_linearity(model, x, torch.zeros(9, 9).long(), samples="examples"), "by position need"),
        (lambda: weight_target_linearity(model, x, y, weights="nothing"), "must match a weight"),
    ):
        with pytest.raises(InputError, match=words):
            call()
