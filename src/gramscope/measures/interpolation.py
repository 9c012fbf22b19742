"""Interpolation in a generative model: how straight the decoded path is, layer by layer of the decoder.

arXiv:2605.06258 reads the smooth interpolation of generative models as linearisation: where a decoder's features are
linear in its latent variables, a straight line of latents stays straight. Along one path ``z(t) = (1-t) z_0 + t z_1``
the target linearity of the features ``h(t)`` in t (with an offset) says how much of them is a straight line.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from gramscope.base.checks import check_choice, check_count, check_finite, check_tensor
from gramscope.base.errors import InputError
from gramscope.base.results import TableResult, as_column
from gramscope.base.user_warnings import undefined
from gramscope.capture.activations import Layers
from gramscope.measures.layer_features import features


def interpolate(
    start: Tensor, stop: Tensor, steps: int = 11, *, kind: str = "linear"
) -> Float[Tensor, "pairs steps *shape"]:
    """Paths from ``start`` to ``stop``, ``steps`` points each, ends included.

    ``kind="linear"``: ``(1-t) z_0 + t z_1``. ``kind="spherical"``: on the great circle of the two directions, with the
    length interpolated linearly, for latents drawn from a Gaussian; opposite directions have no such circle.

    >>> interpolate(torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 4.0]]), 3).tolist()
    [[[0.0, 0.0], [1.0, 2.0], [2.0, 4.0]]]
    """
    if check_tensor(start, "start").shape != check_tensor(stop, "stop").shape or start.dim() < 2:
        raise InputError(
            f"start and stop must have one shape (pairs, ...), got {tuple(start.shape)} and {tuple(stop.shape)}."
        )
    if not (start.is_floating_point() and stop.is_floating_point()):
        raise InputError(f"start and stop must be floating, got {start.dtype} and {stop.dtype}. Cast them: .float().")
    check_count(steps, "steps", 2)
    check_choice(kind, "kind", ("linear", "spherical"))
    t = torch.linspace(0, 1, steps, dtype=start.dtype, device=start.device)
    t = t.reshape(1, steps, *[1] * (start.dim() - 1))
    a, b = start[:, None], stop[:, None]
    if kind == "linear":
        return (1 - t) * a + t * b
    return _spherical(a, b, t)


def _spherical(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    axes = tuple(range(2, a.dim()))
    lengths = [v.square().sum(axes, keepdim=True).sqrt() for v in (a, b)]
    if any(not bool((length > 0).all()) for length in lengths):
        raise InputError('a spherical path must start and stop away from zero. Use kind="linear".')
    u, v = a / lengths[0], b / lengths[1]
    cosine = (u * v).sum(axes, keepdim=True).clamp(-1, 1)
    if bool((cosine <= -1 + 1e-6).any()):
        raise InputError('start and stop must not be opposite for a spherical path. Use kind="linear".')
    angle = torch.arccos(cosine)
    straight = (1 - t) * u + t * v
    curved = (torch.sin((1 - t) * angle) * u + torch.sin(t * angle) * v) / torch.sin(angle).clamp_min(1e-12)
    return torch.where(angle > 1e-6, curved, straight) * ((1 - t) * lengths[0] + t * lengths[1])


def path_linearity(paths: Tensor) -> Float64[Tensor, " pairs"]:
    """Share of each path that is a straight line at even speed: target linearity of the points in t, with an offset.

    ``|Σ_t τ_t h_t|² / (Σ τ_t² · Σ_t |h_t - h̄|²)``, τ the centred t; 1 for a straight path, 0 for one that comes back.
    NaN, with a warning, for a path that does not move. Reference: arXiv:2605.06258, target linearity with targets h
    and features t.

    >>> t = torch.linspace(0, 1, 5)[:, None]
    >>> path_linearity(torch.stack([torch.cat([t, 2 * t], 1), torch.cat([t, (t - 0.5) ** 2], 1)])).round(decimals=3)
    tensor([1.0000, 0.9200], dtype=torch.float64)
    """
    if check_tensor(paths, "paths").dim() < 3 or paths.shape[1] < 3:
        raise InputError(
            f"paths must have shape (pairs, steps, ...) with 3 steps at least (two points are a line), got "
            f"{tuple(paths.shape)}."
        )
    check_finite(paths.detach(), "paths", "Look at the decoder's outputs along the path.")
    h = paths.detach().double().flatten(2)
    h = h - h.mean(1, keepdim=True)
    t = torch.linspace(-1, 1, h.shape[1], dtype=torch.float64, device=h.device)
    along = torch.einsum("s,psd->pd", t, h).square().sum(1) / t.square().sum()
    total = h.square().sum((1, 2))
    still = total <= 0
    if bool(still.any()):
        undefined("path linearity", f"{int(still.sum())} of {len(h)} paths do not move")
    return torch.where(still, torch.full_like(total, torch.nan), (along / total.clamp_min(1e-300)).clamp(max=1.0))


@dataclass(frozen=True, eq=False, repr=False)
class Interpolation(TableResult, shown=("mean", "outputs")):
    """Paths through a decoder: ``linearity[layer]`` (pairs,), and ``outputs``, the decoded points, flattened."""

    linearity: dict[str, Float64[Tensor, " pairs"]]
    outputs: Float[Tensor, "pairs steps d"]

    def _table(self) -> tuple[dict[str, object], None]:
        """A row a path, a column a layer."""
        return {name: as_column(values) for name, values in self.linearity.items()}, None

    def mean(self) -> dict[str, float]:
        """The mean over the paths, by layer."""
        return {name: float(values.mean()) for name, values in self.linearity.items()}


def interpolation_linearity(
    decoder: nn.Module,
    start: Tensor,
    stop: Tensor,
    *,
    steps: int = 11,
    kind: str = "linear",
    layers: Layers = "*",
) -> Interpolation:
    """Path linearity of latent interpolations in every chosen layer of a decoder, its input and output included.

    Args:
        decoder: a module from latents (n, ...) to data (n, ...); it is left as it was, and run in evaluation mode.
        start, stop: latents of the ends (pairs, ...).
        steps, kind: see :func:`interpolate`.
        layers: names or globs.

    The keys are ``"(input)"``, the layers in the order of the forward pass, and ``"(output)"``. Reference:
    arXiv:2605.06258, linear interpolation in generative models.

    Example:
        >>> decoder = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> found = interpolation_linearity(decoder, torch.randn(4, 2), torch.randn(4, 2))
        >>> list(found.linearity), bool((found.linearity["0"] > 1 - 1e-6).all())
        (['(input)', '0', '1', '2', '(output)'], True)
    """
    paths = interpolate(start, stop, steps, kind=kind)
    pairs = len(paths)
    flat = paths.flatten(0, 1)
    found = features(decoder, flat, layers)
    last = features(decoder, flat, "", reduce=lambda a: a.flatten(1))[""]
    rows = {"(input)": flat.flatten(1), **found, "(output)": last}
    linearity = {name: path_linearity(h.reshape(pairs, steps, -1)) for name, h in rows.items()}
    return Interpolation(linearity, last.reshape(pairs, steps, -1))
