"""gramscope shows how a neural network learns, layer by layer."""

from typing import TYPE_CHECKING

from gramscope.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from gramscope import base as base
    from gramscope import hierarchy as hierarchy
    from gramscope import kernels as kernels
    from gramscope import linalg as linalg
    from gramscope import measures as measures
    from gramscope import propagators as propagators
    from gramscope import record as record
    from gramscope import scale as scale
    from gramscope import spectra as spectra
    from gramscope import store as store
    from gramscope import tasks as tasks
    from gramscope import theory as theory
    from gramscope.base.errors import CoupledExamplesError as CoupledExamplesError
    from gramscope.base.errors import GramscopeError as GramscopeError
    from gramscope.base.errors import InputError as InputError
    from gramscope.base.errors import UnsupportedError as UnsupportedError
    from gramscope.capture.capturing import capture as capture
    from gramscope.capture.projection import project as project
    from gramscope.capture.sites import Snapshot as Snapshot
    from gramscope.diagnose.alerts import Alert as Alert
    from gramscope.diagnose.run_diagnosis import diagnose as diagnose
    from gramscope.hierarchy.explain import explain_step as explain_step
    from gramscope.kernels.between_snapshots import snapshot_kernel as snapshot_kernel
    from gramscope.kernels.jacobian import linearize as linearize
    from gramscope.kernels.jacobian import ntk_operator as ntk_operator
    from gramscope.kernels.kernel_matrix import Kernel as Kernel
    from gramscope.kernels.kernel_matrix import kernel as kernel
    from gramscope.linalg import LinearOperator as LinearOperator
    from gramscope.measures import Measure as Measure
    from gramscope.record.adapters import to_mlflow as to_mlflow
    from gramscope.record.adapters import to_tensorboard as to_tensorboard
    from gramscope.record.adapters import to_wandb as to_wandb
    from gramscope.record.start_watch import watch as watch
    from gramscope.report import report as report
    from gramscope.scale.kernel_to_disk import ntk as ntk
    from gramscope.scale.sketch_stream import sketch as sketch
    from gramscope.scale.tiled_kernel import open_kernel as open_kernel
    from gramscope.store import Run as Run
    from gramscope.store import open_run as open_run

__version__ = "0.2.0.dev0"

if not TYPE_CHECKING:  # so that a type checker knows every name and no other; `import gramscope` does not import torch
    __getattr__, __dir__, __all__ = lazy_names(__name__)
    __all__.append("__version__")
