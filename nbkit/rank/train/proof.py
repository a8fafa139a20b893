"""Whether a switch has kept the state, found out beside the first step under the new strategy: nobody waits for it.

A thread of each rank hashes what the old side and the new one hold, while the new one does its first forward and
backward passes, which change no weight; before the optimizer changes any, one all-reduce adds the sums up. Where they
differ the old side, which has been kept, is in force again, and the switch is made once more, compared at once: a model
that changes its weights in its forward passes looks like a mistake here. The step is made again by whatever is in force
then. On a GPU the thread computes on a stream of its own.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from nbkit.errors import SwitchError
from nbkit.events import Switched
from nbkit.planner.exchange import Plan
from nbkit.rank.parallel.digest import sums
from nbkit.rank.train.holdings import Held
from nbkit.rank.train.interrupts import held_back
from nbkit.rank.train.left import Left

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job

__all__ = ["Comparison", "Proof", "give_up", "settled"]

Told = Callable[[Switched | None, BaseException | None], None]
"""What came of it: the switch, with what the proof found, or what the ranks raised."""


class Comparison:
    """Of two sides' states, begun in a thread. The numbers of `new` that a forward pass changes are copied first."""

    def __init__(self, old: Held, new: Held, plan: Plan, *, rank: int, device: torch.device) -> None:
        self._device, self._failed = device, False
        self._keys = sorted({key for holding in (*plan.old, *plan.new) for key in holding})
        self._sums = torch.zeros(2, len(self._keys), dtype=torch.int64)
        # Running statistics are buffers, and change with every forward pass.
        kept = {key: (tensor.clone() if _changes(key) else tensor, layout) for key, (tensor, layout) in new.items()}
        begun = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

        def run() -> None:
            try:
                with _on_own_stream(device, after=begun):
                    for row, (state, holdings) in enumerate(((old, plan.old), (kept, plan.new))):
                        self._sums[row] = sums(state, holdings, self._keys, rank=rank).cpu()
            except Exception as error:
                self._failed = True
                print(f"no proof of a switch: {type(error).__name__}: {error}", file=sys.__stderr__)

        self._thread = threading.Thread(target=run, name="nbkit-proof", daemon=True)
        self._thread.start()

    def identical(self) -> bool:
        """Whether all ranks have found that the states were the same. Collective."""
        self._thread.join()
        told = torch.cat([self._sums.flatten(), torch.tensor([int(self._failed)])]).to(self._device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(told)
        *found, failed = told.tolist()
        half = len(self._keys)
        return not failed and found[:half] == found[half:]


@dataclass
class Proof:
    """A switch that is in force, and not proven yet. again: makes it once more, and compares before anything else.

    listeners: are told what comes of it.
    """

    event: Switched
    left: Left
    comparison: Comparison
    again: Callable[[], Switched]
    listeners: list[Told] = field(default_factory=list)

    def settle(self, job: Job) -> bool:
        """Whether the step that was begun goes on; else it begins again. Collective, before the optimizer steps."""
        if job.device.type == "cuda":
            # The host is ahead of it: what is left of the step would count as time of the proof, and not of the step.
            torch.cuda.current_stream(job.device).synchronize()
        began = time.perf_counter()
        with job.ledger.clock.stopped():
            if self.comparison.identical():
                self.stays(job, True, began)
                return True
            with held_back():
                job.proof = None
                self.left.take_up(job)
                del self.comparison, self.left
            gc.collect()
            try:
                self._tell(self.again(), None)
            except BaseException as error:
                self._tell(None, error)
                if not isinstance(error, SwitchError):
                    raise
        return False

    def stays(self, job: Job, identical: bool | None, since: float) -> None:
        """There is no way back any more. since: when training began to wait for the proof."""
        with held_back():
            job.proof = None
            del self.comparison
            self.left.let_go()
            event = replace(self.event, identical=identical, proof_s=time.perf_counter() - since)
            job.switches.append(event)
        job.ledger.emit(event)
        self._tell(event, None)

    def _tell(self, event: Switched | None, error: BaseException | None) -> None:
        for told in self.listeners:
            told(event, error)


def settled(job: Job) -> bool:
    """Whether the step that was begun goes on, as it does where nothing waits for proof: see `Proof.settle`."""
    return job.proof is None or job.proof.settle(job)


def give_up(job: Job) -> None:
    """The step that was to prove a switch was broken off: nobody will know, and it stays. Not collective."""
    if job.proof is not None:
        job.proof.stays(job, None, time.perf_counter())


def _changes(key: str) -> bool:
    return key.startswith("buffer/")


@contextmanager
def _on_own_stream(device: torch.device, *, after: torch.cuda.Event | None) -> Iterator[None]:
    """On a GPU: what is enqueued inside waits for `after` alone, and nothing that trains waits for it."""
    if after is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield
