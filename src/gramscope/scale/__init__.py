"""What outgrows one process: kernels on disk, sketches of gradients, sweeps of runs."""

from typing import TYPE_CHECKING

from gramscope.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from gramscope.scale.fingerprints import Fingerprints as Fingerprints
    from gramscope.scale.fingerprints import fingerprint_data as fingerprint_data
    from gramscope.scale.fingerprints import fingerprint_model as fingerprint_model
    from gramscope.scale.fingerprints import fingerprint_outputs as fingerprint_outputs
    from gramscope.scale.kernel_job import KernelJob as KernelJob
    from gramscope.scale.kernel_to_disk import plan_kernel as plan_kernel
    from gramscope.scale.nystrom import NystromPreconditioner as NystromPreconditioner
    from gramscope.scale.sketch_result import Estimate as Estimate
    from gramscope.scale.sketch_result import Sketch as Sketch
    from gramscope.scale.sketch_result import load_sketch as load_sketch
    from gramscope.scale.sketch_stream import sketch as sketch
    from gramscope.scale.tile_costs import TileCost as TileCost
    from gramscope.scale.tile_costs import tile_cost as tile_cost
    from gramscope.scale.tile_plan import TilePlan as TilePlan
    from gramscope.scale.tiled_kernel import TiledKernel as TiledKernel
    from gramscope.scale.tiled_kernel import TiledRegression as TiledRegression
    from gramscope.scale.tiled_kernel import open_kernel as open_kernel

if not TYPE_CHECKING:  # so that a type checker knows every name and no other
    __getattr__, __dir__, __all__ = lazy_names(__name__)
