"""The global random streams, put back after code that may draw from them: the user's own, or a library's import.

A stream of a library that is not imported cannot have been used, so torch and numpy are not imported here.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

NumpyState: TypeAlias = tuple[Any, ...]  # numpy is typed where it is imported, and here it may not be


class RandomStreams:
    """The global streams as they stand now: Python's, numpy's, torch's of the CPU and of every GPU."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        self._numpy: NumpyState | None = numpy.random.get_state() if numpy else None
        self._torch = torch.get_rng_state() if torch else None
        self._cuda = torch.cuda.get_rng_state_all() if torch and torch.cuda.is_initialized() else None

    def moved(self) -> bool:
        """Has anybody drawn from torch's or numpy's streams since? (Type checkers draw from Python's.)"""
        now = RandomStreams()
        # numpy's state: the name of its generator, the table of its numbers, and where it stands in that.
        before, after = self._numpy or (), now._numpy or ()
        if before and before[2:] != after[2:]:
            return True
        pairs = [
            *zip(before[1:2], after[1:2], strict=False),
            (self._torch, now._torch),
            *zip(self._cuda or (), now._cuda or (), strict=False),
        ]
        return any(before is not None and bool((before != after).any()) for before, after in pairs)

    def rewind(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._torch is None:
            return
        torch = sys.modules["torch"]
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        elif torch.cuda.is_initialized():  # meanwhile: the streams of the GPUs go back to their start
            for stream in torch.cuda.default_generators:
                stream.manual_seed(stream.initial_seed())


@contextmanager
def streams_put_back() -> Iterator[RandomStreams]:
    """The streams after the block as before it, also after an error; or after every call of a decorated function."""
    streams = RandomStreams()
    try:
        yield streams
    finally:
        streams.rewind()
