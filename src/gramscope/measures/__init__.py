"""Numbers and curves that say how a network learns. Every measure is a function and a streaming class."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gramscope.base.lazy import lazy_names

if TYPE_CHECKING:
    from gramscope.measures.agop import AGOP as AGOP
    from gramscope.measures.agop import AGOPOperator as AGOPOperator
    from gramscope.measures.agop import LayerAGOP as LayerAGOP
    from gramscope.measures.agop import agop as agop
    from gramscope.measures.agop import agop_operator as agop_operator
    from gramscope.measures.agop import layer_agop as layer_agop
    from gramscope.measures.alignment import Alignment as Alignment
    from gramscope.measures.alignment import TargetAlignment as TargetAlignment
    from gramscope.measures.alignment import alignment as alignment
    from gramscope.measures.alignment import kernel_target_alignment as kernel_target_alignment
    from gramscope.measures.ansatz import ansatz_correlation as ansatz_correlation
    from gramscope.measures.ansatz import ansatz_exponent as ansatz_exponent
    from gramscope.measures.ansatz import neural_feature_ansatz as neural_feature_ansatz
    from gramscope.measures.cka import CKA as CKA
    from gramscope.measures.cka import SimilarityMatrix as SimilarityMatrix
    from gramscope.measures.cka import cka as cka
    from gramscope.measures.cka import layer_similarity as layer_similarity
    from gramscope.measures.collapse import Collapse as Collapse
    from gramscope.measures.collapse import NeuralCollapse as NeuralCollapse
    from gramscope.measures.collapse import neural_collapse as neural_collapse
    from gramscope.measures.curves import Curves as Curves
    from gramscope.measures.curves import RichnessCurves as RichnessCurves
    from gramscope.measures.curves import effective_dimension as effective_dimension
    from gramscope.measures.curves import richness_curves as richness_curves
    from gramscope.measures.feature_learning import FeatureLearning as FeatureLearning
    from gramscope.measures.feature_learning import feature_learning as feature_learning
    from gramscope.measures.feature_learning import feature_learning_residual as feature_learning_residual
    from gramscope.measures.features import feature_batches as feature_batches
    from gramscope.measures.features import features as features
    from gramscope.measures.gram_only import GramOnly as GramOnly
    from gramscope.measures.gram_split import StepSplit as StepSplit
    from gramscope.measures.gram_split import gram_only_step as gram_only_step
    from gramscope.measures.gram_split import split_step as split_step
    from gramscope.measures.gram_tracker import GramTracker as GramTracker
    from gramscope.measures.interpolation import Interpolation as Interpolation
    from gramscope.measures.interpolation import interpolate as interpolate
    from gramscope.measures.interpolation import interpolation_linearity as interpolation_linearity
    from gramscope.measures.interpolation import path_linearity as path_linearity
    from gramscope.measures.kernel_cka import KernelCKA as KernelCKA
    from gramscope.measures.kernel_cka import kernel_cka as kernel_cka
    from gramscope.measures.last_layer import last_layer as last_layer
    from gramscope.measures.last_layer import last_layer_batches as last_layer_batches
    from gramscope.measures.linearity_collapse import LinearityCollapse as LinearityCollapse
    from gramscope.measures.linearity_collapse import layer_linearity_collapse as layer_linearity_collapse
    from gramscope.measures.linearity_collapse import linearity_collapse as linearity_collapse
    from gramscope.measures.linearity_penalty import LinearityPenalty as LinearityPenalty
    from gramscope.measures.linearity_penalty import LinearityRegularizer as LinearityRegularizer
    from gramscope.measures.linearity_penalty import linearity_penalty as linearity_penalty
    from gramscope.measures.measure import Facts as Facts
    from gramscope.measures.measure import Measure as Measure
    from gramscope.measures.measure import UndefinedMeasureWarning as UndefinedMeasureWarning
    from gramscope.measures.measure import gather_state as gather_state
    from gramscope.measures.moving_target import LinearizedRun as LinearizedRun
    from gramscope.measures.moving_target import MovingTarget as MovingTarget
    from gramscope.measures.moving_target import moving_target as moving_target
    from gramscope.measures.noise_scale import gradient_noise_scale as gradient_noise_scale
    from gramscope.measures.richness import Richness as Richness
    from gramscope.measures.richness import initial_similarity as initial_similarity
    from gramscope.measures.richness import network_richness as network_richness
    from gramscope.measures.richness import parameter_norm as parameter_norm
    from gramscope.measures.richness import richness as richness
    from gramscope.measures.sharpness import HessianOperator as HessianOperator
    from gramscope.measures.sharpness import Sharpness as Sharpness
    from gramscope.measures.sharpness import sharpness as sharpness
    from gramscope.measures.stationarity import stationarity as stationarity
    from gramscope.measures.stationarity import stationarity_residual as stationarity_residual
    from gramscope.measures.target_linearity import TargetLinearity as TargetLinearity
    from gramscope.measures.target_linearity import held_out_target_linearity as held_out_target_linearity
    from gramscope.measures.target_linearity import layer_target_linearity as layer_target_linearity
    from gramscope.measures.target_linearity import target_linearity as target_linearity
    from gramscope.measures.virtual_covariance import VirtualCovariance as VirtualCovariance
    from gramscope.measures.virtual_covariance import gram_step as gram_step
    from gramscope.measures.virtual_covariance import virtual_covariance as virtual_covariance
    from gramscope.measures.virtual_covariance import virtual_update as virtual_update
    from gramscope.measures.weight_linearity import WeightLinearities as WeightLinearities
    from gramscope.measures.weight_linearity import WeightLinearity as WeightLinearity
    from gramscope.measures.weight_linearity import weight_target_linearity as weight_target_linearity
    from gramscope.measures.weight_matrices import weight_forms as weight_forms

# Public names and the file each lives in; resolved on first use.
_NAMES = {
    # the protocol
    "Facts": "measure",
    "Measure": "measure",
    "UndefinedMeasureWarning": "measure",
    "gather_state": "measure",
    # features of layers
    "features": "features",
    "feature_batches": "features",
    "last_layer": "last_layer",
    "last_layer_batches": "last_layer",
    # richness
    "Richness": "richness",
    "richness": "richness",
    "network_richness": "richness",
    "initial_similarity": "richness",
    "parameter_norm": "richness",
    "Curves": "curves",
    "RichnessCurves": "curves",
    "richness_curves": "curves",
    "effective_dimension": "curves",
    # neural collapse
    "Collapse": "collapse",
    "NeuralCollapse": "collapse",
    "neural_collapse": "collapse",
    "LinearityCollapse": "linearity_collapse",
    "layer_linearity_collapse": "linearity_collapse",
    "linearity_collapse": "linearity_collapse",
    # similarity
    "CKA": "cka",
    "SimilarityMatrix": "cka",
    "cka": "cka",
    "layer_similarity": "cka",
    "KernelCKA": "kernel_cka",
    "kernel_cka": "kernel_cka",
    "Alignment": "alignment",
    "TargetAlignment": "alignment",
    "alignment": "alignment",
    "kernel_target_alignment": "alignment",
    # feature learning
    "FeatureLearning": "feature_learning",
    "feature_learning": "feature_learning",
    "feature_learning_residual": "feature_learning",
    "VirtualCovariance": "virtual_covariance",
    "virtual_covariance": "virtual_covariance",
    "virtual_update": "virtual_covariance",
    "gram_step": "virtual_covariance",
    "GramTracker": "gram_tracker",
    "TargetLinearity": "target_linearity",
    "target_linearity": "target_linearity",
    "held_out_target_linearity": "target_linearity",
    "layer_target_linearity": "target_linearity",
    "Interpolation": "interpolation",
    "interpolate": "interpolation",
    "interpolation_linearity": "interpolation",
    "path_linearity": "interpolation",
    "LinearityPenalty": "linearity_penalty",
    "LinearityRegularizer": "linearity_penalty",
    "linearity_penalty": "linearity_penalty",
    "LinearizedRun": "moving_target",
    "MovingTarget": "moving_target",
    "moving_target": "moving_target",
    "WeightLinearities": "weight_linearity",
    "WeightLinearity": "weight_linearity",
    "weight_target_linearity": "weight_linearity",
    "StepSplit": "gram_split",
    "split_step": "gram_split",
    "gram_only_step": "gram_split",
    "GramOnly": "gram_only",
    "AGOP": "agop",
    "LayerAGOP": "agop",
    "AGOPOperator": "agop",
    "agop": "agop",
    "layer_agop": "agop",
    "agop_operator": "agop",
    "ansatz_correlation": "ansatz",
    "ansatz_exponent": "ansatz",
    "neural_feature_ansatz": "ansatz",
    # training
    "gradient_noise_scale": "noise_scale",
    "HessianOperator": "sharpness",
    "Sharpness": "sharpness",
    "sharpness": "sharpness",
    "stationarity": "stationarity",
    "stationarity_residual": "stationarity",
    "weight_forms": "weight_matrices",
}

__all__ = list(_NAMES)


if not TYPE_CHECKING:  # so that a type checker knows every name and no other
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)


class _Room(ModuleType):
    """Importing a file sets its name on the room; where a measure has the same name, the measure keeps it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _NAMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Room
