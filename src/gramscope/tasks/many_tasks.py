"""Several tasks in time at once, in one format, so that one network learns them all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.base.rng import child_seed
from gramscope.tasks.cognitive import context_integration, delayed_match, go_anti, interval_timing, n_back
from gramscope.tasks.sequences import SequenceTask, flip_flop, line_attractor, memory_pro, parity

TASKS: dict[str, Callable[..., SequenceTask]] = {
    "context_integration": context_integration, "delayed_match": delayed_match, "flip_flop": flip_flop,
    "go_anti": go_anti, "interval_timing": interval_timing, "line_attractor": line_attractor,
    "memory_pro": memory_pro, "n_back": n_back, "parity": parity,
}  # fmt: skip
NAMES = ("delayed_match", "go_anti", "context_integration", "interval_timing", "n_back")


@dataclass(frozen=True, repr=False)
class TaskBattery(SequenceTask, Result):
    """Trials of several tasks; ``groups`` gives the trials of each by name.

    ``x`` holds the tasks' own inputs, channel beside channel from the first, and behind them one rule signal for each
    task, on all the time. ``y`` holds their outputs in the same way; channels that a task does not have are 0 and
    ``used`` is False there. Trials shorter than the longest end in steps that do not count.
    """

    groups: dict[str, Int[Tensor, " trials"]] = field(repr=False)
    used: Bool[Tensor, "trial o"] = field(repr=False)

    def loss(self, outputs: Float[Tensor, "trial time o"]) -> Float[Tensor, ""]:
        """The mean over tasks of each task's own loss."""
        return torch.stack([self.loss_of(name, outputs) for name in self.groups]).mean()

    def loss_of(self, name: str, outputs: Float[Tensor, "trial time o"]) -> Float[Tensor, ""]:
        """Mean squared error of one task over its own outputs, at the steps that count."""
        if name not in self.groups:
            raise InputError(f"there is no task {name!r} in this battery. There are {', '.join(self.groups)}.")
        if outputs.shape != self.y.shape:
            raise InputError(f"outputs must have shape {tuple(self.y.shape)}, got {tuple(outputs.shape)}.")
        rows = self.groups[name].to(outputs.device)
        y, mask, used = (part.to(outputs.device)[rows] for part in (self.y, self.mask, self.used))
        counted = mask[:, :, None] & used[:, None]
        return ((outputs[rows] - y.to(outputs)) ** 2)[counted].mean()


def battery(
    tasks: Mapping[str, SequenceTask] | tuple[str, ...] = NAMES, trials: int = 8, *, seed: int = 0
) -> TaskBattery:
    """Tasks in one format, for one network: inputs side by side with a rule signal, trials padded to one length.

    Args:
        tasks: names of tasks of this package, each made with ``trials`` and a seed of its own; or tasks by name, made
            by hand. By default delayed match, go and anti-go, context integration, interval timing and 2-back.
        trials: of each task, where names are given.
        seed: of all, where names are given.

    >>> both = battery(("n_back", "go_anti"), trials=3)
    >>> both.x.shape, both.y.shape, both.groups["go_anti"].tolist()
    (torch.Size([6, 50, 7]), torch.Size([6, 50, 3]), [3, 4, 5])
    >>> float(both.loss_of("n_back", both.y))
    0.0
    """
    made = dict(tasks) if isinstance(tasks, Mapping) else _made(tasks, trials, seed)
    if not made or not all(isinstance(task, SequenceTask) for task in made.values()):
        raise InputError("tasks must be names of tasks, or tasks by name, and one at least.")
    steps, i, o = (max(task.x.shape[1] for task in made.values()), *_widths(made))
    total = sum(len(task.x) for task in made.values())
    x, y = torch.zeros(total, steps, i + len(made), device="cpu"), torch.zeros(total, steps, o, device="cpu")
    mask, used = (torch.zeros(shape, dtype=torch.bool, device="cpu") for shape in ((total, steps), (total, o)))
    groups, start = dict[str, Tensor](), 0
    for place, (name, task) in enumerate(made.items()):
        rows, length = slice(start, start + len(task.x)), task.x.shape[1]
        x[rows, :length, : task.x.shape[2]] = task.x
        x[rows, :, i + place] = 1.0
        y[rows, :length, : task.y.shape[2]] = task.y
        mask[rows, :length], used[rows, : task.y.shape[2]] = task.mask, True
        groups[name] = torch.arange(start, rows.stop, device="cpu")
        start = rows.stop
    return TaskBattery(x, y, mask, groups, used)


def _made(names: tuple[str, ...], trials: int, seed: int) -> dict[str, SequenceTask]:
    names = (names,) if isinstance(names, str) else tuple(names)
    unknown = [name for name in names if name not in TASKS]
    if unknown or len(set(names)) < len(names):
        raise InputError(f"tasks must be different names among {', '.join(TASKS)}, got {list(names)}.")
    return {name: TASKS[name](trials, seed=child_seed(seed, name)) for name in names}


def _widths(tasks: Mapping[str, SequenceTask]) -> tuple[int, int]:
    return max(t.x.shape[2] for t in tasks.values()), max(t.y.shape[2] for t in tasks.values())
