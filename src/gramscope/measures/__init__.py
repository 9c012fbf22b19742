"""Numbers and curves that say how a network learns. Every measure is a function and a streaming class."""

from typing import TYPE_CHECKING

from gramscope.base.lazy import lazy_names

if TYPE_CHECKING:
    from gramscope.base.effective_rank import effective_rank as effective_rank
    from gramscope.base.effective_rank import participation_ratio as participation_ratio
    from gramscope.measures.ansatz import ansatz_correlation as ansatz_correlation
    from gramscope.measures.ansatz import ansatz_exponent as ansatz_exponent
    from gramscope.measures.ansatz import neural_feature_ansatz as neural_feature_ansatz
    from gramscope.measures.collapse import Collapse as Collapse
    from gramscope.measures.collapse import NeuralCollapse as NeuralCollapse
    from gramscope.measures.collapse import neural_collapse as neural_collapse
    from gramscope.measures.collapse_bounds import LinearityCollapse as LinearityCollapse
    from gramscope.measures.collapse_bounds import layer_linearity_collapse as layer_linearity_collapse
    from gramscope.measures.collapse_bounds import linearity_collapse as linearity_collapse
    from gramscope.measures.curvature import gauss_newton as gauss_newton
    from gramscope.measures.curvature import gauss_newton_sharpness as gauss_newton_sharpness
    from gramscope.measures.eigenfunction_curves import Curves as Curves
    from gramscope.measures.eigenfunction_curves import RichnessCurves as RichnessCurves
    from gramscope.measures.eigenfunction_curves import effective_dimension as effective_dimension
    from gramscope.measures.eigenfunction_curves import richness_curves as richness_curves
    from gramscope.measures.feature_learning_equation import FeatureLearning as FeatureLearning
    from gramscope.measures.feature_learning_equation import feature_learning as feature_learning
    from gramscope.measures.feature_learning_equation import feature_learning_residual as feature_learning_residual
    from gramscope.measures.gradient_outer_product import AGOP as AGOP
    from gramscope.measures.gradient_outer_product import AGOPOperator as AGOPOperator
    from gramscope.measures.gradient_outer_product import LayerAGOP as LayerAGOP
    from gramscope.measures.gradient_outer_product import agop as agop
    from gramscope.measures.gradient_outer_product import agop_operator as agop_operator
    from gramscope.measures.gradient_outer_product import layer_agop as layer_agop
    from gramscope.measures.gram_only import GramOnly as GramOnly
    from gramscope.measures.gram_split import StepSplit as StepSplit
    from gramscope.measures.gram_split import gram_only_step as gram_only_step
    from gramscope.measures.gram_split import split_step as split_step
    from gramscope.measures.gram_tracker import GramTracker as GramTracker
    from gramscope.measures.influence import Influence as Influence
    from gramscope.measures.influence import tracin as tracin
    from gramscope.measures.interpolation import Interpolation as Interpolation
    from gramscope.measures.interpolation import interpolate as interpolate
    from gramscope.measures.interpolation import interpolation_linearity as interpolation_linearity
    from gramscope.measures.interpolation import path_linearity as path_linearity
    from gramscope.measures.kernel_alignment import Alignment as Alignment
    from gramscope.measures.kernel_alignment import TargetAlignment as TargetAlignment
    from gramscope.measures.kernel_alignment import alignment as alignment
    from gramscope.measures.kernel_alignment import kernel_target_alignment as kernel_target_alignment
    from gramscope.measures.last_linear_layer import last_layer as last_layer
    from gramscope.measures.last_linear_layer import last_layer_batches as last_layer_batches
    from gramscope.measures.layer_features import feature_batches as feature_batches
    from gramscope.measures.layer_features import features as features
    from gramscope.measures.lazy_or_rich import Richness as Richness
    from gramscope.measures.lazy_or_rich import initial_similarity as initial_similarity
    from gramscope.measures.lazy_or_rich import network_richness as network_richness
    from gramscope.measures.lazy_or_rich import parameter_norm as parameter_norm
    from gramscope.measures.lazy_or_rich import richness as richness
    from gramscope.measures.linear_cka import CKA as CKA
    from gramscope.measures.linear_cka import SimilarityMatrix as SimilarityMatrix
    from gramscope.measures.linear_cka import cka as cka
    from gramscope.measures.linear_cka import layer_similarity as layer_similarity
    from gramscope.measures.linear_targets import TargetLinearity as TargetLinearity
    from gramscope.measures.linear_targets import held_out_target_linearity as held_out_target_linearity
    from gramscope.measures.linear_targets import layer_target_linearity as layer_target_linearity
    from gramscope.measures.linear_targets import target_linearity as target_linearity
    from gramscope.measures.linearity_regularizer import LinearityPenalty as LinearityPenalty
    from gramscope.measures.linearity_regularizer import LinearityRegularizer as LinearityRegularizer
    from gramscope.measures.linearity_regularizer import linearity_penalty as linearity_penalty
    from gramscope.measures.loss_curvature import HessianOperator as HessianOperator
    from gramscope.measures.loss_curvature import Sharpness as Sharpness
    from gramscope.measures.loss_curvature import sharpness as sharpness
    from gramscope.measures.measure import Facts as Facts
    from gramscope.measures.measure import Measure as Measure
    from gramscope.measures.measure import UndefinedMeasureWarning as UndefinedMeasureWarning
    from gramscope.measures.measure import gather_state as gather_state
    from gramscope.measures.moving_linearization import LinearizedRun as LinearizedRun
    from gramscope.measures.moving_linearization import MovingTarget as MovingTarget
    from gramscope.measures.moving_linearization import moving_target as moving_target
    from gramscope.measures.noise_scale import gradient_noise_scale as gradient_noise_scale
    from gramscope.measures.rbf_cka import KernelCKA as KernelCKA
    from gramscope.measures.rbf_cka import kernel_cka as kernel_cka
    from gramscope.measures.stationary_point import stationarity as stationarity
    from gramscope.measures.stationary_point import stationarity_residual as stationarity_residual
    from gramscope.measures.virtual_updates import VirtualCovariance as VirtualCovariance
    from gramscope.measures.virtual_updates import gram_step as gram_step
    from gramscope.measures.virtual_updates import virtual_covariance as virtual_covariance
    from gramscope.measures.virtual_updates import virtual_update as virtual_update
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
    "features": "layer_features",
    "feature_batches": "layer_features",
    "last_layer": "last_linear_layer",
    "last_layer_batches": "last_linear_layer",
    # richness
    "Richness": "lazy_or_rich",
    "richness": "lazy_or_rich",
    "network_richness": "lazy_or_rich",
    "initial_similarity": "lazy_or_rich",
    "parameter_norm": "lazy_or_rich",
    "Curves": "eigenfunction_curves",
    "RichnessCurves": "eigenfunction_curves",
    "richness_curves": "eigenfunction_curves",
    "effective_dimension": "eigenfunction_curves",
    "effective_rank": "gramscope.base.effective_rank",
    "participation_ratio": "gramscope.base.effective_rank",
    # neural collapse
    "Collapse": "collapse",
    "NeuralCollapse": "collapse",
    "neural_collapse": "collapse",
    "LinearityCollapse": "collapse_bounds",
    "layer_linearity_collapse": "collapse_bounds",
    "linearity_collapse": "collapse_bounds",
    # similarity
    "CKA": "linear_cka",
    "SimilarityMatrix": "linear_cka",
    "cka": "linear_cka",
    "layer_similarity": "linear_cka",
    "KernelCKA": "rbf_cka",
    "kernel_cka": "rbf_cka",
    "Alignment": "kernel_alignment",
    "TargetAlignment": "kernel_alignment",
    "alignment": "kernel_alignment",
    "kernel_target_alignment": "kernel_alignment",
    # feature learning
    "FeatureLearning": "feature_learning_equation",
    "feature_learning": "feature_learning_equation",
    "feature_learning_residual": "feature_learning_equation",
    "VirtualCovariance": "virtual_updates",
    "virtual_covariance": "virtual_updates",
    "virtual_update": "virtual_updates",
    "gram_step": "virtual_updates",
    "GramTracker": "gram_tracker",
    "TargetLinearity": "linear_targets",
    "target_linearity": "linear_targets",
    "held_out_target_linearity": "linear_targets",
    "layer_target_linearity": "linear_targets",
    "Interpolation": "interpolation",
    "interpolate": "interpolation",
    "interpolation_linearity": "interpolation",
    "path_linearity": "interpolation",
    "LinearityPenalty": "linearity_regularizer",
    "LinearityRegularizer": "linearity_regularizer",
    "linearity_penalty": "linearity_regularizer",
    "LinearizedRun": "moving_linearization",
    "MovingTarget": "moving_linearization",
    "moving_target": "moving_linearization",
    "WeightLinearities": "weight_linearity",
    "WeightLinearity": "weight_linearity",
    "weight_target_linearity": "weight_linearity",
    "StepSplit": "gram_split",
    "split_step": "gram_split",
    "gram_only_step": "gram_split",
    "GramOnly": "gram_only",
    "AGOP": "gradient_outer_product",
    "LayerAGOP": "gradient_outer_product",
    "AGOPOperator": "gradient_outer_product",
    "agop": "gradient_outer_product",
    "layer_agop": "gradient_outer_product",
    "agop_operator": "gradient_outer_product",
    "ansatz_correlation": "ansatz",
    "ansatz_exponent": "ansatz",
    "neural_feature_ansatz": "ansatz",
    # training
    "gradient_noise_scale": "noise_scale",
    "HessianOperator": "loss_curvature",
    "Sharpness": "loss_curvature",
    "sharpness": "loss_curvature",
    "stationarity": "stationary_point",
    "stationarity_residual": "stationary_point",
    "gauss_newton": "curvature",
    "gauss_newton_sharpness": "curvature",
    "Influence": "influence",
    "tracin": "influence",
    "weight_forms": "weight_matrices",
}

__all__ = list(_NAMES)


if not TYPE_CHECKING:  # so that a type checker knows every name and no other
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
