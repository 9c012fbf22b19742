"""Measuring changes nothing: not the model, not the inputs, not a random stream, not a setting of torch."""

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor

import jaxtyping
import numpy
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import gramscope as gs
from cases import CASES, COUPLED
from references.fingerprint import assert_same_fingerprint, fingerprint
from references.jacobian import assert_kernel_close, reference_ntk
from zoo.case import Call


@pytest.fixture(autouse=True)
def _as_users_run_it():
    # The runtime type checker of the test suite draws from Python's random stream; users run without it.
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# Each of these has a state that a careless forward or backward pass would move.
DELICATE = [
    "mlp_relu",
    "embedding_max_norm",
    "embedding_sparse",
    "embedding_padding_idx",
    "batch_norm2d_eval",
    "instance_norm2d_running_statistics",
    "mha_self_without_weights",
    "encoder_layer",
    "whole_transformer",
    "lstm_two_layers_bidirectional",
    "gru_two_layers",
    "gru_packed_bidirectional",
    "spectral_norm_eval",
    "spectral_norm_train",
    "weight_norm",
    "weight_norm_by_hook",
    "orthogonal",
    "lora_parametrization",
    "functional_call_inside",
    "layer_output_changed_by_a_hook",
    "compiled",
    "compiled_in_place",
    "data_parallel",
    "torchscript_scripted",
    "checkpoint_reentrant",
    "checkpoint_not_reentrant",
    "tied_embedding_and_readout",
    "frozen_middle_layer_and_bias",
    "unused_parameters",
    "relu_in_place_conv_and_batch_norm",
    "residual_in_place",
    "input_overwritten",
    "energy_and_forces",
    "pinn_residual",
    "experts_by_boolean_mask",
    "dropout_in_eval",
    "keyword_arguments",
    "siamese",
    "hf_gpt2",
]

CALLS = {
    "capture": lambda model, x, case: gs.capture(model, x, outputs=case.outputs),
    "ntk": lambda model, x, case: gs.ntk(model, x, outputs=case.outputs),
    "trace by site in little memory": lambda model, x, case: gs.ntk(
        model, x, reduce="trace", by_site=True, memory=60_000, outputs=case.outputs
    ),
    "frozen": lambda model, x, case: gs.ntk(model, x, frozen=True, outputs=case.outputs),
    "exact": lambda model, x, case: gs.ntk(model, x, coupled="exact", outputs=case.outputs),
    "float64": lambda model, x, case: gs.ntk(model, x, precision="float64", outputs=case.outputs),
}


def built(name, dtype=torch.float64):
    case = (CASES | COUPLED)[name]
    if case.needs:
        pytest.importorskip(case.needs)
    model, x, _ = case.build(dtype=dtype)
    return case, model, x


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", DELICATE)
def test_nothing_changes(name, call):
    case, model, x = built(name, torch.float32)
    before = fingerprint(model, x)
    CALLS[call](model, x, case)
    assert_same_fingerprint(before, fingerprint(model, x))


@pytest.mark.parametrize("name", ["mlp_relu", "embedding_sparse", "frozen_middle_layer_and_bias", "hf_gpt2"])
def test_gradients_already_there_stay(name):
    case, model, x = built(name)
    output = model(**x) if isinstance(x, dict) else model(x)
    (output["logits"] if isinstance(output, dict) else output).square().sum().backward()
    assert any(p.grad is not None for p in model.parameters())
    before = fingerprint(model, x)
    for call in CALLS.values():
        call(model, x, case)
        assert_same_fingerprint(before, fingerprint(model, x))


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("coupled", ["exact", "refuse"])
def test_batch_statistics_stay(name, coupled):
    _, model, x = built(name)
    before = fingerprint(model, x)
    if coupled == "refuse":
        with pytest.raises((ValueError, TypeError)):
            gs.ntk(model, x)
    else:
        gs.ntk(model, x, coupled="exact")
        gs.capture(model, x, coupled="exact")
    assert_same_fingerprint(before, fingerprint(model, x))


def test_mixed_training_flags_stay():
    _, model, x = built("resnet18_narrow")
    model.train()
    model[4].eval()
    model[1].eval()
    before = fingerprint(model, x)
    gs.ntk(model, x, coupled="exact", reduce="trace")
    assert_same_fingerprint(before, fingerprint(model, x))


def test_random_streams_stay_though_the_model_draws():
    def run(m, x):
        noise = torch.randn(4, dtype=x.dtype) + random.random() + numpy.random.rand()  # noqa: NPY002 the legacy stream is the one to guard
        return m.drop(m.inner(x + 0 * noise))

    model = Call(run, inner=nn.Linear(4, 3), drop=nn.Dropout(0.0)).double().train()
    x = torch.randn(3, 4, dtype=torch.float64)
    want = reference_ntk(model, x)
    before = fingerprint(model, x)
    assert_kernel_close(gs.ntk(model, x), want, 1e-12)
    gs.capture(model, x)
    assert_same_fingerprint(before, fingerprint(model, x))


@pytest.mark.parametrize("call", ["capture", "ntk", "exact", "frozen", "float64"])
def test_nothing_changes_when_the_model_fails_half_way(call):
    class Failure(Exception):
        pass

    def run(m, x):
        torch.rand(1)
        h = m.norm(m.embed(x)).mean(1)
        if m.fails:
            raise Failure("out of luck")
        return m.head(h)

    case, _, x = built("embedding_max_norm", torch.float32)
    model = Call(
        run,
        embed=nn.Embedding(5, 4, max_norm=0.5),
        norm=nn.InstanceNorm1d(3, track_running_stats=True),
        head=nn.Linear(4, 2),
        fails=True,
    )
    model.head.bias.requires_grad_(False)
    before = fingerprint(model, x)
    with pytest.raises(Exception, match="out of luck"):
        CALLS[call](model, x, case)
    assert_same_fingerprint(before, fingerprint(model, x))
    model.fails = False
    assert CALLS[call](model, x, case) is not None


def test_nothing_changes_when_only_a_later_pass_fails():
    """The first pass succeeds; if there is a second, it fails."""
    calls = []

    def run(m, x):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("the second pass failed")
        return m.norm(m.inner(x))

    model, x = Call(run, inner=nn.Linear(4, 3), norm=nn.LayerNorm(3)), torch.randn(3, 4)
    before = fingerprint(model, x)
    with contextlib.suppress(Exception):  # one pass may be enough; what matters is what is left behind
        gs.ntk(model, x, memory=2_000)
    assert_same_fingerprint(before, fingerprint(model, x))


def test_nothing_changes_when_the_backward_pass_fails():
    class NoWayBack(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("no way back")

    model, x = (
        Call(lambda m, x: m.head(NoWayBack.apply(m.inner(x))), inner=nn.Linear(4, 3), head=nn.Linear(3, 2)),
        torch.randn(3, 4),
    )
    before = fingerprint(model, x)
    with pytest.raises(Exception, match="no way back"):
        gs.ntk(model, x)
    assert_same_fingerprint(before, fingerprint(model, x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "name",
    [
        "mlp_relu",
        "lstm",
        "encoder_layer",
        "weight_norm",
        "fourier_filter",
        "spectral_norm_train",
        "pinn_residual",
    ],
)
def test_works_where_gradients_are_off(name, mode):
    case, model, x = built(name)
    want = reference_ntk(model, x, outputs=case.outputs)
    with mode():
        before = fingerprint(model, x)
        got = gs.ntk(model, x, outputs=case.outputs)
        gs.capture(model, x, outputs=case.outputs)
        assert_same_fingerprint(before, fingerprint(model, x))
    assert_kernel_close(got, want, 1e-12)


def test_inputs_made_in_inference_mode():
    _, model, _ = built("mlp_relu")
    with torch.inference_mode():
        x = torch.randn(3, 5, dtype=torch.float64)
    assert_kernel_close(gs.ntk(model, x), reference_ntk(model, x.clone()), 1e-12)


def test_inputs_that_require_gradients_keep_none():
    _, model, x = built("mlp_relu")
    x.requires_grad_()
    want = reference_ntk(model, x)
    assert_kernel_close(gs.ntk(model, x), want, 1e-12)
    assert x.requires_grad
    assert x.grad is None


def test_inputs_that_carry_a_graph():
    """x is itself the output of a network whose parameters must not get gradients, nor its graph be freed."""
    _, model, _ = built("mlp_relu")
    first = nn.Linear(5, 5).double()
    x = first(torch.randn(3, 5, dtype=torch.float64))
    assert_kernel_close(gs.ntk(model, x), reference_ntk(model, x.detach()), 1e-12)
    x.sum().backward()
    assert first.weight.grad is not None


def test_settings_of_torch_stay():
    _, model, x = built("mha_self_without_weights", torch.float32)
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.backends.mha.set_fastpath_enabled(False)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.set_default_dtype(torch.float64)
        before = fingerprint(model, x)
        for precision_asked in (None, "float32", "tf32", "float64"):
            gs.ntk(model, x, precision=precision_asked)
        assert_same_fingerprint(before, fingerprint(model, x))
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.mha.set_fastpath_enabled(True)
        torch.backends.cuda.enable_flash_sdp(True)
        torch.set_default_dtype(torch.float32)


def test_training_is_the_same_with_and_without():
    def train(watched):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(6, 2)
        )
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            x, y = torch.randn(8, 4), torch.randn(8, 2)
            optimiser.zero_grad()
            (model(x) - y).square().mean().backward()
            if watched:
                gs.ntk(model, x[:3], coupled="exact")
                gs.ntk(model.eval(), x[:3])
                model.train()
            optimiser.step()
        return model.state_dict(), optimiser.state_dict(), torch.get_rng_state()

    plain, watched = train(False), train(True)
    assert all(torch.equal(plain[0][key], watched[0][key]) for key in plain[0])
    moments = [[s["momentum_buffer"] for s in run[1]["state"].values()] for run in (plain, watched)]
    assert all(map(torch.equal, *moments))
    assert torch.equal(plain[2], watched[2])


DISTURBANCES = {
    "parameter": lambda m: m[0].weight.data.add_(1e-7),
    "grad": lambda m: setattr(m[0].weight, "grad", torch.zeros_like(m[0].weight)),
    "flags": lambda m: m[0].weight.requires_grad_(False),
    "identity": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
    "buffer": lambda m: m[1].running_mean.add_(1),
    "training": lambda m: m[1].train(),
    "_forward_hooks": lambda m: m[0].register_forward_hook(lambda *a: None),
    "attributes": lambda m: setattr(m[0], "forward", m[0].forward),
    "hooks": lambda m: m[0].weight.register_hook(lambda g: g),
    "torch random numbers": lambda m: torch.rand(1),
    "python random numbers": lambda m: random.random(),
    "numpy random numbers": lambda m: numpy.random.rand(),  # noqa: NPY002
}


@pytest.mark.parametrize("what", DISTURBANCES)
def test_the_fingerprint_checker_raises_on_a_disturbance(what):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    before = fingerprint(model)
    assert_same_fingerprint(before, fingerprint(model))
    DISTURBANCES[what](model)
    with pytest.raises(AssertionError, match=what):
        assert_same_fingerprint(before, fingerprint(model))


def test_the_fingerprint_checker_sees_the_inputs_and_the_settings():
    model, x = nn.Linear(4, 3), torch.zeros(2, 4)
    before = fingerprint(model, x)
    with pytest.raises(AssertionError, match="x"):
        assert_same_fingerprint(before, fingerprint(model, x + 1))
    with torch.no_grad(), pytest.raises(AssertionError, match="grad mode"):
        assert_same_fingerprint(before, fingerprint(model, x))


class Careless(nn.Module):
    """Writes where a forward pass should not."""

    def __init__(self, deed):
        super().__init__()
        self.layer, self.deed = nn.Linear(4, 3), deed
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))
        self.count, self.seen, self.state = 0, [], torch.zeros(2)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x):
        self.deed(self, x)
        return self.layer(x)


def normalise(model, x):
    with torch.no_grad():
        model.layer.weight.div_(model.layer.weight.norm(dim=1, keepdim=True))


def replace(model, x):
    model.layer.weight.data = model.layer.weight.data.clamp(-0.1, 0.1)


def cache(model, x):
    model.made = x
    model.seen.append(x)


DEEDS = {
    "a parameter normalised": normalise,
    "a parameter replaced": replace,
    "a parameter clamped": lambda model, x: model.layer.weight.data.clamp_(-0.1, 0.1),
    "a parameter of several": lambda model, x: torch._foreach_mul_([p.data for p in model.parameters()], 0.5),
    "a buffer by its data": lambda model, x: model.mean.data.add_(1),
    "running statistics": lambda model, x: F.batch_norm(x, model.mean, model.variance, training=True),
    "a new buffer": lambda model, x: model.register_buffer("late", x.mean(0)),
    "a counter": lambda model, x: setattr(model, "count", model.count + 1),
    "a cache": cache,
    "a plain tensor": lambda model, x: model.state.add_(1),
    "another plain tensor": lambda model, x: setattr(model, "state", model.state + 1),
    "a generator of its own": lambda model, x: torch.randn(3, generator=model.generator),
}


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("measure", [gs.ntk, gs.capture, lambda model, x: gs.ntk_operator(model, x) @ torch.ones(15)])
def test_careless_models_are_put_back(deed, measure):
    torch.manual_seed(0)
    model, x = Careless(DEEDS[deed]).eval(), torch.randn(5, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    places = {name: value.data_ptr() for name, value in model.state_dict().items()}
    plain = (model.count, list(model.seen), model.state, model.state.clone(), model.generator.get_state())
    attributes = set(vars(model))
    measure(model, x)
    assert list(model.state_dict()) == list(before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.data_ptr() == places[name]
    assert set(vars(model)) == attributes
    assert (model.count, model.seen) == plain[:2]
    assert model.state is plain[2]
    assert torch.equal(model.state, plain[3])
    assert torch.equal(model.generator.get_state(), plain[4])


def test_measuring_in_several_threads_leaves_the_switches_of_the_process():
    fast_path = torch.backends.mha.get_fastpath_enabled()
    generator = getattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", None)
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    with ThreadPoolExecutor(4) as pool:
        kernels = list(pool.map(lambda _: gs.ntk(model, x), range(40)))
    assert all(torch.equal(kernel, kernels[0]) for kernel in kernels)
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
    assert getattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", None) is generator
