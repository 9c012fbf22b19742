"""One training run of benchmarks/diagnosis.py: a loop as people write it, with the mistake that its setup names."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gramscope as gs
from diagnosis_networks import Data, Scaled, build, data_for


@dataclass(frozen=True)
class Setup:
    """A healthy run; a sabotage changes some of these."""

    network: str = "mlp"
    task: str = "digits"
    width: int = 32
    depth: int = 2
    activation: str = "relu"
    norm: bool = False
    post_norm: bool = False
    residual: bool = True
    units: bool = True
    dropout: float = 0.0
    optimizer: str = "sgd"
    lr: float = 0.1
    batch: int = 64
    steps: int = 250
    weight_decay: float = 0.0
    # mistakes
    hidden_scale: float = 1.0  # of the initial hidden weights
    hidden_bias: float | None = None
    constant_hidden: bool = False
    output_scale: float = 0.0
    frozen: bool = False
    missing: bool = False
    zero_grad: bool = True
    body_lr: float = 1.0  # of the layers below the head, relative
    noise: float = 0.0  # share of labels that are drawn at random
    noisy_probe: bool = True
    missing_class: int | None = None
    in_order: bool = False
    input_scale: float = 1.0
    input_shift: float = 0.0
    doubled: float = 0.0  # share of the examples of which two copies are added before the data are split
    split_again: bool = False  # split as there, without copies
    eval_from: int | None = None  # step from which the model is left in evaluation mode
    evaluated_in_training: bool = False
    clip: float = 0.0
    dtype: str = "float32"
    loss_scale: float = 1.0
    spike_every: int = 0
    train_examples: int = 0
    softmax: bool = False  # before a loss that has its own
    target_scale: float = 1.0
    target_shift: float = 0.0
    momentum: float = 0.9  # of the optimiser "momentum"
    one_class_probe: bool = False
    nan_at: int | None = None  # step of a batch with NaN in it
    extra: dict[str, Any] = field(default_factory=dict)


def hidden_layers(model: nn.Module) -> list[nn.Module]:
    """Modules with weights below the head."""
    own = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
    return own[:-1]


def _damage_start(setup: Setup, model: nn.Module) -> None:
    with torch.no_grad():
        for module in hidden_layers(model):
            for name, p in module.named_parameters(recurse=False):
                norm = isinstance(module, nn.LayerNorm | nn.BatchNorm1d | nn.BatchNorm2d)
                if norm or isinstance(module, nn.Embedding):
                    continue
                if p.dim() > 1:
                    p *= setup.hidden_scale
                    if setup.constant_hidden:
                        p.fill_(1 / p[0].numel() ** 0.5)
                elif setup.constant_hidden:
                    p.zero_()
                if setup.hidden_bias is not None and name == "bias":
                    p.fill_(setup.hidden_bias)


def _middle(model: nn.Module) -> nn.Module:
    hidden = [m for m in hidden_layers(model) if not isinstance(m, nn.LayerNorm | nn.Embedding)]
    return hidden[len(hidden) // 2] if len(hidden) > 1 else hidden[0]


def optimizer_for(setup: Setup, model: nn.Module) -> torch.optim.Optimizer:
    head = {id(p) for p in list(model.modules())[-1].parameters()}
    left = {id(p) for p in _middle(model).parameters()} if setup.missing else set()
    free = [p for p in model.parameters() if p.requires_grad and id(p) not in left]
    body = [p for p in free if id(p) not in head]
    groups = [{"params": [p for p in free if id(p) in head]}, {"params": body, "lr": setup.lr * setup.body_lr}]
    settings = {"lr": setup.lr, "weight_decay": setup.weight_decay}
    if setup.optimizer in ("sgd", "momentum"):
        return torch.optim.SGD(groups, momentum=setup.momentum * (setup.optimizer == "momentum"), **settings)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[setup.optimizer](groups, **settings)


def _damage_data(setup: Setup, data: Data, rng: torch.Generator) -> Data:
    x, y, x_test, y_test = data.x, data.y, data.x_test, data.y_test
    if setup.train_examples:
        x, y = x[: setup.train_examples], y[: setup.train_examples]
    if setup.noise:
        y = _noisy(y, setup.noise, rng)
        y_test = _noisy(y_test, setup.noise, rng) if setup.noisy_probe else y_test
    if setup.missing_class is not None:
        keep = y != setup.missing_class
        x, y = x[keep], y[keep]
    if setup.in_order:
        order = y.argsort(stable=True)
        x, y = x[order], y[order]
    if setup.input_scale != 1.0 or setup.input_shift:
        x, x_test = (t * setup.input_scale + setup.input_shift for t in (x, x_test))
    if setup.target_scale != 1.0 or setup.target_shift:
        y, y_test = (t * setup.target_scale + setup.target_shift for t in (y, y_test))
    if setup.one_class_probe:
        x_test, y_test = (t[y_test == y_test[0]] for t in (x_test, y_test))
    if setup.doubled or setup.split_again:
        return _split(Data(x, y, x_test, y_test, data.classes), setup.doubled, rng)
    return Data(x, y, x_test, y_test, data.classes)


def _split(data: Data, doubled: float, rng: torch.Generator) -> Data:
    """Training examples and probe from one pool, three parts of ten for the probe; the old probe becomes ``fresh``."""
    count = int(doubled * len(data.x))
    chosen = torch.cat([torch.arange(len(data.x)), *2 * (torch.arange(count),)])
    chosen = chosen[torch.randperm(len(chosen), generator=rng)]
    probe, train = chosen[: 3 * len(chosen) // 10], chosen[3 * len(chosen) // 10 :]
    fresh = data.x_test, data.y_test
    return Data(data.x[train], data.y[train], data.x[probe], data.y[probe], data.classes, fresh)


def _noisy(y: Tensor, share: float, rng: torch.Generator) -> Tensor:
    """Some of the targets exchanged among their examples."""
    chosen = (torch.rand(len(y), generator=rng) < share).nonzero()[:, 0]
    y = y.clone()
    y[chosen] = y[chosen[torch.randperm(len(chosen), generator=rng)]]
    return y


def train(setup: Setup, seed: int, out: Path) -> dict[str, float]:
    """Train and watch at default settings; the loss and accuracy on held-out examples at the end."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    data = _damage_data(setup, data_for(setup.task, seed), rng)
    model = build(setup, data)
    _damage_start(setup, model)
    if setup.output_scale:
        model = Scaled(model, setup.output_scale)
    dtype = getattr(torch, setup.dtype)
    model = model.to(dtype)
    if setup.frozen:
        _middle(model).requires_grad_(False)
    optimizer = optimizer_for(setup, model)
    probe = data.x_test, data.y_test
    with gs.watch(model, probe=probe, out=out, config={"seed": seed}) as scope:
        scope.use(optimizer)
        for step in range(setup.steps):
            x, y = _batch(setup, data, step, rng)
            loss = _step(setup, model, optimizer, x.to(dtype) if x.is_floating_point() else x, y, step)
            scope.step(loss=loss)
            if setup.norm or setup.dropout:
                _evaluate_as_users_do(setup, model, data, scope, step, dtype)
    return _score(model, data, dtype)


def _batch(setup: Setup, data: Data, step: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    n = len(data.x)
    if setup.in_order:  # one pass through the sorted examples
        start = int(step / setup.steps * n)
        chosen = torch.arange(start, start + setup.batch) % n
    else:
        chosen = torch.randint(0, n, (min(setup.batch, n),), generator=rng)
    x, y = data.x[chosen], data.y[chosen]
    if setup.spike_every and step % setup.spike_every == setup.spike_every - 1:
        x = 3 * x if x.is_floating_point() else x
        y = y[torch.randperm(len(y), generator=rng)] if not y.is_floating_point() else 5 * y
    if setup.nan_at == step:
        x = x.clone().flatten().index_fill(0, torch.tensor([0]), float("nan")).reshape(x.shape)
    return x, y


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    if y.is_floating_point():
        return nn.functional.mse_loss(outputs.float(), y)
    return nn.functional.cross_entropy(outputs.float(), y)


def _step(setup: Setup, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
    model.train(setup.eval_from is None or step < setup.eval_from)
    if setup.zero_grad:
        optimizer.zero_grad()
    outputs = model(x)
    loss = loss_of(outputs.softmax(-1) if setup.softmax else outputs, y)
    (loss * setup.loss_scale).backward()
    if setup.clip:
        nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
    optimizer.step()
    return loss


def _evaluate_as_users_do(setup: Setup, model: nn.Module, data: Data, scope: Any, step: int, dtype: Any) -> None:
    if (step + 1) % 25:
        return
    was = model.training
    model.train(setup.evaluated_in_training)
    with torch.no_grad():
        x = data.x_test.to(dtype) if data.x_test.is_floating_point() else data.x_test
        scope.log(test_accuracy=(model(x).argmax(1) == data.y_test).float().mean())
    model.train(was)


def _score(model: nn.Module, data: Data, dtype: Any) -> dict[str, float]:
    model.eval()
    found = {}
    with torch.no_grad():
        for name, (x, y) in {"": (data.x_test, data.y_test), "fresh_": data.fresh or (None, None)}.items():
            if x is None or y is None:
                continue
            f = model(x.to(dtype) if x.is_floating_point() else x)
            found[f"{name}loss"] = float(loss_of(f, y))
            if data.classes:
                found[f"{name}accuracy"] = float((f.argmax(1) == y).float().mean())
    return found
