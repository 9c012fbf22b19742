"""``gramscope run``: an experiment from a TOML file."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from gramscope import tasks
from gramscope.base.errors import InputError
from gramscope.cli.training import train
from gramscope.tasks import Task

DATA: dict[str, Callable[..., Task]] = {
    "digits": tasks.digits,
    "mnist": lambda **options: tasks.mnist("mnist", **options),
    "fashion-mnist": lambda **options: tasks.mnist("fashion-mnist", **options),
    "label-encoded-mnist": lambda **options: tasks.label_encoded(tasks.mnist("mnist", **options)),
    "teacher-student": tasks.teacher_student,
    "heaviside": tasks.heaviside,
}
OPTIMISERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
DEFAULTS: dict[str, dict[str, Any]] = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "width": 64, "depth": 3},
    "optimiser": {"name": "sgd", "lr": 0.1},
    "train": {"steps": 400, "batch": 64, "seed": 0, "loss": "cross_entropy", "target_scale": 1.0},
    "watch": {"out": "runs/run", "every": 20, "probe": 20, "measures": "*", "layers": "*"},
}


def run_config(path: Path, changes: list[str], quiet: bool = False) -> dict[str, Any]:
    """Train and watch; returns the run's folder and its last numbers."""
    config = read_config(path, changes)
    console = Console(quiet=quiet)
    task, loss = _data(config["data"]), _loss(config["train"])
    model = _model(config["model"], task, int(config["train"]["seed"]))
    optimizer = _optimiser(config["optimiser"], model)
    options = config["watch"]
    out = Path(options["out"])
    scope = train(
        model, task, optimizer, loss, steps=int(config["train"]["steps"]), batch=int(config["train"]["batch"]),
        seed=int(config["train"]["seed"]), out=out, every=options["every"], probe=task.balanced(int(options["probe"])),
        label=out.name, console=console, measures=options["measures"], layers=options["layers"],
        overhead=options.get("overhead"), config=config,
    )  # fmt: skip
    last = scope.records[-1]["scalars"]
    console.print(
        f"Run: [bold]{out}[/bold] ({scope.count} steps, watching took {scope.overhead:.0%} of the training time)"
    )
    console.print(f"Now: gramscope report {out}", style="dim")
    return {"run": str(out), "steps": scope.count, "scalars": last}


def read_config(path: Path, changes: list[str]) -> dict[str, dict[str, Any]]:
    """The file over the defaults, with ``section.key=value`` changes; a name that nobody knows is refused."""
    if not path.exists():
        raise InputError(f"{path} must be a TOML file, but there is no such file.")
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} must be TOML: {error}.") from error
    for change in changes:
        key, equals, value = change.partition("=")
        section, _, name = key.strip().partition(".")
        if not equals or not name:
            raise InputError(f"--set takes section.key=value, got {change!r}.")
        given.setdefault(section, {})[name] = _value(value.strip())
    unknown = sorted(set(given) - set(DEFAULTS))
    if unknown:
        raise InputError(f"{path} has a section [{unknown[0]}], which is none of {', '.join(DEFAULTS)}.")
    return {section: {**defaults, **given.get(section, {})} for section, defaults in DEFAULTS.items()}


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string


def _pick(kind: str, table: dict[str, Any], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    rest = dict(options)
    name = rest.pop("name")
    if name not in table:
        raise InputError(f"{kind}.name must be one of {', '.join(table)}, got {name!r}.")
    return table[name], rest


def _data(options: dict[str, Any]) -> Task:
    build, rest = _pick("data", DATA, options)
    return _built("data", build, **rest)


def _model(options: dict[str, Any], task: Task, seed: int) -> nn.Module:
    inputs, classes = task.x.shape[1], task.classes

    def mlp(width: int = 64, depth: int = 3) -> nn.Module:
        return tasks.mlp((inputs, *[width] * depth, classes), seed)

    def cnn(width: int = 16, depth: int = 0) -> nn.Module:
        size = round(inputs**0.5)
        if size * size != inputs:
            raise InputError(f"a cnn needs square images, but this data has {inputs} inputs. Use model.name = 'mlp'.")
        return tasks.cnn(seed, classes=classes, width=width, size=size)

    build, rest = _pick("model", {"mlp": mlp, "cnn": cnn}, options)
    return _built("model", build, **rest)


def _optimiser(options: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    build, rest = _pick("optimiser", dict(OPTIMISERS), options)
    return _built("optimiser", build, model.parameters(), **rest)


def _built(section: str, build: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return build(*args, **options)
    except TypeError as error:
        raise InputError(f"[{section}] has a key that does not fit: {error}.") from error


def _loss(options: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    scale = float(options["target_scale"])
    if options["loss"] == "cross_entropy":
        return lambda f, y: F.cross_entropy(f, y)
    if options["loss"] == "mse":
        return lambda f, y: F.mse_loss(f, scale * F.one_hot(y, f.shape[1]).to(f.dtype))
    raise InputError(f'train.loss must be "cross_entropy" or "mse", got {options["loss"]!r}.')
