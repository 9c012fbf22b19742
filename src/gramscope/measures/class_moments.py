"""Means and scatter of labelled rows, class by class, mergeable; rows are kept while that takes less memory."""

import math
from dataclasses import dataclass, field, replace
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
    width = classes or (int(labels.max()) + 1 if len(labels) else 1)
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
    rounding: Rounding
    scatter: Float[Tensor, "p p"] | None = field(repr=False, default=None)  # Σ_W
    residuals: tuple[Rows, Int[Tensor, " n"]] | None = field(repr=False, default=None)

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
        if self.scatter is not None:
            return torch.einsum("pr,pq,qr->r", directions, self.scatter, directions)
        assert self.residuals is not None
        rows, places = self.residuals
        total = torch.zeros(directions.shape[1], dtype=torch.float64, device=directions.device)
        for start in range(0, rows.n, 1024):
            at = places[start : start + 1024]
            along = self.centres[at].centred(rows.block(start, start + 1024)) @ directions
            total += (along.square() / self.counts[at, None]).sum(0)
        return total


@dataclass(frozen=True, eq=False)
class ClassMoments:
    """For each class its number of rows, their mean and their scatter about it."""

    labels: Int[Tensor, " C"]
    counts: Float[Tensor, " C"]
    centres: Centre  # the means, (C, p)
    scatters: Float[Tensor, "C p p"]

    @classmethod
    def of(cls, rows: Float[Tensor, "n p"], labels: Int[Tensor, " n"]) -> "ClassMoments":
        present = labels.unique()
        counts, centres, scatters = [], [], []
        for label in present:
            own = rows[labels == label]
            centre = Centre.of(own)
            residuals = centre.centred(own)
            counts.append(float(len(own)))
            centres.append(centre)
            scatters.append(residuals.mT @ residuals)
        means = Centre(torch.stack([c.mean for c in centres]), torch.stack([c.rest for c in centres]))
        return cls(present, torch.tensor(counts, device="cpu").to(rows), means, torch.stack(scatters))

    def merged(self, other: "ClassMoments") -> "ClassMoments":
        labels = torch.cat([self.labels, other.labels.to(self.labels)]).unique()
        a, b = self._spread(labels), other._spread(labels.to(other.labels))
        counts_b, scatters_b = b[0].to(self.counts), b[2].to(self.scatters)
        counts = a[0] + counts_b
        gap = a[1].gap(b[1])
        weight = (counts_b / counts)[:, None]
        scatters = a[2] + scatters_b
        scatters += torch.einsum("c,cp,cq->cpq", a[0] * counts_b / counts, gap, gap)
        # A class that only one side has keeps its mean to the last digit.
        centres = a[1].moved(gap * weight).where(a[0][:, None] > 0, b[1].to(self.scatters))
        return ClassMoments(labels, counts, centres, scatters)

    def _spread(self, labels: Int[Tensor, " K"]) -> tuple[Tensor, Centre, Tensor]:
        """The same with empty entries for the classes of ``labels`` that are not here."""
        places = torch.searchsorted(labels, self.labels)

        def spread(x: Tensor) -> Tensor:
            return x.new_zeros(len(labels), *x.shape[1:]).index_copy(0, places, x)

        return spread(self.counts), Centre(spread(self.centres.mean), spread(self.centres.rest)), spread(self.scatters)

    def statistics(self, rounding: Rounding) -> ClassStatistics:
        spread = self.scatters.diagonal(dim1=1, dim2=2)
        variances = spread.sum(1) / self.counts
        squares = (spread + self.counts[:, None] * self.centres.mean.square()).sum(0) / self.counts.sum()
        within = torch.einsum("cpq,c->pq", self.scatters, 1 / self.counts)
        labels = tuple(self.labels.tolist())
        return ClassStatistics(labels, self.counts, self.centres, variances, squares, rounding, scatter=within)


@dataclass(frozen=True, eq=False)
class ClassState:
    """Labelled rows (and, for NC4, the outputs of the network), or their class moments once these are smaller."""

    width: int
    labels: tuple[Tensor, ...] = field(repr=False)
    rows: Rows | None
    outputs: Rows | None
    moments: ClassMoments | None
    keep_rows: bool
    rounding: Rounding

    @classmethod
    def of(
        cls, features: Tensor, labels: Int[Tensor, " n"], outputs: Tensor | None, *, keep_rows: bool
    ) -> "ClassState":
        rows = Rows.of(features, "features")
        if rows.n != len(labels):
            check_paired(features, labels, "features", "labels")
        kept = None if outputs is None else Rows.of(outputs, "outputs")
        if kept is not None and outputs is not None:
            check_paired(features, outputs, "features", "outputs")
        own = (labels.to(rows.device).clone(),) if len(labels) else ()
        return cls(rows.width, own, rows, kept, None, keep_rows, rows.rounding)._compact()

    @property
    def n(self) -> int:
        return int(self.moments.counts.sum()) if self.moments is not None else self.rows.n if self.rows else 0

    def merged(self, other: "ClassState") -> "ClassState":
        if self.width != other.width:
            raise InputError(f"states of one feature width can be merged, got {self.width} and {other.width}.")
        if (self.outputs is None) != (other.outputs is None):
            raise InputError("outputs must be given for every batch or for none.")
        if self.n == 0 or other.n == 0:
            return other if self.n == 0 else self
        rounding = self.rounding.merged(other.rounding)
        if self.rows is not None and other.rows is not None:
            outputs = self.outputs.merged(other.outputs) if self.outputs and other.outputs else None
            labels = self.labels + tuple(chunk.to(self.rows.device) for chunk in other.labels)
            rows = self.rows.merged(other.rows)
            return ClassState(self.width, labels, rows, outputs, None, self.keep_rows, rounding)._compact()
        merged = self._as_moments().merged(other._as_moments())
        return ClassState(self.width, (), None, None, merged, False, rounding)

    def statistics(self) -> ClassStatistics:
        if self.moments is not None:
            return self.moments.statistics(self.rounding)
        assert self.rows is not None
        present, places = torch.cat(self.labels).unique(return_inverse=True)
        counts = torch.bincount(places, minlength=len(present)).double()
        means = torch.zeros((len(present), self.width), dtype=torch.float64, device=self.rows.device)
        squares = torch.zeros_like(means[0])
        for start in range(0, self.rows.n, 1024):
            block = self.rows.block(start, start + 1024)
            means.index_add_(0, places[start : start + 1024], block)
            squares += block.square().sum(0) / self.rows.n
        means /= counts[:, None]
        variances, rests = torch.zeros_like(counts), torch.zeros_like(means)
        for start in range(0, self.rows.n, 1024):
            at = places[start : start + 1024]
            residuals = self.rows.block(start, start + 1024) - means[at]
            variances.index_add_(0, at, residuals.square().sum(1))
            rests.index_add_(0, at, residuals)
        rests /= counts[:, None]
        # About the mean with its last digits: |x - m - δ|² sums to |x - m|² - n |δ|².
        variances = (variances / counts - rests.square().sum(1)).clamp(min=0)
        labels = tuple(present.tolist())
        centres = Centre(means, torch.zeros_like(means)).moved(rests)
        about = self.rows, places
        return ClassStatistics(labels, counts, centres, variances, squares, self.rounding, residuals=about)

    def _as_moments(self) -> ClassMoments:
        if self.moments is not None:
            return self.moments
        assert self.rows is not None
        return ClassMoments.of(self.rows.all(), torch.cat(self.labels))

    def _compact(self) -> "ClassState":
        if self.keep_rows or self.rows is None or not self.labels:
            return self
        if self.rows.nbytes <= 8 * self.width**2:  # not even one class would be smaller; spares the count below
            return self
        classes = len(torch.cat(self.labels).unique())
        if self.rows.nbytes <= 8 * classes * self.width * (self.width + 1):
            return self
        return replace(self, labels=(), rows=None, outputs=None, moments=self._as_moments())
