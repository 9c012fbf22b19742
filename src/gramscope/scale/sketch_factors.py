"""The projections of all parameters of a network: drawn from a seed, and learned from its first examples."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.rng import child_seed
from gramscope.capture import Site
from gramscope.scale.sketch_projections import Method, beside_basis, random_projection
from gramscope.scale.sketch_sites import Factors, MatrixShape, choose_matrix, may_be_apart, sketched

LEARNED_FROM = 64  # examples of the first batch
LEARNED_SHARE = 2  # one in so many columns of a projection is learned
LARGEST_EIGEN, OVERSAMPLED, ITERATIONS = 1024, 8, 3  # side of a Gram matrix that is diagonalised; else iterated
MOST_LEARNED = 8192  # rows of the longest side of a parameter for which a basis is sought


@dataclass(frozen=True)
class SketchPlan:
    """What sets the random matrices: at most ``size``² numbers for each parameter, ``repeats`` times."""

    size: int
    repeats: int
    method: Method
    seed: int
    apart: bool = True


@dataclass(eq=False)
class Projections:
    """The matrices of each parameter, made when its sites are first seen.

    ``matrices`` says how each parameter is a matrix; ``bases`` are the learned directions, under "name/rows" and
    "name/columns"; ``apart`` are the parameters whose projected signals and inputs are held apart. All are fixed once
    made: the same for all batches, and for another checkpoint that is given them.
    """

    plan: SketchPlan
    matrices: dict[str, MatrixShape] = field(default_factory=dict)
    bases: dict[str, Float[Tensor, "d q"]] = field(default_factory=dict)
    apart: set[str] = field(default_factory=set)
    _factors: dict[tuple[str, torch.dtype, torch.device], Factors] = field(default_factory=dict)

    def factors(
        self, name: str, shape: Sequence[int], sites: Sequence[Site], dtype: torch.dtype, device: torch.device
    ) -> Factors:
        """The matrices of a parameter; where they are new, the ``sites`` tell its form and its large directions."""
        key = name, dtype, device
        if key not in self._factors:
            if name not in self.matrices:
                self.matrices[name] = choose_matrix(tuple(shape), sites)
                if self.plan.apart and may_be_apart(sites, self.matrices[name]):
                    self.apart.add(name)
                if self.plan.method == "learned" and sites:
                    self._learn(name, sites)
            self._factors[key] = self._made(name, dtype, device)
        return self._factors[key]

    def _sizes(self, name: str) -> tuple[int, int]:
        """Rows and columns of a parameter's sketch."""
        matrix = self.matrices[name]
        return matrix.sketched_apart(self.plan.size) if name in self.apart else matrix.sketched(self.plan.size)

    def is_whole(self, name: str) -> bool:
        """Whether a parameter's sketch is its gradient, so that nothing is random."""
        matrix = self.matrices[name]
        return self._sizes(name) == (matrix.rows, matrix.columns)

    def _made(self, name: str, dtype: torch.dtype, device: torch.device) -> Factors:
        matrix = self.matrices[name]
        b, a = self._sizes(name)
        sides, whole = [], set()
        for side, d, m in (("rows", matrix.rows, b), ("columns", matrix.columns, a)):
            if m == d:
                whole.add(side)
                sides.append(identity(d, dtype, device))
                continue
            drawn = [self._projection(name, side, d, m, repeat) for repeat in range(self.plan.repeats)]
            sides.append(torch.stack(drawn, 1).to(dtype=dtype, device=device))
        rows, columns = sides
        return Factors(matrix, rows, columns, frozenset(whole))

    def _projection(self, name: str, side: str, d: int, m: int, repeat: int) -> Float[Tensor, "d m"]:
        seed = child_seed(self.plan.seed, "sketch", name, side, repeat)
        basis = self.bases.get(f"{name}/{side}")
        if basis is not None:
            return beside_basis(basis.double(), m, seed=seed)
        return random_projection(d, m, seed=seed)

    # Learned directions ----------------------------------------------------------------------------

    def _learn(self, name: str, sites: Sequence[Site]) -> None:
        """The largest directions of the rows and of the columns of the first examples' gradients.

        One side is projected at random, the other kept whole: ``Z = [P_Rᵀ G]`` over examples spans, with high
        probability, what the rows of all G span (Halko, Martinsson & Tropp 2011, arXiv:0909.4061, section 4).
        """
        matrix = self.matrices[name]
        b, a = self._sizes(name)
        some = [site.part(slice(0, LEARNED_FROM), slice(None)) for site in sites]
        for side, d, m, other, width in (
            ("rows", matrix.rows, b, matrix.columns, a),
            ("columns", matrix.columns, a, matrix.rows, b),
        ):
            if m == d or m < 2 or d > MOST_LEARNED:
                continue
            seed = child_seed(self.plan.seed, "learn", name, side)
            probe = random_projection(other, width, seed=seed)[:, None]
            probe = probe.to(dtype=torch.promote_types(some[0].dtype, torch.float32), device=some[0].held.device)
            whole, kept = identity(d, probe.dtype, probe.device), frozenset({side})
            if side == "rows":
                found = sketched(some, Factors(matrix, whole, probe, kept))[0].unflatten(2, (d, width)).transpose(2, 3)
            else:
                found = sketched(some, Factors(matrix, probe, whole, kept))[0].unflatten(2, (width, d))
            basis = _leading(found.reshape(-1, d), m // LEARNED_SHARE, seed)
            if basis.shape[1]:
                self.bases[f"{name}/{side}"] = basis

    # The same again --------------------------------------------------------------------------------

    def renewed(self) -> "Projections":
        """The same matrices for another pass: shapes and bases are copied, the matrices drawn again."""
        return Projections(self.plan, dict(self.matrices), dict(self.bases), set(self.apart))

    def fingerprint(self, names: Sequence[str]) -> str:
        """A hash of all that sets the matrices of these parameters: equal where sketches may be compared."""
        digest = blake2b(repr(self.plan).encode(), digest_size=16)
        for name in sorted(names):
            digest.update(repr((name, self.matrices[name], name in self.apart)).encode())
            for side in ("rows", "columns"):
                if (basis := self.bases.get(f"{name}/{side}")) is not None:
                    digest.update(basis.numpy().tobytes())
        return digest.hexdigest()


def identity(d: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "d 1 d"]:
    """The shape of an identity matrix, without its numbers."""
    return torch.ones((), dtype=dtype, device=device).expand(d, 1, d)


def _leading(rows: Float[Tensor, "m d"], q: int, seed: int) -> Float[Tensor, "d q"]:
    """Orthonormal float64 columns: the q leading right singular vectors, fewer where the rank is less.

    From the smaller Gram matrix; of large ones by subspace iteration (Halko, Martinsson & Tropp 2011, algorithm 4.4).
    """
    rows = rows.double().cpu()
    m, d = rows.shape
    if min(m, d) > LARGEST_EIGEN:
        rng = np.random.default_rng(child_seed(seed, "subspace"))
        basis = torch.from_numpy(rng.standard_normal((d, min(d, q + OVERSAMPLED))))
        for _ in range(ITERATIONS):
            basis = torch.linalg.qr(rows.T @ (rows @ basis))[0]
        return basis @ _leading(rows @ basis, q, seed)
    gram = rows.T @ rows if d <= m else rows @ rows.T
    values, vectors = torch.linalg.eigh(gram)
    order = torch.arange(len(values) - 1, -1, -1, device=values.device)[:q]
    kept = order[values[order] > 1e-10 * float(values[-1].clamp(min=0)) + 1e-300]
    found = vectors[:, kept] if d <= m else rows.T @ vectors[:, kept]
    return torch.linalg.qr(found)[0].contiguous() if found.shape[1] else found
