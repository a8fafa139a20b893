"""Makes all ranks wait for each other before a fit, an evaluation, a save, a switch, or another call beside steps.

A group pairs collectives by the order in which each rank calls them, whatever their purpose. So a rank that evaluates
alone would wait forever, or would receive another rank's gradients. Therefore each such call first calls `meet`, which
returns when every rank has called it with the same purpose. If the purposes differ, each rank raises an error that
names both.

One rank may wait in `meet` while another can no longer come, because it makes a later step, waits in a collective, or
has ended the cell. A thread on each rank looks for this in the world's store twice a second. Then both ranks raise an
error. Steps become no slower.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from nbkit.errors import TrainingError
from nbkit.rank.comm import delegating_group
from nbkit.rank.comm.gloo import interruptible_wait
from nbkit.rank.comm.group_creation import breaking_off
from nbkit.rank.world import failure_alarm, world
from nbkit.wire.activity import ANYONE, Operation
from nbkit.wire.user_code import is_users

PARTED = "the ranks have parted"
_LOOK_SECONDS = 0.5
_SURE_SECONDS = 1.5  # a message or a cell that is on its way to another rank arrives sooner
_FIRST_PAUSE, _SLOW_PAUSE, _LONGEST_PAUSE = 0.0001, 0.01, 0.02
_KEPT = 100  # past meetings in the store


@dataclass
class _Here:
    """The state of this rank.

    key: the name of the world. Its meetings are counted from 1. number: the last meeting that this rank has come to.
    waits: the time at which this rank began to wait there; None if it does not wait. apart: the error message if the
    ranks cannot meet. cell: the id and the ranks of the running cell. run: the number of the `fit` or loop that makes
    steps, and a function that returns the step. step: the step at the end of the last meeting, None outside of a run.
    passed: the keys of past meetings in the store.
    """

    key: str = ""
    number: int = 0
    waits: float | None = None
    woken: bool = False
    apart: str = ""
    cell: tuple[str, tuple[int, ...]] = "", ()
    run: tuple[int, Callable[[], int]] | None = None
    step: int | None = None
    over: threading.Event | None = None
    passed: list[str] = field(default_factory=list)


_here = _Here()
_threads = threading.Lock()
_looks = threading.Lock()  # held while the thread reads the store


def meet(purpose: str) -> None:
    """Return when every rank has called this with the same purpose, such as "evaluate". Collective; uses no group.

    Raises TrainingError if ranks have different purposes, or if a rank can no longer come. Raises RuntimeError if the
    world is broken meanwhile.
    """
    if (here := _world()) is not None:
        _meet(here, purpose, purpose)


def begin_cell(cell: str, ranks: Iterable[int]) -> None:
    """Note that a cell begins on this rank, and which ranks run it."""
    _here.cell = cell, tuple(ranks)
    if (here := _world()) is not None:
        if len(_here.cell[1]) < here.place.world_size:
            _say_whether_ended(here, ended=False)  # others may run another cell meanwhile
        _look_from_now_on()


def end_cell(*, finished: bool = True) -> None:
    """Note that the cell has ended on this rank.

    finished: True if the cell raised no error. Errors are reported to the other ranks in another way.
    """
    if finished and (here := _world()) is not None:
        with suppress(Exception):  # rank 0 has died; that is reported in another way
            _say_whether_ended(here, ended=True)
    with _threads:
        if _here.over is not None:
            _here.over.set()
            _here.over = None
    _here.cell = "", ()


def begin_run(number: int, making: Callable[[], int]) -> None:
    """Note that steps are made from now on.

    number: the number of the run, equal on all ranks. making: returns the current step, or the last one.
    """
    _here.run, _here.step, _here.apart = (number, making), None, ""
    if _world() is not None:
        _look_from_now_on()


def end_run() -> None:
    """Note that no more steps are made. After an error, call it before the cleanup, whose waits have time limits."""
    _here.run = None


def leave() -> None:
    """Tell the other ranks that this rank makes no further step of the run. Does not wait."""
    if (here := _world()) is not None and _here.run is not None:
        number, making = _here.run
        own = _own(here, f"left after step {making()}", "")
        _store(here).compare_set(f"left/{number}", "", json.dumps(own))


def arrive() -> None:
    """Wait at the end of the run for all ranks. Raises the errors of `meet`."""
    if (here := _world()) is not None and _here.run is not None:
        _meet(here, "the end of the training", f"left after step {_here.run[1]()}")


def parted() -> TrainingError | None:
    """Return the error to raise if this rank was broken off because the ranks cannot meet; else None."""
    here = world.current()
    if not _here.apart and here is not None and here.dirty and here.place.world_size > 1 and _here.key == here.key:
        with suppress(Exception):  # the store is gone because rank 0 has died; that is reported in another way
            store, key = _store(here), f"apart/{_here.number + 1}"
            if store.check([key]):  # another rank has broken off, which ended this rank's collective
                _here.apart = json.loads(store.get(key))["said"]
    return _error(_here.apart) if _here.apart else None


def unheard() -> TrainingError | None:
    """Return `parted()` on a device, where a broken-off collective raises no error and leaves arbitrary numbers."""
    here = world.current()
    return parted() if here is not None and here.dirty.endswith(PARTED) and here.place.device != "cpu" else None


def _cause() -> TrainingError | None:
    """Return the error to raise instead of gloo's error if the ranks cannot meet; else None.

    The first rank that learns of this shuts its connections. Another rank may notice that before its own thread has
    read the store, but by then the store holds the reason.
    """
    here = world.current()
    if here is None or here.place.world_size == 1 or _here.key != here.key:
        return None
    with suppress(Exception):  # the store is gone because rank 0 has died; that is reported in another way
        store, key = _store(here), f"apart/{_here.number + 1}"
        if not _here.apart and store.check([key]) and not (heard := json.loads(store.get(key)))["clean"]:
            _here.apart = heard["said"]
            failure_alarm.break_out(f"{_here.apart}: {PARTED}", _error(_here.apart))
    return _error(_here.apart) if _here.apart else None


interruptible_wait.causes.append(_cause)


def _error(said: str) -> TrainingError:
    if " left after step " in said:
        return TrainingError(
            "One rank has left the training, and the other ranks would wait for it forever.",
            numbers=said,
            hint="if job.stop_if(flag): break   leaves the loop on all ranks as soon as the flag is set on one",
        )
    return TrainingError(
        "The ranks have made different calls, and would wait for each other.",
        numbers=said,
        hint="the same calls on every rank: in a %%distributed cell, and not inside `if rank == 0:`",
    )


def _world() -> world.World | None:
    """Return the world if it has several ranks and is not broken; else None."""
    here = world.current()
    if here is None or here.place.world_size == 1 or here.dirty:
        return None
    if _here.key != here.key:
        _here.key, _here.number, _here.apart, _here.passed = here.key, 0, "", []
    return here


def _store(here: world.World, store: Store | None = None) -> Store:
    return PrefixStore(f"{here.key}/meet", store or here._require_store())


def _own(here: world.World, does: str, purpose: str) -> dict[str, Any]:
    """Return what other ranks are told about this rank. Call it only in the main thread.

    purpose: the purpose of the meeting that this rank waits for; "" if it does not wait.
    """
    run = _here.run
    return {
        "rank": here.place.rank,
        "does": f"rank {here.place.rank}{':' * (does == purpose)} {does}{_line(sys._getframe())}",
        "for": purpose,
        "run": None if run is None else [run[0], run[1]()],
        "counts": delegating_group.fingerprint(),
    }


def _meet(here: world.World, purpose: str, does: str) -> None:
    """Wait for all ranks. does: a text for the other ranks' errors that says what this rank does."""
    _look_from_now_on()
    store, size = _store(here), here.place.world_size
    number = _here.number = _here.number + 1
    come, since = f"come/{number}/{purpose}", time.monotonic()  # `%nbkit why` reads number, purpose and since
    own: dict[str, Any] = {}
    _here.woken, added = False, False
    try:
        _here.waits = since
        added = True
        if store.add(come, 1) == size:
            _tidy(here, store, come)
            return
        pause = _FIRST_PAUSE
        while store.add(come, 0) < size:
            if _here.woken or here.dirty or world.current() is not here:
                raise RuntimeError(f"Waiting for the other ranks was aborted: {here.dirty or 'one of them has failed'}")
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE * max(1, size // 16))
            if pause < _SLOW_PAUSE:
                continue
            own = own or _own(here, does, purpose)
            # Repeated in every round, because the rank that wrote this first may have been interrupted and have left.
            first = json.loads(store.compare_set(f"at/{number}", "", json.dumps(own)))
            if first["for"] != purpose:
                both = {"said": f"{first['does']}; {own['does']}", "clean": True}
                store.compare_set(f"apart/{number}", "", json.dumps(both))
            if store.check([f"apart/{number}"]):
                added = False
                heard = json.loads(store.get(f"apart/{number}"))
                if not heard["clean"]:
                    _here.apart = heard["said"]
                    failure_alarm.break_out(f"{heard['said']}: {PARTED}")
                raise _error(heard["said"])
        _tidy(here, store, come)
    except DistError as error:
        raise RuntimeError("Waiting for the other ranks was aborted: the store, which rank 0 keeps, is gone") from error
    except BaseException:
        # After an interrupt, this rank comes again to the meeting of the same number, where the others still wait.
        if added and not here.dirty and _here.key == here.key:
            with suppress(Exception):  # the store may be gone; the error is raised in any case
                if (left := store.add(come, -1)) == size - 1:
                    store.add(come, 1)  # all had come
                else:
                    _here.number -= 1
                    at = f"at/{number}"
                    if left == 0 or (store.check([at]) and json.loads(store.get(at)) == own):
                        store.delete_key(at)
        raise
    finally:
        _here.waits = None


def _tidy(here: world.World, store: Store, come: str) -> None:
    """End a meeting to which all ranks have come. Rank 0 deletes the keys of old meetings from time to time."""
    _here.step = None if _here.run is None else _here.run[1]()
    if here.place.rank == 0:
        _here.passed.append(come)
        if len(_here.passed) > _KEPT:
            for key in _here.passed[:-1]:
                store.delete_key(key)
            del _here.passed[:-1]


WAITS = _meet.__code__


def _wake() -> None:
    _here.woken = True


breaking_off.append(_wake)


# The thread ---------------------------------------------------------------------------------------------------------


def _look_from_now_on() -> None:
    with _threads:
        if _here.over is None:
            _here.over = threading.Event()
            threading.Thread(target=_watch, args=(_here.over,), name="nbkit-meeting", daemon=True).start()
            if not _here.cell[0]:
                atexit.unregister(end_cell)
                atexit.register(end_cell)  # in a script: runs before the world is left


@contextmanager
def unwatched() -> Iterator[None]:
    """Keep the thread from reading the store, because rank 0 closes it while a world of another size is formed.

    torch would print each read that fails, with its C++ frames.
    """
    held = _looks.acquire(timeout=_LOOK_SECONDS)
    try:
        yield
    finally:
        if held:
            _looks.release()


def _watch(over: threading.Event) -> None:
    key, store, before = "", None, 0
    while not over.wait(_LOOK_SECONDS):
        with _looks:
            here = world.current()
            if here is None or here.dirty:
                continue
            try:
                if store is None or key != here.key:
                    own: Any = here._require_store()
                    store, key = _store(here, own.clone()), here.key  # nccl may block the world's own connection
                number, text = (_here.key == key and _apart(here, store, _here.number)) or (0, "")
                # Act only if two looks in a row agree. After a rewind or a load, one rank changes its step before
                # another.
                seen, before = before, number
                if number and seen == number and not over.is_set():
                    told = store.compare_set(f"apart/{number}", "", json.dumps({"said": text, "clean": False}))
                    if _here.waits is None:  # else `_meet` reads it
                        _here.apart = json.loads(told)["said"]
                        failure_alarm.break_out(f"{_here.apart}: {PARTED}", _error(_here.apart))
            except Exception:  # the store is gone because rank 0 has died; that is reported in another way
                store = None


def _apart(here: world.World, store: Store, number: int) -> tuple[int, str] | None:
    """Return (a meeting that cannot take place, what two ranks do instead), or None.

    number: the last meeting that this rank has come to.
    """
    mine, (cell, inside) = here.place.rank, _here.cell
    if (since := _here.waits) is not None:
        if time.monotonic() - since > _SURE_SECONDS:
            others = (rank for rank in range(here.place.world_size) if rank != mine)
            for rank, how in _ended(store, others, lambda ended: ended["number"] < number):
                at = json.loads(store.get(f"at/{number}")) if store.check([f"at/{number}"]) else None
                if at is not None and at["rank"] != rank:
                    return number, f"{at['does']}; rank {rank} {how}"
        return None
    for key in (f"at/{number + 1}", f"left/{_here.run[0]}" if _here.run is not None else ""):
        if key and store.check([key]) and (does := _cannot_come(other := json.loads(store.get(key)), mine)):
            return number + 1, f"{other['does']}; rank {mine} {does}"
    # Look for this only while steps are made. Outside of a run the user may call a collective by hand, and
    # `%nbkit why` explains the wait.
    if _here.run is not None and store.check([f"ended-in/{cell}"]) and (waits := _awaited()) is not None:
        partners = [rank for rank in _partners(waits) if rank != mine and (not cell or rank in inside)]
        for rank, how in _ended(store, partners, lambda ended: _lacks(ended["counts"], waits, mine)):
            return number + 1, f"rank {mine} waits in {waits.op}{_line()}; rank {rank} {how}"
    return None


def _cannot_come(other: dict[str, Any], mine: int) -> str:
    """Return what this rank, `mine`, does instead of coming to where `other` waits; "" if it may still come."""
    run = _here.run
    if run is not None and other["run"] is not None and other["run"][0] == run[0]:
        # A load or a rewind changes the step too, and another rank may finish it long before this rank does. So this
        # rank must also have made a step since it last met the others.
        step = run[1]()
        if step > other["run"][1] and step != _here.step:
            return f"makes step {step}{_line()}"
    if other["for"] and (waits := _awaited()) is not None and other["rank"] in _partners(waits):
        if _lacks(other["counts"], waits, mine):
            return f"waits in {waits.op}{_line()}"
    return ""


def _partners(waits: Operation) -> tuple[int, ...]:
    """Return the ranks that take part in an operation: the members of its group, or the other end of a message."""
    return waits.members if waits.peer is None else (waits.peer,)


def _lacks(counts: dict[str, int], waits: Operation, mine: int) -> bool:
    """Return True if a partner with these counts (see `fingerprint`) has not issued its part of `waits`.

    mine: this rank.
    """
    key = waits.group
    if waits.peer is not None:
        here, there = waits.members.index(mine), waits.members.index(waits.peer)
        key += f": {here}->{there} received" if waits.op == "send" else f": {there}->{here} sent"
    return counts.get(key, 0) < waits.number


def _awaited() -> Operation | None:
    """Return the operation in which the main thread has waited for a while; None if that wait ends by itself.

    A message from any rank is left out, because every rank may still send it.
    """
    from nbkit.rank.world.activity import awaited

    waits = awaited()
    if waits is None or waits.peer == ANYONE or waits.seconds <= _SURE_SECONDS:
        return None
    return waits if waits.op != "monitored_barrier" else None  # it reports the missing ranks itself


def _ended(store: Store, ranks: Iterable[int], lacks: Callable[[dict[str, Any]], bool]) -> Iterable[tuple[int, str]]:
    """Yield (rank, text) for each of `ranks` that can no longer come.

    Such a rank does not run this rank's cell; or it has ended this cell, and `lacks` returns True for what it noted at
    the end of the cell.
    """
    cell, inside = _here.cell
    for rank in ranks:
        key = f"ended/{rank}"
        ended = json.loads(store.get(key)) if store.check([key]) else None
        if ended is not None and ended["ended"] and ended["cell"] == cell and lacks(ended):
            yield rank, "has ended this cell" if cell else "has ended"
        elif cell and rank not in inside and (ended is None or ended["ended"]):
            yield rank, "does not run this cell"


def _say_whether_ended(here: world.World, *, ended: bool) -> None:
    store, cell = _store(here), _here.cell[0]
    own = {"cell": cell, "ended": ended, "number": _here.number, "counts": delegating_group.fingerprint()}
    store.set(f"ended/{here.place.rank}", json.dumps(own))
    if ended:
        store.set(f"ended-in/{cell}", "")


def _line(frame: FrameType | None = None) -> str:
    """Return the main thread's line in the user's code, such as " at line 3". frame: its innermost frame, if known."""
    frame = frame or sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f" at line {frame.f_lineno}"
        frame = frame.f_back
    return ""
