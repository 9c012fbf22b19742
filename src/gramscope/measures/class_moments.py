"""Labelled rows, their class means and their spread about these, class by class."""

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gramscope.base.checks import check_finite, check_tensor
from gramscope.base.class_labels import class_labels
from gramscope.base.errors import InputError
from gramscope.base.moments import Centre, check_paired
from gramscope.base.rounding import EPS64, Rounding, floor
from gramscope.measures.rows import Rows


def regression_accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Share of examples with ``i - ½ < f(x) < i + ½`` for the label i: a regression network as a classifier.

    Args:
        outputs: f (n,) or (n, 1), one number for each example.
        labels: classes (n,) as whole numbers.

    Reference: arXiv:2410.04264, appendix D.3 and figure 10 (ResNet-18 on digits with one output).

    Example:
        >>> import torch
        >>> regression_accuracy(torch.tensor([0.2, 1.4, 2.6, 3.5]), torch.tensor([0, 1, 2, 3]))
        0.5
    """
    if check_tensor(outputs, "outputs").dim() not in (1, 2) or outputs.numel() != len(outputs) or len(outputs) == 0:
        raise InputError(
            f"outputs must be one number for each example, (n,) or (n, 1), got shape {tuple(outputs.shape)}. "
            "For one output a class, compare argmax with the labels."
        )
    check_finite(outputs, "outputs", "Look for a run that has diverged.")
    wanted = class_labels(labels)
    check_paired(outputs, wanted, "outputs", "labels")
    distance = (outputs.detach().double().reshape(-1) - wanted.to(outputs.device)).abs()
    return float((distance < 0.5).double().mean())


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

    @classmethod
    def of(cls, rows: Rows, labels: Int[Tensor, " n"]) -> "ClassStatistics":
        present, places = labels.to(rows.device).unique(return_inverse=True)
        counts = torch.bincount(places, minlength=len(present)).double()
        means = torch.zeros((len(present), rows.width), dtype=torch.float64, device=rows.device)
        squares = torch.zeros_like(means[0])
        for some, block in rows.blocks():
            means.index_add_(0, places[some], block)
            squares += block.square().sum(0) / rows.n
        means /= counts[:, None]
        variances, rests = torch.zeros_like(counts), torch.zeros_like(means)
        for some, block in rows.blocks():
            at = places[some]
            residuals = block - means[at]
            variances.index_add_(0, at, residuals.square().sum(1))
            rests.index_add_(0, at, residuals)
        rests /= counts[:, None]
        # About the mean with its last digits: |x - m - δ|² sums to |x - m|² - n |δ|².
        variances = (variances / counts - rests.square().sum(1)).clamp(min=0)
        centres = Centre(means, torch.zeros_like(means)).moved(rests)
        return cls(tuple(present.tolist()), counts, centres, variances, squares, rows, places)

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
        for some, block in self.rows.blocks():
            at = self.places[some]
            along = self.centres[at].centred(block) @ directions
            total += (along.square() / self.counts[at, None]).sum(0)
        return total
