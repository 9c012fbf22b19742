"""Signals that split into a factor of the output and one of the example: found where they are, and nowhere else."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramscope as gs
from cases import CASES
from gramscope.capture import RowSite
from gramscope.kernels import assemble, cost, factored, parts
from gramscope.kernels.factored import FactoredSite, Splitter, may_split, split_site
from gramscope.kernels.ntk import contracted
from in_parts import snapshot_in_parts
from references.jacobian import reference_ntk

ALWAYS, NEVER = -(10**18), 10**18
SIZES = st.integers(1, 4)
# Networks of the zoo with sites of several positions whose signals split.
SPLITTING = [
    "pooling_max_average_adaptive",
    "encoder_layer_sequence_first",
    "vit",
    "class_token",
    "class_token_by_repeat",
    "keyword_arguments",
    "learned_positions_as_many_as_examples",
    "functional_convolution",
    "linear_called_on_two_and_three_axes",
    "siamese",
    "siamese_in_one_doubled_batch",
    "siamese_interleaved",
    "mixer_over_tokens",
    "windows_in_the_batch",
    "micro_batches",
    "one_call_an_example",
    "batch_padded_inside",
    "experts_by_scatter_add",
    "gather_by_data",
    "last_valid_token",
    "graph_convolution",
    "resnet18_narrow",
    "unet_with_skip",
    "hf_gpt2_classification",
]


def products(n, k, T, g, o, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(k, g, o, generator=generator, dtype=dtype)
    of_example = torch.randn(n, T, g, o, generator=generator, dtype=dtype)
    of_example *= torch.rand(of_example.shape, generator=generator) > 0.4  # as behind a ReLU
    return factors, of_example, factors[None, :, None] * of_example[:, None]


class Pooled(nn.Module):
    """Convolutions, a residual sum, pooling, a head: as most residual networks end."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU, groups: int = 1, transposed: bool = False) -> None:
        super().__init__()
        kind = nn.ConvTranspose2d if transposed else nn.Conv2d
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.last, self.norm = kind(4, 6, 3, padding=1, groups=groups), nn.BatchNorm2d(6)
        self.shortcut, self.head = nn.Conv2d(4, 6, 1, bias=False), nn.Linear(6, 3)
        self.activation = activation()

    def forward(self, x):
        x = self.activation(self.first(x))
        return self.head(self.activation(self.norm(self.last(x)) + self.shortcut(x)).mean((2, 3)))


POOLED = {
    "relu": Pooled(),
    "silu": Pooled(nn.SiLU),
    "grouped": Pooled(groups=2),
    "transposed": Pooled(nn.Tanh, transposed=True),
    "grouped, transposed": Pooled(nn.GELU, groups=2, transposed=True),
}


@given(SIZES, SIZES, SIZES, SIZES, SIZES, st.integers(0, 99), st.sampled_from([torch.float64, torch.float32]))
@settings(max_examples=80, deadline=None)
def test_products_are_taken_apart(n, k, T, g, o, seed, dtype):
    _, _, signals = products(n, k, T, g, o, seed=seed, dtype=dtype)
    splitter = Splitter(signals)
    found = splitter.split(signals)
    assert found is not None
    # Either side is known up to a factor of the channel; their product is not.
    again = splitter.factors[None, :, None] * found[:, None]
    torch.testing.assert_close(again, signals, rtol=8 * torch.finfo(dtype).eps, atol=0)
    assert bool((splitter.factors.abs() <= 1).all())


@given(SIZES, st.integers(2, 4), SIZES, SIZES, SIZES, st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_one_entry_that_does_not_fit_is_seen(n, k, T, g, o, seed):
    """Off by a hundred roundings of the greatest signal of its channel and position."""
    _, of_example, signals = products(n + 1, k, T, g, o, seed=seed)
    where = of_example.abs().flatten().argmax()
    place = torch.unravel_index(where, of_example.shape)
    if float(of_example[place]) == 0:
        return
    example, position, group, channel = (int(index) for index in place)
    column = signals[example, :, position, group, channel]
    column[int(column.abs().argmin())] += 100 * torch.finfo(torch.float64).eps * column.abs().max()
    if float(of_example[:, :, group, channel].count_nonzero()) > 1:  # else this entry tells what F is
        assert Splitter(signals).split(signals) is None


def test_a_channel_that_is_silent_at_first_is_learnt_later():
    factors, of_example, _ = products(6, 3, 5, 1, 4)
    of_example[:4, ..., 2] = 0
    signals = factors[None, :, None] * of_example[:, None]
    splitter = Splitter(signals)
    parts_found = [splitter.split(signals[:3]), splitter.split(signals[3:])]
    assert all(part is not None for part in parts_found)
    again = splitter.factors[None, :, None] * torch.cat(parts_found)[:, None]
    torch.testing.assert_close(again, signals, rtol=1e-14, atol=0)


def test_signals_that_are_not_finite_do_not_split():
    for value in (torch.nan, torch.inf):
        _, _, signals = products(4, 3, 5, 1, 4)
        signals[2, 1, 3, 0, 2] = value
        assert Splitter(signals).split(signals) is None


def test_one_output_and_half_precision_are_left_alone():
    _, _, signals = products(3, 3, 4, 1, 5)
    assert may_split(signals)
    assert not may_split(signals[:, :1])
    assert not may_split(signals.to(torch.bfloat16))


@pytest.mark.parametrize("name", POOLED)
def test_which_sites_of_a_pooled_network_split(name):
    model, x = POOLED[name].double().eval(), torch.randn(5, 2, 6, 6, dtype=torch.float64)
    sites = {site.name: split_site(site) for site in gs.capture(model, x).sites if site.name.endswith("weight")
             and hasattr(site, "positions")}  # fmt: skip
    assert {site for site, split in sites.items() if split is not None} >= {"last.weight", "shortcut.weight"}
    assert sites["first.weight"] is None


@pytest.mark.parametrize("reduce", ["none", "trace"])
@pytest.mark.parametrize("name", POOLED)
def test_kernels_by_factors_against_brute_force(name, reduce, monkeypatch):
    """float64 to 1e-12, as every rule: the split itself is good to 16 roundings, 4e-15."""
    monkeypatch.setattr(cost, "COMPARED", ALWAYS)
    used = counted_splits(monkeypatch)
    model, x = POOLED[name].double().eval(), torch.randn(5, 2, 6, 6, dtype=torch.float64)
    x2 = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    for other in (None, x2):
        expected = reference_ntk(model, x, other, reduce=reduce, by_site=True)
        found = gs.ntk(model, x, other, reduce=reduce, by_site=True)
        for site, kernel in expected.items():
            torch.testing.assert_close(found[site], kernel, rtol=1e-12, atol=1e-12 * float(kernel.abs().max()))
    assert len(used) >= 4  # two sites, with x2 and without


def test_float32_stays_within_its_tolerance(monkeypatch):
    monkeypatch.setattr(cost, "COMPARED", ALWAYS)
    model, x = Pooled().eval(), torch.randn(6, 2, 9, 9)
    used = counted_splits(monkeypatch)
    found, expected = gs.ntk(model, x), reference_ntk(model, x)
    assert used
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-6


def test_a_later_part_that_does_not_split_goes_on_as_rows():
    model, x = Pooled(groups=2, transposed=True).double().eval(), torch.randn(6, 2, 6, 6, dtype=torch.float64)
    some = [gs.capture(model, x[start : start + 2]).by_parameter()["last.weight"][0] for start in (0, 2, 4)]
    some[1] = replace(some[1], signals=torch.randn(some[1].signals.shape, dtype=torch.float64))
    joining = parts._Factored(some[0], 6)
    for start, site in zip((0, 2, 4), some, strict=True):
        assert joining.add(site, start)
    joined = joining.site()
    assert isinstance(joined, RowSite)
    torch.testing.assert_close(joined.rows(), torch.cat([site.rows() for site in some]), rtol=1e-12, atol=1e-14)


def test_parts_that_split_are_one_site_by_factors(monkeypatch):
    monkeypatch.setattr(cost, "COMPARED", ALWAYS)
    model, x = Pooled().double().eval(), torch.randn(5, 2, 6, 6, dtype=torch.float64)
    options = {"outputs": None, "frozen": False, "precision": None}
    snapshot = snapshot_in_parts(model, x, 5, 2, trace=False, **options)
    whole = gs.capture(model, x).by_parameter()
    split = {site.name: site for site in snapshot.sites if isinstance(site, FactoredSite)}
    assert set(split) == {"last.weight", "shortcut.weight", "head.weight"}
    for name, site in split.items():
        assert (site.examples, site.directions, site.dtype) == (5, 3, torch.float64)
        torch.testing.assert_close(site.rows(), whole[name][0].rows(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", SPLITTING)
def test_the_zoo_with_and_without_factors(name, monkeypatch):
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    used = counted_splits(monkeypatch)
    model, x, _ = case.build(dtype=torch.float64)
    options = {"outputs": case.outputs, "frozen": False, "precision": None}
    snapshot = gs.capture(model, x, **options)
    for trace in (False, True):
        monkeypatch.setattr(cost, "COMPARED", NEVER)
        plain = contracted(snapshot, trace=trace, by_site=True)
        monkeypatch.setattr(cost, "COMPARED", ALWAYS)
        in_parts = snapshot_in_parts(model, x, case.n, 2, trace=trace, **options)
        scale = max(float(kernel.abs().max()) for kernel in plain.values())
        for found in (contracted(s, trace=trace, by_site=True) for s in (snapshot, in_parts)):
            for parameter, kernel in plain.items():
                torch.testing.assert_close(found[parameter], kernel, rtol=1e-10, atol=1e-12 * scale)
    assert used


def counted_splits(monkeypatch):
    """Sites that were split, as a list that grows."""
    used = []

    def watched(site):
        split = factored.split_site(site)
        if split is not None:
            used.append(site.name)
        return split

    monkeypatch.setattr(assemble, "split_site", watched)
    return used
