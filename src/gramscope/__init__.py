"""gramscope shows how a neural network learns, layer by layer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    from gramscope.capture.capture import capture as capture
    from gramscope.capture.projection import project as project
    from gramscope.capture.sites import Snapshot as Snapshot
    from gramscope.diagnose.opening import diagnose as diagnose
    from gramscope.hierarchy.explain import explain_step as explain_step
    from gramscope.kernels.between_snapshots import snapshot_kernel as snapshot_kernel
    from gramscope.kernels.kernel import Kernel as Kernel
    from gramscope.kernels.kernel import kernel as kernel
    from gramscope.kernels.linearized_model import linearize as linearize
    from gramscope.kernels.operator import ntk_operator as ntk_operator
    from gramscope.linalg import LinearOperator as LinearOperator
    from gramscope.measures import Measure as Measure
    from gramscope.record.adapters import to_mlflow as to_mlflow
    from gramscope.record.adapters import to_tensorboard as to_tensorboard
    from gramscope.record.adapters import to_wandb as to_wandb
    from gramscope.record.alerts import Alert as Alert
    from gramscope.record.watch import watch as watch
    from gramscope.report import report as report
    from gramscope.scale.kernel_to_disk import ntk as ntk
    from gramscope.scale.sketch_stream import sketch as sketch
    from gramscope.scale.tiled_kernel import open_kernel as open_kernel
    from gramscope.store import Run as Run
    from gramscope.store import open_run as open_run

__version__ = "0.1.0"

# Public names and where they live; resolved on first use, so that `import gramscope` does not import torch.
_NAMES = {
    "Snapshot": "gramscope.capture.sites:Snapshot",
    "ntk": "gramscope.scale.kernel_to_disk:ntk",
    "ntk_operator": "gramscope.kernels.operator:ntk_operator",
    "linearize": "gramscope.kernels.linearized_model:linearize",
    "snapshot_kernel": "gramscope.kernels.between_snapshots:snapshot_kernel",
    "kernel": "gramscope.kernels.kernel:kernel",
    "Kernel": "gramscope.kernels.kernel:Kernel",
    "project": "gramscope.capture.projection:project",
    "watch": "gramscope.record.watch:watch",
    "Alert": "gramscope.record.alerts:Alert",
    "to_tensorboard": "gramscope.record.adapters:to_tensorboard",
    "to_wandb": "gramscope.record.adapters:to_wandb",
    "to_mlflow": "gramscope.record.adapters:to_mlflow",
    "open_kernel": "gramscope.scale.tiled_kernel:open_kernel",
    "open_run": "gramscope.store:open_run",
    "Run": "gramscope.store:Run",
    "Measure": "gramscope.measures:Measure",
    "report": "gramscope.report:report",
    "sketch": "gramscope.scale.sketch_stream:sketch",
    "explain_step": "gramscope.hierarchy.explain:explain_step",
    "LinearOperator": "gramscope.linalg:LinearOperator",
    "GramscopeError": "gramscope.base.errors:GramscopeError",
    "InputError": "gramscope.base.errors:InputError",
    "UnsupportedError": "gramscope.base.errors:UnsupportedError",
    "CoupledExamplesError": "gramscope.base.errors:CoupledExamplesError",
}
_ROOMS = (
    "base",
    "capture",
    "diagnose",
    "hierarchy",
    "kernels",
    "linalg",
    "measures",
    "propagators",
    "record",
    "scale",
    "spectra",
    "store",
    "tasks",
    "theory",
)

__all__ = [*_NAMES, *_ROOMS, "__version__"]


if not TYPE_CHECKING:  # so that a type checker knows every name and no other

    def __getattr__(name: str) -> Any:
        if name in _NAMES:
            module, _, attribute = _NAMES[name].partition(":")
            value = getattr(import_module(module), attribute)
        elif name in _ROOMS:
            value = import_module(f"gramscope.{name}")
        else:
            raise AttributeError(f"gramscope has no {name!r}; it has {', '.join(__all__)}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
