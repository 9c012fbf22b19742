"""One P K P* product, the top of the spectrum and a trace for a GRU, against vjp + jvp of the whole model.

    python benchmarks/propagators.py [--device cpu|cuda] [--threads 1] [--quick] [--growth]

The baseline is the honest one: `torch.func.vjp`, linearised once and called again, then `torch.func.jvp`, both of the
model as it stands. A dense Jacobian is timed where it fits. Prints seconds (best of a few), peak memory and ratios, and
how the product grows with T, B and H as exponents.
"""

import argparse
import math
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from gramscope.linalg import eigenvalues_top, hutchpp, one_sided_trace
from gramscope.ops.kinks import TwiceDifferentiable
from gramscope.propagators import GlobalNTK


def seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The best of some repeats after one for warming up."""
    # One thread's own time is not disturbed by other programs; several threads' times would be added up.
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    call()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock() - start)
    return min(times)


class PeakMemory(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes of tensors made inside that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._held: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        import weakref

        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._held:
                    self._held.add(key)
                    size = storage.nbytes()
                    self.now += size
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._freed, key, size)
        return out

    def _freed(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.now -= size


def peak_memory(call: Callable[[], object], device: torch.device) -> float:
    """Peak mebibytes of tensors that a call makes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    with PeakMemory() as mode:
        call()
    return mode.most / 2**20


def problem(steps: int, trials: int, width: int, device: torch.device) -> tuple[nn.GRU, Tensor]:
    torch.manual_seed(0)
    return nn.GRU(16, width, batch_first=True).to(device), torch.randn(trials, steps, 16, device=device)


def baseline(model: nn.GRU, x: Tensor) -> Callable[[Tensor], Tensor]:
    """q -> J Jᵀ q by reverse and forward mode through the whole model."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def run(p: dict[str, Tensor]) -> Tensor:
        # torch's fused cell on a GPU has no forward derivative: there both passes go through plain operations.
        with TwiceDifferentiable() if x.is_cuda else nullcontext():
            return torch.func.functional_call(model, p, (x,))[0]

    torch.backends.cudnn.enabled = False  # its kernels have no forward mode; torch's own are used for both passes
    output, back = torch.func.vjp(run, parameters)

    def product(q: Tensor) -> Tensor:
        (gradient,) = back(q.reshape(output.shape))
        return torch.func.jvp(run, (parameters,), (gradient,))[1].reshape(-1)

    return product


def compare(steps: int, trials: int, width: int, device: torch.device, quick: bool) -> None:
    model, x = problem(steps, trials, width, device)
    repeats = 2 if quick else 5
    print(f"GRU, H {width}, T {steps}, B {trials}, {device}, {torch.get_num_threads()} threads, float32")
    build = seconds(lambda: GlobalNTK(model, x), device, repeats)
    g = GlobalNTK(model, x)
    q = torch.randn(g.axes.size, device=device)
    ours = seconds(lambda: g.operator @ q, device, repeats)
    plain = baseline(model, x)
    theirs = seconds(lambda: plain(q), device, repeats)
    error = float((g.operator @ q - plain(q)).norm() / plain(q).norm())
    print(f"  build                     {build:9.4f} s")
    print(f"  P K P* product            {ours:9.4f} s   {peak_memory(lambda: g.operator @ q, device):8.1f} MiB")
    print(f"  vjp + jvp of the model    {theirs:9.4f} s   {peak_memory(lambda: plain(q), device):8.1f} MiB")
    print(f"  ratio {theirs / ours:.2f}, difference {error:.1e} of the norm")
    for name, op in {"P": g.P, "P*": g.P.T, "K": g.K}.items():
        print(f"  {name:<4} alone                {seconds(lambda op=op: op @ q, device, repeats):9.4f} s")
    many = torch.randn(g.axes.size, 8, device=device)
    print(f"  8 products at once, each  {seconds(lambda: g.operator @ many, device, 1) / 8:9.4f} s")
    if quick:
        return
    start = time.perf_counter()
    top = eigenvalues_top(g.operator, 20, tol=1e-3)
    print(f"  top 20 eigenvalues        {time.perf_counter() - start:9.2f} s   ({top.products} products, "
          f"converged {top.all_converged}, largest {float(top.values[0]):.4g})")  # fmt: skip
    for name, estimate in {
        "trace, one-sided, 60 probes": lambda: one_sided_trace(g.jacobian, 60, block=20),
        "trace, Hutch++, 60 products": lambda: hutchpp(g.operator, 60),
    }.items():
        start = time.perf_counter()
        found = estimate()
        print(f"  {name} {time.perf_counter() - start:6.2f} s   {found}")


def dense_jacobian(device: torch.device) -> None:
    """Where the dense Jacobian fits: a small GRU."""
    model, x = problem(10, 4, 16, device)
    g = GlobalNTK(model, x)
    q = torch.randn(g.axes.size, device=device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def whole() -> Tensor:
        found = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,))[0])(parameters)
        flat = torch.cat([part.reshape(g.axes.size, -1) for part in found.values()], dim=1)
        return flat @ (flat.mT @ q)

    print("small GRU, H 16, T 10, B 4")
    print(f"  dense Jacobian, then a product {seconds(whole, device, 2):8.4f} s")
    print(f"  P K P* product                 {seconds(lambda: g.operator @ q, device, 3):8.4f} s")


def growth(device: torch.device) -> None:
    """Exponents of time and memory when one size doubles."""
    for axis, sizes in {"T": ((50, 16, 128), (100, 16, 128)), "B": ((50, 16, 128), (50, 32, 128)),
                        "H": ((50, 16, 128), (50, 16, 256))}.items():  # fmt: skip
        found = []
        for size in sizes:
            model, x = problem(*size, device)
            g = GlobalNTK(model, x)
            q = torch.randn(g.axes.size, device=device)
            call = lambda g=g, q=q: g.operator @ q  # noqa: E731
            found.append((seconds(call, device, 5), peak_memory(call, device)))
        (t0, m0), (t1, m1) = found
        print(f"  {axis} doubled: time ~ {axis}^{math.log2(t1 / t0):.2f}, memory ~ {axis}^{math.log2(m1 / m0):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--quick", action="store_true", help="the product alone, few repeats")
    parser.add_argument("--growth", action="store_true", help="only the exponents")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if options.growth:
        growth(device)
        return
    compare(100, 32, 256, device, options.quick)
    if not options.quick:
        dense_jacobian(device)
        growth(device)


if __name__ == "__main__":
    main()
