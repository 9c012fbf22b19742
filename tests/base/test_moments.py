"""Rows of any input dtype in float64, and their mean to twice the digits."""

import pytest
import torch

from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.moments import Centre, as_rows


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.bool]
)
def test_input_dtypes(dtype):
    rows = as_rows(torch.tensor([[0, 1], [1, 1], [1, 0]]).to(dtype))
    assert rows.dtype == torch.float64
    assert torch.allclose(Centre.of(rows).mean, torch.tensor([2 / 3, 2 / 3], dtype=torch.float64))


def test_variance_survives_a_mean_that_swallows_it_in_float32():
    x = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64) + 1e8
    assert abs(float(Centre.of(x).centred(x).square().mean()) - 2 / 3) < 1e-12
    by_squares = (x.float() ** 2).mean() - x.float().mean() ** 2
    assert abs(float(by_squares) - 2 / 3) > 0.1, "the textbook formula is expected to fail here"


def test_not_contiguous_and_more_axes():
    x = torch.randn(4, 5, 6).transpose(0, 2)
    assert not x.is_contiguous()
    assert torch.equal(as_rows(x), x.reshape(6, -1).double())
    assert as_rows(torch.zeros(0, 3, 2)).shape == (0, 6)
    assert as_rows(torch.ones(3)).shape == (3, 1)


def test_wrong_input_is_explained():
    with pytest.raises(InputError, match="finite"):
        as_rows(torch.tensor([[float("nan")]]))
    with pytest.raises(UnsupportedError, match="real"):
        as_rows(torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(InputError, match="first axis"):
        as_rows(torch.tensor(1.0))
