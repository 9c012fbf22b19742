"""One site at a time: both ways of summation on random shapes and layouts, and the counts by which one is chosen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from gramscope.capture import OuterSite
from gramscope.capture.sites import Frame
from gramscope.scale import sketch_sites
from gramscope.scale.sketch_cost import SketchShape, factored_cost, formed_cost, formed_is_cheaper
from gramscope.scale.sketch_factors import Projections, SketchPlan

F64 = torch.float64


def outer_site(n, k, T, g, o, i, order, frame=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, T, g, i, generator=generator, dtype=F64)
    signals = torch.randn(n, k, T, g, o, generator=generator, dtype=F64)
    axes = (g, o, i) if len(order) == 3 else (o, i)
    return OuterSite("w", "linear", frame, inputs.__getitem__, signals, i, axes, order)


def factors_of(site, shape, size=2, repeats=2):
    return Projections(SketchPlan(size, repeats, "orthogonal", 0)).factors("w", shape, [site], F64, torch.device("cpu"))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 6),
    order=st.permutations([0, 1, 2]),
    view=st.sampled_from(["whole", "rows of a larger one", "shuffled"]),
    seed=st.integers(0, 9),
)
def test_factored_and_formed_sketches_agree_for_any_layout(sizes, order, view, seed):
    """Groups, transposed and sliced weights; entries in no order at all go by the formed gradient."""
    n, k, T, g, o, i = sizes
    shape = tuple((g, o, i)[axis] for axis in order)
    count, frame = g * o * i, None
    if view == "rows of a larger one":
        frame = Frame(torch.arange(count) + count // shape[0], (2 + shape[0], *shape[1:]))
    elif view == "shuffled":
        frame = Frame(torch.randperm(count, generator=torch.Generator().manual_seed(seed)), shape)
    site = outer_site(n, k, T, g, o, i, tuple(order), frame, seed)
    factors = factors_of(site, shape if frame is None else frame.shape)
    place = sketch_sites.placed(site, factors.matrix)
    if order == [0, 1, 2] and view != "shuffled":
        assert place is not None, "a plain layer, or a part of one, needs no gradient"
    if place is not None:
        assert torch.allclose(
            sketch_sites._outer(site, place, factors), sketch_sites._formed(site, factors), rtol=1e-10
        )


def test_rows_of_a_shuffled_weight_are_not_taken_for_an_outer_product():
    frame = Frame(torch.randperm(12, generator=torch.Generator().manual_seed(0)), (3, 4))
    site = outer_site(2, 1, 2, 1, 3, 4, (0, 1), frame)
    assert sketch_sites.placed(site, sketch_sites.MatrixShape((3, 4), 1)) is None


def shape_of(site, factors):
    return sketch_sites.sketch_shape(site, factors)


@pytest.mark.parametrize(("T", "g", "k"), [(5, 1, 1), (5, 1, 3), (2, 2, 1)])
def test_costs_are_the_multiply_adds_that_torch_counts(T, g, k):
    site = outer_site(1, k, T, g, 20, 30, (0, 1, 2))
    factors = factors_of(site, (g, 20, 30), size=3)
    place = sketch_sites.placed(site, factors.matrix)
    with FlopCounterMode(display=False) as counter:
        sketch_sites._outer(site, place, factors)
    assert counter.get_total_flops() == 2 * factored_cost(shape_of(site, factors))
    with FlopCounterMode(display=False) as counter:
        sketch_sites._formed(site, factors)
    assert counter.get_total_flops() == 2 * formed_cost(shape_of(site, factors))


def test_wide_layers_are_factored_and_early_convolutions_formed():
    wide = SketchShape(k=1, T=128, g=1, i=768, o=3072, rows=3072, columns=768, b=16, a=16, repeats=6)
    early = SketchShape(k=1, T=784, g=1, i=9, o=16, rows=16, columns=9, b=16, a=9, repeats=6)
    assert not formed_is_cheaper(wide)
    assert formed_is_cheaper(early)
    assert factored_cost(wide) < 128 * 768 * 3072, "not even the gradient is formed for that"
