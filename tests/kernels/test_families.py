"""Families of Hugging Face models: the tangent kernel against one backward pass a scalar output, in float64.

Tolerances as in test_zoo.py, relative to the norm of the exact kernel: 1e-12, or 1e-5 for the models that cast to
float32 inside (INNER_FLOAT32 says where).
"""

import copy
from functools import cache

import pytest
import torch

pytest.importorskip("transformers")

import gramscope as gs
from references.jacobian import assert_kernel_close, assert_sites_close, reference_ntk
from zoo.families import BUILDERS, INNER_FLOAT32, TINY, build, run_experts

# Parameters that may be computed by the exact but slow autograd fallback: family -> {parameter: reason}.
FALLBACK_OK: dict[str, dict[str, str]] = {}

MIXTURES = ("mixtral", "qwen2_moe")


@cache
def built(name):
    return build(name, TINY, n=3)


@cache
def exact_sites(name):
    model, x, outputs = built(name)
    return reference_ntk(model, x, by_site=True, outputs=outputs)


def exact(name):
    return sum(exact_sites(name).values())


def tolerance(name):
    return 1e-5 if name in INNER_FLOAT32 else 1e-12


@pytest.mark.parametrize("name", BUILDERS)
def test_full_kernel(name):
    model, x, outputs = built(name)
    assert_kernel_close(gs.ntk(model, x, outputs=outputs), exact(name), tolerance(name))


@pytest.mark.parametrize("name", BUILDERS)
def test_trace(name):
    model, x, outputs = built(name)
    want = torch.einsum("acbc->ab", exact(name))
    assert_kernel_close(gs.ntk(model, x, reduce="trace", outputs=outputs), want, tolerance(name))


@pytest.mark.parametrize("name", BUILDERS)
def test_kernel_of_each_parameter(name):
    model, x, outputs = built(name)
    assert_sites_close(gs.ntk(model, x, by_site=True, outputs=outputs), exact_sites(name), tolerance(name))


@pytest.mark.parametrize("name", BUILDERS)
def test_no_fallback(name):
    model, x, outputs = built(name)
    unexpected = set(gs.capture(model, x, outputs=outputs).fallback) - set(FALLBACK_OK.get(name, ()))
    assert not unexpected


# --- the other ways to run the experts of a mixture


def with_experts_run(name, how):
    """grouped_mm, the default of transformers 5, has no float64."""
    model, x, outputs = build(name, TINY, n=3, dtype=torch.float32 if how == "grouped_mm" else torch.float64)
    run_experts(model, how)
    return model, x, outputs


@pytest.mark.parametrize("how", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_in_one_product(name, how):
    """batched_mm takes one matrix a token; grouped_mm sorts the tokens of all examples by expert."""
    model, x, outputs = with_experts_run(name, how)
    loop = copy.deepcopy(model)
    run_experts(loop, "eager")
    want = reference_ntk(loop, x, by_site=True, outputs=outputs)
    assert_sites_close(gs.ntk(model, x, by_site=True, outputs=outputs), want, 1e-5)


@pytest.mark.parametrize("how", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", MIXTURES)
def test_no_fallback_for_experts_in_one_product(name, how):
    model, x, outputs = with_experts_run(name, how)
    assert gs.capture(model, x, outputs=outputs).fallback == ()
