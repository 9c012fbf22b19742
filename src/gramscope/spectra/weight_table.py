"""One row a weight: spectrum, tail, alternatives, noise and null of a whole network."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from gramscope.base.checks import check_choice, check_count, check_counts
from gramscope.base.errors import GramscopeError, InputError
from gramscope.base.progress_bar import progress
from gramscope.base.rng import child_seed
from gramscope.linalg import LinearOperator
from gramscope.spectra.alternative_tails import Alternative, alternatives_checked
from gramscope.spectra.eigenvalues import Array, as_eigenvalues, pooled_squared_singular_values, spectrum
from gramscope.spectra.layouts import Layout
from gramscope.spectra.marchenko_pastur import MarchenkoPasturFit, fit_marchenko_pastur_checked, undefined
from gramscope.spectra.shuffled import ShuffledNull, shuffled_null_checked
from gramscope.spectra.spectrum_ranks import log_alpha_norm_checked, ranks_checked
from gramscope.spectra.tail import Convention, TailFit, fit_checked, p_value_checked, require_convention
from gramscope.spectra.tail_verdict import needs_null, training_label, verdict, verdict_alone
from gramscope.spectra.weights import Skipped, Source, Weight, weights_of

if TYPE_CHECKING:
    from pandas import DataFrame

ConvLayout = Literal["slices", "unfold"]
Row = dict[str, Any]
_TAIL = ("alpha", "sigma", "D", "xmin", "n_tail")
_RANKS = ("log_norm", "log_spectral_norm", "stable_rank", "participation", "entropy", "rank")
_SHUFFLES = 10  # the fewest whose p can lie below 0.1, the level of the verdict


@dataclass(frozen=True)
class _Plan:
    convention: Convention
    bootstrap: int
    shuffles: int | None
    seed: int


def analyze(
    source: Source,
    *,
    convention: Convention = "gramscope",
    conv: ConvLayout = "slices",
    include: str = "*",
    bootstrap: int = 100,
    shuffles: int | None = None,
    min_size: int = 1,
    max_size: int | None = None,
    seed: int = 0,
    workers: int | None = None,
) -> "DataFrame":
    """The spectrum of every weight of a network, one row a weight.

    A row is about ``λ = eig(WᵀW)`` of one weight. It has the power-law tail (:func:`fit_tail`), other laws for it
    (:func:`alternatives`) and its bootstrap p-value (:func:`p_value`); ranks and norms (:func:`ranks`,
    ``alpha_hat = α log10 λ_max``, ``log_alpha_norm = log10 Σ λ^α``); the Marchenko-Pastur bulk with its spikes
    (:func:`fit_marchenko_pastur`); the shuffled null (:func:`shuffled_null`); and a ``verdict`` in words. A NaN has
    its ``reason``. Packed weights get a row for each part (gates, q, k, v), tied ones one row in all;
    ``skipped(frame)`` lists every parameter without a row and why.

    Args:
        source: a module, a dict of tensors (a state dict; symmetric operators may be among them), a matrix or an
            operator.
        convention: "gramscope", or "weightwatcher" for the numbers of WeightWatcher 0.7.7.
        conv: convolutions as one matrix for each kernel position, eigenvalues pooled ("slices"), or unfolded to
            (out, in · positions) ("unfold").
        include: a glob of names.
        bootstrap: replicates of the p-value, 0 for none. Without them no power law is claimed.
        shuffles: of every weight, 0 for none; by default ten, of those weights that would else be called a power law.
        min_size, max_size: weights whose smaller side lies outside are skipped, and listed.
        workers: weights at a time, by default torch's number of threads.

    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> frame = analyze(nn.Sequential(nn.Linear(60, 80), nn.LayerNorm(80), nn.LSTM(80, 40)))
    >>> frame["name"].tolist()[:3]
    ['0.weight', '2.weight_ih_l0[i]', '2.weight_ih_l0[f]']
    >>> set(frame["verdict"]) <= {"no power law", "undecided"}
    True
    >>> skipped(frame)["name"].tolist()
    ['0.bias', '1.weight', '1.bias', '2.bias_ih_l0', '2.bias_hh_l0']
    """
    plan = _Plan(require_convention(convention), bootstrap, shuffles, seed)
    check_counts(0, bootstrap=bootstrap, shuffles=shuffles or 0, min_size=min_size)
    if max_size is not None and max_size < min_size:
        raise InputError(f"max_size must be at least min_size={min_size}, got {max_size}.")
    chosen, left_out = _choose(source, convention, conv, include, min_size, max_size)
    count = min(torch.get_num_threads() if workers is None else check_count(workers, "workers"), len(chosen))
    with progress("spectra", len(chosen)) as step:
        rows = _rows(chosen, plan, count, step)
    from pandas import DataFrame

    frame = DataFrame(rows, columns=None if rows else ["name", "kind", "reason"])
    frame.attrs["skipped"] = [{"name": s.name, "shape": s.shape, "reason": s.reason} for s in left_out]
    frame.attrs["convention"], frame.attrs["conv"], frame.attrs["seed"] = convention, conv, seed
    return frame


def skipped(frame: "DataFrame") -> "DataFrame":
    """The parameters that :func:`analyze` gave no row, with shape and reason.

    >>> skipped(analyze({"weight": torch.eye(3), "steps": 7}))["reason"].tolist()
    ['not a tensor but a int']
    """
    if "skipped" not in frame.attrs:
        raise InputError("the frame must come from analyze, with its attrs kept; this one lists no skipped parameters.")
    return type(frame)(frame.attrs["skipped"], columns=["name", "shape", "reason"])


@torch.no_grad()
def esds(
    source: Source, *, convention: Convention = "gramscope", conv: ConvLayout = "slices", include: str = "*"
) -> dict[str, Float64[Tensor, " _"]]:
    """The eigenvalues behind the rows of :func:`analyze`: name to λ, ascending.

    ``λ = eig(WᵀW)`` of each weight, by :func:`esd`. Takes what :func:`analyze` takes.

    >>> {name: len(values) for name, values in esds(torch.nn.MultiheadAttention(8, 2)).items()}
    {'in_proj_weight[q]': 8, 'in_proj_weight[k]': 8, 'in_proj_weight[v]': 8, 'out_proj.weight': 8}
    """
    chosen, _ = _choose(source, require_convention(convention), conv, include, 1, None)
    return {weight.name: torch.from_numpy(_eigenvalues(weight)) for weight in chosen}


def _choose(
    source: Source, convention: Convention, conv: str, include: str, min_size: int, max_size: int | None
) -> tuple[list[Weight], list[Skipped]]:
    check_choice(conv, "conv", get_args(ConvLayout))
    weights, left_out = weights_of(source, Layout(conv, convention == "weightwatcher"))
    chosen = []
    for weight in weights:
        size = min(weight.matrices.shape[-2:])
        if not fnmatchcase(weight.name, include):
            left_out.append(Skipped(weight.name, weight.shape, f"its name does not match include={include!r}"))
        elif size < min_size or (max_size is not None and size > max_size):
            reason = f"its smaller side is {size}, outside min_size={min_size}, max_size={max_size}"
            left_out.append(Skipped(weight.name, weight.shape, reason))
        else:
            chosen.append(weight)
    if weights and not any(fnmatchcase(weight.name, include) for weight in weights):
        raise InputError(f"include={include!r} matches no weight. There are {[w.name for w in weights][:8]} ...")
    return chosen, left_out


def _rows(chosen: list[Weight], plan: _Plan, workers: int, step: Callable[[], None]) -> list[Row]:
    rows: list[Row] = []
    with _one_core_each() if workers > 1 else nullcontext(), ThreadPoolExecutor(max(workers, 1)) as pool:
        for row in pool.map(_row, chosen, repeat(plan)):  # where one fails, those in the queue are cancelled
            rows.append(row)
            step()
    return rows


def _one_core_each() -> AbstractContextManager[object]:
    """Each worker multiplies on one core: weights side by side scale better than the threads of one product."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits


@torch.no_grad()
def _eigenvalues(weight: Weight) -> Array:
    if isinstance(weight.matrices, LinearOperator):
        return as_eigenvalues(spectrum(weight.matrices), weight.name)
    return weight.scale * pooled_squared_singular_values(weight.matrices, weight.name)


def _row(weight: Weight, plan: _Plan) -> Row:
    shape = weight.matrices.shape
    is_operator = isinstance(weight.matrices, LinearOperator)
    row: Row = {
        "name": weight.name,
        "kind": weight.kind,
        "shape": weight.shape,
        "matrices": 1 if is_operator else int(shape[0]),
        "N": max(shape[-2:]),
        "M": min(shape[-2:]),
        "Q": max(shape[-2:]) / min(shape[-2:]),
    }
    reasons: dict[str, str] = {}
    # A bad weight of a diverged network keeps its row, and the others are still worth a look.
    try:
        values = _eigenvalues(weight)
    except GramscopeError as error:
        values = np.zeros(0)
        reasons["everything"] = str(error)
    row["n_eigenvalues"] = len(values)
    row.update(_measured(values, weight, plan, reasons))
    named = "; ".join(f"{what} NaN: {why}" for what, why in reasons.items())
    row["reason"] = reasons.get("everything", named)
    return row


def _measured(values: Array, weight: Weight, plan: _Plan, reasons: dict[str, str]) -> Row:
    seed = child_seed(plan.seed, weight.name)
    fit = fit_checked(values, plan.convention)
    alternative = alternatives_checked(values, fit)
    noted = fit.reason or alternative["exponential"].reason
    if noted:
        reasons["alpha, sigma, D, xmin and the alternatives are" if fit.reason else "the alternatives are"] = noted
    p = p_value_checked(values, fit, plan.bootstrap, seed) if plan.bootstrap else None
    null = _null(values, weight, plan, seed, needs_null(verdict_alone(fit, alternative, p)))
    long = int(max(weight.matrices.shape[-2:]))
    scales = ranks_checked(values, plan.convention, long)
    reasons.update(scales.reasons)
    row: Row = {
        "lambda_max": scales.lambda_max,
        **_tail_columns(fit, values, scales.log_spectral_norm),
        **_alternative_columns(alternative),
        **({"p_value": p} if p is not None else {}),
        "verdict": verdict(fit, alternative, p, null if isinstance(null, ShuffledNull) else None),
        **({"warning": training_label(fit.alpha)} if plan.convention == "weightwatcher" else {}),
        **{name: getattr(scales, name) for name in _RANKS},
        **_noise_columns(_noise(values, weight, plan), reasons),
    }
    if plan.shuffles != 0:
        row.update(_null_columns(null, reasons))
    return row


def _tail_columns(fit: TailFit, values: Array, log_largest: float) -> Row:
    return {
        **{name: getattr(fit, name) for name in _TAIL},
        "alpha_hat": fit.alpha * log_largest,
        "log_alpha_norm": log_alpha_norm_checked(values, fit.alpha),
    }


def _alternative_columns(alternative: dict[str, Alternative]) -> Row:
    exponential, truncated = alternative["exponential"], alternative["truncated"]
    return {
        "exponential_ratio": exponential.ratio,
        "exponential_p": exponential.p,
        "truncated_ratio": truncated.ratio,
        "truncated_p": truncated.p,
        "truncated_alpha": truncated.parameters["alpha"],
        "truncated_rate": truncated.parameters["rate"],
    }


def _noise(values: Array, weight: Weight, plan: _Plan) -> MarchenkoPasturFit:
    if isinstance(weight.matrices, LinearOperator):
        why = "an operator is not WᵀW of a matrix of known shape; use fit_marchenko_pastur with the shape"
        return undefined(why)
    rows, cols = weight.matrices.shape[-2:]
    return fit_marchenko_pastur_checked(values, (int(rows), int(cols)), plan.convention)


def _noise_columns(noise: MarchenkoPasturFit, reasons: dict[str, str]) -> Row:
    if noise.reason:
        reasons["soft_rank and the mp_ columns are"] = noise.reason
    return {
        "mp_sigma": noise.sigma,
        "mp_edge": noise.edges[1],
        "mp_D": noise.D,
        "spikes": noise.spikes if noise.reason is None else math.nan,
        "soft_rank": noise.soft_rank,
    }


def _null(values: Array, weight: Weight, plan: _Plan, seed: int, needed: bool) -> ShuffledNull | str:
    """The shuffled null, or why there is none."""
    if isinstance(weight.matrices, LinearOperator) or not values.size:
        return "there are no entries of a matrix W to shuffle"
    shuffles = plan.shuffles if plan.shuffles is not None else _SHUFFLES if needed else 0
    if not shuffles:
        return f"the verdict does not need it. Pass shuffles={_SHUFFLES} to compute it"
    return shuffled_null_checked(weight.matrices, values, shuffles, seed, plan.convention, weight.scale)


def _null_columns(null: ShuffledNull | str, reasons: dict[str, str]) -> Row:
    names = ("shuffled_alpha", "shuffled_lambda_max", "shuffled_distance", "shuffled_p", "traps")
    if isinstance(null, str):
        reasons["the shuffled null is"] = null
        return dict.fromkeys(names, math.nan)
    finite = null.alpha[np.isfinite(null.alpha)]
    if not finite.size:
        reasons["shuffled_alpha is"] = "no shuffle had a tail to fit"
    numbers = (
        float(np.median(finite)) if finite.size else math.nan,
        float(null.lambda_max.mean()),
        null.distance,
        null.p,
        float(null.traps.mean()),
    )
    return dict(zip(names, numbers, strict=True))
