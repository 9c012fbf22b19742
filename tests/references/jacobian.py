"""The Jacobian by one backward pass a scalar output, and the tangent kernel as a product of Jacobians.

No hooks, no vmap, no torch.func, no rule about any layer: if this is wrong, autograd is wrong.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


def reference_jacobian(model: nn.Module, x: Any, outputs: Any = None, frozen: bool = False) -> dict[str, Tensor]:
    """df_{mu c}/dtheta for each parameter: name -> (n, C, *parameter shape), in float64.

    The model is copied and the whole batch runs once, so coupled examples are right too. Parameters with
    requires_grad False are left out unless `frozen`.
    """
    with torch.inference_mode(False), torch.enable_grad():
        parallel = isinstance(model, nn.DataParallel)
        model, x = private_copy(unwrapped(model))._apply(double), doubled(x)
        if parallel:  # with a GPU in the machine, DataParallel has moved its model there, and moves its inputs
            device = next(model.parameters()).device
            x = tree_map_only(Tensor, lambda t: t.to(device), x)
        if frozen:
            for p in model.parameters():  # TorchScript models have no requires_grad_ of their own
                p.requires_grad_(True)
        # torch.compile puts "_orig_mod." into the names of a compiled submodule.
        parameters = {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters() if p.requires_grad}
        f = flat_outputs(model, x, outputs)
        rows = {name: [] for name in parameters}
        for value in f.flatten():
            model.zero_grad(set_to_none=True)
            # backward() and not autograd.grad(): the reentrant kind of checkpoint forbids the latter.
            value.backward(retain_graph=True)
            for name, p in parameters.items():
                gradient = (torch.zeros_like(p) if p.grad is None else p.grad.to_dense()).detach()
                # A complex parameter is two real ones.
                rows[name].append((torch.view_as_real(gradient) if p.is_complex() else gradient).clone())
    return {name: torch.stack(grads).reshape(*f.shape, *grads[0].shape) for name, grads in rows.items()}


def reference_ntk(
    model: nn.Module,
    x: Any,
    x2: Any = None,
    reduce: str = "none",
    by_site: bool = False,
    outputs: Any = None,
    frozen: bool = False,
) -> Any:
    """K[mu, c, nu, d] = sum over parameters of df_{mu c}/dtheta df_{nu d}/dtheta, in float64."""
    left = reference_jacobian(model, x, outputs, frozen)
    right = left if x2 is None else reference_jacobian(model, x2, outputs, frozen)
    pattern = {"none": "acp,bdp->acbd", "trace": "acp,bcp->ab"}[reduce]
    sites = {
        name: torch.einsum(pattern, *(j[name].reshape(*j[name].shape[:2], -1) for j in (left, right))) for name in left
    }
    return sites if by_site else sum(sites.values())


def flat_outputs(model: nn.Module, x: Any, outputs: Any = None) -> Tensor:
    """The outputs chosen, (n, C)."""
    n = len(next(leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)))
    if isinstance(outputs, Callable):
        return outputs(model, x).reshape(n, -1)
    if isinstance(x, tuple):
        f = model(*x)
    elif isinstance(x, Mapping):
        f = model(**x)
    else:
        f = model(x)
    f = first_tensor(f).reshape(n, -1)
    if outputs is None:
        return f
    return (
        f[:, [outputs]] if isinstance(outputs, int) else f[:, outputs if isinstance(outputs, slice) else list(outputs)]
    )


def first_tensor(output: Any) -> Tensor:
    """The tensor meant: the output itself, "logits" by name, or the first floating one."""
    if isinstance(output, Tensor):
        return output
    if is_dataclass(output) and not isinstance(output, Mapping):
        output = {field.name: getattr(output, field.name) for field in fields(output)}
    if isinstance(output, Mapping):
        if output.get("logits") is not None:
            return output["logits"]
        return next(v for v in output.values() if isinstance(v, Tensor) and v.is_floating_point())
    return next(v for v in output if isinstance(v, Tensor))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DataParallel and DistributedDataParallel, whose names it keeps."""
    while True:
        if isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def private_copy(model: nn.Module) -> nn.Module:
    # deepcopy refuses tensors that are results of operations (the old weight_norm keeps one); they are
    # recomputed in the forward pass, so a detached copy will do.
    results = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    with torch.no_grad():  # else a TorchScript copy has parameters that are no leaves; and it drops the flags
        copied = copy.deepcopy(model, results)
    for parameter, original in zip(copied.parameters(), model.parameters(), strict=True):
        parameter.requires_grad_(original.requires_grad)
    return copied


def doubled(x: Any) -> Any:
    """x in float64, every tensor a copy."""
    return tree_map_only(Tensor, lambda t: double(t.detach().clone()), x)


def double(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def relative_error(got: Tensor, want: Tensor, scale: Tensor | None = None) -> float:
    """|got - want| / |scale| in Frobenius norms; scale is `want` unless given."""
    got, want = got.double().cpu(), want.cpu()
    return ((got - want).norm() / (want if scale is None else scale.cpu()).norm()).item()


def assert_kernel_close(
    got: Any, want: Tensor, tolerance: float, scale: Tensor | None = None, name: str = "kernel"
) -> None:
    """Raise unless `got` has the shape of `want`, is finite, and is within tolerance of it."""
    if not isinstance(got, Tensor):
        raise AssertionError(f"{name} must be a tensor, got {type(got).__name__}")
    if got.shape != want.shape:
        raise AssertionError(f"{name} must have shape {tuple(want.shape)}, got {tuple(got.shape)}")
    if not got.isfinite().all():
        raise AssertionError(f"{name} has entries that are not finite")
    error = relative_error(got, want, scale)
    if not error <= tolerance:
        raise AssertionError(f"{name} is off by {error:.2e} of the norm, tolerance {tolerance:.0e}")


def assert_sites_close(got: Any, want: dict[str, Tensor], tolerance: float) -> None:
    """Raise unless both hold the same names and each kernel is within tolerance of the total's norm."""
    if set(got) != set(want):
        missing, extra = sorted(set(want) - set(got)), sorted(set(got) - set(want))
        raise AssertionError(f"site names differ: missing {missing}, not expected {extra}")
    total = sum(want.values())
    wrong = []
    for name in want:
        try:
            assert_kernel_close(got[name], want[name], tolerance, scale=total, name=name)
        except AssertionError as error:
            wrong.append(str(error))
    if wrong:
        raise AssertionError("; ".join(wrong))
