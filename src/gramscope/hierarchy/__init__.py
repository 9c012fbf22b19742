"""The hierarchy of layerwise Gram metrics (Nordio 2026, arXiv:2606.09744): fields, pullbacks, explained steps."""

from typing import TYPE_CHECKING

from gramscope.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from gramscope.hierarchy.accumulated_flow import AccumulatedFlow as AccumulatedFlow
    from gramscope.hierarchy.accumulated_flow import CoactivationSubspace as CoactivationSubspace
    from gramscope.hierarchy.accumulated_flow import FlowShare as FlowShare
    from gramscope.hierarchy.accumulated_flow import coactivation_subspace as coactivation_subspace
    from gramscope.hierarchy.accumulated_flow import flow_share as flow_share
    from gramscope.hierarchy.class_coactivation import SharedActivation as SharedActivation
    from gramscope.hierarchy.class_coactivation import shared_activation as shared_activation
    from gramscope.hierarchy.explain import explain_step as explain_step
    from gramscope.hierarchy.explained import ExplainedStep as ExplainedStep
    from gramscope.hierarchy.field_training import activation_step as activation_step
    from gramscope.hierarchy.field_training import field_step as field_step
    from gramscope.hierarchy.field_training import safe_rate as safe_rate
    from gramscope.hierarchy.fields import Fields as Fields
    from gramscope.hierarchy.gated import GatedNetwork as GatedNetwork
    from gramscope.hierarchy.gated import frozen_masks as frozen_masks
    from gramscope.hierarchy.gated import masks_only as masks_only
    from gramscope.hierarchy.kernel_regressor import KernelReLURegressor as KernelReLURegressor
    from gramscope.hierarchy.mask_concentration import Concentration as Concentration
    from gramscope.hierarchy.mask_concentration import SubspaceOverlap as SubspaceOverlap
    from gramscope.hierarchy.mask_concentration import class_metric as class_metric
    from gramscope.hierarchy.mask_concentration import coactivation as coactivation
    from gramscope.hierarchy.mask_concentration import concentration as concentration
    from gramscope.hierarchy.mask_concentration import mean_projector as mean_projector
    from gramscope.hierarchy.mask_concentration import metric_spectrum as metric_spectrum
    from gramscope.hierarchy.mask_concentration import overlap_rank as overlap_rank
    from gramscope.hierarchy.mask_concentration import subspace_overlap as subspace_overlap
    from gramscope.hierarchy.mask_concentration import update_alignment as update_alignment
    from gramscope.hierarchy.network_pullback import NetworkPullback as NetworkPullback
    from gramscope.hierarchy.network_pullback import Transport as Transport
    from gramscope.hierarchy.pullback import Pullback as Pullback
    from gramscope.hierarchy.reduced_closure import Closure as Closure
    from gramscope.hierarchy.reduced_closure import LayerClosure as LayerClosure
    from gramscope.hierarchy.reduced_closure import closure as closure
    from gramscope.hierarchy.reduced_state import ReducedComparison as ReducedComparison
    from gramscope.hierarchy.reduced_state import ReducedState as ReducedState
    from gramscope.hierarchy.reduced_state import compare_reduced as compare_reduced
    from gramscope.hierarchy.step import FieldChange as FieldChange
    from gramscope.hierarchy.step import StepComparison as StepComparison
    from gramscope.hierarchy.step import StepPrediction as StepPrediction
    from gramscope.hierarchy.trajectory import Trajectory as Trajectory
    from gramscope.hierarchy.trajectory import predict_trajectory as predict_trajectory

if not TYPE_CHECKING:  # so that a type checker knows every name and no other
    __getattr__, __dir__, __all__ = lazy_names(__name__)
