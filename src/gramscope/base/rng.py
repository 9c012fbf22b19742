"""Seeded random vectors that leave torch's global random stream alone.

Every draw takes an explicit generator. A generator from :func:`generator` lives on the CPU and draws
float64, and the result is then cast and moved: one seed means one set of vectors, whatever the device
or the dtype. Vectors are drawn one after another, so the first of a long run are those of a short run.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from gramscope.base.checks import check_choice, check_count

Distribution = Literal["rademacher", "gaussian", "sphere"]


def check_seed(seed: object) -> int:
    """A seed as an int: whole, and what torch and numpy both take."""
    return check_count(seed, "seed", 0, 2**63 - 1)


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator at ``seed``; torch's global one is neither read nor moved.

    >>> float(torch.rand((), generator=generator(3))) == float(torch.rand((), generator=generator(3)))
    True
    """
    return torch.Generator(device=device).manual_seed(check_seed(seed))


def stream(seed: object, *labels: str | int) -> torch.Generator:
    """The random numbers of one part of a computation at ``seed``."""
    return generator(child_seed(seed, *labels))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's CPU stream at ``seed`` for code that draws from it (initialisations), and back where it was after.

    Not ``torch.manual_seed``, which would seed every GPU as well.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(check_seed(seed))
        yield


def child_seed(seed: object, *labels: str | int) -> int:
    """A seed for one part of a computation, set by the parent's seed and the part's name.

    Hashing, unlike ``seed + 1``, keeps the streams of neighbouring parents apart; and a method that names
    its own stream is independent of data that the caller drew from the same seed.

    >>> child_seed(0, "probes", 1) == child_seed(0, "probes", 1)
    True
    >>> child_seed(0, "probes", 1) == child_seed(1, "probes", 0)
    False
    """
    text = repr((check_seed(seed), *labels)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) % 2**63


def gaussian(n: int, k: int, *, rng: torch.Generator, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """``k`` columns of ``n`` independent standard normal entries, shape ``(n, k)``."""
    return _columns(n, [_normal(n, rng) for _ in range(k)], dtype, device)


def rademacher(n: int, k: int, *, rng: torch.Generator, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """``k`` columns of ``n`` independent signs ±1, shape ``(n, k)``."""
    return _columns(n, [_signs(n, rng) for _ in range(k)], dtype, device)


def sphere(n: int, k: int, *, rng: torch.Generator, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """``k`` columns uniform on the sphere of radius ``√n``, so that ``E[z zᵀ] = I``; shape ``(n, k)``."""
    drawn = [_normal(n, rng) for _ in range(k)]
    scaled = [z * (n**0.5 / z.norm()) if n else z for z in drawn]
    return _columns(n, scaled, dtype, device)


def probes(
    n: int,
    k: int,
    distribution: Distribution,
    *,
    rng: torch.Generator,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """``k`` columns ``z`` with ``E[z zᵀ] = I``, shape ``(n, k)``, drawn from the named distribution."""
    check_choice(distribution, "distribution", get_args(Distribution))
    draw = {"rademacher": rademacher, "gaussian": gaussian, "sphere": sphere}[distribution]
    return draw(n, k, rng=rng, dtype=dtype, device=device)


def _normal(n: int, rng: torch.Generator) -> Tensor:
    return torch.randn(n, generator=rng, dtype=torch.float64, device=rng.device)


def _signs(n: int, rng: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (n,), generator=rng, device=rng.device) * 2 - 1


def _columns(n: int, drawn: list[Tensor], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if not drawn:
        return torch.zeros((n, 0), dtype=dtype, device=device)
    return torch.stack([z.to(dtype) for z in drawn], dim=1).to(device=device)
