"""Gauss-Newton and Fisher matrices, and TracIn, against brute force in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError

F64 = torch.float64


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, torch.randn(5, 4, dtype=F64), torch.tensor([0, 2, 1, 0, 2])


def rows(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(parameters)
    return torch.cat([part.reshape(3 * len(x), -1) for part in found.values()], dim=1)


def test_gauss_newton_is_the_product_of_dense_matrices() -> None:
    model, x, labels = problem()
    J, f = rows(model, x), model(x).detach()
    targets = torch.randn(5, 3, dtype=F64)
    for loss, y, function in (
        ("cross_entropy", labels, lambda g: F.cross_entropy(g, labels)),
        ("mse", targets, lambda g: F.mse_loss(g, targets)),
        (lambda g, y: (g - y).abs().pow(3).sum(), targets, lambda g: (g - targets).abs().pow(3).sum()),
    ):
        H = torch.func.hessian(function)(f).reshape(15, 15)
        wanted = J.T @ H @ J
        G = gs.measures.gauss_newton(model, x, y, loss=loss)
        assert G.symmetric
        torch.testing.assert_close(G.dense(), wanted, rtol=1e-10, atol=1e-12)
        top = gs.measures.gauss_newton_sharpness(model, x, y, loss=loss)
        assert top.value == pytest.approx(float(torch.linalg.eigvalsh(wanted)[-1]), rel=1e-8)


def test_it_is_the_fisher_matrix_of_a_softmax() -> None:
    model, x, labels = problem()
    p = model(x).detach().softmax(1)
    wanted = torch.zeros(51, 51, dtype=F64)
    for i in range(5):
        for c in range(3):
            slope = torch.autograd.grad(F.log_softmax(model(x[i]), 0)[c], list(model.parameters()))
            g = torch.cat([part.flatten() for part in slope])
            wanted += p[i, c] * torch.outer(g, g) / 5
    found = gs.measures.gauss_newton(model, x, labels).dense()
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)
    other = gs.measures.gauss_newton(model, x, labels.flip(0)).dense()
    torch.testing.assert_close(other, found, rtol=1e-12, atol=1e-15)  # labels do not matter


def test_gauss_newton_of_the_squared_error_has_the_spectrum_of_the_kernel() -> None:
    model, x, _ = problem()
    kernel = gs.kernel(model, x).spectrum()
    found = torch.linalg.eigvalsh(gs.measures.gauss_newton(model, x, torch.zeros(5, 3, dtype=F64), loss="mse").dense())
    torch.testing.assert_close(found.flip(0)[:15], 2 / 15 * kernel, rtol=1e-9, atol=1e-12)


def example_gradient(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x[None]), y[None])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def test_tracin_is_a_sum_of_products_of_gradients() -> None:
    model, x, y = problem()
    x_test, y_test = torch.randn(2, 4, dtype=F64), torch.tensor([1, 0])
    states, rates, wanted = [], [0.1, 0.05], torch.zeros(5, 2, dtype=F64)
    other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    for rate in rates:
        with torch.no_grad():
            for p in other.parameters():
                p += 0.3 * torch.randn_like(p)
        states.append({name: value.clone() for name, value in other.state_dict().items()})
        train = torch.stack([example_gradient(other, x[i], y[i]) for i in range(5)])
        test = torch.stack([example_gradient(other, x_test[j], y_test[j]) for j in range(2)])
        wanted += rate * train @ test.T
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = gs.measures.tracin(model, x, y, x_test, y_test, checkpoints=states, lr=rates, batch_size=3)
    torch.testing.assert_close(found.scores, wanted, rtol=1e-10, atol=1e-13)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert found.proponents(0, 2) == wanted[:, 0].argsort(descending=True)[:2].tolist()
    assert found.opponents(1, 1) == [int(wanted[:, 1].argmin())]
    assert repr(found) == "Influence(5 training on 2 test examples, 2 checkpoints)"


def test_tracin_predicts_the_change_of_a_test_loss_in_one_step() -> None:
    """One small step on one training example changes each test loss by -lr times its score, to first order."""
    model, x, y = problem()
    x_test, y_test = torch.randn(2, 4, dtype=F64), torch.tensor([1, 0])
    lr = 1e-5
    found = gs.measures.tracin(model, x, y, x_test, y_test, lr=lr).scores
    loss = F.cross_entropy(model(x_test), y_test, reduction="none").detach()
    slope = torch.autograd.grad(F.cross_entropy(model(x[:1]), y[:1]), list(model.parameters()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), slope, strict=True):
            p -= lr * g
    change = F.cross_entropy(model(x_test), y_test, reduction="none").detach() - loss
    torch.testing.assert_close(-change, found[0], rtol=1e-3, atol=0)


def test_tracin_refuses_what_does_not_fit() -> None:
    model, x, y = problem()
    with pytest.raises(InputError, match="one for each of the 1 checkpoints"):
        gs.measures.tracin(model, x, y, x, y, lr=[0.1, 0.2])
    with pytest.raises(InputError, match="one row for each example"):
        gs.measures.tracin(model, x, y[:2], x, y)
    with pytest.raises(InputError, match="batch_size"):
        gs.measures.tracin(model, x, y, x, y, batch_size=0)


def test_heat_map_shows_the_matrix() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    found = gs.measures.layer_similarity(
        model, torch.randn(30, 4), ["0", "1"], other=nn.Sequential(nn.Linear(4, 5)), other_layers=["0"]
    )
    axes = found.plot().axes[0]
    assert axes.images[0].get_array().tolist() == found.values.tolist()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0"]
