"""Which example each entry of a signal belongs to: every layout is read off, every mixture is seen."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gramscope as gs
from gramscope.base.errors import CoupledExamplesError
from gramscope.capture.owners import Owner, exponents, find_owner, mixes, power_of_two, regular_owner, without_vanished

CPU = torch.device("cpu")


def probed(labels, n, dtype=torch.float64, seed=0):
    """Random signals of these labels, and the same with every example scaled, once for each digit of its number."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(labels.shape, generator=generator, dtype=torch.float64).to(dtype)
    digits = exponents(n, dtype, CPU)
    return plain, [plain * torch.exp2(digit.to(dtype))[labels] for digit in digits], digits


def regular(plain, scaled, digit):
    return regular_owner(plain, scaled, power_of_two(digit, plain.real.dtype))


@given(st.integers(1, 70), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_regular_layouts_on_any_axis(n, outer, inner, axis, seed):
    along = torch.arange(n).repeat_interleave(inner).repeat(outer)
    shape = [2, 2, 2]
    shape[axis] = len(along)
    labels = along.reshape([-1 if a == axis else 1 for a in range(3)]).expand(shape)
    plain, scaled, digits = probed(labels, n, seed=seed)
    for found in regular(plain, scaled[0], digits[0]), find_owner(plain, scaled, digits):
        assert found is not None
        assert torch.equal(found.everywhere(plain.shape).expand_as(plain), labels)
        if n > 1:
            assert found.axis == axis
            gathered = found.gather(plain.movedim(axis, 0), 0)
            for example in range(n):
                mine = plain.movedim(axis, 0)[along == example]
                torch.testing.assert_close(gathered[example].sum(0), mine.sum(0))
                torch.testing.assert_close(found.sums(plain)[example], mine.sum())
    if n > 1:
        assert regular(plain, scaled[0], digits[0]).regular == (outer, inner)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        plain, scaled, digits = probed(order[labels], n, seed=seed)
        assert (regular(plain, scaled[0], digits[0]) is None) == bool((order != torch.arange(n)).any())


@given(st.integers(2, 40), st.integers(1, 30), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_rows_in_any_order(n, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    along = torch.randint(n, (rows,), generator=generator)
    plain, scaled, digits = probed(along[:, None].expand(rows, 3), n, seed=seed)
    found = find_owner(plain, scaled, digits)
    assert torch.equal(found.labels, along)
    gathered = found.gather(plain, 0)
    assert gathered.shape[0] == n
    for example in range(n):
        torch.testing.assert_close(gathered[example].sum(0), plain[along == example].sum(0))


def test_labels_that_follow_no_axis():
    labels = torch.tensor([[0, 1, 2], [2, 0, 1]])
    found = find_owner(*probed(labels, 3))
    assert found.axis is None
    assert torch.equal(found.labels, labels)


def test_zeros_belong_to_nobody_unless_the_layout_tells():
    for examples, told in ([0, 0, 1, 1, 2, 2], 1), ([2, 0, 1, 0, 2, 1], -1):
        plain, scaled, digits = probed(torch.tensor(examples)[:, None].expand(6, 2), 3)
        for tensor in (plain, *scaled):
            tensor[3] = 0
        found = regular(plain, scaled[0], digits[0]) or find_owner(plain, scaled, digits)
        assert found.labels.tolist() == [*examples[:3], told, *examples[4:]]
        assert found.regular == ((1, 2) if told > 0 else None)
    silent = find_owner(plain * 0, [tensor * 0 for tensor in scaled], digits)
    assert silent.silent


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_scales_exactly(dtype):
    plain, scaled, digits = probed(torch.arange(6)[:, None].expand(6, 4), 6, dtype)
    assert regular(plain, scaled[0], digits[0]) is not None
    assert find_owner(plain, scaled, digits) is not None


@pytest.mark.parametrize(("dtype", "weak"), [(torch.float64, 1e-10), (torch.float32, 1e-3)])
def test_a_weak_mixture_is_no_layout(dtype, weak):
    """Examples that take so much of their neighbours, far above rounding, which is 1e-16 and 6e-8."""
    plain, scaled, digits = probed(torch.arange(5)[:, None].expand(5, 4), 5, dtype)
    neighbours = plain + weak * plain.roll(1, 0)
    mixed = [tensor + weak * tensor.roll(1, 0) for tensor in scaled]
    assert regular(neighbours, mixed[0], digits[0]) is None
    assert find_owner(neighbours, mixed, digits) is None


def test_a_large_example_hides_no_mixture_of_the_others():
    plain, scaled, digits = probed(torch.arange(5)[:, None].expand(5, 4), 5)
    for tensor in (plain, *scaled):
        tensor[0] *= 1e12
        tensor[1] += 1e-3 * tensor[2]
    assert regular(plain, scaled[0], digits[0]) is None


def test_vanished_signals_count_as_zeros_and_hide_no_mixture():
    plain, scaled, digits = probed(torch.arange(5)[:, None].expand(5, 4), 5, torch.float32)
    plain[1], scaled[0][1] = 3e-44, 5e-44  # what is left of numbers that ran out of bits
    assert regular(plain, scaled[0], digits[0]) is None
    found = regular(*without_vanished(plain, scaled), digits[0])
    assert found is not None
    assert found.regular == (1, 1)
    for tensor in (plain, *scaled):
        tensor[3] += 1e-3 * tensor[2]
    assert regular(*without_vanished(plain, scaled), digits[0]) is None
    nothing = regular(*without_vanished(plain * 1e-40, [scaled[0] * 1e-40]), digits[0])
    assert nothing is not None
    assert nothing.silent


def test_sums_over_all_examples_are_seen_from_one_pass():
    plain, scaled, _ = probed(torch.arange(50)[:, None].expand(50, 4), 50)
    assert mixes(plain.sum(0), scaled[0].sum(0))
    assert not mixes(plain, scaled[0])


def test_sums_in_another_order_are_rounding():
    """As fused attention on a GPU gives them: off by some 1e-6 in float32."""
    plain, scaled, digits = probed(torch.arange(5)[:, None].expand(5, 400), 5, torch.float32)
    noisy = scaled[0] * (1 + 1e-6 * torch.randn(5, 400, generator=torch.Generator().manual_seed(0)))
    assert regular(plain, noisy, digits[0]) is not None


def test_a_layout_carries_over_to_more_examples():
    owner = Owner(3, 1, torch.device("cpu"), (1, 2))
    more = owner.like(7, torch.Size([4, 14]))
    assert torch.equal(more.labels, torch.arange(7).repeat_interleave(2))
    assert owner.like(7, torch.Size([4, 13])) is None
    by_entry = Owner(3, None, torch.device("cpu"), found=torch.zeros(2, 2, dtype=torch.long))
    assert by_entry.like(7, torch.Size([2, 2])) is None


def test_imaginary_parts_count():
    plain, scaled, digits = probed(torch.arange(4)[:, None].expand(4, 3), 4)
    neighbours = [1j * tensor.roll(1, 0) for tensor in (plain, *scaled)]
    mixed = [tensor + 1e-3 * other for tensor, other in zip((plain, *scaled), neighbours, strict=True)]
    assert regular(plain * (1 + 2j), scaled[0] * (1 + 2j), digits[0]) is not None
    assert regular(mixed[0], mixed[1], digits[0]) is None
    assert find_owner(mixed[0], mixed[1:], digits) is None


class RoundedInTF32(torch.autograd.Function):
    """The identity, whose gradient is off by 1e-3, each time in another way, where TF32 is allowed."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if torch.get_float32_matmul_precision() == "highest":
            return gradient
        return gradient * (1 + 1e-3 * torch.randn(gradient.shape))


class Rounded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.last(RoundedInTF32.apply(torch.tanh(self.first(x))))


def test_the_search_is_in_full_precision_whatever_the_pass_is_in():
    """Rounding of 1e-3 that differs from pass to pass, as on a GPU, is no mixture of examples."""
    torch.manual_seed(0)
    model, x = Rounded(), torch.randn(6, 3)
    found = gs.capture(model, x, precision="tf32")
    assert {site.name: site.rule for site in found.sites} == {
        "first.weight": "linear", "first.bias": "bias", "last.weight": "linear", "last.bias": "bias"
    }  # fmt: skip
    exact = gs.ntk(model, x)
    assert float((gs.ntk(model, x, precision="tf32") - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_entry_that_agrees_to_rounding_proves_nothing(dtype):
    """The gradient of ``0.3 * w`` sums all examples; in one of 40 networks it was taken for that of one."""
    digits = exponents(7, dtype, torch.device("cpu"))
    near = 1 + {torch.float32: 5e-5, torch.bfloat16: 1e-2}[dtype]
    for entries, proven in ((1, False), (20, True)):
        plain = torch.ones(entries, 1, dtype=dtype)
        scaled = plain * (near * 2.0 ** float(digits[0][3]))
        assert (find_owner(plain, [scaled], digits) is not None) == proven


@pytest.mark.parametrize("kind", [partial(torch.nn.TransformerEncoderLayer, 8, 2, 16), partial(torch.nn.GRU, 8, 8)])
def test_time_first_inside_a_layer_is_a_regular_layout(kind):
    """Its examples are plainly apart: no further forward pass asks. Read time first they mix, and are refused."""
    calls = []

    def outputs(model, x):
        found = model(x)
        return (found if isinstance(found, torch.Tensor) else found[0]).mean(1)

    layer, x = kind(batch_first=True).eval(), torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    layer.register_forward_hook(lambda *_: calls.append(1))
    assert not gs.capture(layer, x, outputs=outputs).fallback
    assert len(calls) == 1
    with pytest.raises(CoupledExamplesError, match="mix the 4 examples"):
        gs.capture(kind().eval(), x, outputs=outputs)
