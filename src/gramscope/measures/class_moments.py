"""Labelled rows, their class means and their spread about these, class by class."""

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gramscope.base.errors import InputError
from gramscope.base.moments import Centre, check_paired
from gramscope.base.rounding import EPS64, Rounding, floor
from gramscope.measures.rows import Rows

LARGEST = 2**32  # numbers in one-hot targets: 32 GiB of them


def class_labels(labels: Tensor, *, negative: bool = False) -> Int[Tensor, " n"]:
    """Labels (n,) as int64; one-hot rows (n, C) count as the labels they stand for.

    Negative ones are refused unless ``negative``: as a rule they mark examples without a class (torch's -100).
    """
    if not isinstance(labels, Tensor):
        raise InputError(f"labels must be a torch.Tensor, got {type(labels).__name__}. Use torch.as_tensor(labels).")
    labels = labels.detach()
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dim() == 2:
        hot = labels != 0
        if not bool(((labels == 1) == hot).all()) or not bool((hot.sum(1) == 1).all()):
            raise InputError("labels must be classes (n,) or one-hot rows (n, C), got rows that are not one-hot.")
        return hot.long().argmax(1)
    if labels.dim() != 1 or labels.is_complex():
        raise InputError(f"labels must have shape (n,) or be one-hot (n, C), got {tuple(labels.shape)}.")
    if labels.is_floating_point() and not bool((labels.isfinite() & (labels == labels.round())).all()):
        raise InputError("labels must be whole numbers, got fractions. Pass classes, not regression targets.")
    labels = labels.long()
    if not negative and len(labels) and int(labels.min()) < 0:
        raise InputError(
            f"class labels must be numbered from 0, got {int(labels.min())}. Drop ignored examples (label -100) first; "
            "where negative labels are classes, renumber them: labels.unique(return_inverse=True)[1]."
        )
    return labels


def one_hot(labels: Int[Tensor, " n"], classes: int | None = None) -> Float[Tensor, "n C"]:
    """Labels from 0 as float64 rows; as many columns as ``classes``, or as the largest label needs."""
    largest = int(labels.max()) if len(labels) else 0
    if classes is not None and largest >= classes:
        raise InputError(f"class labels must be between 0 and {classes - 1}, got {largest}. Check classes=.")
    width = classes or largest + 1
    if len(labels) * width > LARGEST:
        raise InputError(
            f"class labels must be numbered from 0 without large gaps, but these need one-hot targets of "
            f"{len(labels)} x {width}. Renumber all of them together: labels.unique(return_inverse=True)[1]."
        )
    return torch.nn.functional.one_hot(labels, width).double()


@dataclass(frozen=True, eq=False)
class ClassStatistics:
    """What the measures of collapse read: means, within-class variances, and the within scatter along directions."""

    labels: tuple[int, ...]
    counts: Float[Tensor, " C"]
    centres: Centre  # the means, (C, p)
    variances: Float[Tensor, " C"]  # E_c |φ - μ_c|²
    squares: Float[Tensor, " p"]  # E φ², over all examples
    rows: Rows = field(repr=False)
    places: Int[Tensor, " n"] = field(repr=False)  # the class of each row, as its place among the labels

    @property
    def rounding(self) -> Rounding:
        return self.rows.rounding

    @cached_property
    def centred(self) -> Float[Tensor, "C p"]:
        """Class means minus their mean; every class counts alike."""
        return self.centre.gap(self.centres)

    @cached_property
    def centre(self) -> Centre:
        """The mean of the class means (p,)."""
        middle = self.centres.mean.mean(0)
        start = Centre(middle, torch.zeros_like(middle))
        return start.moved(start.gap(self.centres).mean(0))

    @cached_property
    def rounding_of_means(self) -> float:
        """How far class means may lie from where they belong: that of the features, less by the mean over a class."""
        scale = float(self.centres.mean.norm(dim=1).max()) + float(self.variances.max().sqrt())
        return max(1e3 * EPS64, self.rounding.relative / math.sqrt(float(self.counts.min()))) * scale

    def along_means(self) -> tuple[Float[Tensor, " r"], Float[Tensor, "p r"]]:
        """Singular values and directions (columns) of the centred means that are more than rounding, C - 1 at most."""
        classes, width = self.centred.shape
        _, s, v = torch.linalg.svd(self.centred, full_matrices=False)
        errors = self.rounding.errors(self.squares.sqrt()) * math.sqrt(classes / float(self.counts.min()))
        floors = floor(classes, width) * (v.square() @ errors.square()).sqrt()
        kept = s > floors.clamp_min(max(classes, width) * EPS64 * float(s[0]))
        kept[classes - 1 :] = False
        return s[kept], v[kept].mT

    def within_along(self, directions: Float[Tensor, "p r"]) -> Float[Tensor, " r"]:
        """``vᵀ Σ_W v`` for each column v."""
        total = torch.zeros(directions.shape[1], dtype=torch.float64, device=directions.device)
        for start in range(0, self.rows.n, 1024):
            at = self.places[start : start + 1024]
            along = self.centres[at].centred(self.rows.block(start, start + 1024)) @ directions
            total += (along.square() / self.counts[at, None]).sum(0)
        return total


@dataclass(frozen=True, eq=False)
class ClassState:
    """Labelled rows and, for NC4, the outputs of the network."""

    rows: Rows
    labels: tuple[Tensor, ...] = field(repr=False)
    outputs: Rows | None

    @classmethod
    def of(cls, features: Tensor, labels: Int[Tensor, " n"], outputs: Tensor | None) -> "ClassState":
        rows = Rows.of(features, "features")
        check_paired(features, labels, "features", "labels")
        if outputs is not None:
            check_paired(features, outputs, "features", "outputs")
        own = (labels.to(rows.device).clone(),) if len(labels) else ()
        return cls(rows, own, None if outputs is None else Rows.of(outputs, "outputs"))

    @property
    def n(self) -> int:
        return self.rows.n

    def merged(self, other: "ClassState") -> "ClassState":
        if (self.outputs is None) != (other.outputs is None):
            raise InputError("outputs must be given for every batch or for none.")
        rows = self.rows.merged(other.rows)
        labels = tuple(chunk.to(rows.device) for chunk in self.labels + other.labels)
        return ClassState(rows, labels, self.outputs.merged(other.outputs) if self.outputs and other.outputs else None)

    def statistics(self) -> ClassStatistics:
        present, places = torch.cat(self.labels).unique(return_inverse=True)
        counts = torch.bincount(places, minlength=len(present)).double()
        means = torch.zeros((len(present), self.rows.width), dtype=torch.float64, device=self.rows.device)
        squares = torch.zeros_like(means[0])
        for start in range(0, self.n, 1024):
            block = self.rows.block(start, start + 1024)
            means.index_add_(0, places[start : start + 1024], block)
            squares += block.square().sum(0) / self.n
        means /= counts[:, None]
        variances, rests = torch.zeros_like(counts), torch.zeros_like(means)
        for start in range(0, self.n, 1024):
            at = places[start : start + 1024]
            residuals = self.rows.block(start, start + 1024) - means[at]
            variances.index_add_(0, at, residuals.square().sum(1))
            rests.index_add_(0, at, residuals)
        rests /= counts[:, None]
        # About the mean with its last digits: |x - m - δ|² sums to |x - m|² - n |δ|².
        variances = (variances / counts - rests.square().sum(1)).clamp(min=0)
        centres = Centre(means, torch.zeros_like(means)).moved(rests)
        return ClassStatistics(tuple(present.tolist()), counts, centres, variances, squares, self.rows, places)
