"""gramscope.spectra.analyze against WeightWatcher's analyze: the same network, one process, in turns.

    python benchmarks/spectra.py                       # 12 layers, 768 wide, what the issue names
    python benchmarks/spectra.py --layers 1 --repeats 3
    OMP_NUM_THREADS=1 python benchmarks/spectra.py --busy    # CPU time of one thread, beside other work
    python benchmarks/spectra.py --device cuda         # gramscope reads the weights from the GPU

WeightWatcher is no dependency of gramscope; in an environment of its own:
    python3 -m venv bench && bench/bin/pip install -c constraints.txt torch
    bench/bin/pip install weightwatcher jaxtyping rich && bench/bin/pip install -e . --no-deps

Both get the network as WeightWatcher can read it: it skips nn.MultiheadAttention's packed in_proj_weight without a
word, so the layer here has q, k, v and output projections of its own. Bootstrap and null are left out of the first
line. gramscope always fits the Marchenko-Pastur law; WeightWatcher runs without that fit (its default) and with it.
Values are compared."""

import argparse
import contextlib
import io
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from gramscope import spectra


class Block(nn.Module):
    """The weights of one transformer layer: q, k, v, output, and an MLP of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])


def network(layers: int, width: int, seed: int) -> nn.Module:
    """Student-t entries with four degrees of freedom: heavy tails, as trained weights have."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(*(Block(width) for _ in range(layers)))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            normal = torch.randn(parameter.shape, generator=generator)
            chi = sum(torch.randn(parameter.shape, generator=generator) ** 2 for _ in range(4))
            parameter.data = normal / (chi / 4).sqrt() / parameter.shape[1] ** 0.5
    return model


def weightwatcher_contestant(model: nn.Module, **options: bool) -> Callable[[], object] | None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            import weightwatcher
    except ImportError:
        print("weightwatcher is not installed here: gramscope alone")
        return None

    def call() -> object:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return weightwatcher.WeightWatcher(model=model).analyze(**options)

    return call


def timed(call: Callable[[], object], clock: Callable[[], float]) -> tuple[float, object]:
    begin = clock()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - begin, result


def compare(ours, theirs) -> None:
    left = ours.assign(key=ours["name"].str.removesuffix(".weight")).set_index("key")
    right = theirs.set_index("longname")
    both = left.index.intersection(right.index)
    print(f"\n{len(left)} rows here, {len(right)} there, {len(both)} in common")
    pairs = {"alpha": "alpha", "D": "D", "xmin": "xmin", "n_tail": "num_pl_spikes", "alpha_hat": "alpha_weighted"}
    pairs |= {"mp_sigma": "sigma_mp", "mp_edge": "bulk_max", "spikes": "num_spikes", "soft_rank": "mp_softrank"}
    pairs |= {"log_alpha_norm": "log_alpha_norm", "stable_rank": "stable_rank", "entropy": "entropy"}
    for mine, other in pairs.items():
        if other not in right:
            continue
        difference = (left.loc[both, mine].astype(float) - right.loc[both, other].astype(float)).abs().max()
        print(f"  {mine:15s} largest difference {difference:.1e}")
    print("\nweight                 gramscope alpha   weightwatcher alpha")
    for key in both[:6]:
        print(f"  {key:20s} {left.loc[key, 'alpha']:14.8f} {right.loc[key, 'alpha']:18.8f}")


def report(name: str, seconds: list[float], reference: float) -> None:
    median = statistics.median(seconds)
    print(f"  {name:52s} {median:9.3f} s  best {min(seconds):9.3f} s  ratio {median / reference:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--busy", action="store_true", help="a machine that others use: one thread, CPU time")
    parser.add_argument("--tail-alone", action="store_true", help="leave out WeightWatcher's slow Marchenko-Pastur fit")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    clock = time.process_time if options.busy else time.perf_counter
    if options.busy:
        torch.set_num_threads(1)  # and OMP_NUM_THREADS=1 in the environment, for the BLAS of NumPy and SciPy
    model = network(options.layers, options.width, options.seed)
    here = network(options.layers, options.width, options.seed).to(options.device)
    contestants: dict[str, Callable[[], object]] = {
        "gramscope, convention='weightwatcher', no bootstrap": lambda: spectra.analyze(
            here, convention="weightwatcher", bootstrap=0, workers=options.workers
        ),
        "gramscope, as it comes (100 bootstrap fits a weight)": lambda: spectra.analyze(here, workers=options.workers),
    }
    peer = weightwatcher_contestant(model)
    if peer is not None:
        contestants["weightwatcher, tail alone"] = peer
    if peer is not None and not options.tail_alone:
        with_noise = weightwatcher_contestant(model, mp_fit=True, randomize=False)
        contestants["weightwatcher, with its Marchenko-Pastur fit"] = with_noise
    print(
        f"{options.layers} layers, width {options.width}, {options.device}, {torch.get_num_threads()} threads, "
        f"{os.cpu_count()} cores, workers {options.workers or 'as threads'}, {options.repeats} repeats in turns"
        + (", CPU time" if options.busy else "")
    )
    times: dict[str, list[float]] = {name: [] for name in contestants}
    results: dict[str, object] = {}
    spectra.analyze(Block(16), convention="weightwatcher")  # the first call pays for imports and caches
    for _ in range(options.repeats):
        for name, call in contestants.items():
            seconds, results[name] = timed(call, clock)
            times[name].append(seconds)
            print(f"  {name}: {seconds:.3f} s", flush=True)
    first = next(iter(contestants))
    print()
    for name, seconds in times.items():
        report(name, seconds, statistics.median(times[first]))
    if peer is not None:
        compare(results[first], results[list(contestants)[-1]])


if __name__ == "__main__":
    main()
