"""The zoo on a GPU: every exact quantity there equals that on the CPU, which other tests compare with brute force.

Both in float64. A GPU adds in another order, and convolutions and scatters in an order that changes from call to call:
1e-10 of the norm is far above that (some 1e-13) and far below a forgotten term. Models that cast to float32 inside
agree to float32.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import gramscope as gs
from cases import CASES
from references.jacobian import flat_outputs, reference_ntk
from zoo.families import BUILDERS, INNER_FLOAT32, TINY, build

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

CUDA = "cuda"
FIXED_BATCH = {"flattened_token_major_square"}  # takes batches of one size only
STAYS = {"data_parallel"}  # its wrapper asks for one device only where there is no GPU
# On a GPU torch computes these with less than float64 (hardswish divides by a float32 6), or so it looks: on an H200
# they differed from the CPU by 3e-10 to 2e-8 of the norm. They are compared with plain autograd on the GPU.
ROUNDED = {"mlp_of_several_activations", "weight_norm", "weight_norm_by_hook", "one_parametrized_layer_called_twice"}


def there(x):
    return tree_map_only(Tensor, lambda t: t.to(CUDA), x)


def on_gpu(name, dtype=torch.float64):
    """A case with its options and tolerance, on the CPU and on the GPU; skipped where the model itself stays behind."""
    if name in STAYS:
        pytest.skip("the model does not run on a GPU as it does on a CPU")
    case = CASES[name]
    model, x, x2 = case.build(dtype=dtype)
    try:
        flat_outputs(case.build(dtype=dtype)[0].to(CUDA), there(x), case.outputs).sum().backward()
    except Exception as error:
        pytest.skip(f"the model does not run on a GPU: {str(error).splitlines()[0][:100]}")
    return (
        model,
        case.build(dtype=dtype)[0].to(CUDA),
        x,
        x2,
        {"outputs": case.outputs},
        1e-5 if case.inner_float32 else 1e-10,
    )


def assert_equal_there(found, wanted, tolerance):
    """Leaf by leaf, on the GPU, relative to the norm of the largest leaf."""
    found, wanted = ([t for t in tree_leaves(tree) if isinstance(t, Tensor)] for tree in (found, wanted))
    assert len(found) == len(wanted) > 0
    scale = max(float(t.double().norm()) for t in wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.device.type == CUDA
        assert one.shape == other.shape
        assert float((one.cpu().double() - other.cpu().double()).norm()) <= tolerance * scale


@pytest.mark.parametrize("name", CASES)
def test_kernels(name):
    model, moved, x, x2, options, tolerance = on_gpu(name)
    kernel = gs.ntk
    if name in ROUNDED:
        model, x, x2, kernel = moved, there(x), there(x2), reference_ntk
    for more in ({}, {"reduce": "trace"}, {"by_site": True}):
        assert_equal_there(gs.ntk(moved, there(x), **options, **more), kernel(model, x, **options, **more), tolerance)
    if name not in FIXED_BATCH:
        both = gs.ntk(moved, there(x), there(x2), **options), kernel(model, x, x2, **options)
        assert_equal_there(*both, tolerance)


@pytest.mark.parametrize("name", BUILDERS)
def test_kernels_of_families(name):
    model, x, outputs = build(name, TINY, n=3)
    found = gs.ntk(copy.deepcopy(model).to(CUDA), there(x), by_site=True, outputs=outputs)
    wanted = gs.ntk(model, x, by_site=True, outputs=outputs)
    assert_equal_there(found, wanted, 1e-5 if name in INNER_FLOAT32 else 1e-10)


@pytest.mark.parametrize("name", list(CASES)[::3])
def test_operator_and_step(name):
    model, moved, x, _, options, tolerance = on_gpu(name)
    here, operator = gs.ntk_operator(model, x, **options), gs.ntk_operator(moved, there(x), **options)
    v = torch.randn(here.shape[1], 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_equal_there(operator @ v.to(CUDA), here @ v, tolerance)
    loss = {"lr": 1e-3, "loss": lambda f, y: 0.5 * f.square().sum(), **options}
    step, wanted = gs.explain_step(moved, there(x), None, **loss), gs.explain_step(model, x, None, **loss)
    assert step.parameter_decrease == pytest.approx(wanted.parameter_decrease, rel=1e-4, abs=1e-8)


def small_network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3)
    )


X = torch.randn(24, 1, 6, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["mlp_tanh", "gru"])
def test_velocity_of_the_kernel(name):
    model, moved, x, _, options, tolerance = on_gpu(name)
    found = gs.kernels.dntk_velocity(moved, there(x), lambda f: 0.5 * f.square().sum(), **options)
    assert_equal_there(
        found, gs.kernels.dntk_velocity(model, x, lambda f: 0.5 * f.square().sum(), **options), tolerance
    )


@pytest.mark.parametrize("precision", [None, "tf32", "split"])
def test_precisions(precision):
    """float32 to 1e-5 of the norm; TF32 has eleven bits."""
    model = small_network().eval()
    wanted = gs.ntk(copy.deepcopy(model).double(), X.double())
    found = gs.ntk(model.to(CUDA), X.to(CUDA), precision=precision)
    assert_equal_there(found, wanted, 5e-3 if precision == "tf32" else 1e-5)


def trained(folder, autocast, device=CUDA):
    model = small_network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = X.to(device), Y.to(device)
    scope = (
        None
        if folder is None
        else gs.watch(model, (x, y), out=folder, every=2, overhead=None, measures=list(gs.record.WATCHED_MEASURES))
    )
    if scope is not None:
        scope.use(optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if scope is not None:
            scope.step(loss=loss)
    if scope is not None:
        scope.close()
    state = [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
    return [t.clone() for t in state], scope


@pytest.mark.parametrize("autocast", [False, True])
def test_watching_changes_nothing(tmp_path, autocast, monkeypatch):
    """Each bit, with every measure; and no measure fails there that does not fail on the CPU."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain, _ = trained(None, autocast)
        watched, scope = trained(tmp_path / "gpu", autocast)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    _, here = trained(tmp_path / "cpu", autocast, "cpu")
    for record, wanted in zip(scope.records, here.records, strict=True):
        assert set(record["failures"]) == set(wanted["failures"])
        assert set(record["scalars"]) == set(wanted["scalars"])


def test_whole_instrument():
    """One call each of what else takes a network."""
    model, x = small_network().eval().double(), X.double()
    moved, z = copy.deepcopy(model).to(CUDA), x.to(CUDA)
    left, right = (gs.propagators.GlobalNTK(m, v).operator.dense() for m, v in ((moved, z), (model, x)))
    assert_equal_there(left, right, 1e-10)
    wanted = gs.measures.network_richness(model, x)
    assert gs.measures.network_richness(moved, z) == pytest.approx(wanted, abs=1e-9)
    assert_equal_there(gs.kernel(moved, z).matrix, gs.kernel(model, x).matrix, 1e-10)
    left, right = gs.spectra.analyze(moved), gs.spectra.analyze(model)
    assert left["alpha"].to_numpy() == pytest.approx(right["alpha"].to_numpy(), rel=1e-6, nan_ok=True)
    found, sketched = (gs.sketch(m, [v], size=4, repeats=2).kernel().value for m, v in ((moved, z), (model, x)))
    assert found.cpu().numpy() == pytest.approx(
        sketched.cpu().numpy(), rel=1e-6, abs=1e-8 * float(sketched.abs().max())
    )
