"""Every network of the zoo: the tangent kernel against one backward pass a scalar output.

Tolerances, relative to the Frobenius norm of the exact kernel:
float64, 1e-12: two orders of summation in nets this small differ by some 1e-15, a wrong rule by 1e-3 or
more; 1e-12 leaves room for the one and none for the other, nor for a silent rounding to float32 (1e-7).
float32, 1e-5: the reference takes the float32 weights cast up, so only the arithmetic differs; plain float32
autograd stays below 3e-6 on every case (test_reference.py measures it).
"""

import re
from functools import cache

import pytest
import torch

import gramscope as gs
from cases import CASES, COUPLED, cast
from references.jacobian import assert_kernel_close, assert_sites_close, reference_ntk

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}

REPRESENTATIVE = [
    "mlp_relu",
    "linear_4d",
    "single_example",
    "conv2d_same_even_kernel",
    "conv_transpose2d_stride_padding",
    "embedding_repeated_ids",
    "embedding_bag_mean",
    "layer_norm_two_axes_and_positions",
    "batch_norm2d_eval",
    "mha_sequence_first",
    "encoder_layer",
    "lstm_projected_two_layers_bidirectional",
    "gru_packed_bidirectional",
    "vanilla_loop_by_hand",
    "gpt_tied",
    "vit",
    "position_table_passes_an_mlp_as_many_as_examples",
    "einsum_three_factors",
    "output_has_a_constant_part",
    "fourier_filter",
    "conv_at_two_resolutions",
    "siamese_in_one_doubled_batch",
    "unused_parameters",
    "frozen_middle_layer_and_bias",
    "flattened_token_major",
    "one_call_an_example",
    "experts_by_boolean_mask",
    "residual_in_place",
    "spectral_norm_train",
    "returns_a_dict_with_logits",
    "energy_and_forces",
    "pinn_residual",
    "keyword_arguments",
    "hf_bert_classification",
]


def tolerance(case, dtype):
    return TOLERANCE[torch.float32 if case.inner_float32 else dtype]


def built(name, dtype=torch.float64):
    case = (CASES | COUPLED)[name]
    if case.needs:
        pytest.importorskip(case.needs)
    return case, *case.build(dtype=dtype)


@cache
def exact_sites(name, dtype=torch.float64, cross=False):
    case, model, x, x2 = built(name, dtype)
    return reference_ntk(model, x, x2 if cross else None, by_site=True, outputs=case.outputs)


def exact(name, dtype=torch.float64, cross=False):
    return sum(exact_sites(name, dtype, cross).values())


def traced(kernel):
    return torch.einsum("acbc->ab", kernel)


# --- every case


@pytest.mark.parametrize("name", CASES)
def test_full_kernel(name):
    case, model, x, _ = built(name)
    got = gs.ntk(model, x, outputs=case.outputs)
    assert got.dtype == torch.float64
    assert not got.requires_grad
    assert_kernel_close(got, exact(name), tolerance(case, torch.float64))


@pytest.mark.parametrize("name", CASES)
def test_kernel_of_each_parameter(name):
    case, model, x, _ = built(name)
    got = gs.ntk(model, x, by_site=True, outputs=case.outputs)
    assert_sites_close(got, exact_sites(name), tolerance(case, torch.float64))


@pytest.mark.parametrize("name", CASES)
def test_trace(name):
    case, model, x, _ = built(name)
    got = gs.ntk(model, x, reduce="trace", outputs=case.outputs)
    assert_kernel_close(got, traced(exact(name)), tolerance(case, torch.float64))
    sites = gs.ntk(model, x, reduce="trace", by_site=True, outputs=case.outputs)
    want = {site: traced(kernel) for site, kernel in exact_sites(name).items()}
    assert_sites_close(sites, want, tolerance(case, torch.float64))


@pytest.mark.parametrize("name", CASES)
def test_float32(name):
    case, model, x, _ = built(name, torch.float32)
    got = gs.ntk(model, x, by_site=True, outputs=case.outputs)
    assert all(kernel.dtype == torch.float32 for kernel in got.values())
    assert_sites_close(got, exact_sites(name, torch.float32), tolerance(case, torch.float32))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.fallback_ok is not True])
def test_plain_layers_need_no_fallback(name):
    case, model, x, _ = built(name)
    allowed = set(case.fallback_ok or ())
    assert set(gs.capture(model, x).fallback) <= allowed


# --- a second set of inputs


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_cross_kernel(name):
    case, model, x, x2 = built(name)
    got = gs.ntk(model, x, x2, by_site=True, outputs=case.outputs)
    assert_sites_close(got, exact_sites(name, cross=True), tolerance(case, torch.float64))
    assert_kernel_close(
        gs.ntk(model, x, x2, reduce="trace", outputs=case.outputs),
        traced(exact(name, cross=True)),
        tolerance(case, torch.float64),
    )


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_second_inputs_equal_to_the_first_change_nothing(name):
    case, model, x, _ = built(name)
    _, _, same, _ = built(name)
    assert_kernel_close(gs.ntk(model, x, same, outputs=case.outputs), exact(name), tolerance(case, torch.float64))


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_symmetric_and_without_negative_eigenvalues(name):
    case, model, x, _ = built(name)
    kernel = gs.ntk(model, x, outputs=case.outputs)
    square = kernel.flatten(2).flatten(0, 1)
    assert_kernel_close(square.T, square, 1e-14)
    eigenvalues = torch.linalg.eigvalsh(square)
    assert eigenvalues[0] > -1e-13 * eigenvalues[-1]


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_examples_alone_or_in_any_order(name):
    """The kernel of two examples, last first, is a corner of the kernel of all."""
    case, model, x, _ = built(name)
    n = case.n
    chosen = torch.tensor([n - 1, 0][: min(n, 2)])
    part = pick(x, chosen)
    got = gs.ntk(model, part, outputs=case.outputs)
    assert_kernel_close(got, exact(name)[chosen][:, :, chosen], tolerance(case, torch.float64))


def pick(x, rows):
    if isinstance(x, tuple):
        return tuple(part[rows] for part in x)
    if isinstance(x, dict):
        return {key: part[rows] for key, part in x.items()}
    return x[rows]


# --- memory


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_small_memory_budgets_change_nothing(name):
    """Four times the smallest budget accepted forces small blocks."""
    case, model, x, x2 = built(name)
    choice = {"outputs": case.outputs}
    little = 4 * smallest_budget(model, x, None, by_site=True, **choice)
    got = gs.ntk(model, x, memory=little, by_site=True, **choice)
    assert_sites_close(got, exact_sites(name), tolerance(case, torch.float64))
    little = 4 * smallest_budget(model, x, x2, **choice)
    got = gs.ntk(model, x, x2, memory=little, **choice)
    assert_kernel_close(got, exact(name, cross=True), tolerance(case, torch.float64))
    little = 4 * smallest_budget(model, x, None, reduce="trace", **choice)
    got = gs.ntk(model, x, memory=little, reduce="trace", **choice)
    assert_kernel_close(got, traced(exact(name)), tolerance(case, torch.float64))


@pytest.mark.parametrize(
    "name", ["mlp_relu", "conv2d_same_even_kernel", "embedding_repeated_ids", "frozen_middle_layer_and_bias"]
)
def test_the_smallest_memory_budget_suffices(name):
    _, model, x, x2 = built(name)
    for second, want in ((None, exact(name)), (x2, exact(name, cross=True))):
        got = gs.ntk(model, x, second, memory=smallest_budget(model, x, second))
        assert_kernel_close(got, want, 1e-12)


def smallest_budget(model, x, x2, **options):
    """The bytes that the refusal of one byte asks for."""
    with pytest.raises(ValueError, match=r"at least [\d,]+ bytes") as caught:
        gs.ntk(model, x, x2, memory=1, **options)
    return int(re.search(r"at least ([\d,]+) bytes", str(caught.value))[1].replace(",", ""))


@pytest.mark.parametrize("name", ["mlp_relu", "conv_deep", "embedding", "gru"])
def test_any_budget_gives_the_same(name):
    """From one example and output at a time to all at once, more examples than anywhere else."""
    case, model, _, _ = built(name)
    x = cast(case.x(5), torch.float64)
    want = reference_ntk(model, x)
    for budget in (60_000, 200_000, 1_000_000):
        if budget > 2 * smallest_budget(model, x, None):
            assert_kernel_close(gs.ntk(model, x, memory=budget), want, 1e-12, name=f"kernel in {budget} bytes")
        assert_kernel_close(
            gs.ntk(model, x, memory=budget, reduce="trace"),
            traced(want),
            1e-12,
            name=f"trace in {budget} bytes",
        )


# --- outputs


@pytest.mark.parametrize("outputs", [0, 2, -1, [2, 0], (1,), slice(1, None), slice(None, None, 2), slice(-2, None)])
@pytest.mark.parametrize(
    "name", ["mlp_tanh", "gpt_tied", "mha_self", "lstm", "experts_by_scatter_add", "unet_with_skip"]
)
def test_chosen_outputs(name, outputs):
    _, model, x, x2 = built(name)
    width = exact(name).shape[1]
    if (outputs == 2 and width < 3) or (outputs == [2, 0] and width < 3):
        pytest.skip("this case has two outputs")
    columns = torch.arange(width)[outputs].reshape(-1) if not isinstance(outputs, tuple) else torch.tensor(outputs)
    want = exact(name)[:, columns][:, :, :, columns]
    assert_kernel_close(gs.ntk(model, x, outputs=outputs), want, 1e-12)
    assert_kernel_close(gs.ntk(model, x, outputs=outputs, reduce="trace"), traced(want), 1e-12)
    cross = exact(name, cross=True)[:, columns][:, :, :, columns]
    assert_kernel_close(gs.ntk(model, x, x2, outputs=outputs), cross, 1e-12)


@pytest.mark.parametrize(
    "outputs",
    [
        lambda model, x: model(x).sin().sum(1),
        lambda model, x: model(x)[:, :2] * x[:, :1],
        lambda model, x: model(x) - model(2 * x),
        lambda model, x: torch.stack([model(x), model(-x)], 2),
        lambda model, x: model[0](x),
        lambda model, x: torch.log_softmax(model(x), -1),
    ],
    ids=["scalar", "slice", "two calls", "beyond two axes", "an inner layer", "log probabilities"],
)
def test_outputs_by_a_function(outputs):
    _, model, x, x2 = built("mlp_tanh")
    sites = gs.ntk(model, x, by_site=True, outputs=outputs)
    assert_sites_close(sites, reference_ntk(model, x, by_site=True, outputs=outputs), 1e-12)
    cross = gs.ntk(model, x, x2, outputs=outputs)
    assert_kernel_close(cross, reference_ntk(model, x, x2, outputs=outputs), 1e-12)


def test_outputs_by_a_function_of_several_inputs():
    _, model, x, _ = built("siamese")
    outputs = lambda model, x: model(*x).tanh()  # noqa: E731
    assert_kernel_close(gs.ntk(model, x, outputs=outputs), reference_ntk(model, x, outputs=outputs), 1e-12)


# --- precision


@pytest.mark.parametrize("name", ["mlp_tanh", "conv2d_same_even_kernel", "lstm", "encoder_layer", "fourier_filter"])
def test_float64_asked_of_a_float32_model(name):
    _, model, x, _ = built(name, torch.float32)
    got = gs.ntk(model, x, precision="float64")
    assert got.dtype == torch.float64
    assert_kernel_close(got, exact(name, torch.float32), 1e-12)
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("precision", [None, "float64", "tf32"])
def test_a_float64_model_is_not_rounded_unless_float32_is_asked_for(precision):
    _, model, x, _ = built("mlp_tanh")
    assert_kernel_close(gs.ntk(model, x, precision=precision), exact("mlp_tanh"), 1e-12)


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_float32_by_name(precision):
    _, model, x, _ = built("mlp_tanh", torch.float32)
    got = gs.ntk(model, x, precision=precision)
    assert got.dtype == torch.float32
    assert_kernel_close(got, exact("mlp_tanh", torch.float32), 1e-5)  # there is no tf32 on a CPU


# --- frozen, unused and unreached parameters


@pytest.mark.parametrize(
    "name",
    [
        "frozen_first_layer",
        "frozen_middle_layer_and_bias",
        "frozen_parts_of_attention_and_recurrence",
        "lora_module",
        "lora_parametrization",
    ],
)
def test_frozen_parameters(name):
    _, model, x, _ = built(name)
    frozen = {key for key, p in model.named_parameters() if not p.requires_grad}
    assert set(gs.capture(model, x).frozen) == frozen
    assert not frozen & set(gs.ntk(model, x, by_site=True))
    want = reference_ntk(model, x, by_site=True, frozen=True)
    assert frozen <= set(want)
    assert_sites_close(gs.ntk(model, x, by_site=True, frozen=True), want, 1e-12)


@pytest.mark.parametrize(
    ("name", "unreached"),
    [
        ("unused_parameters", {"spare.weight", "spare.bias", "loose"}),
        ("called_but_without_effect", {"other.weight", "other.bias"}),
        ("no_grad_part", {"fixed.weight", "fixed.bias"}),
        ("mlp_tanh", set()),
        ("gpt_tied", set()),
    ],
)
def test_parameters_the_output_does_not_use_are_named(name, unreached):
    _, model, x, _ = built(name)
    assert set(gs.capture(model, x).unreached) == unreached
    sites = gs.ntk(model, x, by_site=True)
    assert all((sites[key] == 0).all() for key in unreached)


# --- coupled examples


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_examples_are_refused(name):
    _, model, x, _ = built(name)
    with pytest.raises((ValueError, TypeError), match=r"(?is)example.*coupled\s*=\s*.exact") as caught:
        gs.ntk(model, x)
    assert type(caught.value).__module__.startswith("gramscope")


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_examples_exactly(name):
    _, model, x, x2 = built(name)
    assert_sites_close(gs.ntk(model, x, by_site=True, coupled="exact"), exact_sites(name), 1e-12)
    assert_kernel_close(gs.ntk(model, x, reduce="trace", coupled="exact"), traced(exact(name)), 1e-12)
    assert_kernel_close(gs.ntk(model, x, memory=20_000, coupled="exact"), exact(name), 1e-12)
    if name != "contrastive_similarities":  # its number of outputs is the number of examples
        assert_kernel_close(gs.ntk(model, x, x2, coupled="exact"), exact(name, cross=True), 1e-12)


@pytest.mark.parametrize("name", ["mlp_relu", "lstm", "gpt_tied", "frozen_first_layer"])
def test_exact_mode_on_examples_that_are_not_coupled(name):
    _, model, x, _ = built(name)
    assert_sites_close(gs.ntk(model, x, by_site=True, coupled="exact"), exact_sites(name), 1e-12)


def test_train_mode_without_coupling_is_not_refused():
    _, model, x, _ = built("encoder_layer_norm_first_gelu")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert_kernel_close(gs.ntk(model.train().requires_grad_(), x), reference_ntk(model, x), 1e-12)


# --- inputs laid out in odd ways


def test_inputs_that_are_views():
    _, model, x, _ = built("mlp_tanh")
    wide = torch.randn(5, 6, dtype=torch.float64)
    for view in (wide.T[:3], wide[:, :1].expand(5, 5)[1:4], x[:1].expand(4, -1), wide[::2, 1:]):
        assert_kernel_close(gs.ntk(model, view), reference_ntk(model, view), 1e-12)


def test_two_equal_examples():
    _, model, x, _ = built("mlp_relu")
    doubled = torch.cat([x, x])
    assert_kernel_close(gs.ntk(model, doubled), reference_ntk(model, doubled), 1e-12)


# --- wrappers


def test_distributed_data_parallel():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        _, model, x, _ = built("mlp_tanh")
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        assert_sites_close(gs.ntk(wrapped, x, by_site=True), exact_sites("mlp_tanh"), 1e-12)
        wrapped(x).sum().backward()  # the wrapper still works
        assert all(p.grad is not None for p in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_twice_gives_the_same():
    for name in ["mlp_relu", "spectral_norm_train", "embedding_max_norm", "compiled"]:
        _, model, x, _ = built(name)
        assert torch.equal(gs.ntk(model, x), gs.ntk(model, x)), name
