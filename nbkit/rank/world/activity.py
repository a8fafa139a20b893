"""Reports from a separate thread what this rank is doing: see nbkit.wire.activity.

It also finds out whether the user's own code calls a split model. All ranks must call such a model, because each holds
only a part of it.
"""

from __future__ import annotations

import ast
import linecache
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import PurePath
from time import perf_counter_ns as now
from types import CodeType, FrameType
from typing import Any

import torch.autograd.graph
import torch.distributed as dist
from torch import nn

from nbkit.rank.comm import delegating_group
from nbkit.rank.comm.delegating_group import DelegatingGroup, num_bytes
from nbkit.rank.comm.gloo.interruptible_wait import Interruptible
from nbkit.rank.parallel.module.forward_wrapper import marked_parts
from nbkit.rank.telemetry import collectives
from nbkit.rank.telemetry.collectives import CollectiveCall, Timed, wait_on_host
from nbkit.rank.telemetry.phases import clock
from nbkit.rank.torch_private import call_of_module, group_tables
from nbkit.rank.world import meeting
from nbkit.rank.world.flight_recorder import unfinished
from nbkit.wire.activity import ANYONE, Activity, CodeLine, GroupLog, Operation
from nbkit.wire.user_code import is_users

_TORCH = PurePath(nn.__file__).parents[1]


def split_model_call(frames: Sequence[FrameType]) -> tuple[FrameType, str] | None:
    """Return (the user's frame that calls a split model, the model's strategy); None if a step or nobody calls one.

    frames: the frames of a thread, innermost first.
    """
    caller, model = None, None
    for frame in frames:
        if frame.f_code is call_of_module:  # the outermost module is the model; the inner modules are its blocks
            caller, model = None, frame.f_locals.get("self")
        elif model is not None and caller is None and not PurePath(frame.f_code.co_filename).is_relative_to(_TORCH):
            caller = frame
    if caller is None or not isinstance(model, nn.Module) or not is_users(caller.f_code.co_filename):
        return None
    strategy = marked_parts(model)
    return (caller, strategy) if strategy is not None else None


OPERATIONS = 64  # maximum of collectives to report for a group; the same maximum holds for messages
_CALLS = 4096  # number of the newest calls that are searched
_DEVICE_SECONDS = 1.0  # if a device has not finished an operation after this time, it counts as waited for
_CALL_CHARACTERS = 60
_C10D = dist.distributed_c10d.__file__
_AUTOGRAD = torch.autograd.graph.__file__
_READERS = ("torch/utils/data/", "nbkit/rank/data/")
_WAITS = (Timed.wait.__code__, wait_on_host.__code__)  # each has the local variable `call`
_LIMITED = (*_WAITS, Interruptible.wait.__code__)  # each has the local variable `timeout`
_NEW_GROUP = "_new_group_with_tag"


def activity(rank: int, cells: Mapping[str, int], *, stacks: bool = False, **known: Any) -> Activity:
    """Return what this rank is doing. cells: file -> cell number, for code in cells. known: more fields of Activity."""
    frames = sys._current_frames()
    main = list(_outwards(frames.get(threading.main_thread().ident or 0)))
    line, logs = _innermost(main, cells), _logs(cells)
    waits, on_device = _awaited(main, line, cells), False
    for ident, frame in frames.items():  # on a device, the backward pass runs in its own thread
        if waits is None and ident not in (threading.main_thread().ident, threading.get_ident()):
            call = next((each.f_locals["call"] for each in _outwards(frame) if each.f_code in _WAITS), None)
            waits = None if call is None else _operation(call, cells, line)
    if waits is None:
        waits = _on_device(cells)
        on_device = waits is not None
    called = split_model_call(main) if waits is not None else None
    return Activity(
        rank,
        line=line,
        reads_data=_reads_data(main),
        waits=waits,
        on_device=on_device,
        groups=logs,
        stacks=_stacks(frames) if stacks else "",
        cells=dict(cells),
        split_call=None if called is None else _line(called[0].f_code, called[0].f_lasti, cells),
        split_by="" if called is None else called[1],
        unfinished=unfinished() if waits is not None else (),
        **known,
    )


def awaited() -> Operation | None:
    """Return the operation in which the main thread waits without a time limit. Call this from another thread."""
    main = list(_outwards(sys._current_frames().get(threading.main_thread().ident or 0)))
    if any(frame.f_code in _LIMITED and any(frame.f_locals["timeout"]) for frame in main):
        return None
    return _awaited(main, None, {}) or _on_device({})


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _innermost(frames: list[FrameType], cells: Mapping[str, int]) -> CodeLine | None:
    users = next((frame for frame in frames if is_users(frame.f_code.co_filename)), None)
    return None if users is None else _line(users.f_code, users.f_lasti, cells)


def _line(code: CodeType, at: int, cells: Mapping[str, int]) -> CodeLine:
    positions = next(islice(code.co_positions(), at // 2, None), (None,) * 4)
    file, line = code.co_filename, positions[0] or code.co_firstlineno
    return CodeLine(file, line, code.co_name, cells.get(file, 0), _called(file, positions))


def _called(file: str, positions: tuple[int | None, ...]) -> str:
    """Return the name of the function called at these positions, such as "time.sleep"; "" without call or source."""
    first, last, start, stop = positions
    if first is None or last is None or start is None or stop is None:
        return ""
    lines = [line.encode() for line in linecache.getlines(file)[first - 1 : last]]
    if not lines:
        return ""
    lines[-1] = lines[-1][:stop]
    lines[0] = lines[0][start:]
    try:
        node = ast.parse(b"".join(lines).decode().strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return ""
    if not isinstance(node, ast.Call):
        return ""
    called = ast.unparse(node.func)
    return called if len(called) <= _CALL_CHARACTERS and "\n" not in called else ""


def _reads_data(frames: list[FrameType]) -> bool:
    files = (frame.f_code.co_filename.replace("\\", "/") for frame in frames)
    return clock.state == "data" or any(reader in file for file in files for reader in _READERS)


# The operation it waits in ------------------------------------------------------------------------------------------


def _awaited(frames: list[FrameType], line: CodeLine | None, cells: Mapping[str, int]) -> Operation | None:
    """Return the operation in which the innermost frames wait; None if user code is reached first."""
    for frame in frames:
        code = frame.f_code
        if is_users(code.co_filename):
            return None
        if code in _WAITS:
            return _operation(frame.f_locals["call"], cells, line)
        if code.co_filename == delegating_group.__file__ and code.co_name in ("issue", "_transfer"):
            return _being_issued(frame, line)
        if code is meeting.WAITS and "number" in frame.f_locals:
            known = frame.f_locals
            seconds = time.monotonic() - known["since"]
            return Operation(known["purpose"], "", "", _everyone(), known["number"], seconds=seconds, line=line)
        if code.co_filename == _C10D and code.co_name == _NEW_GROUP:
            return _being_made(frame, line)
        if code.co_filename == _C10D and collectives.mode() != "time":
            last = delegating_group.last_issued()  # handles hold no calls if nothing is timed
            return None if last is None else replace(last, line=line)
        if code.co_filename == _AUTOGRAD and (call := _oldest(_may_be_open)) is not None:
            return _operation(call, cells, line)  # torch's DDP waits in C++, within the backward pass
    return None


def _may_be_open(call: CollectiveCall) -> bool:
    """Return True if a call is under way, or may be, because nothing in this backward pass has noticed its end."""
    if call.is_open:
        return True
    unknown = not call.heard and call.waited is None and call.peer is None and call.on_device is None
    return unknown and collectives.ring.backward is not None and call.number >= collectives.ring.backward


def _being_issued(frame: FrameType, line: CodeLine | None) -> Operation | None:
    """Return the operation that is being issued. This may block, because members of some groups first meet."""
    known, group = frame.f_locals, frame.f_locals.get("self")
    if not isinstance(group, DelegatingGroup) or "number" not in known:
        return None
    last = delegating_group.last_issued()
    if frame.f_code.co_name == "_transfer":
        peer, given = known["peer"], known["tensors"]
        peer, name = group.members[peer] if isinstance(peer, int) else ANYONE, known["operation"]
    else:
        payload, args = known["payload"], known["args"]
        peer, name = None, known["spoken"]
        given = args[payload] if payload is not None and payload < len(args) else None
    return Operation(
        name, group.label, group.seen.axis, group.members, known["number"], peer, num_bytes(given),
        seconds=last.seconds if last else 0.0, line=line,
    )  # fmt: skip


def _being_made(frame: FrameType, line: CodeLine | None) -> Operation:
    """Return the creation of a group as an operation. All ranks of the world create groups in the same order."""
    world = group_tables
    # torch increases the count when it names a group, before it waits for anything.
    ranks = tuple(frame.f_locals.get("ranks") or ())
    everyone = _everyone()
    alone = bool(ranks) and frame.f_locals.get("use_local_synchronization")
    return Operation("new_group", "", "", ranks if alone else everyone, world.group_count, line=line)


def _everyone() -> tuple[int, ...]:
    return dist.group.WORLD.members if isinstance(dist.group.WORLD, DelegatingGroup) else ()


def _on_device(cells: Mapping[str, int]) -> Operation | None:
    """Return the oldest operation that a device should have finished a while ago; None if there is none."""
    call = _oldest(lambda call: call.on_device is not None and call.on_device.is_open())
    if call is None or now() - call.issued < _DEVICE_SECONDS * 1e9:
        return None
    return _operation(call, cells)


def _oldest(under_way: Callable[[CollectiveCall], bool]) -> CollectiveCall | None:
    """Return the oldest of the newest calls for which `under_way` is true; None if there is none."""
    return next((call for call in _newest() if under_way(call)), None)


def _newest() -> list[CollectiveCall]:
    """Return the newest calls of this generation of the world, the oldest first."""
    ring = collectives.ring
    return ring.between(max(ring.generation, ring.end - _CALLS), ring.end)[0]


# The operations it has issued ---------------------------------------------------------------------------------------


def _logs(cells: Mapping[str, int]) -> dict[str, GroupLog]:
    groups = delegating_group.registered()
    newest: dict[str, list[CollectiveCall]] = {group.label: [] for group in groups}
    for call in _newest():
        if call.op != collectives.BATCH:
            newest.setdefault(call.group.label, []).append(call)
    return {group.label: _log(group, newest[group.label], cells) for group in groups}


def _log(group: DelegatingGroup, calls: list[CollectiveCall], cells: Mapping[str, int]) -> GroupLog:
    messages = [call for call in calls if call.peer is not None]
    collected = [call for call in calls if call.peer is None]
    return GroupLog(
        group.seen.axis,
        group.members,
        group.count,
        _by_rank(group, group.sent),
        _by_rank(group, group.received),
        tuple(_operation(call, cells) for call in collected[-OPERATIONS:]),
        tuple(_operation(call, cells) for call in messages[-OPERATIONS:]),
    )


def _by_rank(group: DelegatingGroup, counts: Mapping[int | str, int]) -> dict[int, int]:
    return {group.members[peer] if isinstance(peer, int) else ANYONE: number for peer, number in list(counts.items())}


def _operation(call: CollectiveCall, cells: Mapping[str, int], line: CodeLine | None = None) -> Operation:
    """Return a call as an Operation. line: the line that issued it, used if the call has no line."""
    if call.code is not None:
        line = _line(call.code, call.at, cells)
    dtype = str(call.dtype).removeprefix("torch.") if call.dtype is not None else ""
    seconds, seen = (now() - call.issued) / 1e9, call.group
    return Operation(
        call.op, seen.label, seen.axis, seen.members, call.place, call.peer, call.bytes, dtype, call.tag, call.root,
        seconds, line,
    )  # fmt: skip


def _stacks(frames: Mapping[int, FrameType]) -> str:
    """Return the stack of every thread as text, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    order = sorted(frames, key=lambda ident: ident != threading.main_thread().ident)
    shown = [
        f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frames[ident]))
        for ident in order
        if ident != threading.get_ident()
    ]
    return "\n".join(shown)
