"""``gramscope run``: an experiment from a TOML file."""

import difflib
import inspect
import math
import shlex
import tomllib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from gramscope import tasks
from gramscope.base.checks import check_choice, check_count, check_number
from gramscope.base.errors import GramscopeError, InputError
from gramscope.cli.training_loop import train
from gramscope.record.probe import chosen, matcher
from gramscope.store.records import SCALARS_FILE
from gramscope.tasks import Task

DATA: dict[str, Callable[..., Task]] = {
    "digits": tasks.digits,
    "mnist": partial(tasks.mnist, "mnist"),
    "fashion-mnist": partial(tasks.mnist, "fashion-mnist"),
    "label-encoded-mnist": lambda **options: tasks.label_encoded(tasks.mnist("mnist", **options)),
    "teacher-student": tasks.teacher_student,
    "heaviside": tasks.heaviside,
}
OPTIMISERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
Section: TypeAlias = dict[str, Any]  # of a TOML file; _check_values says what is wrong with an entry
Config: TypeAlias = dict[str, Section]

DEFAULTS: Config = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "width": 64},
    "optimiser": {"name": "sgd", "lr": 0.1},
    "train": {"steps": 400, "batch": 64, "seed": 0, "loss": "cross_entropy", "target_scale": 1.0},
    "watch": {"out": "runs/run", "every": 20, "probe": 20, "measures": "*", "layers": "*"},
}
MLP_DEPTH = 3  # no default of [model]: a cnn has none

# Sections whose keys are all known here; those of the others belong to what their name picks.
KEYS = {"train": tuple(DEFAULTS["train"]), "watch": (*DEFAULTS["watch"], "overhead")}
LEAST_COUNTS = {  # the least that makes sense
    "train.steps": 1, "train.batch": 1, "train.seed": 0, "model.width": 1, "model.depth": 0, "watch.probe": 1,
}  # fmt: skip
LEAST_NUMBERS = {"optimiser.lr": 0.0, "train.target_scale": -math.inf, "watch.overhead": 0.0}


def build(path: Path, changes: list[str]) -> tuple[nn.Module, Task]:
    """The model that a config describes, before training, and its data."""
    task, model, _, _ = _parts(read_config(path, changes))
    return model, task


def run_config(path: Path, changes: list[str], quiet: bool = False) -> Section:
    """Train and watch; returns the run's folder and its last numbers."""
    config, console = read_config(path, changes), Console(quiet=quiet)
    task, model, optimizer, loss = _parts(config)
    options = config["watch"]
    out = _free(Path(options["out"]))
    own = {key: value for key, value in options.items() if key != "out"}  # a run may be moved
    notes = _cut_down(config, task)
    for note in notes:
        console.print(f"Note: {note}", style="dim", markup=False)
    scope = train(
        model, task, optimizer, loss, steps=int(config["train"]["steps"]), batch=int(config["train"]["batch"]),
        seed=int(config["train"]["seed"]), out=out, every=options["every"], probe=task.balanced(int(options["probe"])),
        label=out.name, console=console, measures=options["measures"], layers=options["layers"],
        overhead=options.get("overhead"), config={**config, "watch": own}, lines=True,
    )  # fmt: skip
    last = scope.records[-1]["scalars"]
    took = f"watching took {scope.overhead:.0%} of the training time"
    took += "" if "overhead" in options else "; --set watch.overhead=0.05 limits it"
    console.print(f"Run: [bold]{out}[/bold] ({scope.count} steps, {took})", soft_wrap=True)
    console.print(f"Now: gramscope report {shlex.quote(str(out))}", style="dim", markup=False, soft_wrap=True)
    return {"run": str(out), "steps": scope.count, "scalars": last, "notes": notes}


def check_config(config: Config, task: Task | None = None) -> Task:
    """Raise where a value is wrong or nothing can be built of it; returns the data, which other configs may share."""
    task, model, _, _ = _parts(config, task)
    chosen(config["watch"]["measures"], task.y)
    matcher(config["watch"]["layers"], model)
    return task


def _parts(
    config: Config, task: Task | None = None
) -> tuple[Task, nn.Module, torch.optim.Optimizer, Callable[[Tensor, Tensor], Tensor]]:
    _check_values(config)
    task, loss = _data(config["data"]) if task is None else task, _loss(config["train"])
    model = _model(config["model"], task, int(config["train"]["seed"]))
    return task, model, _optimiser(config["optimiser"], model), loss


def _cut_down(config: Config, task: Task) -> list[str]:
    """What is asked for and the data has less of, in words."""
    batch, probe, notes = config["train"]["batch"], config["watch"]["probe"], []
    if batch > len(task.x):
        notes.append(f"train.batch is {batch:,}, but the data has {len(task.x):,} training examples: all are taken.")
    counts = torch.bincount(task.y, minlength=task.classes)
    if probe > int(counts.min()):
        notes.append(
            f"watch.probe is {probe:,} examples of each class, but the smallest class has {int(counts.min()):,}: the "
            f"probe has {int(counts.clamp(max=probe).sum()):,} examples in all."
        )
    return notes


def _free(out: Path) -> Path:
    """The folder, if a new run can be made there: this command starts runs and does not go on with them."""
    lines = out / SCALARS_FILE
    if lines.is_file() and lines.stat().st_size:
        raise InputError(
            f"watch.out must be a folder without a run, but {out} holds one. Choose another, e.g. --set "
            f"watch.out={shlex.quote(str(out.with_name(out.name + '-2')))}, or move it away."
        )
    return out


def read_config(path: Path, changes: list[str]) -> Config:
    """The file over the defaults, with ``section.key=value`` changes; a name that nobody knows is refused."""
    if not path.is_file():
        what = "it is a directory" if path.is_dir() else "there is no such file"
        raise InputError(f"{path} must be a TOML file, but {what}.")
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} must be TOML: {error}.") from error
    for change in changes:
        key, equals, value = change.partition("=")
        section, _, name = key.strip().partition(".")
        if not equals or not name:
            raise InputError(f"--set takes section.key=value, got {change!r}.")
        if not isinstance(given.setdefault(section, {}), dict):
            raise InputError(f"{section} in {path} must be a section, [{section}], got {given[section]!r}.")
        given[section][name] = toml_value(value.strip())
    for section, keys in given.items():
        _check_known(f"[{section}]", section, DEFAULTS, "section")
        if not isinstance(keys, dict):
            raise InputError(f"{section} in {path} must be a section, [{section}], got {keys!r}.")
        for key in keys if section in KEYS else ():
            _check_known(f"{section}.{key}", key, KEYS[section], f"key of [{section}]")
    config = {section: {**defaults, **given.get(section, {})} for section, defaults in DEFAULTS.items()}
    if config["model"]["name"] == "mlp":
        config["model"].setdefault("depth", MLP_DEPTH)
    return config


def _check_known(shown: str, name: str, known: Iterable[str], kind: str) -> None:
    """A misspelt name would leave its default in place, so it is refused, with the names that are close."""
    names = list(known)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=2, cutoff=0.65)
        advice = f"Did you mean {' or '.join(close)}?" if close else f"It may be {', '.join(names)}."
        raise InputError(f"{shown} is no {kind}. {advice}")


def _check_values(config: Config) -> None:
    """Numbers of the right kind and size, said before anything is built or trained."""
    for name, least in LEAST_COUNTS.items():
        section, _, key = name.partition(".")
        check_count(config[section].get(key, least), name, least)
    for name, bound in LEAST_NUMBERS.items():
        section, _, key = name.partition(".")
        check_number(config[section].get(key, 0.0), name, least=bound)
    watch = config["watch"]
    if not isinstance(watch["out"], str) or not watch["out"]:
        raise InputError(f"watch.out must be the path of a folder, got {watch['out']!r}.")
    for key in ("measures", "layers"):
        given = watch[key]
        if not isinstance(given, str) and not (isinstance(given, list) and all(isinstance(g, str) for g in given)):
            raise InputError(f"watch.{key} must be a name or a list of names, got {given!r}.")


def toml_value(text: str) -> Any:
    """What stands behind ``key =`` in a TOML file; a bare word is a text."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _pick(kind: str, table: dict[str, Any], options: Section) -> tuple[Any, dict[str, Any]]:
    rest = dict(options)
    name = rest.pop("name")
    check_choice(name, f"{kind}.name", table)
    return table[name], rest


def _data(options: Section) -> Task:
    build, rest = _pick("data", DATA, options)
    return _built("data", build, **rest)


def _model(options: Section, task: Task, seed: int) -> nn.Module:
    inputs, classes = task.x.shape[1], task.classes

    def mlp(width: int, depth: int) -> nn.Module:
        return tasks.mlp((inputs, *[width] * depth, classes), seed)

    def cnn(width: int) -> nn.Module:
        size = round(inputs**0.5)
        if size * size != inputs:
            raise InputError(f"a cnn needs square images, but this data has {inputs} inputs. Use model.name = 'mlp'.")
        return tasks.cnn(classes=classes, width=width, size=size, seed=seed)

    build, rest = _pick("model", {"mlp": mlp, "cnn": cnn}, options)
    return _built("model", build, **rest)


def _optimiser(options: Section, model: nn.Module) -> torch.optim.Optimizer:
    build, rest = _pick("optimiser", dict(OPTIMISERS), options)
    return _built("optimiser", build, model.parameters(), **rest)


def _built(section: str, build: Callable[..., Any], *args: Any, **options: Any) -> Any:
    known = inspect.signature(build).parameters.values()
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in known):
        for key in options:
            _check_known(f"{section}.{key}", key, [p.name for p in known][len(args) :], f"key that fits this {section}")
    try:
        return build(*args, **options)
    except GramscopeError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"[{section}] has a value that does not fit: {_first_line(error)}.") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _loss(options: Section) -> Callable[[Tensor, Tensor], Tensor]:
    check_choice(options["loss"], "train.loss", ("cross_entropy", "mse"))
    if options["loss"] == "cross_entropy":
        return F.cross_entropy
    scale = float(options["target_scale"])
    return lambda f, y: F.mse_loss(f, scale * F.one_hot(y, f.shape[1]).to(f.dtype))
