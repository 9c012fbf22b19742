"""The global tangent kernel of states, P K P* (arXiv:2605.08746, arXiv:2507.06381)."""

from gramscope.propagators.activity import (
    SelfReferentialBias,
    activity_modes,
    self_referential_bias,
    structural_rank_bound,
)
from gramscope.propagators.dynamics import ScaledResponse, finite_time_exponent, lyapunov_spectrum, scaled_response
from gramscope.propagators.global_ntk import GlobalNTK
from gramscope.propagators.measures import (
    alignment,
    explained_variance_dimension,
    interference,
    mean_response,
    partial_average,
    partial_trace,
    participation_ratio,
    random_modes,
    rayleigh,
    representation_alignment,
)
from gramscope.propagators.prediction import StatePrediction, predict_states

__all__ = [
    "GlobalNTK",
    "ScaledResponse",
    "SelfReferentialBias",
    "StatePrediction",
    "activity_modes",
    "alignment",
    "explained_variance_dimension",
    "finite_time_exponent",
    "interference",
    "lyapunov_spectrum",
    "mean_response",
    "partial_average",
    "partial_trace",
    "participation_ratio",
    "predict_states",
    "random_modes",
    "rayleigh",
    "representation_alignment",
    "scaled_response",
    "self_referential_bias",
    "structural_rank_bound",
]
