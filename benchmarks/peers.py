"""The contestants: each computes the NTK of one torch network on one batch, in its own way.

The torch.func methods are the two of PyTorch's tutorial, written here for a batch against itself.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

OURS = "gramscope"


class Unavailable(Exception):
    """A contestant that cannot run here; the message says why."""


@dataclass(frozen=True)
class Contestant:
    """A name, the timed call, and what turns its result into gramscope's layout."""

    name: str
    run: Callable[[], Any]
    layout: Callable[[Any], Tensor] = lambda result: result
    compile: Callable[[], float | None] | None = None
    needs: float = 0.0  # bytes, a lower estimate

    def warm_up(self) -> tuple[Any, float | None]:
        """One untimed call; its result and the FLOP counted in it (None where nothing counts them)."""
        if self.compile is not None:
            flops = self.compile()
            return self.run(), flops
        with FlopCounter() as counter:
            result = self.run()
        return result, counter.total


class FlopCounter(TorchDispatchMode):
    """Adds up the FLOP of matrix products and convolutions by torch's own formulas.

    Not ``FlopCounterMode``: it also hooks every module, which breaks peers that call ``autograd.grad``
    from hooks of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _out_of_place(func._overloadpacket) not in flop_registry:
            # Under inference_mode composite operators arrive whole.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        formula = flop_registry.get(_out_of_place(func._overloadpacket))
        if func is torch.ops.aten.convolution_backward.default:
            # torch's formula counts a grouped weight gradient once too often per group, and vmap
            # turns per-example gradients into groups.
            self.total += 2.0 * _backward_macs(*args)
        elif formula is not None:
            self.total += formula(*args, **kwargs, out_val=out)
        return out


def _out_of_place(packet: Any) -> Any:
    """``addmm`` for ``addmm_``: torch has formulas for the former only."""
    name = packet.__name__
    return getattr(torch.ops.aten, name[:-1], packet) if name.endswith("_") and name[0] != "_" else packet


def _backward_macs(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    transposed, mask = rest[4], rest[7]
    positions = x.numel() if transposed else grad.numel()
    return positions * weight[0].numel() * (mask[0] + mask[1])


@dataclass(frozen=True)
class Problem:
    """What every contestant is given."""

    model: nn.Sequential
    x: Tensor
    reduce: str = "none"
    precision: str | None = None
    block: int | None = None

    @property
    def outputs(self) -> int:
        with torch.no_grad():
            return int(self.model(self.x[:1]).shape[-1])

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def large_for_pairs(self) -> bool:
        """Whether work per pair of examples, or of outputs, through the whole network takes minutes."""
        convolutional = any(isinstance(m, nn.Conv2d) for m in self.model.modules())
        return convolutional and (len(self.x) > 16 or self.parameters > 1e6)

    def jacobian_bytes(self, n: int | None = None) -> float:
        """Size of the Jacobian of all outputs of ``n`` examples."""
        n = len(self.x) if n is None else n
        return float(n * self.outputs * self.parameters * self.x.element_size())


def gramscope(problem: Problem) -> Iterator[Contestant]:
    gs = load_gramscope()
    options = {} if problem.precision is None else {"precision": problem.precision}
    yield Contestant(OURS, lambda: gs.ntk(problem.model, problem.x, reduce=problem.reduce, **options))


def load_gramscope() -> Any:
    gs = _load("gramscope")
    try:
        gs.ntk, gs.ntk_operator  # noqa: B018 - public names are resolved when first read
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"not importable here: {error}") from error
    return gs


def torch_func(problem: Problem) -> Iterator[Contestant]:
    single, params = functional(problem.model)
    outputs = problem.outputs
    n = len(problem.x)
    if problem.block is None:
        yield Contestant(
            "torch.func Jacobian contraction",
            lambda: jacobian_contraction(single, params, problem.x, problem.reduce),
            needs=problem.jacobian_bytes(),
        )
        if problem.reduce == "none" and not problem.large_for_pairs:
            # Under the nested vmap torch carries one weight tangent, and every activation, per
            # pair of examples and output.
            activation = _largest_activation(problem.model, problem.x[:1])
            weight = max(p.numel() for p in problem.model.parameters())
            carried = n * n * outputs * (weight + 3 * activation) * problem.x.element_size()
            yield Contestant(
                "torch.func NTK-vector products",
                lambda: vector_products(single, params, problem.x, outputs),
                needs=problem.jacobian_bytes() + carried,
            )
    else:
        block = problem.block
        yield Contestant(
            f"torch.func contraction, blocks of {block}",
            lambda: blocked_contraction(single, params, problem.x, outputs, block),
            needs=2.5 * problem.jacobian_bytes(block),
        )


def neural_tangents(problem: Problem) -> Iterator[Contestant]:
    jax = _load("jax")
    nt = _neural_tangents()
    from twins import to_jax, twin

    params, apply = twin(problem.model, problem.x.shape[1:])
    x = to_jax(problem.x)
    trace = problem.reduce == "trace"
    outputs = problem.outputs
    # The Jacobian is a live array of the first two whatever the compiler does, and the second
    # carries activations per pair of examples and output; structured derivatives need neither.
    pairs = len(problem.x) ** 2 * outputs * _largest_activation(problem.model, problem.x[:1])
    jacobian = problem.jacobian_bytes()
    needs = {1: jacobian, 2: jacobian + 2.0 * pairs * problem.x.element_size(), 3: 0.0}
    for number in (1, 3) if problem.large_for_pairs else (1, 2, 3):
        kernel = nt.empirical_ntk_fn(apply, trace_axes=(-1,) if trace else (), vmap_axes=0, implementation=number)
        method = nt.NtkImplementation(number).name.lower().replace("_", " ")
        program = _Program(jax.jit(lambda x, p, kernel=kernel: kernel(x, None, p)), (x, params))

        def layout(result: Any) -> Tensor:
            value = torch.from_dlpack(result)
            # neural-tangents divides a trace by the number of outputs.
            return value * outputs if trace else value.permute(0, 2, 1, 3)

        yield Contestant(
            f"neural-tangents {method}",
            program.run,
            layout=layout,
            compile=program.compile,
            needs=needs[number],
        )


class _Program:
    """A jitted JAX function with its arguments, compiled ahead of the first timed call."""

    def __init__(self, jitted: Any, args: tuple[Any, ...]) -> None:
        self._jitted, self._args, self._compiled = jitted, args, None

    def compile(self) -> float | None:
        self._compiled = self._jitted.lower(*self._args).compile()
        cost = self._compiled.cost_analysis()
        cost = cost[0] if isinstance(cost, list) else cost
        return float(cost["flops"]) if cost and cost.get("flops", 0) > 0 else None

    def run(self) -> Any:
        return self._compiled(*self._args).block_until_ready()


def nngeometry(problem: Problem) -> Iterator[Contestant]:
    if problem.reduce == "trace":
        raise Unavailable("computes the full kernel only")
    gram = _load("nngeometry.gram")
    if problem.large_for_pairs:
        raise Unavailable("not run: two example gradients per layer and pair of outputs, minutes at this size")
    model = copy.deepcopy(problem.model)  # if it fails, its hooks stay on the model
    layers = _load("nngeometry.layercollection").LayerCollection.from_model(model)
    data = torch.utils.data.TensorDataset(problem.x.clone())
    loader = torch.utils.data.DataLoader(data, batch_size=len(problem.x))
    device = problem.x.device

    def run() -> Tensor:
        matrix = gram.GramMatrix(model, loader, function=lambda *d: model(d[0].to(device)), layer_collection=layers)
        return matrix.to_torch()

    yield Contestant("nngeometry GramMatrix", run, layout=lambda g: g.permute(1, 0, 3, 2))


def torchtangents(problem: Problem) -> Iterator[Contestant]:
    _load("torchtangents")
    raise Unavailable("installed, but no adapter was written: it was on no registry when this was")
    yield  # pragma: no cover - makes this a generator like its siblings


PEERS: dict[str, Callable[[Problem], Iterator[Contestant]]] = {
    "torch.func": torch_func,
    "neural-tangents": neural_tangents,
    "nngeometry": nngeometry,
    "torchtangents": torchtangents,
}

Single = Callable[[dict[str, Tensor], Tensor], Tensor]


def functional(model: nn.Module) -> tuple[Single, dict[str, Tensor]]:
    """The network as a function of its parameters and one example."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def single(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, (x[None],))[0]

    return single, params


def jacobian_contraction(
    single: Single, params: dict[str, Tensor], x: Float[Tensor, "n ..."], reduce: str = "none"
) -> Tensor:
    """Tutorial method 1: every example's Jacobian, contracted parameter by parameter."""
    return _contract(*[_jacobian(single, params, x)] * 2, reduce)


def blocked_contraction(
    single: Single, params: dict[str, Tensor], x: Float[Tensor, "n ..."], outputs: int, block: int
) -> Float[Tensor, "n c n c"]:
    """Method 1 for batches whose Jacobian does not fit: two blocks of examples at a time."""
    n = len(x)
    kernel = x.new_empty(n, outputs, n, outputs)
    starts = range(0, n, block)
    for i in starts:
        left = _jacobian(single, params, x[i : i + block])
        for j in starts[starts.index(i) :]:
            right = left if j == i else _jacobian(single, params, x[j : j + block])
            part = _contract(left, right, "none")
            kernel[i : i + block, :, j : j + block] = part
            kernel[j : j + block, :, i : i + block] = part.permute(2, 3, 0, 1)
            del right, part
        del left
    return kernel


def vector_products(
    single: Single, params: dict[str, Tensor], x: Float[Tensor, "n ..."], outputs: int
) -> Float[Tensor, "n c n c"]:
    """Tutorial method 2: for each pair of examples, a vjp at one and a jvp at the other per output."""
    basis = torch.eye(outputs, dtype=x.dtype, device=x.device)

    def pair(left: Tensor, right: Tensor) -> Float[Tensor, "c d"]:
        _, pull = vjp(lambda p: single(p, left), params)

        def row(unit: Tensor) -> Tensor:
            return jvp(lambda p: single(p, right), (params,), pull(unit))[1]

        return vmap(row)(basis)

    return vmap(vmap(pair, (None, 0)), (0, None))(x, x).permute(0, 2, 1, 3)


def vjp_then_jvp(model: nn.Module, x: Float[Tensor, "n ..."], v: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    """One product K v from scratch: one vjp and one jvp over the batch, each with its forward pass."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def call(p: dict[str, Tensor]) -> Tensor:
        return functional_call(model, p, (x,))

    _, pull = vjp(call, params)
    return jvp(call, (params,), pull(v))[1]


def kept_vjp_then_jvp(model: nn.Module, x: Float[Tensor, "n ..."]) -> Callable[[Tensor], Tensor]:
    """The same with the vjp's forward pass kept from one product to the next."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def call(p: dict[str, Tensor]) -> Tensor:
        return functional_call(model, p, (x,))

    _, pull = vjp(call, params)
    return lambda v: jvp(call, (params,), pull(v))[1]


def reference(model: nn.Module, x: Float[Tensor, "m ..."]) -> Float[Tensor, "m c m c"]:
    """The kernel in float64 from one plain backward pass per output: nothing shared with any contestant."""
    double = copy.deepcopy(model).double()
    params = [p for p in double.parameters() if p.requires_grad]
    out = double(x.double())
    rows = [
        torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, params, retain_graph=True)])
        for value in out.reshape(-1)
    ]
    jacobian = torch.stack(rows)
    return (jacobian @ jacobian.T).reshape(*out.shape, *out.shape)


def _jacobian(single: Single, params: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    rows = vmap(jacrev(single), (None, 0))(params, x)
    return [j.flatten(2) for j in rows.values()]


def _contract(left: list[Tensor], right: list[Tensor], reduce: str) -> Tensor:
    pattern = "icp,jdp->icjd" if reduce == "none" else "icp,jcp->ij"
    total = torch.einsum(pattern, left[0], right[0])
    for one, other in zip(left[1:], right[1:], strict=True):
        total += torch.einsum(pattern, one, other)
    return total


def _largest_activation(model: nn.Sequential, example: Tensor) -> int:
    largest = 0
    with torch.no_grad():
        for layer in model:
            example = layer(example)
            largest = max(largest, example.numel())
    return largest


def _neural_tangents() -> Any:
    ad = _load("jax.interpreters.ad")
    # Structured derivatives (0.6.5, the last release) reads two names here that jax has since
    # moved; with them in place it runs on jax 0.4.35.
    for name, home in (("source_info_util", "jax._src.source_info_util"), ("config", "jax")):
        if not hasattr(ad, name):
            module = _load(home)
            setattr(ad, name, module.config if name == "config" else module)
    return _load("neural_tangents")


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"not importable here: {error}") from error
