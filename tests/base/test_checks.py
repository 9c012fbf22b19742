"""Checks that many calls share: one rule, one message."""

import numpy as np
import pytest
import torch

from gramscope.base.checks import check_choice, check_tensor
from gramscope.base.errors import InputError, UnsupportedError


def test_a_choice() -> None:
    check_choice(None, "channels", ("first", None))
    with pytest.raises(InputError, match="end must be one of 'a', 'b', got 'c'"):
        check_choice("c", "end", ("a", "b"))


def test_a_tensor() -> None:
    x = torch.ones(2)
    assert check_tensor(x, "x") is x
    for bad in (np.ones(2), [1.0], None):
        with pytest.raises(InputError, match=r"x must be a torch.Tensor, got \w+. Convert it"):
            check_tensor(bad, "x")
    with pytest.raises(UnsupportedError, match="x must be real"):
        check_tensor(x.to(torch.complex64), "x")
