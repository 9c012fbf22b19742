"""Numbers and curves that say how a network learns. Every measure is a function and a streaming class."""

from typing import TYPE_CHECKING

from gramscope.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from gramscope.base.effective_rank import effective_rank as effective_rank
    from gramscope.base.effective_rank import participation_ratio as participation_ratio
    from gramscope.measures.ansatz import ansatz_correlation as ansatz_correlation
    from gramscope.measures.ansatz import ansatz_exponent as ansatz_exponent
    from gramscope.measures.ansatz import neural_feature_ansatz as neural_feature_ansatz
    from gramscope.measures.class_moments import regression_accuracy as regression_accuracy
    from gramscope.measures.collapse import Collapse as Collapse
    from gramscope.measures.collapse import NeuralCollapse as NeuralCollapse
    from gramscope.measures.collapse import neural_collapse as neural_collapse
    from gramscope.measures.collapse_bounds import LinearityCollapse as LinearityCollapse
    from gramscope.measures.collapse_bounds import layer_linearity_collapse as layer_linearity_collapse
    from gramscope.measures.collapse_bounds import linearity_collapse as linearity_collapse
    from gramscope.measures.curve_statistics import CurveCorrelation as CurveCorrelation
    from gramscope.measures.curve_statistics import curve_correlation as curve_correlation
    from gramscope.measures.curve_statistics import layer_curves as layer_curves
    from gramscope.measures.curve_statistics import utilisation_dimension as utilisation_dimension
    from gramscope.measures.eigenfunction_curves import Curves as Curves
    from gramscope.measures.eigenfunction_curves import RichnessCurves as RichnessCurves
    from gramscope.measures.eigenfunction_curves import effective_dimension as effective_dimension
    from gramscope.measures.eigenfunction_curves import richness_curves as richness_curves
    from gramscope.measures.feature_learning_equation import FeatureLearning as FeatureLearning
    from gramscope.measures.feature_learning_equation import feature_learning as feature_learning
    from gramscope.measures.feature_learning_equation import feature_learning_residual as feature_learning_residual
    from gramscope.measures.feature_learning_equation import stationarity as stationarity
    from gramscope.measures.feature_learning_equation import stationarity_residual as stationarity_residual
    from gramscope.measures.gradient_outer_product import AGOP as AGOP
    from gramscope.measures.gradient_outer_product import AGOPOperator as AGOPOperator
    from gramscope.measures.gradient_outer_product import LayerAGOP as LayerAGOP
    from gramscope.measures.gradient_outer_product import agop as agop
    from gramscope.measures.gradient_outer_product import agop_operator as agop_operator
    from gramscope.measures.gradient_outer_product import layer_agop as layer_agop
    from gramscope.measures.gram_only import GramOnly as GramOnly
    from gramscope.measures.gram_only import StepSplit as StepSplit
    from gramscope.measures.gram_only import gram_only_step as gram_only_step
    from gramscope.measures.gram_only import split_step as split_step
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
    from gramscope.measures.linear_learning import Eigenmodes as Eigenmodes
    from gramscope.measures.linear_learning import Learnability as Learnability
    from gramscope.measures.linear_learning import eigenmodes as eigenmodes
    from gramscope.measures.linear_learning import learnability as learnability
    from gramscope.measures.linear_learning import mode_dynamics as mode_dynamics
    from gramscope.measures.linear_learning import predicted_loss as predicted_loss
    from gramscope.measures.linear_targets import TargetLinearity as TargetLinearity
    from gramscope.measures.linear_targets import held_out_target_linearity as held_out_target_linearity
    from gramscope.measures.linear_targets import layer_target_linearity as layer_target_linearity
    from gramscope.measures.linear_targets import target_linearity as target_linearity
    from gramscope.measures.linearity_regularizer import LinearityPenalty as LinearityPenalty
    from gramscope.measures.linearity_regularizer import LinearityRegularizer as LinearityRegularizer
    from gramscope.measures.linearity_regularizer import linearity_penalty as linearity_penalty
    from gramscope.measures.loss_curvature import HessianOperator as HessianOperator
    from gramscope.measures.loss_curvature import Sharpness as Sharpness
    from gramscope.measures.loss_curvature import gauss_newton as gauss_newton
    from gramscope.measures.loss_curvature import gauss_newton_sharpness as gauss_newton_sharpness
    from gramscope.measures.loss_curvature import sharpness as sharpness
    from gramscope.measures.measure import Measure as Measure
    from gramscope.measures.measure import UndefinedMeasureWarning as UndefinedMeasureWarning
    from gramscope.measures.measure import gather_state as gather_state
    from gramscope.measures.moving_linearization import LinearizedRun as LinearizedRun
    from gramscope.measures.moving_linearization import MovingTarget as MovingTarget
    from gramscope.measures.moving_linearization import moving_target as moving_target
    from gramscope.measures.noise_scale import gradient_noise_scale as gradient_noise_scale
    from gramscope.measures.rbf_cka import KernelCKA as KernelCKA
    from gramscope.measures.rbf_cka import kernel_cka as kernel_cka
    from gramscope.measures.sampled_eigenfunctions import NystromErrors as NystromErrors
    from gramscope.measures.sampled_eigenfunctions import PlainProjections as PlainProjections
    from gramscope.measures.sampled_eigenfunctions import nystrom_errors as nystrom_errors
    from gramscope.measures.sampled_eigenfunctions import projections_without_qr as projections_without_qr
    from gramscope.measures.virtual_updates import VirtualCovariance as VirtualCovariance
    from gramscope.measures.virtual_updates import gram_step as gram_step
    from gramscope.measures.virtual_updates import virtual_covariance as virtual_covariance
    from gramscope.measures.virtual_updates import virtual_update as virtual_update
    from gramscope.measures.weight_linearity import WeightLinearities as WeightLinearities
    from gramscope.measures.weight_linearity import WeightLinearity as WeightLinearity
    from gramscope.measures.weight_linearity import weight_target_linearity as weight_target_linearity
    from gramscope.measures.weight_matrices import weight_forms as weight_forms

if not TYPE_CHECKING:  # so that a type checker knows every name and no other
    __getattr__, __dir__, __all__ = lazy_names(__name__)
