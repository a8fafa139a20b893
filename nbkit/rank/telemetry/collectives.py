"""Records every collective and message that this rank issues: the operation, its axis, its bytes and its time.

The groups of delegating_group.py call `begin` before they pass an operation on, and `follow` afterwards. Each operation
is a `CollectiveCall` in a ring of fixed size. Nothing here waits for a device, another rank or a disk. The `done` of a
call that could not be timed is None.

NBKIT_TELEMETRY or `set_mode` chooses what is recorded. "off" records nothing. "count" records calls and bytes. "time"
(the default) also records when calls ended, and how long this rank was blocked in their wait().

`Timed` is a handle that records these times. For an operation on the host it reads a clock twice. For an operation on a
device it records events on the current stream, and reads them after they have passed. It never synchronises. The device
part follows PyTorch's documentation (ProcessGroupNCCL, CUDA events). A backend's handle keeps the memory that its
collective has written, such as the gathered weights of a block. So no such handle is kept after its wait().
"""

from __future__ import annotations

import itertools
import os
import sys
from contextlib import suppress
from time import perf_counter_ns as now
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist

from nbkit.errors import UsageError
from nbkit.mesh import AXES
from nbkit.rank.comm.gloo.interruptible_wait import Interruptible, wait, wait_for_message
from nbkit.rank.device import Event, accelerator
from nbkit.rank.telemetry.phases import clock
from nbkit.wire.user_code import is_users

_AT_ONCE_NS = 50_000
"""If a wait for a message or on a device is shorter, the operation was already over. Then its end is unknown."""


class DeviceCall:
    """The times of an operation on a device stream.

    seconds: from issue to end. stalled: how long the current stream waited for it. Both are None until they are known,
    and stay None if they cannot be measured.
    """

    __slots__ = ("_first", "_stalls", "seconds", "stalled")

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.stalled: float | None = None
        self._first = accelerator().stamp()
        self._stalls: list[tuple[Event, Event]] = []

    def ended_in_stream(self) -> tuple[Event, Event]:
        """Note that the operation runs on the current stream, and blocks it from begin to end.

        Returns the events at its begin and its end.
        """
        self._stalls.append(ends := (self._first, accelerator().stamp()))
        return ends

    def stall(self, first: Event, work: Any) -> None:
        """Note that the current stream waits for `work`, beginning at the event `first`."""
        self._stalls.append((first, accelerator().stamp()))
        # _get_duration raises if the work failed, or if its group does not time works.
        with suppress(RuntimeError):
            if self.seconds is None and work.is_completed():
                self.seconds = work._get_duration() / 1e3

    def is_open(self) -> bool:
        """Return True if a stream is known to wait for the operation now. Any thread may call it."""
        stalls = list(self._stalls)
        return bool(stalls) and not stalls[-1][1].query()

    def resolve(self) -> bool:
        """Read the events that have passed, and return True if all have. Only the writing thread calls it."""
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
    """A wrapper around the handle of an inner group, which records times in `call`, a CollectiveCall.

    state: the state of the training thread while it is in wait().
    """

    def __init__(self, inner: Any, call: Any, state: str) -> None:
        Interruptible.__init__(self, inner, call.issued, call.peer is not None)
        self.call, self.state = call, state

    def listen(self) -> None:
        """Record the end when it happens, if the backend reports it. Works that are written in Python do not."""
        if type(self.inner) is not dist.Work:
            return  # the future of a work in Python may contain a part of its computation
        call = self.call

        def over(_: Any) -> None:
            if call.done is None:
                call.done = now()

        try:
            self.inner.get_future().add_done_callback(over)
        except RuntimeError:  # suppress() would take half a microsecond
            pass

    def get_future(self) -> Any:
        return self.inner.get_future() if self.call.on_device is not None else Interruptible.get_future(self)

    def wait(self, *timeout: Any) -> Any:
        call = self.call
        if call.on_device is not None:
            first = accelerator().stamp()
            outer = clock.switch(self.state)
            try:
                return self.inner.wait(*timeout)
            finally:
                call.on_device.stall(first, self.inner)
                clock.back(outer)
        return wait_on_host(self.inner, call, self.state, *timeout)


def wait_on_host(work: Any, call: Any, state: str, *timeout: Any) -> Any:
    """Wait for `work`, and return what its wait() returns. Records in `call` how long this thread was blocked.

    state: the state of the training thread while it waits.
    """
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


BATCH = "batch"
"""The name of an operation that waits for several messages issued as one. Its bytes count in these messages."""

MODES = ("off", "count", "time")
_AXES = (*AXES, "shard", "replicate", "ep", "edp")


class GroupInfo:
    """A group's label, its axis, and the global ranks of its members."""

    __slots__ = ("axis", "blocked", "label", "members", "transfer")

    def __init__(self, label: str, axis: str, members: tuple[int, ...]) -> None:
        self.label, self.axis, self.members = label, axis, members
        # The state of the training thread while it waits: see phases.py.
        self.blocked = f"wait {axis}"
        # In a pipeline, the time spent waiting for a neighbour is a bubble of the schedule.
        self.transfer = "bubble" if axis == "pp" else self.blocked


class CollectiveCall:
    """An operation that this rank issued.

    peer: the global rank at the other end of a message, None for a collective. place: the number of collectives that
    the group has issued, this one included; for a message, the number sent to (or received from) this peer. bytes: the
    bytes that this rank contributes. dtype: the dtype of the first tensor. tag: the tag of a message. root: the global
    rank that sends in a broadcast or scatter, or receives in a reduce or gather.

    Times are in ns of perf_counter. issued: when it was issued. waited: when the first wait() began. done: when it
    ended, None if that is unknown. blocked: how long this rank waited for it. outside: True if it was issued between
    the steps of a training, or without a training.

    heard: True if `done` is reliable. It is not for an asynchronous collective in a step that does not listen, where
    wait() sees the end only of collectives that are still under way. It is not for a message that had arrived before
    wait().

    code, at: the user's code that issued it, and the instruction in that code. code is None if the nearest frames
    contain no code of the user.
    """

    __slots__ = ("at", "blocked", "bytes", "code", "done", "dtype", "group", "heard", "issued", "number", "on_device",
                 "op", "outside", "peer", "place", "root", "tag", "waited")  # fmt: skip

    def __init__(self, op: str, group: GroupInfo, peer: int | None, place: int, num_bytes: int) -> None:
        self.op, self.group, self.peer, self.place, self.bytes = op, group, peer, place, num_bytes
        self.number = -1
        self.issued = self.blocked = 0
        self.waited: int | None = None
        self.done: int | None = None
        self.outside = clock.outside
        self.heard = True
        self.on_device: DeviceCall | None = None
        self.dtype: Any = None
        self.tag = 0
        self.root: int | None = None
        self.code: CodeType | None = None
        self.at = 0

    @property
    def axis(self) -> str:
        """Return the axis of its group: pp, dp, cp, tp, shard, replicate, world, or the name of the user's group."""
        return self.group.axis

    @property
    def is_open(self) -> bool:
        """Return True if this is a collective on the host that reports its end, and has not ended."""
        return self.peer is None and self.on_device is None and self.heard and self.done is None and _mode == "time"

    @property
    def seconds(self) -> float | None:
        """Return the seconds from issue to end, including the wait for late peers; None if that is unknown."""
        if self.on_device is not None:
            return self.on_device.seconds
        return None if self.done is None else (self.done - self.issued) / 1e9

    @property
    def blocked_seconds(self) -> float | None:
        """Return the seconds that the host waited for it, or on a device the compute stream; None while unknown."""
        return self.blocked / 1e9 if self.on_device is None else self.on_device.stalled

    def __repr__(self) -> str:
        took = "not timed" if self.seconds is None else f"{self.seconds * 1e3:.3f} ms"
        whom = "" if self.peer is None else f" {self.peer}"
        return f"<{self.op}{whom} on {self.axis}: {self.bytes} bytes, {took}>"


class _IsUsers(dict[str, bool]):
    """A cache: file -> True if it is the user's."""

    def __missing__(self, file: str) -> bool:
        found = self[file] = is_users(file)
        return found


class Ring:
    """A buffer of the newest `size` calls (a power of two), which overwrites older calls. Any thread may use it.

    end: the number of calls that were put. generation: the value of `end` when this generation of the world began.
    backward: the value of `end` when the current backward pass began; None outside of backward passes, and in programs
    that do not listen.
    """

    backward: int | None = None

    def __init__(self, size: int = 1 << 14) -> None:
        self._slots: list[CollectiveCall | None] = [None] * size
        self._mask = size - 1
        self._numbers = itertools.count()
        self.end = self.generation = 0

    def put(self, call: CollectiveCall) -> None:
        """Add a call."""
        # next() of a count is a single instruction of the interpreter, so two threads never get the same number.
        call.number = number = next(self._numbers)
        self._slots[number & self._mask] = call
        self.end = number + 1

    def between(self, start: int, stop: int) -> tuple[list[CollectiveCall], int]:
        """Return (the calls number start to stop - 1 that are still held, the number of those that are lost)."""
        first = max(start, stop - len(self._slots))
        held = [self._slots[number & self._mask] for number in range(first, stop)]
        calls = [call for number, call in enumerate(held, first) if call is not None and call.number == number]
        return calls, max(stop - start, 0) - len(calls)


ring = Ring()
_is_users = _IsUsers()
_FRAMES = (None,) * 6  # frames to search for the user's code; code that is farther away only called a library
_mode = os.environ.get("NBKIT_TELEMETRY", "time")
if _mode not in MODES:
    _mode = "time"
_own = 0


def mode() -> str:
    """Return the current mode: "off", "count" or "time"."""
    return _mode


def set_mode(wanted: str) -> None:
    """Record nothing ("off"), calls and bytes ("count"), or times too ("time"), from the next operation on.

    Raises UsageError for another word.
    """
    global _mode
    if wanted not in MODES:
        raise UsageError(f"There is no telemetry {wanted!r}.", numbers=", ".join(MODES), hint="set_mode('time')")
    _mode = wanted


def own_ns() -> int:
    """Return the nanoseconds that recording calls has taken in this process, without the thread that writes."""
    return _own


def recent(num: int = 100) -> list[CollectiveCall]:
    """Return the newest `num` calls of this rank, the oldest first. Direct calls of dist.* in a cell are included."""
    stop = ring.end
    return ring.between(max(0, stop - num), stop)[0]


def axis_of(desc: str, name: str) -> str:
    """Return a group's axis, from its description and name in torch. Without an axis, return one of these two."""
    desc = desc.removeprefix("mesh_")
    # "pp up": the channels of a pipeline on NCCL have groups of their own.
    if desc.partition(" ")[0] in _AXES:
        return desc.partition(" ")[0]
    return "world" if desc == "default_pg" else name if desc in ("", "undefined") else desc


def begin(
    op: str,
    group: GroupInfo,
    peer: int | None,
    place: int,
    num_bytes: int,
    *,
    on_device: bool,
    dtype: Any = None,
    tag: int = 0,
    entered: int | None = None,
) -> CollectiveCall:
    """Note that an operation is about to be issued.

    on_device: the operation runs on a stream of a device, so wait() blocks the stream and not the host. entered: the
    time at which recording began (ns of perf_counter), if the caller has read it.
    """
    global _own
    if entered is None:
        entered = now()
    call = CollectiveCall(op, group, peer, place, num_bytes)
    call.dtype, call.tag = dtype, tag
    # This is None if no Python code issued the operation: on a GPU, autograd's threads call DDP's reducer from C++.
    frame: FrameType | None = sys._getframe(1).f_back
    for _ in _FRAMES:
        if frame is None:
            break
        # The key is the file's name, because the hash of a code object is computed at every lookup.
        if _is_users[frame.f_code.co_filename]:
            call.code, call.at = frame.f_code, frame.f_lasti
            break
        frame = frame.f_back
    ring.put(call)
    if _mode == "time":
        if on_device:
            call.on_device = DeviceCall()
        call.issued = now()
        _own += call.issued - entered
    else:
        call.issued = entered
        _own += now() - entered
    return call


def follow(call: CollectiveCall, work: Any, *, at_once: bool = False) -> Any:
    """Note that an operation has been issued, and return the handle for its caller.

    work: the backend's handle; None if the operation is done, or enqueued on the current stream. at_once: the caller
    waits immediately. For an operation on the host this function then waits, which saves a wrapper around the handle.
    """
    global _own
    if _mode != "time":
        return work
    state = call.group.blocked if call.peer is None and call.op != BATCH else call.group.transfer
    if at_once and work is not None and call.on_device is None:
        wait_on_host(work, call, state)
        return work
    entered = now()
    if work is None:
        if call.on_device is not None:
            call.on_device.ended_in_stream()
        else:
            # The call itself was the wait.
            call.waited, call.done, call.blocked = call.issued, entered, entered - call.issued
            clock.insert(state, call.issued, entered)
        return None
    timed = Timed(work, call, state)
    if call.on_device is None:
        # Listening makes a thread of the backend take the interpreter from the waiting thread. gloo has no future for
        # a message, and the attempt to get one costs more than everything else here.
        if call.peer is None:
            call.heard = clock.listens
            if call.heard:
                timed.listen()
    _own += now() - entered
    return timed
