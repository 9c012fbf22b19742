"""One dict for a whole network."""

import math
from typing import TYPE_CHECKING, Any, TypedDict

from gramscope.base.errors import InputError
from gramscope.spectra.tail_verdict import training_label
from gramscope.spectra.weight_table import analyze
from gramscope.spectra.weights import Source

if TYPE_CHECKING:
    from pandas import DataFrame

MEANS = ("alpha", "alpha_hat", "log_alpha_norm", "log_norm", "log_spectral_norm", "stable_rank")


class SpectraSummary(TypedDict):
    """Means over the weights of a network, in WeightWatcher's names; what :func:`summary` returns."""

    weights: int
    alpha: float
    alpha_hat: float
    log_alpha_norm: float
    log_norm: float
    log_spectral_norm: float
    stable_rank: float
    verdicts: dict[str, int]
    without_alpha: list[str]
    over_trained: list[str]
    under_trained: list[str]


def summary(source: "Source | DataFrame", **options: Any) -> SpectraSummary:
    """One dict for a network: means over its weights, what the verdicts are, and WeightWatcher's labels.

    ``source`` is what :func:`analyze` takes, with its options, or a frame that it made. ``alpha``, ``alpha_hat``,
    ``log_alpha_norm``, ``log_norm``, ``log_spectral_norm`` and ``stable_rank`` are means over the weights for which
    they are defined, as WeightWatcher's ``get_summary`` takes them. ``verdicts`` counts the verdicts;
    ``without_alpha``, ``over_trained`` (α < 2) and ``under_trained`` (α > 6) name weights. The labels are meant for
    ``convention="weightwatcher"``.

    >>> import torch
    >>> found = summary(torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Linear(60, 40)), bootstrap=0)
    >>> found["weights"], found["without_alpha"]
    (2, [])
    """
    from pandas import DataFrame

    if isinstance(source, DataFrame):
        if options:
            raise InputError(f"a frame is analysed already: pass the model to use {', '.join(options)}.")
        frame = source
    else:
        frame = analyze(source, **options)
    missing = [name for name in ("name", "verdict", *MEANS) if name not in frame.columns]
    if missing:
        raise InputError(f"summary needs a frame from analyze, but the columns {missing} are missing.")
    means = {name: float(frame[name].mean()) if len(frame) else math.nan for name in MEANS}
    labels = {str(name): training_label(alpha) for name, alpha in zip(frame["name"], frame["alpha"], strict=True)}
    return SpectraSummary(
        weights=len(frame),
        **means,  # type: ignore[typeddict-item]
        verdicts={str(verdict): int(count) for verdict, count in frame["verdict"].value_counts().items()},
        without_alpha=[str(name) for name in frame["name"][frame["alpha"].isna()]],
        over_trained=[name for name, label in labels.items() if label == "over-trained"],
        under_trained=[name for name, label in labels.items() if label == "under-trained"],
    )
