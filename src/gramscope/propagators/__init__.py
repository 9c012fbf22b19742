"""The global tangent kernel of states, P K P* (arXiv:2605.08746, arXiv:2507.06381)."""

from typing import TYPE_CHECKING

from gramscope.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from gramscope.propagators.activity import SelfReferentialBias as SelfReferentialBias
    from gramscope.propagators.activity import activity_modes as activity_modes
    from gramscope.propagators.activity import self_referential_bias as self_referential_bias
    from gramscope.propagators.activity import structural_rank_bound as structural_rank_bound
    from gramscope.propagators.between_tasks import TaskInterference as TaskInterference
    from gramscope.propagators.between_tasks import task_interference as task_interference
    from gramscope.propagators.beyond_task import CollapseBeyondTask as CollapseBeyondTask
    from gramscope.propagators.beyond_task import collapse_beyond_task as collapse_beyond_task
    from gramscope.propagators.blocked import BlockedComponents as BlockedComponents
    from gramscope.propagators.blocked import blocked_components as blocked_components
    from gramscope.propagators.dynamics import ScaledResponse as ScaledResponse
    from gramscope.propagators.dynamics import finite_time_exponent as finite_time_exponent
    from gramscope.propagators.dynamics import lyapunov_spectrum as lyapunov_spectrum
    from gramscope.propagators.dynamics import scaled_response as scaled_response
    from gramscope.propagators.global_ntk import GlobalNTK as GlobalNTK
    from gramscope.propagators.measures import alignment as alignment
    from gramscope.propagators.measures import explained_variance_dimension as explained_variance_dimension
    from gramscope.propagators.measures import interference as interference
    from gramscope.propagators.measures import mean_response as mean_response
    from gramscope.propagators.measures import partial_average as partial_average
    from gramscope.propagators.measures import partial_trace as partial_trace
    from gramscope.propagators.measures import participation_ratio as participation_ratio
    from gramscope.propagators.measures import random_modes as random_modes
    from gramscope.propagators.measures import rayleigh as rayleigh
    from gramscope.propagators.measures import representation_alignment as representation_alignment
    from gramscope.propagators.neural_ode import Autonomous as Autonomous
    from gramscope.propagators.neural_ode import NeuralODE as NeuralODE
    from gramscope.propagators.prediction import StatePrediction as StatePrediction
    from gramscope.propagators.prediction import predict_states as predict_states
    from gramscope.propagators.rank_and_bound import KernelRank as KernelRank
    from gramscope.propagators.rank_and_bound import kernel_rank as kernel_rank
    from gramscope.propagators.scan import diagonal_scan as diagonal_scan
    from gramscope.propagators.scan import selective_scan as selective_scan
    from gramscope.propagators.state_space import S4D as S4D
    from gramscope.propagators.state_space import SelectiveSSM as SelectiveSSM

if not TYPE_CHECKING:  # so that a type checker knows every name and no other
    __getattr__, __dir__, __all__ = lazy_names(__name__)
