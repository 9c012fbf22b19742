"""Signals that are a product of a side of the output and one of the example: known from the way they came."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramscope as gs
from cases import CASES
from gramscope.capture import OuterSite
from gramscope.kernels import assemble, factored, memory, parts
from gramscope.kernels.cost import Shape, pairing_pays
from gramscope.kernels.factored import FactoredSite, PairedPiece
from gramscope.kernels.ntk import contracted
from in_parts import snapshot_in_parts
from references.jacobian import reference_ntk

SIZES = st.integers(1, 4)


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


@pytest.fixture
def wherever_possible(monkeypatch):
    """Factors are used wherever a site has some, whether that saves work or not."""
    for room in (assemble, parts):
        monkeypatch.setattr(room, "split_pays", lambda shape: True)
    monkeypatch.setattr(assemble, "pairing_pays", lambda shape: not shape.trace)


@pytest.fixture
def in_small_parts(wherever_possible, monkeypatch):
    """And two examples are taken at a time."""
    monkeypatch.setattr(memory, "PART", 1)


def by_factors(snapshot):
    """Names of the parameters whose signals are known to be products."""
    return {site.name for site in snapshot.sites if isinstance(site, OuterSite) and site.factors is not None}


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("name", POOLED)
def test_which_sites_of_a_pooled_network_split(name, n):
    """A batch of one has the same factors as any other: nothing is taken for shared because there is one example."""
    model, x = POOLED[name].double().eval(), torch.randn(n, 2, 6, 6, dtype=torch.float64)
    found = by_factors(gs.capture(model, x))
    # Next to the edge of the image, a transposed kernel sees a part of the positions only, and F is not the same there.
    assert found == ({"shortcut.weight"} if "transposed" in name else {"last.weight", "shortcut.weight"})


@pytest.mark.parametrize("name", CASES)
def test_the_product_is_the_signal_wherever_one_is_known(name):
    """To 8 roundings of each entry by itself: both sides are products of the same few numbers in another order."""
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    model, x, _ = case.build(dtype=torch.float64)
    for site in gs.capture(model, x, outputs=case.outputs, coupled="exact").sites:
        if isinstance(site, OuterSite) and site.factors is not None:
            side, own = site.factors.of_direction, site.factors.of_example
            tolerance = 8 * torch.finfo(site.dtype).eps
            torch.testing.assert_close(side[None, :, None] * own[:, None], site.signals, rtol=tolerance, atol=0)


def test_networks_whose_signals_split():
    """A head behind an activation, at one position or behind a mean over all; not behind what mixes entries."""
    deep = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    x = torch.randn(4, 3)
    assert by_factors(gs.capture(deep, x)) == {"2.weight"}
    assert by_factors(gs.capture(deep, x, directions=torch.randn(2, 4, 2))) == set()  # other directions an example
    normed = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 2))
    assert by_factors(gs.capture(normed, x)) == set()
    flattened = nn.Sequential(nn.Conv1d(1, 4, 2), nn.GELU(), nn.Flatten(), nn.Linear(8, 2))
    assert by_factors(gs.capture(flattened, x[:, None])) == set()  # F is another at each position
    averaged = nn.Sequential(nn.Conv1d(1, 4, 2), nn.GELU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2))
    assert by_factors(gs.capture(averaged, x[:, None])) == {"0.weight"}


class TwoHeads(nn.Module):
    """Outputs of two heads side by side: two signals that are the same for all examples meet, and stay so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 1)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return torch.cat([self.left(hidden), self.right(hidden)], dim=1)


def test_two_heads_share_what_is_below_them(wherever_possible):
    model, x = TwoHeads().double(), torch.randn(4, 3, dtype=torch.float64)
    assert by_factors(gs.capture(model, x)) == {"first.weight"}
    for reduce in ("none", "trace"):
        assert_equal_to_reference(model, x, None, reduce)


@pytest.mark.parametrize("reduce", ["none", "trace"])
@pytest.mark.parametrize("name", POOLED)
def test_kernels_by_factors_against_brute_force(name, reduce, wherever_possible):
    """float64 to 1e-12, as every rule."""
    model, x = POOLED[name].double().eval(), torch.randn(5, 2, 6, 6, dtype=torch.float64)
    for other in (None, torch.randn(3, 2, 6, 6, dtype=torch.float64)):
        assert_equal_to_reference(model, x, other, reduce)


def test_float32_stays_within_its_tolerance(wherever_possible):
    model, x = Pooled().eval(), torch.randn(6, 2, 9, 9)
    found, expected = gs.ntk(model, x), reference_ntk(model, x)
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-6


@given(SIZES, SIZES, SIZES, SIZES, st.booleans(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_pairs_of_outputs(n, m, k, o, symmetric, seed):
    generator = torch.Generator().manual_seed(seed)
    m = n if symmetric else m
    inner, left, right, factors = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((n, m), (n, o), (m, o), (k, o))
    )
    right = left if symmetric else right
    expected = torch.einsum("nm,co,do,no,mo->ncmd", inner, factors, factors, left, right).reshape(n * k, m * k)
    found = torch.ones(n * k, m * k, dtype=torch.float64)
    piece = PairedPiece(inner, left, right, factors)
    for row in range(n):
        for cols in ((0, m // 2), (m // 2, m)):
            piece.add(found[row * k : (row + 1) * k, cols[0] * k : cols[1] * k], (row, row + 1), cols)
    torch.testing.assert_close(found - 1, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("memory", [None, 60_000], ids=["whole", "in blocks"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_deep_network_in_pairs_of_outputs(bias, memory, monkeypatch):
    used = []
    monkeypatch.setattr(assemble, "pairing_pays", lambda shape: not shape.trace)

    class Watched(PairedPiece):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            used.append(self)

    monkeypatch.setattr(assemble, "PairedPiece", Watched)
    torch.manual_seed(0)
    layers = nn.Linear(4, 9, bias=bias), nn.ReLU(), nn.Linear(9, 7, bias=bias), nn.GELU(), nn.Linear(7, 3, bias=bias)
    model, x = nn.Sequential(*layers).double(), torch.randn(23, 4, dtype=torch.float64)
    for other in (None, torch.randn(5, 4, dtype=torch.float64)):
        expected = reference_ntk(model, x, other)
        found = gs.ntk(model, x, other, memory=memory)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))
        assert used
        used.clear()


def test_many_outputs_are_not_held_in_pairs(monkeypatch):
    """A head of 600 outputs: 180,300 pairs of 300 numbers would be 216 MB for each example."""
    monkeypatch.setattr(assemble, "PairedPiece", None)
    model = nn.Sequential(nn.Linear(3, 300), nn.ReLU(), nn.Linear(300, 600))
    assert by_factors(gs.capture(model, torch.randn(2, 3))) == {"0.weight"}
    monkeypatch.setattr(assemble, "pairing_pays", lambda shape: not shape.trace)
    assert gs.ntk(model, torch.randn(2, 3)).shape == (2, 600, 2, 600)


def test_when_pairs_of_outputs_pay():
    large = {"n": 512, "m": 512, "T": 1, "g": 1, "i": 1024, "o": 1024, "symmetric": True}
    assert pairing_pays(Shape(k=10, trace=False, **large))
    assert not pairing_pays(Shape(k=1, trace=False, **large))
    assert not pairing_pays(Shape(k=10, trace=True, **large))
    assert not pairing_pays(Shape(k=10, trace=False, **(large | {"T": 4})))
    assert not pairing_pays(Shape(k=10, trace=False, **(large | {"o": 64})))  # putting them in place costs more
    assert not pairing_pays(Shape(k=10, trace=False, **(large | {"n": 8, "m": 8})))


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


def test_rows_much_larger_than_their_signals_are_not_kept(in_small_parts):
    model = nn.Sequential(
        nn.Conv1d(1, 64, 4, 4), nn.ReLU(), nn.Conv1d(64, 8, 3, padding=1), nn.ReLU(), Mean(), nn.Linear(8, 2)
    )
    snapshot = snapshot_in_parts(
        model.double(), torch.randn(6, 1, 8, dtype=torch.float64), 6, 2, trace=False, outputs=None, frozen=False,
        precision=None,
    )  # fmt: skip
    assert not any(isinstance(site, FactoredSite) for site in snapshot.sites if site.name == "2.weight")


def test_parts_that_split_are_one_site_by_factors(wherever_possible):
    model, x = Pooled().double().eval(), torch.randn(5, 2, 6, 6, dtype=torch.float64)
    options = {"outputs": None, "frozen": False, "precision": None}
    snapshot = snapshot_in_parts(model, x, 5, 2, trace=False, **options)
    whole = gs.capture(model, x).by_parameter()
    split = {site.name: site for site in snapshot.sites if isinstance(site, FactoredSite)}
    assert {"last.weight", "shortcut.weight"} <= set(split)
    for name, site in split.items():
        assert (site.examples, site.directions, site.dtype) == (5, 3, torch.float64)
        torch.testing.assert_close(site.rows(), whole[name][0].rows(), rtol=1e-12, atol=1e-14)


def test_parts_that_are_not_kept_as_rows_keep_their_factors(in_small_parts):
    model = nn.Sequential(nn.Conv1d(1, 64, 4, 4), nn.ReLU(), nn.Conv1d(64, 8, 2), nn.ReLU(), Mean(), nn.Linear(8, 2))
    x = torch.randn(5, 1, 8, dtype=torch.float64)
    options = {"outputs": None, "frozen": False, "precision": None}
    snapshot = snapshot_in_parts(model.double(), x, 5, 2, trace=False, **options)
    (mine,) = snapshot.by_parameter()["2.weight"]
    (whole,) = gs.capture(model, x).by_parameter()["2.weight"]
    for side in ("of_direction", "of_example"):
        torch.testing.assert_close(getattr(mine.factors, side), getattr(whole.factors, side), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].needs])
def test_the_zoo_with_and_without_factors(name, monkeypatch):
    case = CASES[name]
    model, x, _ = case.build(dtype=torch.float64)
    options = {"outputs": case.outputs, "frozen": False, "precision": None}
    snapshot = gs.capture(model, x, **options)
    if not by_factors(snapshot):
        return  # the product test above has seen that there are none
    for trace in (False, True):
        kernels = []
        for pays in (False, True):
            for room in (assemble, parts):
                monkeypatch.setattr(room, "split_pays", lambda shape, pays=pays: pays)
            monkeypatch.setattr(assemble, "pairing_pays", lambda shape, pays=pays: pays and not shape.trace)
            in_parts = snapshot_in_parts(model, x, case.n, 2, trace=trace, **options)
            kernels += [contracted(s, trace=trace, by_site=True) for s in (snapshot, in_parts)]
        scale = max(float(kernel.abs().max()) for kernel in kernels[0].values())
        for found in kernels[1:]:
            for parameter, kernel in kernels[0].items():
                torch.testing.assert_close(found[parameter], kernel, rtol=1e-10, atol=1e-12 * scale)
