"""The handle of a collective that notes how long this rank stands still in it, and when it ended.

On the host: two readings of a clock. On a device the same with events on the current stream, read when they have
passed; nothing is ever synchronised. That half follows PyTorch's documentation (ProcessGroupNCCL, CUDA events).

Nothing here holds the handle of a backend beyond its wait(): it keeps what the collective has written to, such as the
gathered weights of a block.
"""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter_ns as now
from typing import Any

import torch.distributed as dist

from nbkit.rank.comm.gloo.interruptible_wait import Interruptible, wait, wait_for_message
from nbkit.rank.device import Event, accelerator
from nbkit.rank.telemetry.phases import clock

_AT_ONCE_NS = 50_000
"""A wait for a message, or on a device for anything, that took less found it over: nobody knows for how long."""


class CudaCall:
    """What is known of an operation on a device stream. seconds and stalled: None until it is over, or for good."""

    __slots__ = ("_first", "_stalls", "seconds", "stalled")

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.stalled: float | None = None
        self._first = accelerator().stamp()
        self._stalls: list[tuple[Event, Event]] = []

    def ended_in_stream(self) -> None:
        """It was enqueued on the current stream itself, which therefore stands still from begin to end."""
        self._stalls.append((self._first, accelerator().stamp()))

    def stall(self, first: Event, work: Any) -> None:
        """The current stream was made to wait for `work`, from `first` on."""
        self._stalls.append((first, accelerator().stamp()))
        # A work that failed, or whose group does not time, raises: it then has no duration of its own.
        with suppress(RuntimeError):
            if self.seconds is None and work.is_completed():
                self.seconds = work._get_duration() / 1e3

    def is_open(self) -> bool:
        """Whether a stream is known to stand still for it now. From any thread."""
        stalls = list(self._stalls)
        return bool(stalls) and not stalls[-1][1].query()

    def resolve(self) -> bool:
        """Read what has passed; whether that is everything. For the writing thread."""
        if self._stalls and not self._stalls[-1][1].query():
            return False
        if self._stalls and self.stalled is None:
            waits = [one.elapsed_time(other) / 1e3 for one, other in self._stalls]
            self.stalled = sum(waits)
            in_stream = self._stalls[0][0] is self._first
            if self.seconds is None and (in_stream or waits[0] * 1e9 >= _AT_ONCE_NS):
                self.seconds = self._first.elapsed_time(self._stalls[0][1]) / 1e3
            self._stalls = self._stalls[-1:]
        return True


class Timed(Interruptible):
    """Stands before the handle of an inner group; gives its every answer.

    call: a record.Call. state: what the training thread does while it stands in wait().
    """

    def __init__(self, inner: Any, call: Any, state: str) -> None:
        Interruptible.__init__(self, inner, call.issued, call.peer is not None)
        self.call, self.state = call, state

    def listen(self) -> None:
        """Have the end noted as it comes, where the backend tells (a work of ours does not)."""
        if type(self.inner) is not dist.Work:
            return  # a future of a work in Python may do its computing in it
        call = self.call

        def over(_: Any) -> None:
            if call.done is None:
                call.done = now()

        try:
            self.inner.get_future().add_done_callback(over)
        except RuntimeError:  # suppress() takes half a microsecond
            pass

    def get_future(self) -> Any:
        return self.inner.get_future() if self.call.cuda is not None else Interruptible.get_future(self)

    def wait(self, *timeout: Any) -> Any:
        call = self.call
        if call.cuda is not None:
            first = accelerator().stamp()
            outer = clock.switch(self.state)
            try:
                return self.inner.wait(*timeout)
            finally:
                call.cuda.stall(first, self.inner)
                clock.back(outer)
        return wait_on_host(self.inner, call, self.state, *timeout)


def wait_on_host(work: Any, call: Any, state: str, *timeout: Any) -> Any:
    """What `work`.wait() gives. It is noted of `call` that this thread, in `state` meanwhile, stood still."""
    outer, began = clock.switch(state), now()
    try:
        return (wait if call.peer is None else wait_for_message)(work, call.issued, *timeout)
    finally:
        ended = now()
        if call.waited is None:
            call.waited = began
        if call.peer is not None and ended - began < _AT_ONCE_NS:
            call.heard = False
        if call.done is None and call.heard:
            call.done = ended
        call.blocked += ended - began
        clock.back(outer)
