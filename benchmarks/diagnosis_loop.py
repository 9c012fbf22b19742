"""One training run of benchmarks/diagnosis.py: a loop as people write it, with the mistake that its options name."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramscope as gs
from diagnosis_faults import Data, Options, optimizer_of, spoil_data, spoil_network

STEPS, EVALUATED, FEW = 240, 25, 8  # steps of a run; between evaluations of the loop; examples at once in those
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
    """``right``: kinds that name the fault; none for a healthy run, and for a fault for which there is no rule.

    ``remedy``: options that the first advice changes. ``must_learn``: a healthy run counts only if it has learnt.
    """

    base: Base
    name: str
    right: tuple[str, ...] = ()
    o: Options = field(default_factory=dict)
    healthy: bool = False
    remedy: Options | None = None
    must_learn: bool = False

    def options(self, remedied: bool) -> Options:
        usual = {"steps": STEPS, "data": self.base.data, "optimizer": self.base.optimizer}
        return usual | self.base.o | self.o | ((self.remedy or {}) if remedied else {})


def makers(bases: dict[str, Base]) -> tuple[Callable[..., Run], Callable[..., Run]]:
    """``broken(base, what, right, optimizer, **options)`` and ``sound(base, what, optimizer, **options)``."""

    def options(optimizer: Make | None, o: Options) -> Options:
        return o if optimizer is None else {"optimizer": optimizer} | o

    def broken(base: str, name: str, right: str, optimizer: Make | None = None, **o: Any) -> Run:
        return Run(bases[base], f"{base}: {name}", tuple(right.split()), options(optimizer, o))

    def sound(base: str, name: str = "as it is", optimizer: Make | None = None, **o: Any) -> Run:
        return Run(bases[base], f"{base}: {name}", (), options(optimizer, o), healthy=True)

    return broken, sound


class Scaled(nn.Module):
    """``scale (f - f₀)``: the lazy regime of Chizat et al. (arXiv:1812.07956) where the scale is large."""

    def __init__(self, body: nn.Module, scale: float) -> None:
        super().__init__()
        self.body, self.scale = body, scale
        self.start = [p.detach().clone() for p in body.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        names = [name for name, _ in self.body.named_parameters()]
        first = torch.func.functional_call(self.body, dict(zip(names, self.start, strict=True)), (x,))
        return self.scale * (self.body(x) - first.detach())


# Losses --------------------------------------------------------------------------------------------------------------
def usual_loss(f: Tensor, y: Tensor, o: Options) -> Tensor:
    """Cross-entropy for labels, binary for 0 and 1, mean squared error for numbers."""
    f, reduction, twice = f.float(), o.get("reduction", "mean"), o.get("twice")
    if not y.is_floating_point() and f.shape != y.shape:
        f = f.movedim(1, -1) if f.shape[1:-1] != y.shape[1:] else f
        f, smoothing = f.softmax(-1) if twice else f, o.get("smoothing", 0.0)
        return F.cross_entropy(f.flatten(0, -2), y.flatten(), reduction=reduction, label_smoothing=smoothing)
    if ((y == 0) | (y == 1)).all():
        return F.binary_cross_entropy_with_logits(f.sigmoid() if twice else f, y.float(), reduction=reduction)
    return F.mse_loss(f, y, reduction=reduction)


def loss_of(run: Run, o: Options) -> Loss:
    """What the run is trained on; of an ``objective`` the watch is not told."""
    own = o.get("objective", run.base.loss)
    if own is None:
        return lambda f, y: usual_loss(f, y, o)
    return lambda f, y: own(f.sigmoid() if o.get("twice") else f, y)


# Batches and steps ---------------------------------------------------------------------------------------------------
def _batch(o: Options, step: int, n: int, rng: torch.Generator) -> Tensor:
    size = min(o.get("batch", 64), n)
    if o.get("same"):
        return torch.arange(size)
    if o.get("sorted"):  # one pass
        return torch.arange(size) + (n - size) * step // o["steps"]
    return torch.arange(n) if size == n else torch.randint(0, n, (size,), generator=rng)


def _rate(o: Options, step: int) -> float:
    warm = min(1.0, (step + 1) / o["warmup"]) if "warmup" in o else 1.0
    if not o.get("cosine"):
        return warm
    end = o["steps"] if o["cosine"] is True else o["cosine"]
    warm = warm if "warmup" in o else min(1.0, (step + 1) / 20)
    return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, step / end)))


def _inputs(o: Options, x: Tensor) -> Tensor:
    return x.to(o.get("dtype", x.dtype)) if x.is_floating_point() else x


def _disturbed(o: Options, x: Tensor, y: Tensor, step: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise in every batch, or something wrong in some of them."""
    if "noise" in o:
        x = x + o["noise"] * torch.randn(x.shape)
    if o.get("spikes") and step % o["spikes"] == o["spikes"] - 1:
        x = x * 100
    if o.get("bad_every") and step % o["bad_every"] == o["bad_every"] - 1:
        x = 3 * x if x.is_floating_point() else x
        y = 5 * y if y.is_floating_point() else y[torch.randperm(len(y), generator=rng)]
    if o.get("nan_at") == step:
        x = x.clone()
        x.view(-1)[0] = math.nan
    return _inputs(o, x), y


def _batch_loss(o: Options, model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(o.get("autocast"))):
        if not o.get("mixup"):
            found = loss(model(x), y)
            return found + o["extra"] * model.aux if "extra" in o else found
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


# A run ---------------------------------------------------------------------------------------------------------------
def train(run: Run, seed: int, out: Path | None, remedied: bool = False) -> dict[str, float]:
    """Train and watch at default settings; how well it went on held-out examples."""
    o = run.options(remedied)
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    (x, y, x_test, y_test), fresh = spoil_data(o, o["data"](seed, o), rng)
    model = run.base.network(o)
    if "pretrained" in o:
        _pretrain(run, o, model, x, y, rng)
    spoil_network(o, model)
    model = (Scaled(model, o["output_scale"]) if o.get("output_scale") else model).to(o.get("dtype", torch.float32))
    optimizer = optimizer_of(o, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(o, step))
    loss, opponent = loss_of(run, o), o["opponent"]() if "opponent" in o else None
    given: dict[str, Any] = {} if run.base.loss is None else {"loss": run.base.loss}
    begin = _held_out(run, o, model, x_test, y_test)["loss"]
    with gs.watch(model, probe=(x_test, y_test), out=out, measures="*" if out else ["norm"], **given) as scope:
        scope.use(optimizer)
        for step in range(o["steps"]):
            model.train(o.get("evaluation") is None or step < o["evaluation"])

            def draw(step: int = step) -> tuple[Tensor, Tensor]:
                chosen = _batch(o, step, len(x), rng)
                a, b = x[chosen], y[chosen]
                a, b = opponent.mixed(model, a, b) if opponent else (a, b)
                return _disturbed(o, a, b, step, rng)

            found = _train_step(o, model, loss, optimizer, draw)
            if opponent:
                opponent.learn(model)
            schedule.step()
            scope.step(loss=found)
            if o.get("logs") and (step + 1) % EVALUATED == 0:
                scope.log(test_accuracy=_told(o, model, x_test, y_test))
    return {"first_loss": begin} | _score(run, o, model, (x_test, y_test), fresh)


@torch.no_grad()
def _told(o: Options, model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The accuracy that a loop logs: of few examples at once, and in training mode where that is forgotten."""
    was = model.training
    model.train(bool(o.get("evaluated_in_training")))
    named = torch.cat([model(_inputs(o, part)).argmax(1) for part in x.split(FEW) if len(part) > 1])
    model.train(was)
    return float((named == y[: len(named)]).float().mean())


@torch.no_grad()
def _held_out(run: Run, o: Options, model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    model.eval()
    f = model(_inputs(o, x))
    loss = o.get("objective", run.base.loss) or (lambda f, y: usual_loss(f, y, {}))
    found = {"loss": float(loss(f, y))}
    if not y.is_floating_point() and y.dim() == 1 and f.dim() == 2:
        found["accuracy"] = float((f.argmax(1) == y).float().mean())
    return found


def _score(
    run: Run, o: Options, model: nn.Module, probe: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor] | None
) -> dict[str, float]:
    """Loss and accuracy; ``misled``: how far what is told lies from the truth, where the fault lies in measuring."""
    found = _held_out(run, o, model, *probe)
    if fresh is not None:
        above = math.log(_held_out(run, o, model, *fresh)["loss"] / found["loss"])
        found["misled"] = max(0.0, above) if "doubled" in o else abs(above)  # copies only make the probe look too good
    if "evaluated_in_training" in o:
        found["misled"] = abs(found["accuracy"] - _told(o, model, *probe))
    return found
