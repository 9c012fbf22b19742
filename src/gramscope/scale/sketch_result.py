"""A finished sketch: kernels, norms, neighbours and alignments of per-example gradients, with standard errors.

On disk it is one safetensors file.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gramscope.base.checks import check_count
from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.base.user_warnings import undefined
from gramscope.kernels.kernel_matrix import target_matrix
from gramscope.linalg.intervals import half_widths, jackknife_error
from gramscope.scale.sketch_factors import Projections, SketchPlan
from gramscope.scale.sketch_sites import MatrixShape
from gramscope.store.files import Disk
from gramscope.store.store_errors import disk_trouble

KIND, VERSION = "gramscope sketch", 1
FEATURES, INPUTS, BASES = "features/", "inputs/", "bases/"
ENTRIES_AT_ONCE = 2**24  # of a kernel that is looked at block by block


@dataclass(frozen=True, eq=False, repr=False)
class Estimate(Result):
    """A mean over independent repeats, and the standard error of each entry.

    Of a single repeat it is NaN; zero where nothing is random.

    The errors of the entries are not independent: all share the random matrices. From few repeats use
    :meth:`interval`.
    """

    value: Float[Tensor, "*shape"]
    standard_error: Float[Tensor, "*shape"]
    repeats: int

    def interval(self, level: float = 0.95) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        """For each entry, from where to where it lies with probability ``level`` or more."""
        half = half_widths(level, self.repeats) * self.standard_error
        return self.value - half, self.value + half


@dataclass(frozen=True, eq=False, repr=False)
class Sketch(Result):
    """Sketches φ of the gradients of N examples in k directions, for each parameter; see :func:`gramscope.sketch`.

    ``features`` maps a parameter to (ρ, N, k, d), ρ repeats, or one where the sketch is the gradient itself. For a
    parameter in ``inputs`` (ρ, N, 1, w), which one position of each example uses, these are the projected signals and
    the sketch is the outer product of both: ``⟨φ, φ'⟩ = ⟨s, s'⟩⟨v, v'⟩``.
    ``fallback`` names the parameters whose gradients were formed one example at a time.
    """

    shown: ClassVar[tuple[str, ...]] = ("examples", "directions", "repeats", "nbytes")

    features: Mapping[str, Float[Tensor, "_ N k _"]]
    projections: Projections
    fallback: tuple[str, ...] = ()
    inputs: Mapping[str, Float[Tensor, "_ N 1 _"]] = field(default_factory=dict)

    @property
    def examples(self) -> int:
        return next(iter(self.features.values())).shape[1]

    @property
    def directions(self) -> int:
        return next(iter(self.features.values())).shape[2]

    @property
    def repeats(self) -> int:
        """Independent repeats; 1 if nothing is random."""
        return 1 if len(self.exact) == len(self.features) else self.projections.plan.repeats

    @property
    def exact(self) -> tuple[str, ...]:
        """Parameters that are small enough to be held whole: their kernels have no error."""
        return tuple(name for name in self.features if self.projections.is_whole(name))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.features.values(), *self.inputs.values()))

    def numbers(self, name: str) -> int:
        """Numbers that are held of a parameter, for one example and repeat."""
        inputs = self.inputs[name].shape[3] if name in self.inputs else 0
        return self.directions * self.features[name].shape[3] + inputs

    def __str__(self) -> str:
        plan = self.projections.plan
        numbers = sum(map(self.numbers, self.features))
        lines = [
            f"Sketch of {self.examples:,} examples, {self.directions} directions: {numbers:,} numbers for each, "
            f"{plan.repeats} repeats, {plan.method}, seed {plan.seed}"
        ]
        lines += [
            f"  {name} ({'x'.join(map(str, self.projections.matrices[name].shape))}): {self.numbers(name):,}"
            + (" (whole)" if name in self.exact else "")
            for name in self.features
        ]
        return "\n".join(lines)

    def fingerprint(self) -> str:
        """Equal for sketches whose random matrices are the same, so that they may be compared."""
        return self.projections.fingerprint(list(self.features))

    def to(self, device: torch.device | str) -> "Sketch":
        features = {name: part.to(device) for name, part in self.features.items()}
        return replace(self, features=features, inputs={name: part.to(device) for name, part in self.inputs.items()})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all; :func:`gramscope.scale.load_sketch` reads it."""
        path = Path(path)
        if path.is_dir():
            raise InputError(f"path must be a file, got the directory {path}. Pass e.g. {path / 'sketch.safetensors'}.")
        made = self.projections
        about = {
            "plan": asdict(made.plan),
            "matrices": {name: [list(made.matrices[name].shape), made.matrices[name].split] for name in self.features},
            "apart": sorted(made.apart),
            "fallback": list(self.fallback),
            "fingerprint": self.fingerprint(),
        }
        tensors: dict[str, Tensor] = {FEATURES + name: part.contiguous() for name, part in self.features.items()}
        tensors |= {INPUTS + name: part.contiguous() for name, part in self.inputs.items()}
        tensors |= {BASES + name: basis.contiguous() for name, basis in made.bases.items()}
        text = {"kind": KIND, "version": str(VERSION), "sketch": json.dumps(about)}
        with disk_trouble(f"writing the sketch {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            Disk().write_whole(path, save(tensors, metadata=text))

    # What is computed of it ------------------------------------------------------------------------

    def kernel(self, other: "Sketch | None" = None, layers: str | None = None) -> Estimate:
        """``K_{μν} = Σ_c ⟨∂f_c(x_μ), ∂f_c(x_ν)⟩``, as ``gs.ntk(..., reduce="trace")``: unbiased, (N, M).

        ``other`` is a sketch of other examples, or of another checkpoint, with the same random matrices. ``layers``
        names one parameter; all of them if None.
        """
        return self._estimate(list(self._kernels(other, layers, slice(None))))

    def norms(self) -> Estimate:
        """``√(Σ_c |∂f_c(x_μ)|²)``, the norm of each example's gradient, (N,).

        The squares are unbiased; the standard error of the root is that of the square over twice the root.
        """
        squares = self._estimate(self._squared_norms())
        value = squares.value.clamp(min=0).sqrt()
        error = torch.where(value > 0, squares.standard_error / (2 * value), squares.standard_error.sqrt())
        return Estimate(value, error, squares.repeats)

    def nearest(
        self, k: int = 10, other: "Sketch | None" = None, cosine: bool = True
    ) -> tuple[Int[Tensor, "N k"], Float[Tensor, "N k"]]:
        """For each example the k others whose gradients are most alike: their numbers, and the similarities.

        ``other`` is a sketch of the examples to choose from; its own, without the example itself, if None. Without
        ``cosine`` the inner products are compared, by which examples with large gradients come first.
        """
        among = self if other is None else other
        check_count(k, "k", most=among.examples - (other is None), why="the examples to choose from")
        mine, theirs = self.norms().value, among.norms().value
        found = []
        for start, stop in self._blocks(among):
            kernel = torch.stack(list(self._kernels(other, None, slice(start, stop)))).mean(0)
            if cosine:
                kernel = kernel / (mine[start:stop, None] * theirs).clamp(min=torch.finfo(kernel.dtype).tiny)
            if other is None:
                kernel[range(stop - start), range(start, stop)] = -torch.inf
            found.append(kernel.topk(k, 1))
        return torch.cat([top.indices for top in found]), torch.cat([top.values for top in found])

    def alignment(self, targets: Tensor) -> Estimate:
        """``⟨K, y yᵀ⟩ / (|K| |y yᵀ|)`` with centred targets, labels as one-hot, as ``Kernel.target_alignment``.

        ``|K|²`` is estimated from the products ``⟨K_r, K_s⟩`` of two different repeats, which are unbiased; that of the
        mean kernel would count its error as signal. The standard error is the jackknife's over repeats (Efron 1982).
        """
        y = target_matrix(targets, self.examples).to(next(iter(self.features.values())).device)
        y = y - y.mean(0)
        if not bool(y.any()):
            nothing = torch.tensor(undefined("an alignment", "the targets are the same for all examples"), device="cpu")
            return Estimate(nothing, nothing, self.repeats)
        products, along = self._products(y)
        size = float((y.T @ y).norm())
        value, R = _aligned(products, along, size), len(along)
        if R == 1:
            return Estimate(value, torch.full_like(value, self._error_of_one), 1)
        if R == 2:  # without one of two there is no pair
            return Estimate(value, (along / products.diagonal().sqrt() / size).std() / R**0.5, R)
        kept = [[s for s in range(R) if s != r] for r in range(R)]
        others = torch.stack([_aligned(products[some][:, some], along[some], size) for some in kept])
        return Estimate(value, jackknife_error(others), R)

    # -----------------------------------------------------------------------------------------------

    def _products(self, y: Float[Tensor, "N c"]) -> tuple[Float[Tensor, "rho rho"], Float[Tensor, " rho"]]:
        """``⟨K_r, K_s⟩`` of all repeats and ``⟨K_r, y yᵀ⟩``, from some rows of the kernels at a time."""
        R = self.repeats
        products = torch.zeros(R, R, dtype=torch.float64, device=y.device)
        along = torch.zeros(R, dtype=torch.float64, device=y.device)
        for start, stop in self._blocks(self):
            kernels = torch.stack(list(self._kernels(None, None, slice(start, stop)))).double()
            products += torch.einsum("rnm,snm->rs", kernels, kernels)
            along += torch.einsum("nc,rnm,mc->r", y[start:stop], kernels, y)
        return products, along

    def _estimate(self, samples: list[Tensor]) -> Estimate:
        stacked = torch.stack(samples)
        R = len(stacked)
        if R > 1:
            return Estimate(stacked.mean(0), stacked.std(0) / R**0.5, R)
        return Estimate(stacked[0], torch.full_like(stacked[0], self._error_of_one), 1)

    @property
    def _error_of_one(self) -> float:
        """The standard error where there is one repeat: none if nothing is random, else not known."""
        return 0.0 if len(self.exact) == len(self.features) else torch.nan

    def _blocks(self, among: "Sketch") -> Iterator[tuple[int, int]]:
        rows = max(1, ENTRIES_AT_ONCE // (self.repeats * among.examples))
        return ((start, min(self.examples, start + rows)) for start in range(0, self.examples, rows))

    def _squared_norms(self) -> list[Float[Tensor, " N"]]:
        parts = []
        for name, part in self.features.items():
            squares = part.square().sum((2, 3))  # (ρ, N)
            parts.append(squares * self.inputs[name].square().sum((2, 3)) if name in self.inputs else squares)
        return [
            sum((part[r % len(part)] for part in parts), torch.zeros_like(parts[0][0])) for r in range(self.repeats)
        ]

    def _kernels(self, other: "Sketch | None", layers: str | None, rows: slice) -> Iterator[Float[Tensor, "n M"]]:
        """The estimate of each repeat."""
        theirs = self if other is None else self._checked(other)
        if layers is not None and layers not in self.features:
            raise InputError(
                f"layers must name a parameter of the sketch, got {layers!r}. It has {', '.join(self.features)}."
            )
        names = list(self.features) if layers is None else [layers]
        random = [name for name in names if name not in self.exact]
        fixed = self._sum([name for name in names if name not in random], theirs, 0, rows)
        for repeat in range(self.repeats):
            yield fixed + self._sum(random, theirs, repeat, rows)

    def _sum(self, names: Sequence[str], theirs: "Sketch", repeat: int, rows: slice) -> Float[Tensor, "n M"]:
        some = next(iter(self.features.values()))
        total = some.new_zeros(len(some[0, rows]), theirs.examples)
        for name in names:
            gram = _gram(self.features[name], theirs.features[name], repeat, rows)
            if name in self.inputs:
                gram *= _gram(self.inputs[name], theirs.inputs[name], repeat, rows)
            total += gram
        return total

    def _checked(self, other: "Sketch") -> "Sketch":
        if not isinstance(other, Sketch):
            raise InputError(f"other must be a sketch, got {type(other).__name__}. Make it with gs.sketch.")
        if self.fingerprint() != other.fingerprint():
            raise InputError(
                "two sketches must have the same random matrices to be compared, but they differ in size, repeats, "
                "method, seed, layers or learned directions. Make the second with gs.sketch(..., like=first)."
            )
        if self.directions != other.directions:
            raise InputError(
                f"two sketches must have the same directions to be compared, got {self.directions} and "
                f"{other.directions}. Choose the same outputs, or a loss, for both."
            )
        return other


def _gram(
    mine: Float[Tensor, "_ N k _"], theirs: Float[Tensor, "_ M k _"], repeat: int, rows: slice
) -> Float[Tensor, "n M"]:
    place = repeat % len(mine)  # what is not random is held once
    return mine[place, rows].flatten(1) @ theirs[place].flatten(1).T


def _aligned(products: Float[Tensor, "r r"], along: Float[Tensor, " r"], size: float) -> Tensor:
    R = len(along)
    between = products.sum() - products.diagonal().sum() if R > 1 else products.sum()
    return along.mean() / (between / (R * (R - 1) if R > 1 else 1)).clamp(min=0).sqrt() / size


def load_sketch(path: str | os.PathLike[str]) -> Sketch:
    """The sketch that :meth:`Sketch.save` wrote. No code of the file is run.

    Example:
        >>> import tempfile, torch, gramscope as gs
        >>> found = gs.sketch(torch.nn.Linear(3, 2), torch.eye(3), size=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found.save(folder + "/a.safetensors")
        ...     again = gs.scale.load_sketch(folder + "/a.safetensors")
        >>> torch.equal(found.kernel().value, again.kernel().value)
        True
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} must be a file that sketch.save wrote, but there is no such file.")
    try:
        with disk_trouble(f"reading the sketch {path}"), safe_open(path, framework="pt") as file:
            text = file.metadata() or {}
            if text.get("kind") != KIND:
                raise InputError(f"{path} must be a file that sketch.save wrote, but it is another safetensors file.")
            if int(text["version"]) > VERSION:
                raise InputError(
                    f"{path} has version {text['version']}, but this gramscope reads sketches up to version {VERSION}. "
                    "Upgrade: pip install --upgrade gramscope."
                )
            about = json.loads(text["sketch"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path} must be a file that sketch.save wrote, but it is damaged ({error}).") from error
    matrices = {name: MatrixShape(tuple(shape), split) for name, (shape, split) in about["matrices"].items()}
    bases, inputs = (
        {name.removeprefix(kind): t for name, t in tensors.items() if name.startswith(kind)} for kind in (BASES, INPUTS)
    )
    features = {name: tensors[FEATURES + name] for name in about["matrices"]}
    made = Projections(SketchPlan(**about["plan"]), matrices, bases, set(about["apart"]))
    found = Sketch(features, made, tuple(about["fallback"]), inputs)
    if found.fingerprint() != about["fingerprint"]:
        raise InputError(f"{path} must be as sketch.save wrote it, but its parts do not belong together. Restore it.")
    return found
