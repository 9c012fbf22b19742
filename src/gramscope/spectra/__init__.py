"""Spectra of weights: densities, ranks, tail fits."""

from typing import TYPE_CHECKING

from gramscope.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from gramscope.spectra.alternative_tails import Alternative as Alternative
    from gramscope.spectra.alternative_tails import alternatives as alternatives
    from gramscope.spectra.differences import deltas as deltas
    from gramscope.spectra.differences import distances as distances
    from gramscope.spectra.differences import lora_deltas as lora_deltas
    from gramscope.spectra.eigenvalues import esd as esd
    from gramscope.spectra.eigenvalues import spectrum as spectrum
    from gramscope.spectra.esd_plot import plot_esd as plot_esd
    from gramscope.spectra.marchenko_pastur import MarchenkoPasturFit as MarchenkoPasturFit
    from gramscope.spectra.marchenko_pastur import fit_marchenko_pastur as fit_marchenko_pastur
    from gramscope.spectra.marchenko_pastur import marchenko_pastur_density as marchenko_pastur_density
    from gramscope.spectra.model_summary import SpectraSummary as SpectraSummary
    from gramscope.spectra.model_summary import summary as summary
    from gramscope.spectra.shuffled import ShuffledNull as ShuffledNull
    from gramscope.spectra.shuffled import shuffled_null as shuffled_null
    from gramscope.spectra.spectrum_ranks import Ranks as Ranks
    from gramscope.spectra.spectrum_ranks import log_alpha_norm as log_alpha_norm
    from gramscope.spectra.spectrum_ranks import ranks as ranks
    from gramscope.spectra.spectrum_ranks import stable_rank as stable_rank
    from gramscope.spectra.tail import TailFit as TailFit
    from gramscope.spectra.tail import TailScan as TailScan
    from gramscope.spectra.tail import fit_tail as fit_tail
    from gramscope.spectra.tail import p_value as p_value
    from gramscope.spectra.tail import scan_tail as scan_tail
    from gramscope.spectra.tail_verdict import training_label as training_label
    from gramscope.spectra.tail_verdict import verdict as verdict
    from gramscope.spectra.weight_table import analyze as analyze
    from gramscope.spectra.weight_table import esds as esds
    from gramscope.spectra.weight_table import skipped as skipped

if not TYPE_CHECKING:  # so that a type checker knows every name and no other
    __getattr__, __dir__, __all__ = lazy_names(__name__)
