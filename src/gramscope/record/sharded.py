"""Sharded training (FSDP2, tensor parallel): rank 0 measures a whole private copy that all ranks fill together.

Gathering the weights is a collective. No rank begins one before every rank has said that it is there, through the
store of the process group, which is no collective: who comes alone is told so, and training goes on.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import nn

from gramscope.base.checks import is_distributed, loaded
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.capture.network import unwrap
from gramscope.record.whole_copy import WholeCopy

PATIENCE = 120.0  # seconds that a rank waits for the others at a due step
CLOSING = 10.0  # and at the end
OPENING = 1800.0  # seconds for the first measurement, which is rank 0's alone
_ALONE = (
    "a sharded model is watched by all ranks together, but not all of them came. Call gs.watch and scope.step (or "
    "attach) on every rank, with the same every="
)
_numbers = itertools.count()


def is_sharded(model: nn.Module) -> bool:
    """Whether the parameters are spread over ranks; FSDP1 is refused, on every rank alike."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    flat = loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    if any(isinstance(module, flat) for module in model.modules()):
        raise UnsupportedError(
            "the model must hold its own parameters to be watched, but FullyShardedDataParallel (FSDP1) keeps them in "
            "flat ones. Shard it with torch.distributed.fsdp.fully_shard (FSDP2), which is watched."
        )
    return any(map(is_distributed, model.parameters()))


class Agreement:
    """One word of each rank on one question after another; every rank hears the same."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._store = dist.distributed_c10d._get_default_store()
        self._prefix, self._asked = f"gramscope/{next(_numbers)}", 0

    def words(self, mine: str, seconds: float) -> list[str] | None:
        """What every rank said, in order of ranks; None, on all of them, where one did not come in time."""
        keys, decision = self._keys(self._asked)
        self._store.set(keys[self.rank], mine)
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
            all_here = "yes"
        except RuntimeError:
            all_here = "no"
        # The first to write decides for all: one that comes just too late must not go on alone.
        if self._store.compare_set(decision, "", all_here) != b"yes":
            return None
        words = [self._store.get(key).decode() for key in keys]
        self._forget(self._asked - 1)
        self._asked += 1
        return words

    def _keys(self, number: int) -> tuple[list[str], str]:
        here = f"{self._prefix}/{number}"
        return [f"{here}/{rank}" for rank in range(self.ranks)], f"{here}/all here"

    def _forget(self, number: int) -> None:
        """All ranks have heard the answer to the question before, so that the store need not keep it."""
        if self.rank == 0 and number >= 0:
            keys, decision = self._keys(number)
            for key in (*keys, decision):
                self._store.delete_key(key)


class Shards:
    """The user's sharded ``model``, and a ``copy`` of it: whole on rank 0, without memory on the others."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._agreement = Agreement()
        self._whole = WholeCopy(model, with_memory=self._agreement.rank == 0)
        self.copy = self._whole.copy
        self._broken = False
        names = repr(list(self.copy.state_dict()))
        words = self._agreement.words(names, PATIENCE)
        if words is None:
            raise InputError(f"{_ALONE}.")
        if len(set(words)) > 1:
            raise UnsupportedError(
                "every rank must hold a shard of the same model to be watched, but their parameters have different "
                "names (pipeline parallel?). Watch a model that is not cut into stages."
            )
        self._gather()

    def refresh(self, measure: bool, warn: Callable[[str, str], None], closing: bool = False) -> bool:
        """The weights of now in the copy, if rank 0 wants to ``measure``; every rank is told the same.

        A rank that is ``closing`` does not wait for long: another may have failed, or closes without measuring.
        """
        if self._broken or not dist.is_initialized():
            return False
        words = self._agreement.words("measure" if measure else "wait", CLOSING if closing else PATIENCE)
        if words is None:
            self._broken = True
            after = (
                "The last step is not measured." if closing else "From here on nothing is measured; training goes on."
            )
            warn("shards", f"{_ALONE}. {after}")
            return False
        if words[0] == "measure":
            self._gather()
        return words[0] == "measure"

    def facts(self) -> dict[str, int]:
        """For the run's meta.json."""
        tensors = [*self.copy.parameters(), *self.copy.buffers()]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return {"ranks": self._agreement.ranks, "copy_bytes_on_rank_0": size}

    def _gather(self) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        self._whole.fill(get_model_state_dict(self.model, options=options))

    def refuse_together(self, error: Exception | None) -> None:
        """Called by every rank at the end of the opening: what one refuses, all refuse."""
        words = self._agreement.words("" if error is None else f"{type(error).__name__}: {error}", OPENING)
        if error is not None:
            return  # the rank's own error is raised
        if words is None:
            raise InputError(f"{_ALONE}.")
        for rank, word in enumerate(words):
            if word:
                raise InputError(f"rank {rank} could not open the watch, so no rank does: {word}")


@contextmanager
def opened_together(model: nn.Module) -> Iterator[tuple[nn.Module, Shards | None]]:
    """The model to measure, and its shards; a plain model as it is.

    For a sharded one every rank leaves the block with a watch, or every rank with an error.
    """
    inner = unwrap(model)
    if not is_sharded(inner):
        yield model, None
        return
    shards = Shards(inner)
    try:
        yield shards.copy, shards
    except Exception as error:
        shards.refuse_together(error)
        raise
    shards.refuse_together(None)
