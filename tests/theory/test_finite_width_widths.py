"""``widths`` mean the same whatever the data are."""

import pytest
import torch

from gramscope.base.errors import InputError
from gramscope.theory import FiniteWidthMLP


def test_widths_begin_with_the_input():
    mlp = FiniteWidthMLP(widths=[4, 4, 4])
    assert mlp.layer_widths() == (4, 4)
    assert len(mlp.flow(torch.ones(1, 4))) == len(mlp.flow_from_gram(torch.ones(1, 1))) == 2
    with pytest.raises(InputError, match=r"n_0 = 4 features to match widths=\[4, 4, 4\], got 3.*pass depth=3"):
        mlp.flow(torch.ones(1, 3))  # gave a network of three layers


@pytest.mark.parametrize("features", [3, 4])
def test_with_depth_the_input_may_be_left_out(features):
    x = torch.ones(1, features)
    mlp = FiniteWidthMLP(widths=[4, 4, 4], depth=3)
    assert mlp.flow(x).widths == mlp.layer_widths() == (4, 4, 4)
    assert FiniteWidthMLP(widths=[features, 4, 4, 4], depth=3).flow(x).widths == (4, 4, 4)
    with pytest.raises(InputError, match="n_0 = 7"):
        FiniteWidthMLP(widths=[7, 4, 4, 4], depth=3).flow(x)


def test_the_two_can_be_told_apart_when_shown():
    assert repr(FiniteWidthMLP([4, 4, 4], depth=3)).endswith("depth=3)")
    assert "depth" not in repr(FiniteWidthMLP([4, 4, 4]))
