"""A watch in progress: the loop's side, and what is measured when."""

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gramscope.base.errors import InputError
from gramscope.base.user_warnings import warn
from gramscope.capture.network import unwrap, unwrap_with_input
from gramscope.diagnose.alerts import Alert
from gramscope.diagnose.finding import Diagnosis
from gramscope.diagnose.loss_of_probe import FIRST
from gramscope.record import probe as probe_module
from gramscope.record.budget import GUARANTEED, WIDEST, Budget, closing_line
from gramscope.record.examples import taken
from gramscope.record.findings import AlertLog, FindingLog, MeasuredStep, diagnosis_so_far, other_loss_so_far
from gramscope.record.groups import TOGETHER, DueStep, Groups
from gramscope.record.logged import LogBuffer
from gramscope.record.measuring import Measurer, Taken
from gramscope.record.objective import unknown_objective
from gramscope.record.opening import goes_on_from, open_writer
from gramscope.record.optimizer_watch import OptimizerWatch
from gramscope.record.sharded import Shards
from gramscope.record.subject import Subject
from gramscope.record.watch_options import WatchOptions, check_optimizer, check_out, resume_step, whole_step
from gramscope.record.watched_measures import WATCHED_MEASURES
from gramscope.store import RunWriter, StoreError

_SHARDED_OPTIMIZER = (
    "the optimiser of a sharded model holds shards: its step is not rehearsed, and its updates are not measured. With "
    "lr=... in gs.watch a plain gradient step is rehearsed."
)
FLUSH = 1.0  # seconds between two writings of what was logged


class WatchWarning(UserWarning):
    """Something could not be measured or written; training goes on."""


class Scope:
    """A watch in progress; see :func:`gramscope.watch`. ``count`` is the number of optimiser steps seen."""

    def __init__(
        self, model: nn.Module, probe: object, out: object, due: Callable[[int], bool], options: WatchOptions,
        shards: Shards | None = None,
    ) -> None:  # fmt: skip
        folder = check_out(out)
        self.budget = Budget(options.overhead)
        probe, taken_from = taken(probe, unwrap(model))
        self.model, probe = unwrap_with_input(model, probe)
        self._shards, self._due, self._options = shards, due, options
        self._writes = rank() == 0
        self.chosen_measures, self.subject = self._watched(probe, options)
        self.records: list[MeasuredStep] = []
        self.count = whole_step(options.start, "start")
        self._logged, self._said = LogBuffer(), set[str]()
        self._alerts = AlertLog(options.on_alert or (lambda alert: self._warn(str(alert))))
        self._finding_log = None if options.on_alert is None else FindingLog(options.on_alert)
        self._left_out, self._left_out_last = 0, -1  # due steps without a measurement: how many, and the last
        self._unwritten = 0  # measurements that the disk did not take
        self._stride = 1  # steps that were taken in one go last, of several optimisers
        self._decided = (-1, False)  # a step, and whether it will be measured
        self._hooks: list[RemovableHandle] = []
        self._closed = False
        self._writer: RunWriter | None = None
        if folder is not None and self._writes:
            name = options.name or folder.name
            meta = probe_module.meta(self.subject, self.chosen_measures, name, options.config, taken_from)
            meta |= {} if shards is None else {"sharded": shards.facts()}
            self._writer = open_writer(folder, resume_step(options.resume), meta)
        self.count, memory = goes_on_from(self._writer, self.subject, resume_step(options.resume), self.count)
        self._groups = Groups(self.chosen_measures, self.budget)
        self._measurer = Measurer(self.budget, self._groups, memory, options.raises, self.warn_once)
        self.budget.spent += self.budget.clock() - self.budget.started
        self._begun = self.count
        self._opening = not memory.resumed
        self._guaranteed = GUARANTEED if self._opening else 0  # measurements still to come
        self._flush_at = 0.0  # by the budget's clock
        if self._opening:
            self._measure()
            self._opening = False

    def _watched(self, probe: object, options: WatchOptions) -> tuple[tuple[str, ...], Subject]:
        """The measures, and what they are taken of; whatever cannot be measured at all is refused."""
        probe_module.check_model(self.model)
        x, y = probe_module.split(probe, self.model)
        layer = probe_module.matcher(options.layers, self.model)
        chosen_measures, lacking = probe_module.chosen(options.measures, y)
        weights_only = all(WATCHED_MEASURES[name].weights_only for name in chosen_measures)
        objective = unknown_objective(y, options.loss)
        if self._writes:
            objective = probe_module.objective(self.model, x, y, options.outputs, options.loss, weights_only)
        if lacking:
            self._warn(f"{', '.join(lacking)} cannot be measured without targets: pass probe=(x, y).")
        return chosen_measures, Subject(self.model, x, y, objective, options.outputs, layer, lr=options.lr)

    # The loop's side -------------------------------------------------------------------------------------

    def step(self, loss: object = None, **scalars: object) -> None:
        """Say that an optimiser step was taken. Measures if this step is due; numbers given are kept in any case."""
        if self._hooks:
            self._counted_already(loss, scalars)
        else:
            self.advance(1, loss, **scalars)

    def advance(self, steps: int, loss: object = None, **scalars: object) -> None:
        """Say that so many optimiser steps were taken, of which the last can be measured if any of them was due."""
        if self._ended("step"):
            return
        first, self.count, self._stride = self.count + 1, self.count + steps, steps
        if loss is not None:
            self._logged.keep(self.count, "loss", loss)
        self._keep(scalars)
        if any(map(self._is_due, range(first, self.count + 1))) and self._refreshed():
            self._measure()
        if self.budget.clock() >= self._flush_at:
            self._flush()

    def _refreshed(self) -> bool:
        """Whether to measure now. Of a sharded model rank 0 decides, and all ranks bring its copy up to date."""
        if self._shards is None:
            return True
        begun = self.budget.clock()
        measure = self._shards.refresh(self._will_measure(self.count), self.warn_once)
        self.budget.spent += self.budget.clock() - begun
        return measure

    def due_next(self) -> bool:
        """Will the next step be measured? For numbers that are worth computing only then."""
        return any(map(self._is_due, range(self.count + 1, self.count + self._stride + 1)))

    def _is_due(self, step: int) -> bool:
        try:
            return self._due(step)
        except Exception as error:
            if self._options.raises:
                raise
            self.warn_once(
                "every",
                f"every failed at step {step}: {type(error).__name__}: {error}. Steps at which it fails are not "
                "measured. Correct the function, or pass a number of steps.",
            )
            return False

    def log(self, **scalars: object) -> None:
        """Numbers to keep at the step that was taken last (``count``), as after an evaluation."""
        if not self._ended("log"):
            self._keep(scalars)
            if self.records and self.records[-1]["step"] == self.count:
                self.records[-1]["scalars"] |= self._logged.at(self.count)

    def _keep(self, scalars: Mapping[str, object]) -> None:
        for name, value in scalars.items():
            self._logged.keep(self.count, name, value)

    @property
    def logged(self) -> dict[str, dict[int, float]]:
        """What the loop gave to ``step`` and ``log``: numbers by name and step."""
        self._logged.settle()
        return {name: dict(zip(steps, values, strict=True)) for name, (steps, values) in self._logged.series.items()}

    def _counted_already(self, loss: object, scalars: Mapping[str, object]) -> None:
        self.log(**(scalars if loss is None else {"loss": loss, **scalars}))
        self.warn_once(
            "twice",
            "this watch is attached to an optimiser and counts its steps, so step() only records its numbers. "
            "Call log(loss=...) after optimizer.step() instead, or use(optimizer) in place "
            "of attach(optimizer).",
        )

    def _ended(self, call: str) -> bool:
        """Whether the watch is closed; said once, since a loop calls at every step."""
        if self._closed:
            self.warn_once(
                "closed",
                f"this watch was closed at step {self.count}, and {call}() after that measures and records nothing. "
                "Call it before close(), or inside the with block.",
            )
        return self._closed

    def attach(self, optimizer: object) -> "Scope":
        """Count the steps of ``optimizer`` from now on; call no ``step`` then. Its memory enters the rehearsed step."""
        if self._hooks:
            raise InputError("this watch is attached to an optimiser already. Call close(), or make another watch.")
        self.use(optimizer)
        self._hooks.append(self._checked(optimizer).register_step_post_hook(self._attached))
        return self

    def _attached(self, *_: object) -> None:
        self.advance(1)

    def use(self, optimizer: object, *others: object) -> "Scope":
        """Rehearse steps with this optimiser, without counting its steps. ``others`` move parameters of the model too.

        Updates and settings are those of all of them.
        """
        optimizers = tuple(map(self._checked, (optimizer, *others)))
        self._forget_update()
        if self._shards is None:
            updates = OptimizerWatch(self.model, optimizers, self._next_measured)
            self.subject = replace(self.subject, optimizers=optimizers, updates=updates)
        elif self._writes:
            self.warn_once("sharded optimizer", _SHARDED_OPTIMIZER)
        return self

    def _checked(self, optimizer: object) -> Optimizer:
        return check_optimizer(optimizer, self.model if self._shards is None else self._shards.model)

    def _next_measured(self) -> int | None:
        """The number of the step that comes, if it will be measured."""
        step = self.count + self._stride
        return step if self._writes and self.due_next() and self._will_measure(step) else None

    def _forget_update(self) -> None:
        if self.subject.updates is not None:
            self.subject.updates.remove()

    def close(self, measure: bool = True) -> None:
        """Let go of the optimiser and of the run's directory.

        A last step without a record is measured before, as the model stands now, but not with ``measure=False``. What
        was logged is written in either case. One line (on stderr) says what was measured when, and what it cost. Of a
        sharded model all ranks close together: one that comes alone waits for ten seconds, and measures nothing.
        """
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        with ExitStack() as last:
            last.callback(self._forget_update)
            last.callback(self._say_what_was_measured, finished=measure)
            last.callback(self.budget.end)
            if self._writer is not None:
                last.callback(self._writer.close)
            last.callback(self._flush)
            if measure and self._ends_unmeasured():
                self._left_out -= self._left_out_last == self.count
                self._measure(last=True)

    def _ends_unmeasured(self) -> bool:
        """Whether the last step has no record yet. Of a sharded model rank 0 says so, and all ranks fill its copy."""
        last = self.records[-1]["step"] if self.records else self._begun
        unmeasured = self._writes and self.count > last
        return unmeasured if self._shards is None else self._shards.refresh(unmeasured, self.warn_once, closing=True)

    def _say_what_was_measured(self, finished: bool) -> None:
        if self.records and self.count > self._begun:
            line = closing_line(self.records, self.chosen_measures, self.budget, self._left_out, self._unwritten)
            print(line, file=sys.stderr)
        elif finished and self.subject.optimizers and self.count == self._begun:
            self._warn(
                "the watch saw no step of the optimiser. Call scope.step() after each optimizer.step(), or attach the "
                "optimiser whose step() the loop calls."
            )

    def _flush(self) -> None:
        """Hand what was logged to the disk: a crash loses the numbers of a second at most."""
        self._logged.settle()  # training's own work that is still queued is not measuring
        begun = self.budget.clock()
        self._flush_at = begun + FLUSH
        try:
            numbers = self._logged.unwritten()
            if numbers and self._writer is not None:
                self._writer.log(numbers)
                self._logged.mark_written()
        except StoreError as error:
            if self._options.raises:
                raise
            self.warn_once("logged", f"what was logged up to step {self.count} is not written yet: {error}")
        if self._writes:
            self._alerts.check(self._logged.series)
        self.budget.spent += self.budget.clock() - begun

    def __repr__(self) -> str:
        where = "memory" if self._writer is None else repr(str(self._writer.path))
        state = "closed" if self._closed else "open"
        return f"Scope({type(self.model).__name__}, step {self.count}, {len(self.records)} records in {where}, {state})"

    def __enter__(self) -> "Scope":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(measure=error is None)  # what was interrupted is let go at once

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def alerts(self) -> list[Alert]:
        """What called for a look, in order; see :func:`gramscope.diagnose.alerts.find_alerts`."""
        return list(self._alerts.alerts)

    @property
    def findings(self) -> Diagnosis:
        """What is wrong so far, the likeliest cause first; see :func:`gramscope.diagnose`."""
        return diagnosis_so_far(self.model, self.records, self.logged)

    @property
    def overhead(self) -> float:
        """Seconds spent measuring, the first measurement too, for each second of training up to ``close()``."""
        return self.budget.overhead

    # Measuring ----------------------------------------------------------------------------------------------

    def _measure(self, last: bool = False) -> None:
        if not self._writes:
            return
        self._wait()  # training's own work that is still queued is not measuring
        with self.budget.all_counted():
            if not last and not self._will_measure(self.count):
                self._left_out, self._left_out_last = self._left_out + 1, self.count
                return
            due = DueStep(self.count, last or self._is_guaranteed(self.count), last)
            groups = self._groups.split(self.subject)
            if groups or self._opening:
                self._guaranteed = max(0, self._guaranteed - 1)
                self._commit(self._measurer.take(self.subject, due, groups))
                self._wait()

    def _will_measure(self, step: int) -> bool:
        """Whether a due step will be measured; decided once, since the optimiser's hook asks before the step."""
        if self._decided[0] != step:
            self.budget.due += 1
            groups = self._groups.split(self.subject)
            names = groups.get(TOGETHER)
            due = DueStep(step, self._is_guaranteed(step))
            allowed = names is None or self._groups.affordable(TOGETHER, names, self.subject, due)
            self._decided = step, allowed
        return self._decided[1]

    def _is_guaranteed(self, step: int) -> bool:
        """The first ones of a run, and later one now and then, so that no long stretch of a run is left blank."""
        last = self.records[-1]["step"] if self.records else self._begun
        return self._guaranteed > 0 or step >= WIDEST * max(last, 1)

    def _wait(self) -> None:
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what was measured must not be paid for by the next step, uncounted

    def _commit(self, taken: Taken) -> None:
        self._logged.reserve(taken.scalars)
        self._flush()
        scalars = {**self._logged.at(self.count), **taken.scalars}
        if not self._opening:  # before any training it would be a share of nothing
            scalars["overhead"] = self.budget.overhead
        self.records.append(
            {"step": self.count, "scalars": scalars, "failures": taken.failures, "skipped": taken.skipped}
        )
        if self._writer is not None:
            try:
                self._writer.append(self.count, scalars, taken.arrays, failures=taken.failures)
            except Exception as error:  # the disk's, or a measure's own names and arrays that cannot be stored
                if self._options.raises:
                    raise
                self._unwritten += 1
                self.warn_once(
                    f"not written {type(error).__name__}",
                    f"step {self.count} was not written: {str(error).rstrip('.')}. Later steps are tried, too; close() "
                    "counts those that were not written.",
                )
        forward = self._options.forward
        if forward is not None:
            try:
                forward({name: v for name, v in scalars.items() if math.isfinite(v)}, self.count)
            except Exception as error:
                if self._options.raises:
                    raise
                self.warn_once(
                    f"forward {type(error).__name__}",
                    f"forwarding of step {self.count} failed: {error}. Later steps are tried, too, without a warning.",
                )
        if FIRST < len(self.records) <= 2 * FIRST and (other := other_loss_so_far(self.records, self.logged)):
            self._alerts.ignored.add("loss/probe")
            self.warn_once("other loss", f"the loss on the probe is not the one that is trained on: {other}.")
        self._alerts.measured(self.count, taken.scalars)
        if self._finding_log is not None and len(self.records) > 2:
            self._finding_log.look(self.findings, self.count)

    def _warn(self, message: str) -> None:
        warn(message, WatchWarning)

    def warn_once(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._warn(message)


def rank() -> int:
    """This process's number in a distributed run; 0 alone."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
