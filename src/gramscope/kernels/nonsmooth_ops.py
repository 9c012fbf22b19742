"""Operations with kinks or jumps whose sides are not followed: which they are, and what depends on the parameters.

Such operations are named in results and refused where σ'' is smoothed, never passed over. Norms of order two, ``celu``,
Huber's loss and ``lp_pool`` are not among them: the slope of a norm breaks at one point only, the others' nowhere.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.base.nested import tensors_in
from gramscope.capture.torch_calls import Args, Kwargs, TorchFunction

_BOTH = (
    "sort argsort msort topk kthvalue median nanmedian mode quantile nanquantile aminmax cummax cummin sign sgn round "
    "floor ceil trunc fix frac fmod remainder floor_divide heaviside copysign hardshrink renorm bernoulli gt ge lt le "
    "eq ne greater greater_equal less less_equal not_equal fake_quantize_per_tensor_affine "
    "fake_quantize_per_channel_affine __gt__ __ge__ __lt__ __le__ __eq__ __ne__ __floordiv__ __rfloordiv__ __mod__ "
    "__rmod__"
)
_FUNCTIONAL = (
    "hardshrink l1_loss margin_ranking_loss hinge_embedding_loss cosine_embedding_loss triplet_margin_loss "
    "triplet_margin_with_distance_loss multi_margin_loss multilabel_margin_loss fractional_max_pool2d "
    "fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices"
)
# Tests for faults, not decisions that a network takes.
_HARMLESS = {"isnan", "isinf", "isfinite", "isposinf", "isneginf", "isreal"}


def _found(places: tuple[object, ...], names: str) -> Iterator[TorchFunction]:
    for place in places:
        for name in names.split():
            for spelling in (name, f"{name}_"):
                if hasattr(place, spelling):
                    yield getattr(place, spelling)


NONSMOOTH = {*_found((torch, Tensor), _BOTH), *_found((F,), _FUNCTIONAL)}


# Operations that have kinks with some arguments ---------------------------------------------------

Condition = Callable[[Args, Kwargs], bool]
SOMETIMES: dict[TorchFunction, Condition] = {}


def _sometimes(
    functions: Iterable[TorchFunction], place: int, name: str, default: object, has_kinks: Callable[[object], bool]
) -> None:
    """Register functions whose argument ``name``, positional at ``place``, says whether they have kinks."""

    def condition(args: Args, kwargs: Kwargs) -> bool:
        return has_kinks(args[place] if len(args) > place else kwargs.get(name, default))

    SOMETIMES.update(dict.fromkeys(functions, condition))


def _breaks(order: object) -> bool:
    """Whether ``|z|^p`` breaks off its slope at zero, or a norm picks one entry: p <= 1 or infinite."""
    return isinstance(order, int | float) and (order <= 1 or order == float("inf"))


_sometimes((torch.norm, Tensor.norm, F.normalize, F.pdist, torch.pdist), 1, "p", 2, _breaks)
_sometimes((torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm), 1, "ord", 2, _breaks)
_sometimes((F.pairwise_distance, torch.dist, Tensor.dist, torch.cdist), 2, "p", 2, _breaks)
_sometimes((F.smooth_l1_loss,), 5, "beta", 1.0, lambda beta: bool(beta == 0))
_sometimes((F.gumbel_softmax,), 2, "hard", False, bool)
_sometimes(_found((torch, Tensor), "div divide"), 2, "rounding_mode", None, lambda mode: mode is not None)
_sometimes((F.embedding_bag,), 6, "mode", "mean", lambda mode: bool(mode == "max"))
_sometimes(
    _found((torch, Tensor), "scatter_reduce index_reduce"), 4, "reduce", None, lambda how: how in ("amax", "amin")
)


def is_nonsmooth(func: TorchFunction, args: Args, kwargs: Kwargs, reach: "Reach") -> bool:
    """Whether a call whose arguments depend on the parameters has kinks or jumps that are not followed."""
    if func in NONSMOOTH:
        return True
    if func in SOMETIMES:
        return SOMETIMES[func](args, kwargs)
    # These choose by one of their arguments; with a fixed choice they are linear.
    if func is torch.where or func is Tensor.where:
        condition = kwargs.get("condition", args[0 if func is torch.where else 1] if args else None)
        return reach.has(condition)
    if func is F.grid_sample:
        return reach.has(kwargs.get("grid", args[1] if len(args) > 1 else None))
    return False


def decides(func: TorchFunction, args: Args, kwargs: Kwargs, result: object) -> bool:
    """Whether numbers became whole numbers or truth values, as by ``argmax``, ``bucketize`` or ``long``."""
    name = getattr(func, "__name__", "")
    if name in _HARMLESS or _only_shapes(name):
        return False
    given = tensors_in((args, kwargs))
    return all(map(_is_smooth, given)) and any(not _is_smooth(tensor) for tensor in tensors_in(result))


class Reach:
    """What depends on the parameters: through the graph, and beyond it where a model detaches or decides."""

    def __init__(self) -> None:
        self._cut: dict[int, weakref.ref[Tensor]] = {}

    def has(self, value: object) -> bool:
        return any(tensor.requires_grad or self._is_cut(tensor) for tensor in tensors_in(value))

    def _is_cut(self, tensor: Tensor) -> bool:
        known = self._cut.get(id(tensor))
        return known is not None and known() is tensor

    def follow(self, func: TorchFunction, args: Args, kwargs: Kwargs, result: object) -> None:
        """Note what a call with dependent arguments made outside the graph."""
        name = getattr(func, "__name__", "")
        if _only_shapes(name) or (name.endswith("_as") and not self.has(args[:1])):
            return
        given = tensors_in((args, kwargs))
        chosen = all(map(_is_smooth, given)) or any(self._is_cut(t) for t in given if not _is_smooth(t))
        for tensor in tensors_in(result):
            if not tensor.requires_grad and (chosen or _is_smooth(tensor)):
                self._cut[id(tensor)] = weakref.ref(tensor)


def _is_smooth(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _only_shapes(name: str) -> bool:
    """Whether an operation takes only the shape and type of its argument."""
    return "_like" in name or name.startswith("new_")
