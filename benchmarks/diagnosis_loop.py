"""The loop that the sets of other people's runs share: what was broken, training under gs.watch, and the verdict.

A set (diagnosis_trial.py, diagnosis_fourth.py, diagnosis_fifth.py) has data, networks, faults and healthy runs, and
ends with ``main(FAULTS, HEALTHY, __doc__)``. What counts as right, ``right`` of a fault, is written
down before the first run.
"""

import argparse
import contextlib
import io
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramscope as gs
from diagnosis_faults import Data, Options, groups_of, spoil_data, spoil_network

STEPS = 240
Make = Callable[[Any], torch.optim.Optimizer]
Loss = Callable[[Tensor, Tensor], Tensor]


def by(kind: Any, **settings: Any) -> Make:
    return lambda params: kind(params, **settings)


class Lion(torch.optim.Optimizer):
    """Steps of one length in every entry, by the sign of a mean of gradients; weight decay apart."""

    def __init__(self, params: Any, lr: float = 3e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                a, b = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (a * mean + (1 - a) * p.grad).sign())
                mean.mul_(b).add_((1 - b) * p.grad)


@dataclass(frozen=True)
class Base:
    """A healthy run; ``loss`` only where the watch must be told of it."""

    data: Callable[[int, Options], Data]
    network: Callable[[Options], nn.Module]
    optimizer: Make
    o: Options = field(default_factory=dict)
    loss: Loss | None = None


@dataclass(frozen=True)
class Run:
    """``right``: kinds that name the fault; none for a healthy run, and for a fault for which there is no rule."""

    base: Base
    name: str
    right: tuple[str, ...] = ()
    optimizer: Make | None = None
    o: Options = field(default_factory=dict)
    healthy: bool = False


def makers(bases: dict[str, Base]) -> tuple[Callable[..., Run], Callable[..., Run]]:
    """``broken(base, what, right, optimizer, **options)`` and ``sound(base, what, optimizer, **options)``."""

    def broken(base: str, name: str, right: str, optimizer: Make | None = None, **o: Any) -> Run:
        return Run(bases[base], f"{base}: {name}", tuple(right.split()), optimizer, o)

    def sound(base: str, name: str = "as it is", optimizer: Make | None = None, **o: Any) -> Run:
        return Run(bases[base], f"{base}: {name}", (), optimizer, o, healthy=True)

    return broken, sound


def usual_loss(f: Tensor, y: Tensor, o: Options) -> Tensor:
    """Cross-entropy for labels, binary for 0 and 1, mean squared error for numbers."""
    f, reduction, twice = f.float(), o.get("reduction", "mean"), o.get("twice")
    if not y.is_floating_point() and f.shape != y.shape:
        f = f.softmax(-1) if twice else f
        smoothing = o.get("smoothing", 0.0)
        return F.cross_entropy(f.flatten(0, -2), y.flatten(), reduction=reduction, label_smoothing=smoothing)
    if ((y == 0) | (y == 1)).all():
        return F.binary_cross_entropy_with_logits(f.sigmoid() if twice else f, y.float(), reduction=reduction)
    return F.mse_loss(f, y, reduction=reduction)


def loss_of(run: Run, o: Options) -> Loss:
    own = run.base.loss
    if own is None:
        return lambda f, y: usual_loss(f, y, o)
    return lambda f, y: own(f.sigmoid() if o.get("twice") else f, y)


def _batch(o: Options, step: int, n: int, rng: torch.Generator) -> Tensor:
    size = min(o.get("batch", 64), n)
    if o.get("same"):
        return torch.arange(size)
    if o.get("sorted"):
        return torch.arange(size) + (n - size) * step // o["steps"]
    return torch.arange(n) if size == n else torch.randint(0, n, (size,), generator=rng)


def _rate(o: Options, step: int) -> float:
    if o.get("decay"):
        return float(0.1 ** (step // 10))
    warm = min(1.0, (step + 1) / o["warmup"]) if "warmup" in o else 1.0
    if not o.get("cosine"):
        return warm
    end = o["steps"] if o["cosine"] is True else o["cosine"]
    warm = warm if "warmup" in o else min(1.0, (step + 1) / 20)
    return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, step / end)))


def _set_mode(o: Options, model: nn.Module) -> None:
    model.train("evaluation" not in o)
    for module in model.modules() if "frozen_norm" in o else []:
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def _inputs(o: Options, x: Tensor, step: int) -> Tensor:
    x = x + o["noise"] * torch.randn(x.shape) if "noise" in o else x
    x = x * 100 if "spikes" in o and step % o["spikes"] == o["spikes"] - 1 else x
    return x.to(o.get("dtype", x.dtype)) if x.is_floating_point() else x


def _batch_loss(o: Options, model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(o.get("autocast"))):
        if not o.get("mixup"):
            return o.get("sign", 1.0) * loss(model(x), y)
        part, other = torch.distributions.Beta(0.4, 0.4).sample().item(), torch.randperm(len(x))
        f = model(part * x + (1 - part) * x[other])
        return part * loss(f, y) + (1 - part) * loss(f, y[other])


def _train_step(o: Options, model: nn.Module, loss: Loss, optimizer: Any, draw: Callable[[], Any]) -> Tensor:
    """One step of the optimiser, over ``accumulate`` batches."""
    times = o.get("accumulate", 1)
    if not o.get("keep"):
        optimizer.zero_grad()
    total = torch.zeros(())
    for _ in range(times):
        found = _batch_loss(o, model, loss, *draw())
        (found / times).backward()
        total = total + found.detach() / times
    if o.get("zero_before_step"):
        optimizer.zero_grad()
    if "clip" in o:
        nn.utils.clip_grad_norm_(model.parameters(), o["clip"])
    optimizer.step()
    return total


def _pretrain(run: Run, o: Options, model: nn.Module, x: Tensor, y: Tensor, rng: torch.Generator) -> None:
    """Steps taken before the watch begins, for runs that go on from a trained network."""
    optimizer, loss = run.base.optimizer(model.parameters()), loss_of(run, o)
    for step in range(o["pretrained"]):
        chosen = _batch(o, step, len(x), rng)
        optimizer.zero_grad()
        loss(model(x[chosen]), y[chosen]).backward()
        optimizer.step()


def train(run: Run, seed: int, out: Path | None) -> tuple[float, float]:
    """Train and watch at default settings; the loss of the probe at the start and at the end."""
    o: Options = {"steps": STEPS} | run.base.o | run.o
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    x, y, x_test, y_test = spoil_data(o, run.base.data(seed, o), rng)
    model = run.base.network(o)
    if "pretrained" in o:
        _pretrain(run, o, model, x, y, rng)
    spoil_network(o, model)
    model = model.to(o.get("dtype", torch.float32))
    optimizer = (run.optimizer or run.base.optimizer)(groups_of(o, model))
    if "body" in o:
        optimizer.param_groups[1]["lr"] *= o["body"]
    if "stale" in o:
        model[-1] = nn.Linear(32, 10)  # type: ignore[operator]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(o, step))
    loss, opponent = loss_of(run, o), o["opponent"]() if "opponent" in o else None
    given = {} if run.base.loss is None else {"loss": run.base.loss}
    begin = _held_out(run, o, model, x_test, y_test)
    with gs.watch(model, probe=(x_test, y_test), out=out, measures="*" if out else ["norm"], **given) as scope:
        scope.use(optimizer)
        for step in range(o["steps"]):
            _set_mode(o, model)

            def draw(step: int = step) -> tuple[Tensor, Tensor]:
                chosen = _batch(o, step, len(x), rng)
                a, b = x[chosen], y[chosen]
                a, b = opponent.mixed(a) if opponent else (a, b)
                return _inputs(o, a, step), b

            found = _train_step(o, model, loss, optimizer, draw)
            if opponent:
                opponent.learn(model)
            schedule.step()
            scope.step(loss=found)
    return begin, _held_out(run, o, model, x_test, y_test)


@torch.no_grad()
def _held_out(run: Run, o: Options, model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    return float((run.base.loss or (lambda f, y: usual_loss(f, y, {})))(model(_inputs(o, x, 0)), y))


def show(run: Run, seed: int, out: Path, must_learn: bool) -> str:
    """One line on what was said; returns the verdict."""
    try:
        found = gs.diagnose(out)
    except ArithmeticError as error:  # counts as missed
        print(f"{'MISSED':12}{run.name} [{seed}]: {error!r}", flush=True)
        return "MISSED"
    kinds = [f.kind for f in found if not f.follows_from] + [f"({f.kind})" for f in found if f.follows_from]
    named = {f.kind for f in found}
    if run.healthy and must_learn and not _learnt(out):
        verdict = "not learnt"
    elif run.healthy:
        verdict = "quiet" if found.healthy else "FALSE ALARM"
    elif not run.right:
        verdict = "no rule"
    else:
        verdict = "first" if found[0].kind in run.right else "named" if named & set(run.right) else "MISSED"
    print(f"{verdict:12}{run.name} [{seed}]: {', '.join(kinds)}", flush=True)
    return verdict


def _learnt(out: Path) -> bool:
    """Whether the probe's loss has fallen by a fifth: of numbers 0 and 1 binary cross-entropy, which is trained on."""
    found = gs.open_run(out).scalars()
    loss = found["yes_or_no/loss" if "yes_or_no/loss" in found else "loss/probe"].dropna()
    return bool(loss.iloc[0] - loss.iloc[-1] > 0.2 * abs(loss.iloc[0]))


def main(
    faults: Sequence[Run], healthy: Sequence[Run], about: str, seeds: Sequence[int] = (0,), must_learn: bool = False
) -> None:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--only", default="")
    parser.add_argument("--judge", action="store_true", help="judge the folders again")
    parser.add_argument("--scores", action="store_true", help="only how well the healthy runs learn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if given.scores:
        for run in healthy:
            with contextlib.redirect_stderr(io.StringIO()):
                scores = train(run, 99, None) if given.only in run.name else ()
            if scores:
                print(f"{run.name}: {' to '.join(f'{v:.3g}' for v in scores)}", flush=True)
        return
    begun, verdicts = time.process_time(), Counter[str]()
    for place, run in enumerate([*faults, *healthy]):
        for seed in given.seeds if given.only in run.name else ():
            out = given.out / f"{place}-{seed}"
            if not (given.judge or out.exists()):  # a set that was broken off goes on
                with contextlib.redirect_stderr(io.StringIO()):
                    train(run, seed, out)
            verdicts[show(run, seed, out, must_learn)] += 1
    print(dict(verdicts), f"{time.process_time() - begun:.0f} s")
