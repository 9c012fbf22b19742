"""What the tests write at a step, so that a reader can tell whether it got exactly that."""

from typing import Any

import numpy as np

from gramscope.store import Record, Run


def scalars_of(step: int, attempt: int) -> dict[str, float]:
    rng = np.random.default_rng([step, attempt])
    return {"loss": float(rng.standard_normal()), "share/0.weight": float(rng.random()), "attempt": float(attempt)}


def arrays_of(step: int, attempt: int, size: int = 24) -> dict[str, Any]:
    rng = np.random.default_rng([step, attempt, 1])
    return {
        "kernel": rng.standard_normal((size, size)).astype("float32"),
        "kernel/labels": rng.integers(0, 10, size),
        "spectrum/0.weight": rng.random(size),
    }


def assert_record_holds(run: Run, record: Record) -> None:
    """The record and its arrays, read with their checksum, are what was written at that step of that attempt."""
    assert dict(record.scalars) == scalars_of(record.step, record.attempt)
    assert record.arrays is not None
    size = len(run.array("spectrum/0.weight", record.step, attempt=record.attempt, check=True))
    for name, value in arrays_of(record.step, record.attempt, size).items():
        found = run.array(name, record.step, attempt=record.attempt, check=True)
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found, value)
