"""Spectra of weights: densities, ranks, tail fits."""

from gramscope.spectra.analyze import analyze, esds, skipped
from gramscope.spectra.bootstrap import p_value
from gramscope.spectra.differences import deltas, distances, lora_deltas
from gramscope.spectra.eigenvalues import esd, spectrum
from gramscope.spectra.marchenko_pastur import (
    MarchenkoPasturFit,
    fit_marchenko_pastur,
    marchenko_pastur_density,
)
from gramscope.spectra.model_summary import SpectraSummary, summary
from gramscope.spectra.plots import plot_esd
from gramscope.spectra.ranks import Ranks, log_alpha_norm, ranks, stable_rank
from gramscope.spectra.rivals import Rival, rivals
from gramscope.spectra.shuffled import ShuffledNull, shuffled_null
from gramscope.spectra.tail import TailFit, TailScan, fit_tail, scan_tail
from gramscope.spectra.verdict import training_label, verdict

__all__ = [
    "MarchenkoPasturFit",
    "Ranks",
    "Rival",
    "ShuffledNull",
    "SpectraSummary",
    "TailFit",
    "TailScan",
    "analyze",
    "deltas",
    "distances",
    "esd",
    "esds",
    "fit_marchenko_pastur",
    "fit_tail",
    "log_alpha_norm",
    "lora_deltas",
    "marchenko_pastur_density",
    "p_value",
    "plot_esd",
    "ranks",
    "rivals",
    "scan_tail",
    "shuffled_null",
    "skipped",
    "spectrum",
    "stable_rank",
    "summary",
    "training_label",
    "verdict",
]
