"""Refusing a network is a claim: its examples are coupled. It must be true, whatever the sizes."""

from dataclasses import replace

import pytest

import gramscope as gs
from cases import COUPLED
from gramscope.base.errors import CoupledExamplesError
from references.jacobian import assert_kernel_close, reference_ntk
from zoo import broadcast


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", broadcast.CASES)
def test_broadcast_parameters_at_every_batch_size(name, n):
    model, x, _ = replace(broadcast.CASES[name], n=n).build(seed=n)
    assert_kernel_close(gs.ntk(model, x), reference_ntk(model, x), 1e-12)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", COUPLED)
def test_true_coupling_is_refused_at_every_batch_size(name, n):
    model, x, _ = replace(COUPLED[name], n=n).build(seed=n)
    with pytest.raises(CoupledExamplesError):
        gs.ntk(model, x)
