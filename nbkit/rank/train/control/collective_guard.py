"""Guards a step in which any rank may fail: all ranks hear of it, meet again, and have groups that work.

Use it only around a step that is likely to fail, such as the first one under a strategy. See
nbkit.rank.world.failure_alarm for its cost.

`held_back` delays interrupts for a few lines that every rank must run, or none.
"""

from __future__ import annotations

import gc
import json
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import clear_frames

import torch
import torch.distributed as dist

from nbkit.errors import NotFinite, TrainingError
from nbkit.rank.comm.background_creation import BROKEN_OFF
from nbkit.rank.device import accelerator
from nbkit.rank.train.step.failure import PEER_GONE
from nbkit.rank.world.failure_alarm import Alarm, AlarmHeard


@dataclass(frozen=True)
class Failures:
    """The failures of all ranks. reported: the error of each rank; "" for a rank that only waited for another."""

    reported: Sequence[str]

    @property
    def rank(self) -> int | None:
        """The rank that failed; None if several did."""
        failed = [rank for rank, text in enumerate(self.reported) if text]
        return failed[0] if len(failed) == 1 and len(self.reported) > 1 else None

    @property
    def words(self) -> str:
        """The ranks that failed, with their errors."""
        if len(set(self.reported)) == 1:
            return self.reported[0]
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(self.reported) if text]
        return "; ".join(failed[:2]) + "; ..." * (len(failed) > 2)


class Guard:
    """Guards a step from its construction until `end`. name: the same on every rank, and different for every step."""

    def __init__(self, name: str, *, world_size: int, device: torch.device) -> None:
        self._world_size, self._device = world_size, device
        self.alarm, self._ended = Alarm(name), not Alarm.possible()
        if not self._ended:
            self.alarm.begin()

    def agree(self) -> None:
        """Check that all ranks have come here without a failure. Collective: one small all-reduce."""
        if self._world_size > 1:
            here = torch.ones((), device=self._device)
            dist.all_reduce(here)
            all_here = int(here) == self._world_size  # waits, since a collective broken off on a GPU raises nothing
            self.alarm.check()
            if not all_here:
                raise AlarmHeard("another rank has failed")

    def end(self) -> None:
        """End the guard: a later failure does not concern the other ranks."""
        self._ended = True
        self.alarm.end()

    def concerns(self, error: BaseException) -> bool:
        """Return True if `error` is a failure of the guarded step that all ranks can hear of.

        An interrupt is not, nor a rank that died. NotFinite is not either: its cause is the data, and all ranks raise
        it alike.
        """
        if self._ended or not isinstance(error, Exception) or isinstance(error, NotFinite) or self.alarm.world.dirty:
            return False
        return not waited(error) or self.alarm.rung()

    def failures(self, error: Exception) -> Failures:
        """Return the failures of all ranks, `error` being this rank's. Collective.

        Afterwards all ranks are between two collectives. Raises TrainingError, on every rank, if a device no longer
        computes, and ClusterError if the ranks do not come together.
        """
        alarm = self.alarm
        self.end()
        try:
            if not waited(error):
                alarm.ring()
            said = [json.loads(each) for each in alarm.meet(json.dumps([_spoken(error), _unfit(self._device)]))]
            alarm.mend()
        except BaseException:
            # Whatever failed, other ranks may have been woken, and their groups are broken.
            alarm.world.dirty = alarm.world.dirty or "a step failed, and the ranks did not come together"
            raise
        if unfit := [f"rank {rank}: {why}" for rank, (_, why) in enumerate(said) if why]:
            raise TrainingError("A device does not compute any more.", numbers=unfit[0], hint="%cluster restart")
        let_go(error)
        return Failures([text for text, _ in said])


def let_go(failed: BaseException) -> None:
    """Free the objects held by the frames that `failed` passed through, and by cycles. The memory is needed next."""
    link: BaseException | None = failed
    while link is not None:
        clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    gc.collect()


def waited(error: BaseException) -> bool:
    """Return True if this rank failed because it waited for one that had failed, or was broken out."""
    # The first use of an NCCL communicator is a rendezvous in Python, which raises a different error.
    return isinstance(error, AlarmHeard) or any(sign in str(error) for sign in (*PEER_GONE, BROKEN_OFF))


def _spoken(error: BaseException) -> str:
    return "" if waited(error) else f"{type(error).__name__}: {error}".splitlines()[0]


def _unfit(device: torch.device) -> str:
    """Return why the device of this rank cannot go on, as after an assert in a kernel; "" if it can."""
    if not accelerator().holds(device):
        return ""
    try:
        accelerator().wait_for_all(device)
    except Exception as error:
        return _spoken(error)
    return ""


@contextmanager
def held_back() -> Iterator[None]:
    """Delay a SIGINT that arrives inside until the end. Only for short code that waits for nobody."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals act only in the main thread
        return
    arrived: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
        if arrived:
            signal.raise_signal(signal.SIGINT)
