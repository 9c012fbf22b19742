"""Sketches: equal to explicit projections of formed gradients, unbiased, honest about their error, streaming."""

import warnings

import jaxtyping
import pytest
import torch
from torch import nn

import gramscope as gs
from cases import CASES, FAMILIES
from gramscope.base.errors import CoupledExamplesError, InputError
from gramscope.base.user_warnings import SlowPathWarning
from gramscope.scale import sketch_sites, sketch_stream
from gramscope.scale.sketch_factors import SketchPlan
from references.jacobian import reference_jacobian, reference_ntk
from references.sketch import reference_kernel, reference_sketch, whole_features

F64 = torch.float64


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def inputs(n=5, seed=1):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed), dtype=F64)


def factored_always(monkeypatch):
    """The zoo's layers are so small that forming the gradient is mostly cheaper; here the other way is to be seen."""
    monkeypatch.setattr(sketch_sites, "formed_is_cheaper", lambda shape: False)


def assert_sketch_close(found, want, tolerance):
    """Raise unless both have the same parameters and each sketch is within `tolerance` of the norm of all."""
    assert set(found) == set(want)
    size = sum(part.square().sum() for part in want.values()).sqrt()
    for name, part in want.items():
        assert found[name].shape == part.shape, name
        error = float((found[name].double() - part).norm() / size)
        assert error <= tolerance, f"{name} is off by {error:.1e} of the norm"


# Equality with the explicit projection ------------------------------------------------------------


# All of the sharing family, where uses of one weight must meet the same matrices; of the others every twelfth.
OTHERS = [list(cases)[::12] for family, cases in FAMILIES.items() if family != "sharing"]
CHOSEN = [*FAMILIES["sharing"], *(name for names in OTHERS for name in names)]


@pytest.mark.parametrize("name", CHOSEN)
def test_networks_of_the_zoo_equal_projected_gradients(name, monkeypatch):
    """Tied weights, reused modules, groups, embeddings, norms, recurrent cells, experts: all against autograd."""
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    factored_always(monkeypatch)
    model, x, _ = case.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models that draw random numbers; the zoo's own tests look at these
        found = gs.sketch(model, [x], size=2, repeats=2, outputs=case.outputs)
    want = reference_sketch(model, x, found.projections, found.features, case.outputs)
    # A bare x @ W has inputs in the rows of W. Which these are, only the sites tell.
    sites = gs.capture(model, x, outputs=case.outputs).by_parameter() if found.inputs else {}
    turned = [n for n in found.inputs if sketch_sites.placed(sites[n][0], found.projections.matrices[n]).turned]
    # Sums of float64 products in another order; some models of others round to float32 inside.
    assert_sketch_close(whole_features(found, turned), want, 1e-4 if case.inner_float32 else 1e-10)


@pytest.mark.parametrize("method", ["learned", "orthogonal"])
@pytest.mark.parametrize("name", ["conv_strided", "gpt_tied"])
def test_both_ways_of_summation_agree(name, method, monkeypatch):
    model, x, _ = TIED[name]()
    formed = gs.sketch(model, [x], size=3, repeats=2, method=method)
    factored_always(monkeypatch)
    factored = gs.sketch(model, [x], size=3, repeats=2, method=method, like=formed)
    assert_sketch_close(factored.features, formed.features, 1e-12)
    want = reference_sketch(model, x, formed.projections, formed.features)
    assert_sketch_close(formed.features, want, 1e-12)


class Tied(nn.Module):
    """One table that embeds and reads out, as language models have it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 6)

    def forward(self, ids):
        return self.norm(torch.tanh(self.up(self.table(ids)))) @ self.table.weight.T


def tied_case():
    torch.manual_seed(0)
    return Tied().double(), torch.randint(11, (3, 2)), None


def conv_case():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, groups=2), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, groups=2), nn.Flatten()
    ).double()
    return model, torch.randn(3, 4, 7, 7, dtype=F64), None


TIED = {"gpt_tied": tied_case, "conv_strided": conv_case}


def test_the_comparison_would_see_a_forgotten_use(monkeypatch):
    """A sketch without one of the two uses of a tied weight fails the check above."""
    factored_always(monkeypatch)
    model, x, _ = tied_case()
    found = gs.sketch(model, [x], size=3, repeats=2)
    want = reference_sketch(model, x, found.projections, found.features)
    lookup = sketch_sites._lookup
    monkeypatch.setattr(sketch_sites, "_lookup", lambda site, factors: 0 * lookup(site, factors))
    wrong = gs.sketch(model, [x], size=3, repeats=2, like=found)
    with pytest.raises(AssertionError, match=r"table\.weight is off"):
        assert_sketch_close(wrong.features, want, 1e-10)


def test_half_precision_is_summed_in_float32():
    model, x = network().to(torch.bfloat16), inputs().to(torch.bfloat16)
    found = gs.sketch(model, x, size=2)
    assert {part.dtype for part in found.features.values()} == {torch.float32}
    want = reference_sketch(model, x, found.projections.renewed(), found.features)
    assert_sketch_close(whole_features(found), want, 3e-2)  # signals of bfloat16 have 8 bits


# What it estimates --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "apart"),
    [("learned", True), ("learned", False), ("orthogonal", True), ("orthogonal", False)],
)
def test_kernels_are_unbiased_with_honest_errors(method, apart):
    """Many repeats are many seeds: their mean is the exact kernel within its error bars, and these are of one size."""
    model, x = network(), inputs()
    exact = reference_ntk(model, x, reduce="trace")
    found = gs.sketch(model, x, size=2, repeats=250, method=method, seed=3, apart=apart).kernel()
    assert float((found.standard_error / exact.diagonal().mean()).max()) < 0.2, "else the check would see no bias"
    z = (found.value - exact) / found.standard_error
    # 15 different entries, which share their matrices: 4.5 standard errors come once in 10,000.
    assert float(z.abs().max()) < 4.5
    halved = (found.value / 2 - exact) / found.standard_error
    assert float(halved.abs().max()) > 4.5, "a sketch at the wrong scale is seen"


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Experts(nn.Module):
    """Each token goes to the expert that its gate prefers."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(5, 2), nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x):
        weights = torch.softmax(self.gate(x), -1)
        chosen = weights.argmax(-1, keepdim=True)
        routed = sum(torch.where(chosen == place, expert(x), 0) for place, expert in enumerate(self.experts))
        return (weights.gather(-1, chosen) * torch.tanh(routed)).sum(1)


def odd_case(name):
    torch.manual_seed(0)
    if name == "recurrent":
        return Recurrent().double(), torch.randn(4, 5, 3, dtype=F64)
    if name == "experts":
        return Experts().double(), torch.randn(4, 3, 5, dtype=F64)
    return TIED[name]()[:2]


@pytest.mark.parametrize("method", ["learned", "orthogonal"])
@pytest.mark.parametrize("name", ["gpt_tied", "conv_strided", "recurrent", "experts"])
def test_kernels_of_odd_networks_are_unbiased(name, method):
    model, x = odd_case(name)
    exact = reference_ntk(model, x, reduce="trace")
    found = gs.sketch(model, [x], size=2, repeats=150, method=method, seed=5).kernel()
    assert float((found.standard_error / exact.diagonal().mean()).max()) < 0.25, "else the check would see no bias"
    z = (found.value - exact) / found.standard_error.clamp_min(1e-12 * float(exact.diagonal().max()))
    # Up to 10 different entries, which share their matrices: 4.5 standard errors come once in 10,000.
    assert float(z.abs().max()) < 4.5


def test_standard_errors_are_those_over_seeds():
    model, x = network(), inputs()
    options = {"size": 3, "repeats": 6, "method": "orthogonal", "layers": "2.weight", "apart": False}
    found = [gs.sketch(model, x, **options, seed=seed).kernel() for seed in range(24)]
    spread = torch.stack([one.value for one in found]).var(0)
    claimed = torch.stack([one.standard_error.square() for one in found]).mean(0)
    ratio = float(claimed.sum() / spread.sum())
    assert 0.5 < ratio < 2, "24 seeds tell a variance of skewed numbers to some 25 %"


def test_kernel_norms_and_neighbours_of_one_repeat_are_plain_inner_products():
    found = gs.sketch(network(), inputs(), size=2, repeats=2)
    samples = torch.stack([reference_kernel(found, repeat) for repeat in range(2)])
    kernel = found.kernel()
    assert torch.allclose(kernel.value, samples.mean(0), rtol=1e-12)
    assert torch.allclose(kernel.standard_error, samples.std(0) / 2**0.5, rtol=1e-9)
    norms = found.norms()
    assert torch.allclose(norms.value, samples.mean(0).diagonal().sqrt(), rtol=1e-12)
    assert torch.allclose(norms.standard_error, kernel.standard_error.diagonal() / (2 * norms.value), rtol=1e-9)
    cosine = samples.mean(0) / torch.outer(norms.value, norms.value)
    cosine.fill_diagonal_(-2)
    near, how = found.nearest(2)
    assert torch.equal(near, cosine.topk(2).indices)
    assert torch.allclose(how, cosine.topk(2).values, rtol=1e-12)
    by_parameter = sum(found.kernel(layers=name).value for name in found.features)
    assert torch.allclose(by_parameter, kernel.value, rtol=1e-12)


def test_parameters_that_fit_are_exact():
    model, x = network(), inputs()
    found = gs.sketch(model, x, size=9, repeats=3)
    assert set(found.exact) == set(found.features)
    assert found.repeats == 1
    kernel = found.kernel()
    assert torch.allclose(kernel.value, reference_ntk(model, x, reduce="trace"), rtol=1e-10)
    assert not kernel.standard_error.any()
    assert bool(gs.sketch(model, x, size=2, repeats=1).kernel().standard_error.isnan().all()), "unknown, not zero"
    assert torch.allclose(gs.sketch(model, x, size=9, repeats=1).norms().value ** 2, kernel.value.diagonal())


def test_alignment_is_the_kernels_own_and_corrected_for_the_error_of_the_kernel():
    model, x = network(), inputs(12)
    labels = torch.arange(12) % 3
    kernel = gs.kernel(model, x, reduce="trace")
    whole = gs.sketch(model, x, size=9)
    assert float(whole.alignment(labels).value) == pytest.approx(kernel.target_alignment(labels), rel=1e-9)
    many = gs.sketch(model, x, size=2, repeats=150, method="orthogonal", seed=1, apart=False)
    found = many.alignment(labels)
    assert abs(float(found.value) - kernel.target_alignment(labels)) < 4 * float(found.standard_error)
    few = gs.sketch(model, x, size=2, repeats=2, method="orthogonal", apart=False).alignment(labels)
    assert few.value.isfinite()
    assert few.standard_error.isfinite()


def test_the_alignment_without_the_correction_would_be_seen():
    """Of four repeats of two columns the mean kernel's norm is too large by its own error."""
    model, x, labels = network(), inputs(12), torch.arange(12) % 3
    many = gs.sketch(model, x, size=2, repeats=4, method="orthogonal", seed=1, apart=False)
    y = torch.nn.functional.one_hot(labels).double()
    y = y - y.mean(0)
    mean = many.kernel().value
    plain = float((mean * (y @ y.T)).sum() / mean.norm() / (y @ y.T).norm())
    assert float(many.alignment(labels).value) > plain * 1.01


def test_learned_directions_have_less_error_on_other_examples():
    model = network()
    first, others = inputs(20), inputs(20, seed=2)
    exact = reference_ntk(model, others, reduce="trace")
    errors = {}
    for method in ("learned", "orthogonal"):
        basis = gs.sketch(model, first, size=4, repeats=20, method=method, apart=False)
        found = gs.sketch(model, others, like=basis).kernel().value
        errors[method] = float((found - exact).norm())
    assert errors["learned"] < 0.7 * errors["orthogonal"]


# Streaming, variants, checkpoints -----------------------------------------------------------------


def test_batches_of_any_size_give_the_same_sketch():
    model, x = network(), inputs(7)
    whole = gs.sketch(model, [x], size=3, method="orthogonal")
    parts = gs.sketch(model, [x[:2], x[2:3], x[3:]], size=3, method="orthogonal")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=3)
    loaded = gs.sketch(model, loader, size=3, method="orthogonal")
    for other in (parts, loaded, gs.sketch(model, x, size=3, method="orthogonal")):
        assert_sketch_close(other.features, whole.features, 1e-14)
        assert_sketch_close(other.inputs, whole.inputs, 1e-14)


class Scaled(nn.Module):
    """A network with two inputs."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x, scale):
        return self.network(x) * scale[:, None]


def test_of_pairs_without_a_loss_the_inputs_are_sketched():
    model, x, y = network(), inputs(7), torch.arange(7)
    alone = gs.sketch(model, x, size=3, method="orthogonal")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=3)
    for pairs in (loader, (x, y)):
        assert_sketch_close(gs.sketch(model, pairs, size=3, method="orthogonal").features, alone.features, 1e-14)
    whole = gs.sketch(Scaled(model), (x, torch.full((7,), 2.0, dtype=F64)), size=100)  # so large that it is exact
    torch.testing.assert_close(whole.kernel().value, 4 * gs.ntk(model, x, reduce="trace"), rtol=1e-12, atol=0)


def test_loss_direction_is_the_gradient_of_each_examples_own_loss():
    model, x, y = network(), inputs(), torch.tensor([0, 1, 2, 0, 1])
    found = gs.sketch(model, [(x[:2], y[:2]), (x[2:], y[2:])], size=9, loss="cross_entropy")

    def losses(model, x):
        return nn.functional.cross_entropy(model(x), y, reduction="none")[:, None]

    rows = reference_jacobian(model, x, losses)
    want = sum(rows[name].flatten(1) @ rows[name].flatten(1).T for name in rows)
    assert found.directions == 1
    assert torch.allclose(found.kernel().value, want, rtol=1e-10)
    own = gs.sketch(model, (x, y), size=9, loss=lambda f, y: nn.functional.cross_entropy(f, y, reduction="none"))
    assert torch.allclose(own.kernel().value, want, rtol=1e-10)


@pytest.mark.parametrize("layers", ["4.*", ["4.weight", "4.bias"], 1])
def test_last_layers_only_and_flags_put_back(layers):
    model, x = network(), inputs()
    model[0].bias.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    found = gs.sketch(model, x, size=3, layers=layers)
    assert list(found.features) == ["4.weight", "4.bias"]
    assert [p.requires_grad for p in model.parameters()] == flags
    with pytest.raises(InputError):
        gs.sketch(model, torch.ones(2, 5, dtype=F64), layers=layers)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert "0.bias" not in gs.sketch(model, x, size=3).features
    assert "0.bias" in gs.sketch(model, x, size=3, frozen=True).features


def test_two_checkpoints_are_compared_with_the_same_matrices(tmp_path):
    model, x = network(), inputs()
    first = gs.sketch(model, x, size=2, repeats=150)
    first.save(tmp_path / "deep" / "first.safetensors")
    before = reference_jacobian(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    after = reference_jacobian(model, x)
    again = gs.scale.load_sketch(tmp_path / "deep" / "first.safetensors")
    assert again.fingerprint() == first.fingerprint()
    assert_sketch_close(again.features, first.features, 0.0)
    assert_sketch_close(again.inputs, first.inputs, 0.0)
    found = gs.sketch(model, x, like=again).kernel(first)
    want = sum(torch.einsum("ncp,mcp->nm", after[n].flatten(2), before[n].flatten(2)) for n in before)
    assert float(((found.value - want) / found.standard_error).abs().max()) < 4.5
    with pytest.raises(InputError, match=r"same random matrices.*like=first"):
        gs.sketch(model, x, size=2, repeats=150).kernel(first)
    seeded = [gs.sketch(model, x, size=2, repeats=2, method="orthogonal") for _ in range(2)]
    assert torch.equal(seeded[0].kernel().value, seeded[0].kernel(seeded[1]).value), "a seed alone is enough here"


def test_an_expert_without_tokens_has_gradient_zero():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 4)

        def forward(self, x):
            return self.a(x) if bool((x > 0).all()) else self.b(x)

    model = Routed()
    found = gs.sketch(model, [torch.ones(2, 3), -torch.ones(1, 3)], size=8)
    assert found.inputs.keys() == {"a.weight"}, "b was not used in the first batch, which tells the form"
    assert bool((found.features["b.weight"][:, :2] == 0).all())
    assert bool((found.features["a.weight"][:, 2:] == 0).all())
    assert found.kernel().value[0, 2] == 0


def test_one_position_in_the_first_batch_and_more_in_a_later_one():
    model = nn.Linear(4, 3)
    one, more = torch.randn(2, 1, 4), torch.randn(2, 3, 4)

    def outputs(model, x):
        return model(x).sum(1)

    with pytest.raises(InputError, match=r"weight must be used once.*apart=False"):
        gs.sketch(model, [one, more], size=2, outputs=outputs)
    found = gs.sketch(model, [one, more], size=4, outputs=outputs, apart=False)
    exact = torch.einsum("ni,mi->nm", *2 * [torch.cat([one.sum(1), more.sum(1)])])
    assert torch.allclose(found.kernel(layers="weight").value, 3 * exact, rtol=1e-4, atol=1e-5)


def test_signals_and_inputs_apart_have_less_error_for_as_many_numbers():
    torch.manual_seed(0)
    model, x = nn.Linear(60, 10).double(), torch.randn(30, 60, dtype=F64)
    exact = reference_ntk(model, x, reduce="trace")
    errors = [
        float((gs.sketch(model, x, size=5, repeats=8, method="orthogonal", apart=apart).kernel().value - exact).norm())
        for apart in (True, False)
    ]
    assert errors[0] < 0.7 * errors[1]


def test_the_model_is_left_as_it_was():
    model, x = network(), inputs()
    model.train()
    model(x).sum().backward()
    before = {name: (p.detach().clone(), p.grad.clone()) for name, p in model.named_parameters()}
    stream = torch.get_rng_state()
    gs.sketch(model, x, size=3)
    assert torch.equal(stream, torch.get_rng_state())
    assert model.training
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name][0])
        assert torch.equal(p.grad, before[name][1])


# Bad input ----------------------------------------------------------------------------------------


@pytest.fixture
def as_users_run_it():
    """Without the runtime checks of types that the test suite adds."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size must be a whole number of at least 1, got 0"),
        ({"repeats": 1.5}, "repeats must be a whole number"),
        ({"seed": -1}, "seed must be"),
        ({"method": "pca"}, "method must be one of 'learned', 'orthogonal'"),
        ({"layers": "head.*"}, r"'head.\*' matches none of 0.weight"),
        ({"layers": 9}, "layers must be between 1 and 3"),
        ({"layers": 2.0}, "layers must be a pattern"),
        ({"loss": "hinge"}, 'loss must be "cross_entropy"'),
        ({"loss": lambda f, y: f.sum()}, "with a loss each batch must be a pair"),
        ({"like": 3}, "like must be a sketch"),
    ],
)
def test_bad_arguments_say_what_to_do(options, message, as_users_run_it):
    with pytest.raises(InputError, match=message):
        gs.sketch(network(), inputs(), **options)


def test_bad_data_and_results_say_what_to_do(tmp_path):
    model, x, y = network(), inputs(), torch.zeros(5, dtype=torch.long)
    with pytest.raises(InputError, match="at least one batch"):
        gs.sketch(model, [])
    with pytest.raises(InputError, match="loader must be an iterable"):
        gs.sketch(model, 5)
    with pytest.raises(InputError, match=r"shape \(5,\), got \(\)"):
        gs.sketch(model, (x, y), loss=nn.functional.cross_entropy)
    with pytest.raises(CoupledExamplesError):
        gs.sketch(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double().train(), x)
    found = gs.sketch(model, x, size=3)
    with pytest.raises(InputError, match="k must be a whole number from 1 to 4, the examples to choose from"):
        found.nearest(5)
    with pytest.raises(InputError, match=r"one row for each of the 5 examples, got shape \(4,\)"):
        found.alignment(y[:4])
    with pytest.raises(InputError, match="must name a parameter"):
        found.kernel(layers="7.weight")
    with pytest.raises(InputError, match="same directions"):
        found.kernel(gs.sketch(model, x, outputs=0, like=found))
    with pytest.raises(InputError, match=r"'0\.bias' is in one of them only"):
        gs.sketch(model, x, layers="4.*", like=found)
    with pytest.raises(InputError, match="no such file"):
        gs.scale.load_sketch(tmp_path / "none")
    (tmp_path / "torn").write_bytes(b"abc")
    with pytest.raises(InputError, match="damaged"):
        gs.scale.load_sketch(tmp_path / "torn")
    with pytest.raises(InputError, match="got the directory"):
        found.save(tmp_path)


def test_very_many_outputs_are_told_and_what_would_not_fit_is_refused_at_once(monkeypatch):
    model, passes = nn.Linear(6, 1100).double(), []
    taken = sketch_stream._Stream._cotangents
    monkeypatch.setattr(sketch_stream._Stream, "_cotangents", lambda *given: passes.append(given[-1]) or taken(*given))
    # Of 5 examples and 1,100 outputs: 2 x 16 numbers for the weight, 1 x 16 for the bias, 2 repeats, float64.
    monkeypatch.setattr(sketch_stream, "free_memory", lambda device: 5 * 1100 * 16 * 8 * 2)
    with (
        pytest.warns(SlowPathWarning, match=r"a backward pass for each of its 1,100 outputs\. A loss takes one"),
        pytest.raises(InputError, match=r"the sketch must fit into memory, but will take [\d,]+ bytes and 1,408,000"),
    ):
        gs.sketch(model, inputs(), size=4, repeats=2)
    assert len(passes) == 1, "after the first outputs, not after the first batch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gs.sketch(model, (inputs(), torch.arange(5)), size=4, repeats=2, loss="cross_entropy")


def test_a_plan_is_part_of_the_fingerprint():
    found = gs.sketch(network(), inputs(), size=3)
    other = found.projections.renewed()
    other.plan = SketchPlan(3, 6, "learned", 1)
    assert other.fingerprint(list(found.features)) != found.fingerprint()


def test_a_sketch_and_a_job_say_the_main_thing():
    found = gs.sketch(network(), inputs(), size=2, repeats=3)
    n = len(inputs())
    assert repr(found).startswith(f"Sketch(examples={n}, directions={found.directions}, repeats=3, nbytes=")
    job = gs.scale.KernelJob(network(), inputs(), reduce="trace")
    assert repr(job) == "KernelJob(reduce='trace', outputs=None, precision=None, frozen=False)"
