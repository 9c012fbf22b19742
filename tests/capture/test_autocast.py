"""Under the user's autocast the model runs as the user runs it, and gramscope computes in its own precision."""

import pytest
import torch
from torch import nn

import gramscope as gs
from cases import CASES


def networks():
    torch.manual_seed(0)
    yield (
        "mlp on a sequence",
        nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 2)),
        (torch.randn(4, 3, 8)),
    )
    convolutions = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 3)
    )
    yield "convolutions", convolutions.eval(), torch.randn(5, 2, 6, 6)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    yield "attention", nn.Sequential(encoder, nn.Flatten(), nn.Linear(32, 3)), torch.randn(5, 4, 8)
    for name in ("hf_llama", "hf_bert_classification"):
        pytest.importorskip("transformers")
        model, x, _ = CASES[name].build(dtype=torch.float32)
        yield name, model, x


NETWORKS = {name: (model, x) for name, model, x in networks()}


def rows(model, x):
    """Rows of the Jacobian as the user's own loop would get them: forward under autocast, backward outside."""
    with torch.autocast("cpu", torch.bfloat16):
        f = _outputs(model, x)
    each = []
    for value in f.flatten():
        found = torch.autograd.grad(value, list(model.parameters()), retain_graph=True, allow_unused=True)
        pairs = zip(found, model.parameters(), strict=True)
        each.append(torch.cat([(torch.zeros_like(p) if g is None else g).double().flatten() for g, p in pairs]))
    return torch.stack(each)


def _outputs(model, x):
    f = model(**x) if isinstance(x, dict) else model(x)
    return (f if isinstance(f, torch.Tensor) else f.logits if hasattr(f, "logits") else f[0]).flatten(1)


@pytest.mark.parametrize("name", NETWORKS)
def test_kernels_and_operators(name):
    model, x = NETWORKS[name]
    exact = rows(model, x)
    want = exact @ exact.T
    with torch.autocast("cpu", torch.bfloat16):
        found = {
            "kernel": gs.ntk(model, x).reshape(want.shape),
            "operator": gs.ntk_operator(model, x).dense(),
        }
        trace = gs.ntk(model, x, reduce="trace")
    for kernel in found.values():
        assert kernel.dtype == torch.float32
        # Backward passes in bfloat16, in another order; a wrong part shows at the size of that part.
        assert float((kernel - want).norm()) <= 2e-2 * float(want.norm())
    n = len(trace)
    assert float((trace - torch.einsum("ncmc->nm", want.reshape(n, -1, n, len(want) // n))).norm()) <= 2e-2 * float(
        trace.norm()
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_the_contraction_is_not_rounded(name):
    """A sum of products in float32 is positive to float32; rounded to bfloat16 it would be off by 1e-3."""
    model, x = NETWORKS[name]
    with torch.autocast("cpu", torch.bfloat16):
        kernel = gs.ntk(model, x)
    values = torch.linalg.eigvalsh(kernel.reshape(kernel.shape[0] * kernel.shape[1], -1).double())
    assert float(values[0]) >= -1e-5 * float(values[-1])


def test_solvers_and_products_keep_their_precision():
    torch.manual_seed(0)
    matrix = torch.randn(40, 40)
    matrix = matrix @ matrix.T
    want = torch.linalg.eigvalsh(matrix.double())[-3:].flip(0)
    with torch.autocast("cpu", torch.bfloat16):
        operator = gs.linalg.Dense(matrix, symmetric=True)
        product = operator @ torch.ones(40)
        values = gs.linalg.eigenvalues_top(operator, 3).values
    torch.testing.assert_close(product.double(), matrix.double() @ torch.ones(40).double(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(values.double().sort(descending=True).values, want, rtol=1e-5, atol=0)


def test_an_operator_made_under_autocast_stays_what_it_was():
    model, x = NETWORKS["mlp on a sequence"]
    with torch.autocast("cpu", torch.bfloat16):
        operator = gs.ntk_operator(model, x)
        inside = operator.dense()
    assert torch.equal(operator.dense(), inside)
    assert not torch.equal(gs.ntk_operator(model, x).dense(), inside)


def test_the_users_cache_of_cast_weights_is_left_alone():
    """A loop inside one autocast trains bitwise the same with and without a measurement in it."""

    def train(measured):
        torch.manual_seed(0)
        model, x, y = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(6, 4), torch.randn(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                if measured:
                    gs.ntk(model, x)
                    gs.explain_step(model, x, y, optimizer=optimizer)
                    gs.ntk_operator(model, x).dense()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))
