"""Signals that split into a factor of the output and one of the example: found where they are, and nowhere else."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramscope as gs
from cases import CASES
from gramscope.kernels import assemble, cost, factored, memory
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


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(-1)


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


class Switched(nn.Module):
    """A second way to the outputs, open for large inputs only, whose signals do not split as the others' do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.gate, self.second, self.head = nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(6, 3)
        nn.init.constant_(self.gate.bias, -3.0)

    def forward(self, x):
        pooled = torch.tanh(self.last(torch.relu(self.first(x)))).mean((2, 3))
        return self.head(pooled) + self.second(torch.relu(self.gate(pooled * x.abs().amax((1, 2, 3))[:, None])))


class Turned(nn.Module):
    """One weight, used as it is for high images and transposed for wide ones."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(2, 5, 3, padding=1), nn.Linear(5, 3)
        self.weight = nn.Parameter(torch.randn(5, 5, size, size))

    def forward(self, x):
        convolve = F.conv2d if x.shape[2] >= x.shape[3] else F.conv_transpose2d
        return self.head(torch.relu(convolve(torch.relu(self.first(x)), self.weight)).mean((2, 3)))


def assert_equal_to_reference(model, x, x2, reduce):
    expected = reference_ntk(model, x, x2, reduce=reduce, by_site=True)
    found = gs.ntk(model, x, x2, reduce=reduce, by_site=True)
    for site, kernel in expected.items():
        torch.testing.assert_close(found[site], kernel, rtol=1e-12, atol=1e-12 * float(kernel.abs().max()))


@pytest.fixture
def in_small_parts(monkeypatch):
    """Two examples at a time, and signals taken apart wherever they can be."""
    monkeypatch.setattr(cost, "COMPARED", ALWAYS)
    monkeypatch.setattr(memory, "PART", 1)


@pytest.mark.parametrize("reduce", ["none", "trace"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_weight_that_is_turned_in_x2(size, reduce, in_small_parts):
    torch.manual_seed(0)
    x, x2 = torch.randn(6, 2, 9, 7, dtype=torch.float64), torch.randn(5, 2, 7, 9, dtype=torch.float64)
    assert_equal_to_reference(Turned(size).double(), x, x2, reduce)


@pytest.mark.parametrize("reduce", ["none", "trace"])
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["all split", "x2 does not"])
@pytest.mark.parametrize("m", [2, 5], ids=["x2 at once", "x2 in parts"])
def test_blocks_of_which_one_is_kept_by_factors(m, scale, reduce, in_small_parts):
    torch.manual_seed(0)
    model, x = Switched().double(), torch.randn(6, 2, 8, 8, dtype=torch.float64)
    x2 = scale * torch.randn(m, 2, 8, 8, dtype=torch.float64)
    assert_equal_to_reference(model, x, x2, reduce)
    assert_equal_to_reference(model, x2, x, reduce)


def test_a_later_part_that_does_not_split_is_taken_without_factors(in_small_parts):
    torch.manual_seed(0)
    model, x = Switched().double(), torch.randn(6, 2, 8, 8, dtype=torch.float64)
    options = {"outputs": None, "frozen": False, "precision": None}
    kinds = []
    for last in (1.0, 30.0):
        x[5] *= last
        snapshot = snapshot_in_parts(model, x, 6, 2, trace=False, **options)
        kinds.append(type(next(site for site in snapshot.sites if site.name == "last.weight")))
        assert_equal_to_reference(model, x, None, "none")
    assert kinds[0] is FactoredSite
    assert kinds[1] is not FactoredSite


def test_what_a_piece_holds_is_bounded(monkeypatch):
    """One example of the columns at a time gives what all together give."""
    generator = torch.Generator().manual_seed(0)
    left, right, factors, others = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 3, 5), (6, 3, 5), (2, 3), (2, 3))
    )
    expected = torch.einsum("co,do,noi,moi->ncmd", factors, others, left, right).reshape(8, 12)
    for held in (factored.HELD, {"cpu": 1}):
        monkeypatch.setattr(factored, "HELD", held)
        found = torch.zeros(8, 12, dtype=torch.float64)
        factored.FactoredPiece(left, right, factors, others).add(found, (0, 4), (0, 6))
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


def test_small_outputs_beside_large_ones_are_held_to_their_own_size():
    """Two outputs a billion times the others: whatever these do, it vanishes beside 16 roundings of the large ones."""
    torch.manual_seed(0)
    large = torch.randn(1, 2, 1, 1, 3) * (1 + torch.rand(4, 1, 5, 1, 3))  # nowhere zero
    small = torch.randn(4, 2, 5, 1, 3)
    signals = torch.cat([large, 1e-9 * small], dim=1)
    assert Splitter(large).split(large) is not None
    assert Splitter(signals).split(signals) is None
    _, _, alike = products(4, 4, 5, 1, 3, dtype=torch.float32)
    alike[:, 2:] *= 1e-9
    assert Splitter(alike).split(alike) is not None


def test_rows_much_larger_than_their_signals_are_not_kept(in_small_parts):
    model = nn.Sequential(
        nn.Conv1d(1, 64, 4, 4), nn.ReLU(), nn.Conv1d(64, 8, 3, padding=1), nn.ReLU(), Mean(), nn.Linear(8, 2)
    )
    snapshot = snapshot_in_parts(
        model.double(), torch.randn(6, 1, 8, dtype=torch.float64), 6, 2, trace=False, outputs=None, frozen=False,
        precision=None,
    )  # fmt: skip
    assert not any(isinstance(site, FactoredSite) for site in snapshot.sites if site.name == "2.weight")


def test_parts_that_split_are_one_site_by_factors(monkeypatch):
    monkeypatch.setattr(cost, "COMPARED", ALWAYS)
    model, x = Pooled().double().eval(), torch.randn(5, 2, 6, 6, dtype=torch.float64)
    options = {"outputs": None, "frozen": False, "precision": None}
    snapshot = snapshot_in_parts(model, x, 5, 2, trace=False, **options)
    whole = gs.capture(model, x).by_parameter()
    split = {site.name: site for site in snapshot.sites if isinstance(site, FactoredSite)}
    assert {"last.weight", "shortcut.weight"} <= set(split)
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
