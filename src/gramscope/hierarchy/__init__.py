"""The hierarchy of layerwise Gram metrics (arXiv:2606.09744): fields, pullback operators, explained steps."""

from typing import TYPE_CHECKING, Any

from gramscope.base.streams import streams_put_back
from gramscope.hierarchy.accumulated_flow import (
    AccumulatedFlow,
    CoactivationSubspace,
    FlowShare,
    coactivation_subspace,
    flow_share,
)
from gramscope.hierarchy.class_coactivation import SharedActivation, shared_activation
from gramscope.hierarchy.explain import explain_step
from gramscope.hierarchy.explained import ExplainedStep
from gramscope.hierarchy.field_training import activation_step, field_step, safe_rate
from gramscope.hierarchy.fields import Fields
from gramscope.hierarchy.gated import GatedNetwork, frozen_masks, masks_only
from gramscope.hierarchy.mask_concentration import (
    Concentration,
    SubspaceOverlap,
    class_metric,
    coactivation,
    coactivation_rank,
    concentration,
    mean_projector,
    metric_spectrum,
    overlap_rank,
    subspace_overlap,
    update_alignment,
)
from gramscope.hierarchy.network_pullback import NetworkPullback, Transport
from gramscope.hierarchy.pullback import Pullback
from gramscope.hierarchy.reduced_closure import Closure, LayerClosure, closure
from gramscope.hierarchy.reduced_state import ReducedComparison, ReducedState, compare_reduced
from gramscope.hierarchy.step import FieldChange, StepComparison, StepPrediction
from gramscope.hierarchy.trajectory import Trajectory, predict_trajectory

if TYPE_CHECKING:
    from gramscope.hierarchy.kernel_regressor import KernelReLURegressor as KernelReLURegressor

__all__ = [
    "AccumulatedFlow",
    "Closure",
    "CoactivationSubspace",
    "Concentration",
    "ExplainedStep",
    "FieldChange",
    "Fields",
    "FlowShare",
    "GatedNetwork",
    "KernelReLURegressor",
    "LayerClosure",
    "NetworkPullback",
    "Pullback",
    "ReducedComparison",
    "ReducedState",
    "SharedActivation",
    "StepComparison",
    "StepPrediction",
    "SubspaceOverlap",
    "Trajectory",
    "Transport",
    "activation_step",
    "class_metric",
    "closure",
    "coactivation",
    "coactivation_rank",
    "coactivation_subspace",
    "compare_reduced",
    "concentration",
    "explain_step",
    "field_step",
    "flow_share",
    "frozen_masks",
    "masks_only",
    "mean_projector",
    "metric_spectrum",
    "overlap_rank",
    "predict_trajectory",
    "safe_rate",
    "shared_activation",
    "subspace_overlap",
    "update_alignment",
]


def __getattr__(name: str) -> Any:
    # The estimator needs scikit-learn, which takes a second to import, draws a random number then, and is not needed
    # by anything else here.
    if name == "KernelReLURegressor":
        with streams_put_back():
            from gramscope.hierarchy.kernel_regressor import KernelReLURegressor

        return KernelReLURegressor
    raise AttributeError(f"gramscope.hierarchy has no {name!r}; it has {', '.join(__all__)}")
