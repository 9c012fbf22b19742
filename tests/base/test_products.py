"""Products of float32 matrices by oneDNN, beside float64."""

import pytest
import torch

from gramscope.base import arithmetic


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """oneDNN for all products, whatever the processor; the shapes that it was given."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    called: list[tuple[int, ...]] = []
    multiply = torch.ops.mkldnn._linear_pointwise

    def noted(left, right, *rest):  # type: ignore[no-untyped-def]
        called.append((len(left), *right.shape))
        return multiply(left, right, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", noted)
    monkeypatch.setattr(arithmetic, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(arithmetic, "WORTH", 0)
    return called


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 1), (40, 30, 9000)], ids=str)
def test_product_is_that_of_float64(onednn: list[tuple[int, ...]], shape: tuple[int, int, int]) -> None:
    r, q, p = shape
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(rows, p, generator=generator) for rows in (r, q))
    exact = left.double() @ right.double().T
    for one, other in ((left, right), (left.T.contiguous().T, right), (left, right.repeat(1, 2)[:, :p])):
        found = arithmetic.product_with_transpose(one, other)
        assert float((found - exact).norm() / exact.norm()) < 1e-6
    assert onednn == [(r, q, p)] * 3


def test_float64_and_mixed_matrices_stay_with_torch(onednn: list[tuple[int, ...]]) -> None:
    left, right = torch.randn(3, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    assert torch.equal(arithmetic.product_with_transpose(left, right), left @ right.T)
    assert not onednn
    assert not arithmetic.onednn_pays(left, 2**40)
    assert arithmetic.onednn_pays(left.float(), 2**40)
