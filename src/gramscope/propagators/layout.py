"""Where each state lies in the flat vector of all states."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.axes import Axes
from gramscope.base.errors import InputError
from gramscope.linalg import LinearOperator


@dataclass(frozen=True)
class StateSite:
    """One variable of the state: its name, its own axes, and which of them counts the trials (None: not known)."""

    name: str
    axes: Axes
    trial: int | None = 0


@dataclass(frozen=True)
class StateLayout:
    """The order of the states in a flat vector.

    *stacked*: all sites have one shape and lie along ``stack`` of it, so that every axis has a name.
    *by trial*: the states of one trial lie together, site after site; axes (trial, state), for a cell (trial, time,
    state).
    *plain*: site after site; axes (state,).
    """

    sites: tuple[StateSite, ...]
    axes: Axes
    kind: Literal["stacked", "by trial", "plain"]
    stack: int = 0

    @classmethod
    def of(cls, sites: Sequence[StateSite]) -> "StateLayout":
        """The layout with most names that these sites allow."""
        first = sites[0].axes
        known = all(site.trial is not None for site in sites)
        if known and all(site.axes == first and site.trial == 0 for site in sites) and "site" not in first:
            place = len(first) - 1 if first.names[-1] == "unit" else 1
            sizes = list(first.items())
            named = Axes(**dict([*sizes[:place], ("site", len(sites)), *sizes[place:]]))
            return cls(tuple(sites), named, "stacked", place)
        if len(sites) == 1 and known and sites[0].trial == 0:
            return cls(tuple(sites), first, "plain")
        trials = {site.axes.shape[site.trial] for site in sites if site.trial is not None}
        total = sum(site.axes.size for site in sites)
        if known and len(trials) == 1 and 0 not in trials:
            (n,) = trials
            return cls(tuple(sites), Axes(trial=n, state=total // n), "by trial")
        return cls(tuple(sites), Axes(state=total), "plain")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites)

    def index(self, name: str) -> int:
        if name not in self.names:
            raise InputError(f"there is no state site {name!r}. The sites are {', '.join(self.names)}.")
        return self.names.index(name)

    def split(self, q: Float[Tensor, "k N"]) -> list[Tensor]:
        """Flat vectors as one tensor ``(k, *shape)`` for each site."""
        k = len(q)
        if self.kind == "stacked":
            shape = list(self.sites[0].axes.shape)
            shape.insert(self.stack, len(self.sites))
            return list(q.reshape(k, *shape).unbind(self.stack + 1))
        if self.kind == "plain":
            parts = q.split([site.axes.size for site in self.sites], dim=1)
            return [part.reshape(k, *site.axes.shape) for part, site in zip(parts, self.sites, strict=True)]
        n = self.axes["trial"]
        parts = q.reshape(k, n, self.axes.size // n).split([site.axes.size // n for site in self.sites], dim=2)
        return [
            part.reshape(k, n, *_without(site)).movedim(1, 1 + (site.trial or 0))
            for part, site in zip(parts, self.sites, strict=True)
        ]

    def join(self, parts: Sequence[Tensor]) -> Float[Tensor, "k N"]:
        """The inverse of :meth:`split`."""
        k = len(parts[0])
        if self.kind == "stacked":
            return torch.stack(list(parts), dim=self.stack + 1).reshape(k, self.axes.size)
        if self.kind == "plain":
            return torch.cat([part.flatten(1) for part in parts], dim=1)
        n = self.axes["trial"]
        moved = [
            part.movedim(1 + (site.trial or 0), 1).reshape(k, n, site.axes.size // n)
            for part, site in zip(parts, self.sites, strict=True)
        ]
        return torch.cat(moved, dim=2).reshape(k, self.axes.size)


def _without(site: StateSite) -> tuple[int, ...]:
    return tuple(size for axis, size in enumerate(site.axes.shape) if axis != site.trial)


class Selection(LinearOperator):
    """The restriction of a state vector to one site: ``R``, with ``R Rᵀ = 1``. ``R A Rᵀ`` is a site's own block."""

    def __init__(self, layout: StateLayout, name: str, dtype: torch.dtype, device: torch.device) -> None:
        self.layout, self.place = layout, layout.index(name)
        super().__init__(layout.sites[self.place].axes, layout.axes, dtype=dtype, device=device)

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        return self.layout.split(x.mT)[self.place].reshape(x.shape[1], self.rows.size).mT.clone()

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        parts = [x.new_zeros(x.shape[1], *site.axes.shape) for site in self.layout.sites]
        parts[self.place] = x.mT.reshape(x.shape[1], *self.rows.shape)
        return self.layout.join(parts).mT
