"""Note every collective and message of this rank as it is issued: what, along which axis, how many bytes, how long.

The groups of delegating_group.py call `begin` before and `follow` after they hand an operation on. Each operation is a
`CollectiveCall` in a ring of fixed size. Nothing here waits for a device, another rank or a disk. A call that could not
be timed has no `done`.

NBKIT_TELEMETRY, or `set_mode`: "off"; "count" notes calls and bytes; "time" (the default) also when they ended and how
long this rank stood still in their wait().

`Timed` is the handle of a collective that notes these times. On the host it reads a clock twice. On a device it records
events on the current stream, and reads them when they have passed; nothing is ever synchronised. That half follows
PyTorch's documentation (ProcessGroupNCCL, CUDA events). Nothing here holds the handle of a backend beyond its wait(),
because it keeps what the collective has written to, such as the gathered weights of a block.
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
"""A shorter wait, for a message or on a device, found the operation over already: when it ended is unknown."""


class DeviceCall:
    """Times of an operation on a device stream. seconds and stalled: None until it is over, or for good."""

    __slots__ = ("_first", "_stalls", "seconds", "stalled")

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.stalled: float | None = None
        self._first = accelerator().stamp()
        self._stalls: list[tuple[Event, Event]] = []

    def ended_in_stream(self) -> tuple[Event, Event]:
        """Note that the current stream stands still for it from begin to end, such as for what was enqueued on it.

        Return the events at the two ends.
        """
        self._stalls.append(ends := (self._first, accelerator().stamp()))
        return ends

    def stall(self, first: Event, work: Any) -> None:
        """Note that the current stream was made to wait for `work`, from `first` on."""
        self._stalls.append((first, accelerator().stamp()))
        # A work that failed, or whose group does not time, raises: it then has no duration of its own.
        with suppress(RuntimeError):
            if self.seconds is None and work.is_completed():
                self.seconds = work._get_duration() / 1e3

    def is_open(self) -> bool:
        """Return True if a stream is known to stand still for it now. From any thread."""
        stalls = list(self._stalls)
        return bool(stalls) and not stalls[-1][1].query()

    def resolve(self) -> bool:
        """Read the events that have passed. Return True if those are all. For the writing thread."""
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
    """Stands before the handle of an inner group, and passes its answers on.

    call: a CollectiveCall. state: what the training thread does while it stands in wait().
    """

    def __init__(self, inner: Any, call: Any, state: str) -> None:
        Interruptible.__init__(self, inner, call.issued, call.peer is not None)
        self.call, self.state = call, state

    def listen(self) -> None:
        """Have the end noted as it comes, if the backend tells (a work of ours does not)."""
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
    """Return what `work.wait()` returns. Note in `call` how long this thread, in `state` meanwhile, stood still."""
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
"""The operation that waits for several messages issued as one. Its parts carry the bytes."""

MODES = ("off", "count", "time")
_AXES = (*AXES, "shard", "replicate", "ep", "edp")


class GroupInfo:
    """Facts about a group: its label, the axis it lies along, the global ranks in it."""

    __slots__ = ("axis", "blocked", "label", "members", "transfer")

    def __init__(self, label: str, axis: str, members: tuple[int, ...]) -> None:
        self.label, self.axis, self.members = label, axis, members
        # The state of the training thread while it waits: see phases.py.
        self.blocked = f"wait {axis}"
        # In a pipeline, waiting for the neighbour is idle time of its schedule.
        self.transfer = "bubble" if axis == "pp" else self.blocked


class CollectiveCall:
    """An operation that this rank issued.

    peer: global rank at the other end of a message, None for a collective. place: how many operations of its kind the
    group (for messages: the pair) had issued with it. bytes: what this rank contributes. dtype: of its first tensor.
    tag: of a message. root: the global rank from which a broadcast or scatter goes out, or on which a reduce or gather
    comes together.

    Times are in ns of perf_counter. issued; waited: when the first wait() began; done: when it ended, None if nobody
    could tell; blocked: how long this rank stood still for it. outside: between the steps of a training, or without
    one. heard: `done` may be believed. It may not for an asynchronous collective in a step that does not listen: wait()
    would see only the ends of those still under way, the longest. Nor for a message that wait() found there already.

    code, at: the user's code that issued it and the instruction in that, None if none is near.
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
        """Return True if it is known to be under way: a collective on the host that tells when it ends, and has not."""
        return self.peer is None and self.on_device is None and self.heard and self.done is None and _mode == "time"

    @property
    def seconds(self) -> float | None:
        """Return the seconds from issue to end, peers that came late included; None if that is not known."""
        if self.on_device is not None:
            return self.on_device.seconds
        return None if self.done is None else (self.done - self.issued) / 1e9

    @property
    def blocked_seconds(self) -> float | None:
        """Return how long this rank stood still for it: its host, or on CUDA its compute stream.

        Return None if that is not known (yet).
        """
        return self.blocked / 1e9 if self.on_device is None else self.on_device.stalled

    def __repr__(self) -> str:
        took = "not timed" if self.seconds is None else f"{self.seconds * 1e3:.3f} ms"
        whom = "" if self.peer is None else f" {self.peer}"
        return f"<{self.op}{whom} on {self.axis}: {self.bytes} bytes, {took}>"


class _IsUsers(dict[str, bool]):
    """A cache: file -> True if it is the user's own."""

    def __missing__(self, file: str) -> bool:
        found = self[file] = is_users(file)
        return found


class Ring:
    """The newest `size` calls (a power of two). Older ones are overwritten. Any thread may put, any thread may read.

    end: how many have been put. generation: how many of them before this generation of the world began. backward: how
    many before the backward pass that runs now, in a program that listens; None outside of one.
    """

    backward: int | None = None

    def __init__(self, size: int = 1 << 14) -> None:
        self._slots: list[CollectiveCall | None] = [None] * size
        self._mask = size - 1
        self._numbers = itertools.count()
        self.end = self.generation = 0

    def put(self, call: CollectiveCall) -> None:
        """Note a call."""
        # next() of a count is one instruction of the interpreter: two threads never get the same number.
        call.number = number = next(self._numbers)
        self._slots[number & self._mask] = call
        self.end = number + 1

    def between(self, start: int, stop: int) -> tuple[list[CollectiveCall], int]:
        """Return (calls number start to stop - 1 that are still there, how many of them are not)."""
        first = max(start, stop - len(self._slots))
        held = [self._slots[number & self._mask] for number in range(first, stop)]
        calls = [call for number, call in enumerate(held, first) if call is not None and call.number == number]
        return calls, max(stop - start, 0) - len(calls)


ring = Ring()
_is_users = _IsUsers()
_FRAMES = (None,) * 6  # between an operation and the user's code; code that is farther away only called a library
_mode = os.environ.get("NBKIT_TELEMETRY", "time")
if _mode not in MODES:
    _mode = "time"
_own = 0


def mode() -> str:
    """Return what is noted now: "off", "count" or "time"."""
    return _mode


def set_mode(wanted: str) -> None:
    """Note nothing ("off"), calls and bytes ("count"), or times too ("time"), from the next operation on.

    Raises UsageError for another word.
    """
    global _mode
    if wanted not in MODES:
        raise UsageError(f"There is no telemetry {wanted!r}.", numbers=", ".join(MODES), hint="set_mode('time')")
    _mode = wanted


def own_ns() -> int:
    """Return the nanoseconds that noting itself has taken in this process so far, without the thread that writes."""
    return _own


def recent(num: int = 100) -> list[CollectiveCall]:
    """Return the newest `num` calls of this rank, the oldest first.

    Calls of code that only calls dist.* in a cell are among them.
    """
    stop = ring.end
    return ring.between(max(0, stop - num), stop)[0]


def axis_of(desc: str, name: str) -> str:
    """Return the axis a group lies along, from what torch holds of it; a name of its own if it lies along none."""
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

    on_device: it runs on a stream of a device, so that wait() stops that, not the host. entered: when noting it began,
    if that was read (ns of perf_counter).
    """
    global _own
    if entered is None:
        entered = now()
    call = CollectiveCall(op, group, peer, place, num_bytes)
    call.dtype, call.tag = dtype, tag
    # None if the issuing frame has no caller: on a GPU autograd's threads call DDP's reducer without Python code.
    frame: FrameType | None = sys._getframe(1).f_back
    for _ in _FRAMES:
        if frame is None:
            break
        # Look up the file's name, because the hash of a code object is computed anew each time.
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
    """Note that an operation has been issued. Return the handle to give on.

    work: its handle; None: it is done, or in the stream. at_once: it is waited for before anything else. On the host
    that is done here, which saves it a handle of ours.
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
        # To listen, a thread of the backend has to take the interpreter from the one that waits. gloo has no future
        # for a message, and to be told so costs more than all else here.
        if call.peer is None:
            call.heard = clock.listens
            if call.heard:
                timed.listen()
    _own += now() - entered
    return timed
