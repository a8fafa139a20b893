"""Whether a switch has kept the state, found out beside the first step under the new strategy: nobody waits for it.

A thread of each rank hashes what the old side and the new one hold, while the new one does its first forward and
backward passes, which change no weight; before the optimizer changes any, one all-reduce adds the sums up. Where they
differ the old side, which has been kept, is in force again, and the switch is made once more, compared at once: a model
that changes its weights in its forward passes looks like a mistake here. The step is made again by whatever is in force
then. Where they do not, the old side is kept until the step has been made: see fallback.py. On a GPU the thread
computes on a stream of its own.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from nbkit.errors import SwitchError
from nbkit.planner.reshard.exchange import Plan
from nbkit.rank.parallel.reshard.state_digest import sums
from nbkit.rank.train.checkpoint.job_state import Held
from nbkit.rank.train.control.deferred_interrupt import held_back
from nbkit.rank.train.switch.previous_strategy import Left
from nbkit.records.events import Switched

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job

__all__ = ["Comparison", "Proof", "give_up", "settled"]


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

    def drop(self) -> None:
        """Nobody wants to know any more."""
        self._thread.join()


@dataclass
class Proof:
    """A switch that is in force, while there is its old side. again: makes it once more, and compares before anything
    else. comparison: None when it has been found that the states are the same.
    """

    event: Switched
    left: Left
    comparison: Comparison | None
    again: Callable[[], Switched]

    def settle(self, job: Job) -> bool:
        """Whether the step that was begun goes on; else it begins again. Collective, before the optimizer steps."""
        if self.comparison is None:
            return True
        if job.device.type == "cuda":
            # The host is ahead of it: what is left of the step would count as time of the proof, and not of the step.
            torch.cuda.current_stream(job.device).synchronize()
        began = time.perf_counter()
        with job.ledger.clock.stopped():
            identical = self.comparison.identical()
            if job.fallback is not None:
                job.fallback.check()
            if identical:
                self.comparison = None
                self.event = replace(self.event, identical=True, proof_s=time.perf_counter() - began)
                return True
            with held_back():
                job.proof = None
                self.left.take_up(job)
                del self.comparison, self.left
                asked, job.fallback = job.fallback, None
            gc.collect()
            try:
                self.again()
            except BaseException as error:
                if asked is not None:
                    asked.tell(error)
                if not isinstance(error, SwitchError):
                    raise
            else:
                if asked is not None and job.fallback is not None:
                    job.fallback.listeners += asked.listeners
        return False

    def stays(self, job: Job) -> None:
        """There is no old side any more, and everybody hears of the switch."""
        with held_back():
            job.proof = self.comparison = None
            self.left.let_go()
            job.switches.append(self.event)
            if job.fallback is not None:
                job.fallback.event = self.event
        job.ledger.emit(self.event)


def settled(job: Job) -> None:
    """Between two steps: nothing waits for proof any more, and who asked for the last switch is told. Collective."""
    if job.proof is None or job.proof.settle(job):
        give_up(job)


def give_up(job: Job) -> None:
    """What is not compared will not be: the last switch stays, and who asked for it is told. Not collective."""
    if job.proof is not None:
        job.proof.stays(job)
    if job.fallback is not None:
        job.fallback.tell()
    if job.broken_off:
        job.fallback = None


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
