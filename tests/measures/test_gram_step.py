"""The two parts of a step: against one large linear system, and by what they promise."""

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.base.errors import GramscopeError, InputError
from gramscope.measures.gram_only import gram_only_step, split_step
from gramscope.measures.virtual_updates import VirtualCovariance, gram_step, virtual_covariance, virtual_update
from references.feature_learning import reference_preserving, reference_turned

MANY = settings(max_examples=60, deadline=None)


def drawn(m, d, rank, seed):
    torch.manual_seed(seed)
    weight = (
        torch.randn(m, d).double()
        if rank >= min(m, d)
        else torch.randn(m, rank).double() @ torch.randn(rank, d).double()
    )
    return weight, torch.randn(m, d).double()


@MANY
@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 7), st.integers(0, 10**6))
def test_sylvester_against_one_linear_system(m, d, rank, seed):
    """Wide, tall, rank-deficient: the projection on the directions in which WᵀW stands still."""
    weight, step = drawn(m, d, rank, seed)
    found = split_step(weight, step)
    expected = reference_preserving(weight, step)
    # The reference squares the condition number of W; random weights of this size stay below 1e4.
    assert float((found.preserving - expected).norm()) < 1e-6 * float(step.norm())
    scale = float(weight.norm() * step.norm())
    still = weight.T @ found.preserving
    assert float((still + still.T).norm()) < 1e-13 * scale
    assert abs(float((found.altering * found.preserving).sum())) < 1e-13 * float(step.square().sum())
    assert float((found.altering + found.preserving - step).norm()) < 1e-14 * scale + 1e-14
    assert 0 <= found.share <= 1


@MANY
@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 7), st.floats(1e-6, 10.0), st.integers(0, 10**6))
def test_procrustes_keeps_the_gram_matrix_exactly(m, d, rank, size, seed):
    before, step = drawn(m, d, rank, seed)
    after = before + size * step
    altered, preserved = gram_only_step(before, after), gram_only_step(before, after, "preserving")
    scale = float(before.norm() ** 2 + after.norm() ** 2)
    assert float((altered.T @ altered - after.T @ after).norm()) <= 1e-13 * scale
    assert float((preserved.T @ preserved - before.T @ before).norm()) <= 1e-13 * scale
    # Q brings W₂ as near to W₁ as any turn, the identity included.
    assert float((altered - before).norm()) <= float((after - before).norm()) + 1e-12 * float(after.norm())


def test_exact_gram_step_on_a_layer_of_the_theory():
    """256 x 256, a step of a thousandth: the Gram matrix is that of the full step to 1e-10 of the step."""
    torch.manual_seed(0)
    before = torch.randn(256, 256).double() / 16
    step = 1e-3 * torch.randn(256, 256).double() / 16
    after = before + step
    altered = gram_only_step(before, after)
    change = after.T @ after - before.T @ before
    assert float((altered.T @ altered - after.T @ after).norm() / change.norm()) <= 1e-10
    # Ten Newton-Schulz iterations, as often used for polar factors, are off by more than the step.
    q = before @ after.T
    q = q / q.norm()
    for _ in range(10):
        q = 1.5 * q - 0.5 * q @ q.T @ q
    rough = q @ after
    assert float((rough.T @ rough - after.T @ after).norm() / change.norm()) > 1


@MANY
@given(st.integers(1, 6), st.integers(0, 4), st.integers(0, 10**6))
def test_procrustes_against_the_polar_factor(m, more, seed):
    before, step = drawn(m, m + more, m, seed)
    after = before + 0.1 * step
    if float(torch.linalg.cond(before @ after.T)) < 1e4:
        expected = reference_turned(before, after)
        assert float((gram_only_step(before, after) - expected).norm()) < 1e-6 * float(expected.norm())


@pytest.mark.parametrize(
    ("m", "d", "rank"), [(4, 6, 4), (6, 4, 4), (12, 3, 3), (6, 6, 3), (9, 3, 2), (1, 5, 1), (5, 1, 1)]
)
def test_both_methods_agree_to_first_order(m, d, rank):
    weight, step = drawn(m, d, rank, 0)
    errors = []
    for size in (1e-3, 1e-4):
        first, finite = split_step(weight, size * step), split_step(weight, size * step, "procrustes")
        errors.append(float((first.altering - finite.altering).norm()))
        assert float((finite.altering + finite.preserving - size * step).norm()) < 1e-15
    assert errors[1] < 0.02 * errors[0] + 1e-14  # ten times smaller steps, a hundred times smaller difference


def test_pure_turns_and_pure_stretches():
    torch.manual_seed(0)
    weight = torch.randn(5, 8).double()
    antisymmetric = torch.randn(5, 5).double()
    antisymmetric = antisymmetric - antisymmetric.T
    assert split_step(weight, antisymmetric @ weight).share < 1e-25
    turn = torch.linalg.matrix_exp(antisymmetric)
    assert float((gram_only_step(weight, turn @ weight) - weight).norm()) < 1e-12
    assert split_step(weight, 0.3 * weight).share == pytest.approx(1)
    assert float((gram_only_step(weight, 1.3 * weight) - 1.3 * weight).norm()) < 1e-12


def test_edges():
    zero = torch.zeros(3, 4)
    assert torch.equal(split_step(zero, zero + 1).altering, torch.ones(3, 4).double())
    assert split_step(zero, zero).share == 0
    assert torch.allclose(gram_only_step(zero, zero + 1), torch.ones(3, 4).double())
    grouped = torch.randn(2, 3, 5, 4)
    step = torch.randn(2, 3, 5, 4)
    one_by_one = torch.stack(
        [split_step(w, s).altering for w, s in zip(grouped.flatten(0, 1), step.flatten(0, 1), strict=True)]
    )
    assert torch.allclose(split_step(grouped, step).altering.flatten(0, 1), one_by_one)
    deficient = torch.cat([torch.ones(1, 3, 3), torch.randn(1, 3, 3)])
    moved = gram_only_step(deficient, deficient + 0.1 * torch.eye(3))
    alone = gram_only_step(deficient[0], deficient[0] + 0.1 * torch.eye(3))
    assert torch.allclose(moved[0], alone)
    half = torch.randn(4, 6).bfloat16()
    assert gram_only_step(half, half + 1).dtype == torch.float64


def test_refusals():
    for bad in (
        lambda: split_step(torch.ones(3), torch.ones(3)),
        lambda: split_step(torch.ones(2, 3), torch.ones(3, 2)),
        lambda: split_step(torch.ones(0, 3), torch.ones(0, 3)),
        lambda: split_step(torch.ones(2, 2), torch.full((2, 2), float("nan"))),
        lambda: gram_only_step(torch.ones(2, 2, dtype=torch.complex64), torch.ones(2, 2, dtype=torch.complex64)),
    ):
        with pytest.raises(GramscopeError):
            bad()
    with pytest.raises(InputError, match="flatten"):
        gram_only_step(torch.ones(3), torch.ones(3))


@pytest.mark.parametrize("method", ["sylvester", "procrustes"])
@pytest.mark.parametrize("power", [-190, 190])
def test_a_step_of_any_size_splits_alike(power, method):
    """The parts scale with weight and step, to the last digit; weights whose powers leave float64 are refused."""
    rng = torch.Generator().manual_seed(0)
    w, d = (torch.randn(2, 3, 4, generator=rng).double() for _ in range(2))
    plain, scaled = split_step(w, d, method), split_step(w * 2.0**power, d * 2.0**power, method)
    assert scaled.share == pytest.approx(plain.share, rel=1e-12)
    assert torch.allclose(scaled.preserving * 2.0**-power, plain.preserving, rtol=1e-13, atol=1e-13)
    assert torch.allclose(scaled.altering * 2.0**-power, plain.altering, rtol=1e-13, atol=1e-13)
    with pytest.raises(InputError, match="powers of it leave float64"):
        split_step(w * 2.0 ** (2 * power), d, method)


# The rate, and batches of nothing -----------------------------------------------------------------------


@pytest.mark.parametrize("lr", ["a", None, float("nan"), float("inf"), torch.tensor([0.1, 0.2])])
def test_a_rate_that_is_no_number_is_refused(lr):
    h = torch.randn(4, 3)
    jaxtyping.config.update("jaxtyping_disable", True)  # the tests' type checker would refuse some of them first
    try:
        for call in (virtual_update, virtual_covariance, gram_step):
            with pytest.raises(InputError, match="lr must be one finite number"):
                call(h, h, lr)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("gradients", ["loss", "example"])
def test_an_empty_batch_adds_nothing_to_the_virtual_covariance(gradients):
    h, dh = torch.randn(5, 3), torch.randn(5, 3)
    measure = VirtualCovariance(0.1, gradients=gradients)
    assert torch.equal(measure.over([(h[:0], dh[:0]), (h, dh), (h[:0], dh[:0])]), measure(h, dh))
    with pytest.raises(InputError, match="at least one row"):
        measure(h[:0], dh[:0])
    with pytest.raises(InputError, match="at least one row"):
        virtual_update(h[:0], dh[:0], 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["sylvester", "procrustes"])
def test_a_weight_of_low_rank_splits_like_the_exact_one(method, dtype):
    """Rounding gave a weight of rank 3 all ten directions, and turned the step in them."""
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(10, 3, generator=rng), torch.randn(3, 14, generator=rng)
    exact, step = a.double() @ b.double(), 1e-2 * torch.randn(10, 14, generator=rng).double()
    wanted, found = split_step(exact, step, method), split_step((a @ b).to(dtype), step, method)
    error = float((found.preserving - wanted.preserving).norm() / wanted.preserving.norm())
    assert error < (0.1 if dtype == torch.bfloat16 else 1e-4)
    assert found.share == pytest.approx(wanted.share, abs=0.05 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("shape", [(12, 12), (6, 20), (40, 6)])
def test_a_weight_of_full_rank_is_taken_as_it_is(shape):
    """Cutting nothing, float32 gives what its numbers give in float64."""
    rng = torch.Generator().manual_seed(0)
    w, step = torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)
    for method in ("sylvester", "procrustes"):
        found = split_step(w, step, method).preserving
        fine = split_step(w.double() * 1.1, step.double() * 1.1, method).preserving / 1.1  # no float32 numbers
        assert torch.allclose(found, fine, atol=1e-12)
