"""A plain copy of a sharded module: the same structure, whole parameters, nothing of the sharding's machinery."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gramscope.base.checks import is_distributed, loaded

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # torch.compile, activation checkpointing
_OF_SHARDING = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_STATE_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


class WholeCopy:
    """``copy`` of a sharded ``model``, without wrappers in its names; ``fill`` brings it up to date.

    Without memory its parameters live on the meta device: names and shapes only.
    """

    def __init__(self, model: nn.Module, with_memory: bool) -> None:
        self._with_memory = with_memory
        self._modules: dict[int, tuple[nn.Module, nn.Module]] = {}  # original and copy, by the id of the original
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self.copy = self._blank(model)
        memo: dict[int, object] = {key: made for key, (_, made) in self._modules.items()}
        for module in model.modules():  # a wrapper that is kept somewhere else stands for what it wraps
            memo[id(module)] = memo[id(_inside(module))]
        memo |= {key: made for key, (_, made) in self._tensors.items()}
        for original, made in self._modules.values():
            _copy_attributes(original, made, memo)

    def fill(self, state: Mapping[str, object]) -> None:
        """Parameters and buffers of a whole state dict (empty on all ranks but one), modes and flags of now."""
        for original, made in self._modules.values():
            made.training = original.training
        if not self._with_memory:
            return
        with torch.no_grad():
            for source, target in self._tensors.values():
                target.requires_grad_(source.requires_grad)
                if not is_distributed(source):  # buffers, also those that no state dict has
                    target.copy_(source)
            self.copy.load_state_dict(state)

    def _blank(self, module: nn.Module) -> nn.Module:
        """A module of the plain class with its parameters, buffers and submodules, and no attributes yet."""
        module = _inside(module)
        if id(module) in self._modules:
            return self._modules[id(module)][1]
        made = object.__new__(_plain_class(module))
        nn.Module.__init__(made)
        self._modules[id(module)] = (module, made)
        for name, parameter in module._parameters.items():
            made._parameters[name] = None if parameter is None else self._parameter(parameter)
        for name, buffer in module._buffers.items():
            made._buffers[name] = None if buffer is None else self._whole(buffer)
        for name, child in module._modules.items():
            made._modules[name] = None if child is None else self._blank(child)
        return made

    def _parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) in self._tensors:  # tied
            return self._tensors[id(parameter)][1]  # type: ignore[return-value]
        made = nn.Parameter(self._empty(parameter), requires_grad=parameter.requires_grad)
        self._tensors[id(parameter)] = (parameter, made)
        return made

    def _whole(self, buffer: Tensor) -> Tensor:
        return self._tensors.setdefault(id(buffer), (buffer, self._empty(buffer)))[1]

    def _empty(self, tensor: Tensor) -> Tensor:
        device = tensor.device if self._with_memory else "meta"
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


def _inside(module: nn.Module) -> nn.Module:
    for name in WRAPPERS:
        if name in module._modules:
            return _inside(module._modules[name])  # type: ignore[arg-type]
    return module


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """``fully_shard`` puts a class in front of the module's own."""
    sharded = loaded("torch.distributed.fsdp", "FSDPModule")
    return next(k for k in type(module).__mro__ if issubclass(k, nn.Module) and not issubclass(k, sharded))


def _copy_attributes(original: nn.Module, made: nn.Module, memo: dict[int, object]) -> None:
    for name in _HOOKS:
        kept = {key: hook for key, hook in getattr(original, name).items() if not _of_torch_distributed(original, key)}
        getattr(made, name).update(kept)
    skipped = {"_parameters", "_buffers", "_modules", "_compiled_call_impl", *_HOOKS, *_STATE_HOOKS}
    for name, value in vars(original).items():
        if name not in skipped and not name.startswith(_OF_SHARDING):
            made.__dict__[name] = _copied(value, memo)


def _of_torch_distributed(module: nn.Module, key: int) -> bool:
    """Whether a hook is one of sharding's: it would gather, or cut up, what the copy has whole."""
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        hook = getattr(module, name).get(key)
        if hook is not None:
            inner = getattr(hook, "func", hook)  # functools.partial
            return str(getattr(inner, "__module__", "")).startswith("torch.distributed")
    return False


def _copied(value: object, memo: dict[int, object]) -> object:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # process groups, meshes, locks: what cannot be copied is shared, and none of it is a weight
        return value
