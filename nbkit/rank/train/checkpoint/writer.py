"""Write checkpoints, either at once, or from a copy in a thread while the training continues.

With a thread, the training waits only for the copy to host memory. That memory is kept for the next copy. The threads
of the ranks communicate over their own group, which is not part of the training's counts and timings.
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

_SHARE_OF_FREE = 0.5  # fraction of a host's free memory for copies. Without room, the training waits for the write


@dataclass(frozen=True)
class WriteOutcome:
    """The result of writing a checkpoint. error: the reason if it was not written, otherwise None."""

    path: Path
    step: int
    error: NbkitError | None


class CheckpointWriter:
    """Writes the checkpoints of one job on this rank, one at a time."""

    def __init__(self, *, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._group: dist.ProcessGroup | None = None
        self._room = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._outcome: WriteOutcome | None = None

    def begin(self, taken: Taken, *, beside: bool, then: Callable[[], None] | None = None) -> None:
        """Write `taken`, or begin to write it in a thread. Collective. Call `outcome` for the previous write first.

        beside: use a thread, if host memory holds a copy. then: called on rank 0 when the checkpoint is complete; no
        other rank waits for it. Raises TrainingError, on every rank, if a write without a thread fails.
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
        """Return the result of the last write, only once. While the write runs, return None, or wait for its end."""
        if self._thread is not None:
            if self._thread.is_alive() and not wait:
                return None
            self._thread.join()
            self._thread = None
        found, self._outcome = self._outcome, None
        return found

    def form_again(self) -> None:
        """Use a new group from now on, after ranks were replaced."""
        self._group = None

    def _copied(self, taken: Taken) -> Taken | None:
        """Return `taken` with its tensors copied to host memory; None if there is no room. Collective."""
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
        except Exception as broken:  # for example, the connection to a rank that has died
            error = TrainingError(
                f"The checkpoint {str(taken.path)!r} is incomplete.",
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
