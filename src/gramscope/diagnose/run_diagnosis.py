"""``diagnose``: from run folders to findings."""

import os
from collections.abc import Sequence

from gramscope.base.errors import InputError
from gramscope.diagnose.finding import Diagnosis
from gramscope.diagnose.history import history_of_run
from gramscope.diagnose.ranking import diagnosis_of
from gramscope.store import Run, find_runs, open_run


def diagnose(run: object) -> Diagnosis:
    """What is wrong with a run, and what to try first: findings, the likeliest cause first.

    Each finding says what (one sentence), where, the numbers it rests on with their thresholds, how often such a
    finding was right on runs of known faults, the likely cause and what to try. "Nothing wrong found" is a finding too;
    ``not_judged`` says which rules lacked something, and what to record for them.

    Args:
        run: a folder that :func:`gramscope.watch` wrote (it may still be growing), or an opened run.

    Example:
        >>> import tempfile
        >>> from gramscope.store import RunWriter
        >>> folder = tempfile.TemporaryDirectory()
        >>> with RunWriter.create(folder.name + "/a", {"layers": ["0", "2"]}) as writer:
        ...     for step in (0, 1, 2, 3):
        ...         _ = writer.append(step, {"precision": 1.2e-7, "frozen/0": 1.0, "loss/probe": 2.3 - 0.1 * step})
        >>> found = diagnose(folder.name + "/a")
        >>> found[0].kind, found[0].where
        ('frozen_layer', ('0',))
        >>> print(found[0].remedy)
        If this is not meant, set requires_grad to True before the optimiser is made.
        >>> folder.cleanup()
    """
    opened = run if isinstance(run, Run) else open_run(_checked(run))
    return diagnosis_of(history_of_run(opened), opened.name)


def diagnose_all(runs: Sequence[object]) -> list[Diagnosis]:
    """Of several runs, given as folders, folders of runs, patterns or opened runs."""
    if not runs:
        raise InputError("runs must name at least one run directory, got none. Pass one, e.g. 'runs/a'.")
    opened: list[Run] = []
    for run in runs:
        if isinstance(run, Run):
            opened.append(run)
        else:
            folder = _checked(run)
            opened += [Run(path) for path in find_runs(folder)] or [open_run(folder)]
    return [diagnose(run) for run in opened]


def _checked(run: object) -> str | os.PathLike[str]:
    if not isinstance(run, str | os.PathLike):
        raise InputError(
            f"run must be a folder that gs.watch wrote, or an opened run, got {type(run).__name__}. Pass a path, e.g. "
            "'runs/a'."
        )
    return run
