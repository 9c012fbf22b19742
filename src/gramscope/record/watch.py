"""``watch``: measure a training run while it runs, and change nothing."""

import fnmatch
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gramscope.base.errors import InputError
from gramscope.capture.network import Outputs, count_examples, named_parameters, prepare_input, unwrap
from gramscope.capture.surroundings import untouched
from gramscope.record.budget import Budget
from gramscope.record.moment import Loss, Memory, Moment, Subject, layer_of
from gramscope.record.readings import READERS, Reading
from gramscope.record.schedule import Every, due_at
from gramscope.store import RunWriter, StoreError

OnError = Literal["warn", "raise"]
Forward = Callable[[dict[str, float], int], None]


class WatchWarning(UserWarning):
    """Something could not be measured or written; training goes on."""


def watch(
    model: nn.Module,
    probe: Any,
    out: str | Path | None = None,
    every: Every = 50,
    *,
    measures: str | Sequence[str] = "*",
    layers: str | Sequence[str] = "*",
    loss: Loss | None = None,
    outputs: Outputs = None,
    lr: float | None = None,
    overhead: float | None = 0.05,
    on_error: str = "warn",
    forward: Forward | None = None,
    resume: int | bool = False,
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
        probe: fixed examples (x, y) to measure on, a few hundred; y are labels or numbers. x may be a tuple or a dict.
        out: directory of the run; None keeps the records in ``scope.records`` only.
        every: steps between measurements, "log", "log:10", a collection of steps, or a function of the step.
        measures, layers: names or globs of what to measure; ``gramscope.record.READERS`` lists the measures.
        loss: (outputs, y) -> number; cross-entropy for labels and mean squared error for numbers if None.
        outputs: as for ``gs.capture``.
        lr: learning rate for the rehearsed step, where no optimiser is attached.
        overhead: fraction of the training time that measuring may take. Measures take turns to stay under it, those not
            read for longest first, and dear ones (spectra, step) wait until there is time for them; None reads all of
            them whenever a measurement is due.
        on_error: "warn": a failing measure (or a full disk) never stops training, and is in the record; "raise": it
        does. forward: called as forward(scalars, step) after every record, for TensorBoard, wandb, MLflow.
        resume: True goes on after the last committed step of ``out``; a number goes on from that step.
        name, config: kept in the run's meta.json.
    """
    return Scope(
        model, probe, out, due_at(every), measures=measures, layers=layers, loss=loss, outputs=outputs, lr=lr,
        overhead=overhead, on_error=on_error, forward=forward, resume=resume, name=name, config=config,
    )  # fmt: skip


class Scope:
    """A watch in progress; see :func:`watch`. ``count`` is the number of optimiser steps seen."""

    def __init__(
        self, model: nn.Module, probe: Any, out: str | Path | None, due: Callable[[int], bool], *,
        measures: str | Sequence[str], layers: str | Sequence[str], loss: Loss | None, outputs: Outputs,
        lr: float | None, overhead: float | None, on_error: str, forward: Forward | None, resume: int | bool,
        name: str | None, config: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        if on_error not in ("warn", "raise"):
            raise InputError(f'on_error must be "warn" or "raise", got {on_error!r}.')
        self.model = unwrap(model)
        x, y = _probe(probe)
        self.subject = Subject(self.model, x, y, loss, outputs, _matcher(layers), lr=lr)
        self.readers = _chosen(measures, y)
        self.budget = Budget(overhead)
        self.records: list[dict[str, Any]] = []
        self.count = 0
        self._due, self._on_error, self._forward = due, on_error, forward
        self._memory, self._pending = Memory(), dict[str, Any]()
        self._last_read: dict[str, int] = {}
        self._hooks: list[Any] = []
        self._writes = rank() == 0
        self._closed = False
        self._writer = self._open(out, resume, name, config) if out is not None and self._writes else None
        self.budget.note("open", time.perf_counter() - self.budget.started)
        if self._writer is not None and resume is not False:
            self.count = (self._writer.last_step or 0) if resume is True else int(resume)
        if not self.count:
            self._measure()

    # The loop's side -------------------------------------------------------------------------------------

    def step(self, loss: Any = None, **scalars: Any) -> None:
        """Say that an optimiser step was taken. Measures if this step is due; numbers given are kept with it."""
        self.count += 1
        if loss is not None:
            self.log(loss=loss)
        self.log(**scalars)
        if self._due(self.count):
            self._measure()

    def due_next(self) -> bool:
        """Will the next step be measured? For numbers that are worth computing only then."""
        return self._due(self.count + 1)

    def log(self, **scalars: Any) -> None:
        """Numbers to keep with the next record."""
        for name, value in scalars.items():
            number = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
            if not number and not isinstance(value, int | float):
                raise InputError(f"{name} must be one number to be logged, got {type(value).__name__}.")
            # A tensor is read when it is written, so that a GPU need not wait for it at every step.
            self._pending[name] = value.detach() if isinstance(value, Tensor) else value

    def attach(self, optimizer: Optimizer) -> "Scope":
        """Count the steps of ``optimizer`` from now on; call no ``step`` then. Its memory enters the rehearsed step."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in held for p in self.model.parameters()):
            raise InputError("optimizer must hold parameters of the watched model, but it holds none of them.")
        if self._hooks:
            raise InputError("this watch is attached to an optimiser already. Call close(), or make another watch.")
        self.use(optimizer)
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.step()))
        return self

    def use(self, optimizer: Optimizer) -> "Scope":
        """Rehearse steps with this optimiser, without counting its steps."""
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
        last = self.records[-1]["step"] if self.records else -1
        if self._pending and self._writes and self.count > last:
            self._commit({}, {}, {})
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> "Scope":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def overhead(self) -> float:
        """Seconds spent measuring for each second of training."""
        return self.budget.overhead

    # Measuring ----------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        if not self._writes:
            return
        with self.budget.all_counted():
            self._measure_in_turns()
            device = next(iter(self.model.parameters())).device
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # what was measured must not be paid for by the next step, uncounted

    def _measure_in_turns(self) -> None:
        waiting = sorted(self.readers, key=lambda name: self._last_read.get(name, -1))
        if self.count and not any(self.budget.allows(name, self._guess(name)) for name in (*waiting, "commit")):
            return  # even a line on the disk takes time; what was logged waits for the next one
        scalars: dict[str, float] = {}
        arrays: dict[str, Any] = {}
        failures: dict[str, str] = {}
        skipped: list[str] = []
        moment = Moment(self.subject, self.count, self._memory)
        with untouched(self.model), torch.inference_mode(False):
            for name in waiting:
                if not self.budget.allows(name, self._guess(name)):
                    skipped.append(name)
                    continue
                self._last_read[name] = self.count
                begun = time.perf_counter()
                reading = self._read(name, moment, failures)
                self.budget.note(name, time.perf_counter() - begun)
                scalars |= reading.scalars
                arrays |= reading.arrays
        del moment
        if skipped:
            scalars["skipped"] = float(len(skipped))
        self._commit(scalars, arrays, failures, skipped)

    def _guess(self, name: str) -> float | None:
        guess = READERS[name].guess if name in READERS else None
        return None if guess is None else guess(self.subject, max(self.budget.costs.values(), default=0.0))

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
        return reading

    def _commit(
        self, scalars: dict[str, float], arrays: dict[str, Any], failures: dict[str, str], skipped: Sequence[str] = ()
    ) -> None:
        begun = time.perf_counter()
        given = {name: float(value) for name, value in self._pending.items()}
        self._pending.clear()
        scalars = {**scalars, **given, "overhead": self.budget.overhead}
        self.records.append({"step": self.count, "scalars": scalars, "failures": failures, "skipped": list(skipped)})
        if self._writer is not None:
            try:
                self._writer.append(self.count, scalars, arrays, failures=failures)
            except StoreError as error:
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
        self.budget.note("commit", time.perf_counter() - begun)

    def _open(
        self, out: str | Path, resume: int | bool, name: str | None, config: Mapping[str, Any] | None
    ) -> RunWriter | None:
        if resume is not False:
            return RunWriter.resume(out, None if resume is True else int(resume))
        try:
            return RunWriter.create(out, self._meta(out, name, config))
        except StoreError as error:
            if self._on_error == "raise" or not isinstance(error.__cause__, OSError):
                raise  # a run that is there already is the user's to decide on
            self._warn(f"nothing will be written: {error}")
            return None

    def _meta(self, out: str | Path, name: str | None, config: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "name": name or Path(out).name,
            "model": type(self.model).__name__,
            "parameters": {n: list(p.shape) for n, p in named_parameters(self.model).items()},
            "layers": list(dict.fromkeys(layer_of(n) for n in named_parameters(self.model))),
            "measures": list(self.readers),
            "facts": {n: {"how_to_read": READERS[n].how_to_read} for n in self.readers},
            "probe": _probe_facts(self.subject),
            "config": dict(config or {}),
        }

    def _warn(self, message: str) -> None:
        warnings.warn(message, WatchWarning, stacklevel=4)


def rank() -> int:
    """This process's number in a distributed run; 0 alone."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _probe(probe: Any) -> tuple[Any, Tensor | None]:
    x, y = probe if isinstance(probe, tuple) and len(probe) == 2 else (probe, None)
    n = count_examples(x)
    if y is not None and (not isinstance(y, Tensor) or y.dim() == 0 or len(y) != n):
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise InputError(f"probe must be (x, y) with one target for each of the {n} examples, got y of {got}.")
    return prepare_input(x), None if y is None else y.detach().clone()


def _probe_facts(subject: Subject) -> dict[str, Any]:
    facts: dict[str, Any] = {"examples": count_examples(subject.x)}
    if subject.y is not None and not subject.y.is_floating_point():
        facts["classes"] = int(subject.y.max()) + 1
    return facts


def _chosen(measures: str | Sequence[str], y: Tensor | None) -> tuple[str, ...]:
    patterns = [measures] if isinstance(measures, str) else list(measures)
    found: list[str] = []
    for pattern in patterns:
        known = [name for name, reader in READERS.items() if reader.by_default or name == pattern]
        matched = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise InputError(f"measures must name some of {', '.join(READERS)}, got {pattern!r}.")
        found += matched
    return tuple(n for n in dict.fromkeys(found) if y is not None or not READERS[n].needs_targets)


def _matcher(layers: str | Sequence[str]) -> Callable[[str], bool]:
    patterns = [layers] if isinstance(layers, str) else list(layers)
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
