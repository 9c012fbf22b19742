"""``watch``: measure a training run while it runs, and change nothing."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gramscope.base.errors import InputError
from gramscope.base.warned import warn
from gramscope.capture.network import Outputs, unwrap
from gramscope.record import probe as probe_module
from gramscope.record.arguments import check_optimizer, check_options, resume_step, whole_step
from gramscope.record.budget import Budget
from gramscope.record.fingerprint import difference, fingerprint
from gramscope.record.judge import unseen
from gramscope.record.moment import Memory, Moment, Subject
from gramscope.record.readings import READERS, Reading
from gramscope.record.schedule import due_at
from gramscope.record.turns import LINE, Turns
from gramscope.store import RunWriter, StoreError
from gramscope.store.errors import RunExists
from gramscope.store.names import FINGERPRINT, check_name
from gramscope.store.records import META_FILE


class WatchWarning(UserWarning):
    """Something could not be measured or written; training goes on."""


def watch(
    model: nn.Module,
    probe: Any,
    out: str | Path | None = None,
    every: Any = 50,
    *,
    measures: str | Sequence[str] = "*",
    layers: str | Sequence[str] = "*",
    loss: Any = None,
    outputs: Outputs = None,
    lr: Any = None,
    overhead: Any = 0.05,
    on_error: str = "warn",
    forward: Any = None,
    resume: Any = False,
    start: Any = 0,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> "Scope":
    """Watch a training run: which layer learns, how rich the learning is, how far theory foresaw it.

    ::

        with gs.watch(model, probe=(x, y), out="runs/a", every=50) as scope:
            for batch in loader:
                ...
                optimizer.step()
                scope.step(loss=loss)

    or, for a loop that cannot be edited, ``scope = gs.watch(...).attach(optimizer)``. Training is bitwise the same
    with and without: parameters, optimiser state, random streams, buffers, flags and ``.grad``.

    Args:
        model: any module; compiled and data-parallel wrappers are opened.
        probe: fixed examples (x, y) to measure on, a few hundred. y are numbers, a label for each example or for each
            of its positions, or 0 and 1 for each output. x may be a tuple or a dict; floats take the model's precision.
        out: directory of the run; None keeps the records in ``scope.records`` only.
        every: steps between measurements, "log", "log:10", a collection of steps, or a function of the step.
        measures, layers: names or globs of what to measure; ``gramscope.record.READERS`` lists the measures.
        loss: (outputs, y) -> number; cross-entropy for labels (binary for 0 and 1 with one output each) and mean
            squared error for numbers if None.
        outputs: as for ``gs.capture``.
        lr: learning rate for the rehearsed step, where no optimiser is attached.
        overhead: fraction of the training time that measuring may take. Measures take turns to stay under it: those
            that share one capture together, dear ones (spectra, step) on their own, each turn with the same part of the
            time. None reads all of them whenever a measurement is due.
        on_error: "warn": a failing measure (or a full disk) never stops training, and is in the record; "raise": it
            does.
        forward: called as forward(scalars, step) after every record, for TensorBoard, wandb, MLflow.
        resume: True goes on after the last committed step of ``out``, or starts a new run where there is none; a number
            goes on from that step, which may lie after the last record: not every step has one.
        start: optimiser steps taken before, from which a new run is numbered.
        name, config: kept in the run's meta.json.
    """
    return Scope(
        model, probe, out, due_at(every), measures=measures, layers=layers, loss=loss, outputs=outputs, lr=lr,
        overhead=overhead, on_error=on_error, forward=forward, resume=resume, start=start, name=name, config=config,
    )  # fmt: skip


class Scope:
    """A watch in progress; see :func:`watch`. ``count`` is the number of optimiser steps seen."""

    def __init__(
        self, model: nn.Module, probe: Any, out: str | Path | None, due: Callable[[int], bool], *,
        measures: str | Sequence[str], layers: str | Sequence[str], loss: Any, outputs: Outputs,
        lr: Any, overhead: Any, on_error: str, forward: Any, resume: Any,
        start: Any, name: str | None, config: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        check_options(on_error, out, loss, lr, forward)
        resume, start = resume_step(resume), whole_step(start, "start")
        self.budget = Budget(overhead)
        self.model = unwrap(model)
        self._due, self._on_error, self._forward = due, on_error, forward
        self._writes = rank() == 0
        probe_module.check_model(self.model)
        x, y = probe_module.split(probe, self.model)
        layer = probe_module.matcher(layers, self.model)
        self.readers, lacking = probe_module.chosen(measures, y)
        weights_only = all(READERS[name].weights_only for name in self.readers)
        judge = probe_module.judge(self.model, x, y, outputs, loss, weights_only) if self._writes else unseen(y, loss)
        self.subject = Subject(self.model, x, y, judge, outputs, layer, lr=lr)
        if lacking:
            self._warn(f"{', '.join(lacking)} cannot be measured without targets: pass probe=(x, y).")
        self.records: list[dict[str, Any]] = []
        self.count = start
        self._pending, self._measured, self._said = dict[str, Any](), {"overhead", "skipped"}, set[str]()
        self._turns, self._least = Turns(self.readers, self.budget), 0.0
        self._hooks: list[Any] = []
        self._closed = False
        self._writer = self._open(out, resume, name, config) if out is not None and self._writes else None
        self._memory = self._remembered(resume)
        self.budget.note("open", self.budget.clock() - self.budget.started)
        self._opening = not self._memory.resumed
        if self._opening:
            self._measure()
            self._opening = False

    def _remembered(self, resume: int | bool) -> Memory:
        """Where a resumed run goes on, and what it is compared with: what the first attempt stored."""
        if self._writer is None:
            return Memory()
        now = fingerprint(self.model, self.subject.x, self.subject.outputs)
        last = self._writer.last_step
        if resume is not False and not (resume is True and last is None):
            self.count = resume if resume is not True else last or 0
        if resume is False or last is None or not self.count:
            return Memory(fingerprint=now)  # nothing to go on from, or step 0, which is measured again
        other = difference(self._writer.first_array(FINGERPRINT), now)
        if other:
            return Memory(resumed=True, other=other)
        arrays = {name: self._writer.first_array(f"start/{name}") for name in ("kernel", "features")}
        tensors = {name: None if array is None else torch.tensor(array) for name, array in arrays.items()}
        return Memory(tensors["kernel"], tensors["features"], resumed=True)

    # The loop's side -------------------------------------------------------------------------------------

    def step(self, loss: Any = None, **scalars: Any) -> None:
        """Say that an optimiser step was taken. Measures if this step is due; numbers given are kept with it."""
        begun = self.budget.clock()
        if self._ended("step"):
            return
        self.count += 1
        if loss is not None:
            self._keep("loss", loss)
        for name, value in scalars.items():
            self._keep(name, value)
        due = self._due(self.count)
        self.budget.spent += self.budget.clock() - begun  # little, but at every step
        if due:
            self._measure()

    def due_next(self) -> bool:
        """Will the next step be measured? For numbers that are worth computing only then."""
        return self._due(self.count + 1)

    def log(self, **scalars: Any) -> None:
        """Numbers to keep with the next record."""
        if not self._ended("log"):
            for name, value in scalars.items():
                self._keep(name, value)

    def _ended(self, call: str) -> bool:
        """Whether the watch is closed; said once, since a loop calls at every step."""
        if self._closed and "closed" not in self._said:
            self._said.add("closed")
            self._warn(
                f"this watch was closed at step {self.count}, and {call}() after that measures and keeps nothing. "
                "Call it before close(), or inside the with block."
            )
        return self._closed

    def _keep(self, name: str, value: Any) -> None:
        check_name(name, "a number that is logged")
        if name in self._measured:
            raise InputError(f"{name} is measured by the watch and cannot be logged. Log it under another name.")
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            # Its value now. A GPU need not be waited for: there a copy is read when it is written.
            self._pending[name] = value.item() if value.is_cpu else value.detach().clone()
        elif isinstance(value, Real) or (isinstance(value, np.ndarray) and value.shape == () and np.isrealobj(value)):
            self._pending[name] = float(value)
        else:
            raise InputError(f"{name} must be one number to be logged, got {type(value).__name__}.")

    def attach(self, optimizer: Any) -> "Scope":
        """Count the steps of ``optimizer`` from now on; call no ``step`` then. Its memory enters the rehearsed step."""
        check_optimizer(optimizer)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in held for p in self.model.parameters()):
            raise InputError("optimizer must hold parameters of the watched model, but it holds none of them.")
        if self._hooks:
            raise InputError("this watch is attached to an optimiser already. Call close(), or make another watch.")
        self.use(optimizer)
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.step()))
        return self

    def use(self, optimizer: Any) -> "Scope":
        """Rehearse steps with this optimiser, without counting its steps."""
        check_optimizer(optimizer)
        self.subject = Subject(**{**vars(self.subject), "optimizer": optimizer})
        return self

    def close(self) -> None:
        """Let go of the optimiser and of the run's directory; numbers of steps after the last record are written."""
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._pending and self._writes:
            last = self.records[-1]["step"] if self.records else self._last_stored()
            if self.count > last:
                self._commit({}, {}, {})
            else:
                self._amend()
        if self._writer is not None:
            self._writer.close()

    def _last_stored(self) -> int:
        last = None if self._writer is None else self._writer.last_step
        return -1 if last is None else last

    def _amend(self) -> None:
        """What came after the record of its step belongs into it."""
        given = {name: float(value) for name, value in self._pending.items()}
        self._pending.clear()
        if self.records:
            self.records[-1]["scalars"] |= given
        if self._writer is None:
            return
        try:
            if self._writer.last_step == self.count:
                self._writer.amend(given)
        except StoreError as error:
            if self._on_error == "raise":
                raise
            self._warn(f"the last numbers of step {self.count} were not written: {error}")

    def __repr__(self) -> str:
        where = "memory" if self._writer is None else repr(str(self._writer.path))
        state = "closed" if self._closed else "open"
        return f"Scope({type(self.model).__name__}, step {self.count}, {len(self.records)} records in {where}, {state})"

    def __enter__(self) -> "Scope":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def overhead(self) -> float:
        """Seconds spent measuring for each second of training."""
        return self.budget.overhead

    # Measuring ----------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        # Most due steps of a fast loop are refused: that may cost no more than this comparison.
        if not self._writes or (not self._opening and self.budget.room < self._least):
            return
        with self.budget.all_counted():
            turns = self._turns.split(self.subject)
            foreseen = {turn: self._turns.foreseen(names, self.subject) for turn, names in turns.items()}
            self._least = min((cost or 0.0 for cost in foreseen.values()), default=0.0)
            if self._pending:
                foreseen[LINE] = self._turns.foreseen_line()
                self._least = min(self._least, foreseen[LINE] or 0.0)
            cold = [turn for turn, names in turns.items() if not all(map(self.budget.settled, names))]
            chosen = self._first(foreseen) if self._opening else self.budget.choose(foreseen, cold)
            if chosen or self._opening:
                self._measure_turns({turn: names for turn, names in turns.items() if turn in chosen}, turns)
                self._wait()
                self._least = 0.0  # costs are known better now: the next due step works it out anew
            else:
                self._least = self.budget.room + self._least / 2  # nor is it worked out at each refusal

    def _first(self, foreseen: Mapping[str, float | None]) -> list[str]:
        """Before any training there is no time to share: what is cheap is read, and all of it without a limit."""
        return [turn for turn, cost in foreseen.items() if self.budget.share is None or cost is None]

    def _measure_turns(self, chosen: Mapping[str, Sequence[str]], turns: Mapping[str, Sequence[str]]) -> None:
        scalars: dict[str, float] = {}
        arrays: dict[str, Any] = {}
        failures: dict[str, str] = {}
        moment = Moment(self.subject, self.count, self._memory)
        if chosen:
            with probe_module.surroundings(self.model):
                for turn, names in chosen.items():
                    before = self.budget.spent
                    for name in names:
                        reading = self._timed(name, moment, failures)
                        scalars |= reading.scalars
                        arrays |= reading.arrays
                    if not self._opening:  # the cold start is nobody's turn
                        self.budget.charge(turn, self.budget.spent - before)
        del moment
        skipped = [name for turn, names in turns.items() if turn not in chosen for name in names]
        if skipped:
            scalars["skipped"] = float(len(skipped))
        before = self.budget.spent
        self._commit(scalars, arrays, failures, skipped)
        if not chosen and not self._opening:
            self.budget.charge(LINE, self.budget.spent - before)

    def _timed(self, name: str, moment: Moment, failures: dict[str, str]) -> Reading:
        clock, captured, moment.asked = self.budget.clock, moment.capture_seconds, False
        begun = clock()
        reading = self._read(name, moment, failures)
        seconds = clock() - begun
        if moment.asked:
            self._turns.capturing.add(name)
        if moment.capture_seconds is not None and moment.capture_seconds != captured:
            shared = moment.capture_seconds - (captured or 0.0)
            self.budget.note("capture", shared)
            seconds -= shared
        self.budget.note(name, seconds)
        return reading

    def _wait(self) -> None:
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what was measured must not be paid for by the next step, uncounted

    def _read(self, name: str, moment: Moment, failures: dict[str, str]) -> Reading:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                reading = READERS[name].read(moment)
            except Exception as error:
                if self._on_error == "raise":
                    raise
                failures[name] = f"{type(error).__name__}: {error}"
                reading = Reading()
        undefined = [str(w.message) for w in said if "not defined" in str(w.message)]
        if undefined:
            failures.setdefault(name, "; ".join(dict.fromkeys(undefined)))
        if name in failures and not undefined:
            self._warn(f"the measure {name!r} failed at step {self.count}: {failures[name]}")
        for missing, reason in reading.missing.items():
            failures[missing] = reason
            if missing not in self._said:
                self._said.add(missing)
                self._warn(f"{missing} is left out: {reason}")
        self._measured.update(reading.scalars)
        return reading

    def _commit(
        self, scalars: dict[str, float], arrays: dict[str, Any], failures: dict[str, str], skipped: Sequence[str] = ()
    ) -> None:
        begun = self.budget.clock()
        given = {name: float(value) for name, value in self._pending.items()}
        self._pending.clear()
        scalars = {**given, **scalars, "overhead": self.budget.overhead}
        self.records.append({"step": self.count, "scalars": scalars, "failures": failures, "skipped": list(skipped)})
        if self._writer is not None:
            try:
                self._writer.append(self.count, scalars, arrays, failures=failures)
            except Exception as error:  # the disk's, or a reader's own names and arrays that cannot be stored
                if self._on_error == "raise":
                    raise
                self._warn(f"step {self.count} was not written: {error}")
        if self._forward is not None:
            try:
                self._forward({name: v for name, v in scalars.items() if math.isfinite(v)}, self.count)
            except Exception as error:
                if self._on_error == "raise":
                    raise
                self._warn(f"forwarding of step {self.count} failed: {error}")
        self.budget.note("commit" if arrays else LINE, self.budget.clock() - begun)

    def _open(
        self, out: str | Path, resume: int | bool, name: str | None, config: Mapping[str, Any] | None
    ) -> RunWriter | None:
        if resume is not False and not (resume is True and not (Path(out) / META_FILE).exists()):
            return RunWriter.resume(out, None if resume is True else resume)
        try:
            return RunWriter.create(out, probe_module.meta(self.subject, self.readers, name or Path(out).name, config))
        except StoreError as error:
            if isinstance(error, RunExists):
                raise RunExists(
                    f"out must be a directory without a run, but {out} holds one. Pass resume=True to go on with it, "
                    "choose another directory, or remove it.",
                    error.errno,
                ) from error
            if not isinstance(error.__cause__, OSError):  # another writer, or a file: the user's to decide on
                raise
            if self._on_error == "raise":
                raise
            self._warn(f"nothing will be written: {error}")
            return None

    def _warn(self, message: str) -> None:
        warn(message, WatchWarning)


def rank() -> int:
    """This process's number in a distributed run; 0 alone."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
