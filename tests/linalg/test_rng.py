"""Random vectors: reproducible, of the right law, and never from the global stream."""

import pytest
import torch

from gramscope.base import rng
from gramscope.base.errors import InputError

KINDS = ["rademacher", "gaussian", "sphere"]


@pytest.mark.parametrize("kind", KINDS)
def test_global_stream_is_untouched(kind: str) -> None:
    before = torch.random.get_rng_state()
    rng.probes(50, 4, kind, rng=rng.generator(0), dtype=torch.float32, device="cpu")
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_seed_decides_and_a_long_run_starts_like_a_short_one(kind: str) -> None:
    # 5 and 37 entries: torch fills fewer than 16 normals by another path than more.
    for n in (5, 37):
        long = rng.probes(n, 6, kind, rng=rng.generator(7), dtype=torch.float64, device="cpu")
        short = rng.probes(n, 2, kind, rng=rng.generator(7), dtype=torch.float64, device="cpu")
        other = rng.probes(n, 2, kind, rng=rng.generator(8), dtype=torch.float64, device="cpu")
        assert torch.equal(long[:, :2], short)
        assert not torch.equal(short, other)
        single = rng.probes(n, 2, kind, rng=rng.generator(7), dtype=torch.float32, device="cpu")
        assert torch.equal(single, short.float())


@pytest.mark.parametrize("kind", KINDS)
def test_second_moment_is_the_identity(kind: str) -> None:
    z = rng.probes(4, 20_000, kind, rng=rng.generator(1), dtype=torch.float64, device="cpu")
    covariance = z @ z.mT / z.shape[1]
    # An entry's standard error is at most √2/√20000 = 0.01; five of them.
    assert float((covariance - torch.eye(4, dtype=torch.float64)).abs().max()) < 0.05


def test_laws() -> None:
    signs = rng.rademacher(20, 5, rng=rng.generator(0), dtype=torch.float32, device="cpu")
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    on_sphere = rng.sphere(20, 5, rng=rng.generator(0), dtype=torch.float64, device="cpu")
    torch.testing.assert_close(on_sphere.norm(dim=0), torch.full((5,), 20**0.5, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_asked_nothing_drawn(kind: str) -> None:
    assert rng.probes(3, 0, kind, rng=rng.generator(0), dtype=torch.float32, device="cpu").shape == (3, 0)
    assert rng.probes(0, 2, kind, rng=rng.generator(0), dtype=torch.float32, device="cpu").shape == (0, 2)


def test_child_seeds_are_distinct_and_valid() -> None:
    seeds = {rng.child_seed(s, name, i) for s in range(20) for name in ("a", "b") for i in range(20)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert rng.child_seed(1, "12") != rng.child_seed(1, 12)


@pytest.mark.parametrize("seed", [-1, 2**63, True])
def test_bad_seed_is_refused(seed: int) -> None:
    for take in (rng.generator, rng.child_seed):
        with pytest.raises(InputError, match="seed must be a whole number from 0 to"):
            take(seed)


def test_unknown_distribution_is_refused() -> None:
    # Under pytest the Literal in the signature may refuse it first, with another error.
    with pytest.raises(Exception, match="rademacher"):
        rng.probes(3, 1, "uniform", rng=rng.generator(0), dtype=torch.float32, device="cpu")
