"""``watch``: measure a training run while it runs, and change nothing."""

from collections.abc import Mapping

from torch import nn

from gramscope.capture.network import Outputs
from gramscope.record.schedule import due_at
from gramscope.record.scope import Scope
from gramscope.record.sharded import opened_together
from gramscope.record.watch_options import WatchOptions


def watch(
    model: nn.Module,
    probe: object,
    out: object = None,
    every: object = "log:10",
    *,
    measures: object = "*",
    layers: object = "*",
    loss: object = None,
    outputs: Outputs = None,
    lr: object = None,
    overhead: object = 0.05,
    on_error: str = "warn",
    on_alert: object = None,
    forward: object = None,
    resume: object = False,
    start: object = 0,
    name: str | None = None,
    config: Mapping[str, object] | None = None,
) -> Scope:
    """Watch a training run: which layer learns, how rich the learning is, how well theory predicts it.

    ::

        with gs.watch(model, probe=(x, y), out="runs/a") as scope:
            for batch in loader:
                ...
                optimizer.step()
                scope.step(loss=loss)

    or, for a loop that cannot be edited, ``scope = gs.watch(...).attach(optimizer)``. Training is bit-for-bit the
    same with and without: parameters, optimiser state, random streams, buffers, flags and ``.grad``.

    Args:
        model: any module; compiled and data-parallel wrappers are opened.
        probe: fixed examples (x, y) to measure on, a few hundred (of token sequences a few). y are numbers, a label for
            each example or for each of its positions, or 0 and 1 for each output, as whole numbers (0.0 and 1.0 are
            numbers: pass ``loss`` too). x may be a tuple or a dict; floats take the model's precision. Also a Dataset
            or a DataLoader, whose first examples are taken, numpy arrays, or a dict with ``labels``, as Hugging Face
            models are trained on.
        out: directory of the run; None keeps all of it in ``scope.records`` and ``scope.logged`` only.
        every: steps between measurements, "log:10" (that many in each decade of steps, all of the first ones), "log", a
            collection of steps, or a function of the step. The last step is measured too, when the watch is closed.
        measures, layers: names or globs of what to measure; ``gramscope.record.WATCHED_MEASURES`` lists the measures.
        loss: as for ``explain_step``: "mse", "half_squared", "cross_entropy", or (outputs, y) -> number. If None,
            cross-entropy for labels (binary for 0 and 1 with one output each) and mean squared error for numbers.
        outputs: as for ``gs.capture``.
        lr: learning rate for the rehearsed step, where no optimiser is attached.
        overhead: fraction of the training time that measuring may take. Where it is used up, due steps are left out;
            but the first 13 due steps, the last step, and one at 1.9 times the steps of the last measurement are always
            measured, and 1.5 seconds in all for measures below 0.1 s are always allowed. Expensive measures (spectra,
            step, of a language model the kernel) are taken less often than the others. None measures everything at
            every due step. What the loop logs is kept in either case.
        on_error: "warn": a failing measure (or a full disk) never stops training, and is in the record; "raise": it
            does.
        on_alert: called as on_alert(alert) when a run diverges, has NaN, a dead layer or an exploding gradient, and
            when the diagnosis names a cause at two measurements in a row; once for each. What it raises stops training.
            If None, a warning (not for the diagnosis). ``scope.alerts`` and ``scope.findings`` hold them all.
        forward: called as forward(scalars, step) after every record; ``gs.to_tensorboard``, ``gs.to_wandb`` and
            ``gs.to_mlflow`` make such functions.
        resume: True goes on after the last committed step of ``out``, or starts a new run where there is none; a number
            goes on from that step, which may lie after the last record: not every step has one.
        start: optimiser steps taken before, from which a new run is numbered.
        name, config: kept in the run's meta.json.
    """
    with opened_together(model) as (whole, shards):
        options = WatchOptions(
            measures, layers, loss, outputs, lr, overhead, on_error, on_alert, forward, resume, start, name, config
        )
        return Scope(whole, probe, out, due_at(every), options, shards)
