"""Writes checkpoints: at once, or in a thread beside the training, once what is to be written has been copied.

The training waits for the copy to host memory alone, into memory that is kept for the next one. What the threads of the
ranks tell each other goes over a group of their own, past what counts and times the training's operations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbkit.errors import NbkitError, TrainingError
from nbkit.rank.comm.agree import all_gather_objects, any_rank
from nbkit.rank.train.checkpoint.checkpoint import Taken, write
from nbkit.rank.train.checkpoint.job_state import JobState
from nbkit.rank.train.estimate.free_memory import left
from nbkit.rank.train.replace.backup import Contents, copy_into, host_memory

_SHARE_OF_FREE = 0.5  # of a host's memory, what copies may take; where they would take more, the training waits


@dataclass(frozen=True)
class WriteOutcome:
    """Of a checkpoint that a thread wrote; error: why it is not there."""

    path: Path
    step: int
    error: NbkitError | None


class CheckpointWriter:
    """Of one job on this rank; one checkpoint at a time."""

    def __init__(self, *, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._group: dist.ProcessGroup | None = None
        self._room = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._outcome: WriteOutcome | None = None

    def begin(self, taken: Taken, *, beside: bool, then: Callable[[], None] | None = None) -> None:
        """Write `taken`, or begin to, in a thread. Collective; what came of the one before has been waited for.

        then: what rank 0 does when it is whole, and which nobody waits for.
        Raises TrainingError, on every rank, where it was not written at once.
        """
        assert self._thread is None
        if not beside or (copied := self._copied(taken)) is None:
            write(taken, rank=self.rank, gather=self._gathered)
            self._outcome = WriteOutcome(taken.path, taken.step, None)
            self._end(then)
            return
        if self._group is None and self.world_size > 1:
            self._group = dist.new_group(backend="gloo", group_desc="checkpoint")
        self._thread = threading.Thread(target=self._write, args=(copied, then), name="nbkit-checkpoint", daemon=True)
        self._thread.start()

    def outcome(self, *, wait: bool) -> WriteOutcome | None:
        """Return what came of the last one, once; None while it is being written, unless one is to `wait`."""
        if self._thread is not None:
            if self._thread.is_alive() and not wait:
                return None
            self._thread.join()
            self._thread = None
        found, self._outcome = self._outcome, None
        return found

    def form_again(self) -> None:
        """Go on after ranks were replaced: over another group."""
        self._group = None

    def _copied(self, taken: Taken) -> Taken | None:
        """It, with copies in host memory of what this rank writes; None where that lacks room. Collective."""
        contents = Contents.by_key(taken.held, taken.shares)
        if any_rank(self._room.numel() != contents.num_bytes, device=self.device):
            self._room = self._room.new_empty(0)
            free = left(torch.device("cpu"))
            if any_rank(free is not None and contents.num_bytes > _SHARE_OF_FREE * free, device=self.device):
                return None
            self._room = host_memory(contents.num_bytes, self.device)
        copies: JobState = contents.views(self._room)
        copy_into(copies, taken.held)
        return replace(taken, held=copies)

    def _write(self, taken: Taken, then: Callable[[], None] | None) -> None:
        error: NbkitError | None = None
        try:
            write(taken, rank=self.rank, gather=self._gathered_beside)
        except NbkitError as refused:
            error = refused
        except Exception as broken:  # the connection to a rank that has died
            error = TrainingError(
                f"The checkpoint {str(taken.path)!r} was not written to its end.",
                numbers=f"{type(broken).__name__}: {broken}",
            )
        else:
            self._end(then)
        self._outcome = WriteOutcome(taken.path, taken.step, error)

    def _end(self, then: Callable[[], None] | None) -> None:
        if then is not None and self.rank == 0:
            then()

    def _gathered(self, own: Any) -> list[Any]:
        return all_gather_objects(own, world_size=self.world_size, device=self.device)

    def _gathered_beside(self, own: Any) -> list[Any]:
        group: Any = getattr(self._group, "inner", self._group)
        return all_gather_objects(own, world_size=self.world_size, device=torch.device("cpu"), group=group)
