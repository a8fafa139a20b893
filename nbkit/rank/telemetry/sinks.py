"""The bus of a job, which passes the events of a training to sinks.

    class Tracker:
        def open(self, run):  # optional
            self.run = wandb.init(name=run["name"])

        def write(self, event):  # {"kind": "step", "step": 7, "loss": 1.2, ...}
            if event["kind"] == "step":
                self.run.log(event)

        def close(self):  # optional
            self.run.finish()

    trainer = nbkit.Trainer(..., sinks=[Tracker()])

nbkit's own sinks have the same methods: the records on disk (session.py), TensorBoard's scalars (tensorboard.py), the
progress line (`ProgressLine`), and the recorder of memory (train/run_recorder.py).

Errors: a sink that raises gives one warning that names it, and gets no further events. It never ends a training.

Threads: the training thread calls `write` between two steps, so `write` must return at once. A sink that may take
longer is put on the bus as `InThread(sink)`. Sinks of users always are.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from nbkit.durations import text_of
from nbkit.errors import TrainingError
from nbkit.figures import figure
from nbkit.plugins import described
from nbkit.records.event_words import mark_of
from nbkit.records.events import Event, Rebalanced, RunStarted, RunStopped, StepDone, Switched

_LAST_SECONDS = 10.0
"""The time that the end of a run, or of the process, waits for a sink."""

CLOSE_SECONDS = 3.0
"""The time that a stop of the cluster waits for all sinks. The notebook waits 5 s for the end of a cluster."""


@runtime_checkable
class Sink(Protocol):
    """An object that gets the events of a training. `open(run)` and `close()` are optional."""

    def write(self, event: dict[str, Any]) -> None:
        """Take an event: {"kind": ..., "step": finished steps, ...}. A step's event holds its entry of `history`."""
        ...


def check_sinks(sinks: Sequence[Sink]) -> None:
    """Raise TrainingError if a sink is a class, has no method `write`, or is not in a list."""
    if not isinstance(sinks, Sequence):
        name = type(sinks).__name__
        raise TrainingError("sinks= must be a list.", numbers=f"sinks={sinks!r}", hint=f"sinks=[{name}(...)]")
    for sink in sinks:
        if isinstance(sink, type) or not isinstance(sink, Sink):
            raise TrainingError(
                "A sink must have a method write(event).",
                numbers=f"sinks=[{sink!r}]",
                hint=f"sinks=[{sink.__name__}()]"
                if isinstance(sink, type)
                else "class Losses:   def write(self, event): print(event);   then sinks=[Losses()]",
            )


class Bus:
    """Passes each event of a job to the sinks of this rank, in the order in which they were added."""

    def __init__(self) -> None:
        self.sinks: list[Sink] = []

    def add(self, sink: Sink | None, *, run: dict[str, Any] | None = None) -> None:
        """Add a sink. None adds nothing. run: if given, open the sink for this run."""
        if sink is not None:
            self.sinks.append(sink)
            if run is not None:
                self._call(sink, "open", run)

    def emit(self, event: Event) -> None:
        """Pass an event to all sinks."""
        told = event.as_dict() if self.sinks else {}
        for sink in list(self.sinks):
            self._call(sink, "write", dict(told))

    def _call(self, sink: Sink, method: str, *arguments: Any) -> None:
        try:
            getattr(sink, method, _nothing)(*arguments)
        except Exception as error:
            self.sinks = [other for other in self.sinks if other is not sink]
            warnings.warn(_lost(f"given to the sink {type(sink).__name__}", error), stacklevel=3)


def _lost(what: str, error: Exception) -> str:
    return f"nothing more is {what}: {described(error)}"


def _nothing(*_: Any) -> None:
    """Do nothing, in place of an optional method that a sink does not have."""


class InThread:
    """A sink that passes its events to another sink in a thread, so that no step waits for that sink.

    The last event of a run waits for the thread, at most `wait_s` seconds. The inner sink is opened at the first event.
    It is closed by `close`, when this object is deleted, or when the process exits. what, pace_s: see Background.
    """

    def __init__(self, sink: Sink, *, what: str = "", pace_s: float = 0.0, wait_s: float | None = None) -> None:
        self._wait_s = _LAST_SECONDS if wait_s is None else wait_s
        # The thread does not refer to this object, so this object can be deleted, which ends the thread.
        self._inner = inner = _Opened(sink)
        self.name = type(sink).__name__
        what = what or f"given to the sink {self.name}"
        self._writing = Background(inner.take, inner.close, name=f"nbkit-{self.name}", what=what, pace_s=pace_s)
        weakref.finalize(self, self._writing.end, seconds=self._wait_s)
        _in_threads.add(self)

    def open(self, run: dict[str, Any]) -> None:
        """Open the inner sink for `run` when its first event comes."""
        self._inner.run = run

    def write(self, event: dict[str, Any]) -> None:
        """Take an event. The last event of a run waits for the inner sink, at most `wait_s` seconds."""
        self._writing.put(event)
        if event["kind"] == RunStopped.kind:
            self._writing.flush(self._wait_s)

    def close(self, *, seconds: float = _LAST_SECONDS) -> None:
        """Pass on the remaining events, and close the inner sink. Waits for it, at most `seconds`."""
        self._writing.end(seconds=seconds)


class _Opened:
    """The part of an InThread that its thread refers to. run: the argument for the sink's `open`."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._opened = sink, False
        self.run: dict[str, Any] = {}

    def take(self, item: Any) -> None:
        if not isinstance(item, dict):
            return
        if not self._opened:
            getattr(self._sink, "open", _nothing)(self.run)
            self._opened = True
        self._sink.write(item)

    def close(self) -> None:
        if self._opened:
            getattr(self._sink, "close", _nothing)()


@dataclass(frozen=True)
class AbsentSink:
    """A placeholder for a user's sink that this process lacks, because it joined the training later."""

    name: str

    def write(self, event: dict[str, Any]) -> None:
        """Do nothing."""


_in_threads: weakref.WeakSet[InThread] = weakref.WeakSet()

announce: Callable[[], None] = _nothing
"""Called when a job has sinks of the user. The bridge sets it, so that a stop of the cluster waits for `close_all`."""


def add_users(bus: Bus, sinks: Iterable[Sink], run: dict[str, Any]) -> tuple[Sink, ...]:
    """Put the user's sinks on the bus, open them for `run`, and return them, each as an InThread.

    A sink that is an InThread already is added unchanged. An AbsentSink is left out.
    """
    added = [
        each if isinstance(each, InThread) else InThread(each) for each in sinks if not isinstance(each, AbsentSink)
    ]
    for sink in added:
        bus.add(sink, run=run)
    if added:
        announce()
    return tuple(added)


def close_all(seconds: float = CLOSE_SECONDS) -> None:
    """Close all InThread sinks at the same time, and wait for them, at most `seconds`. Any thread may call it.

    It is called when this process is about to end without cleaning up.
    """
    sinks, until = list(_in_threads), time.monotonic() + seconds
    for sink in sinks:
        sink.close(seconds=0.0)
    for sink in sinks:
        sink.close(seconds=max(until - time.monotonic(), 0.0))


IDLE = ()
"""The item that is taken if none has come for `idle_s` seconds."""


class Background:
    """Calls `take` with each item that is put, in a separate thread.

    After an error it takes no more items. At the end the thread calls `close`. An item that is a threading.Event is set
    when all items before it have been taken.

    idle_s: take IDLE after this many seconds without an item. pace_s: before an item, sleep for this many seconds if no
    other item waits, because waking up for each item slows the training. what: a text for the warning that says what
    happens to items, such as "recorded in runs/a".
    """

    def __init__(
        self,
        take: Callable[[Any], None],
        close: Callable[[], None],
        *,
        name: str,
        what: str,
        idle_s: float | None = None,
        pace_s: float = 0.0,
    ) -> None:
        self._take, self._close, self._what, self._idle_s, self._pace_s = take, close, what, idle_s, pace_s
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._failure: Exception | None = None
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """Put an item. Any thread may call it."""
        self.tell()
        self._items.put(item)

    def tell(self) -> None:
        """Warn once if `take` has failed. Only the main thread warns, because its output appears in the cell."""
        if self._failure is None or self._warned or threading.current_thread() is not threading.main_thread():
            return
        self._warned = True
        warnings.warn(_lost(self._what, self._failure), stacklevel=3)

    def end(self, *, seconds: float = 0.0) -> None:
        """End the thread after the items that were put. seconds: how long to wait for the end."""
        self._items.put(None)
        self._hurry.set()
        if seconds and threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def flush(self, seconds: float = math.inf) -> None:
        """Wait, at most `seconds`, until all items that were put have been taken. After `end`, none is taken."""
        written, until = threading.Event(), time.monotonic() + seconds
        self._items.put(written)
        self._hurry.set()
        while self._thread.is_alive() and not written.wait(min(1.0, max(until - time.monotonic(), 0.0))):
            if time.monotonic() >= until:
                warnings.warn(f"after {seconds:.0f} s, not everything is {self._what}", stacklevel=3)
                break
        self.tell()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                if self._failure is None:
                    self._take(item)
            except Exception as error:
                self._failure = error
            finally:
                if isinstance(item, threading.Event):
                    item.set()
        try:
            self._close()
        except Exception as error:
            said = f"what is {self._what} was not closed: {described(error)}"
            print(f"nbkit: {said}", file=sys.stderr, flush=True)

    def _next(self) -> Any:
        try:
            item = self._items.get(timeout=self._idle_s)
        except queue.Empty:
            return IDLE
        if self._pace_s and item is not None and not isinstance(item, threading.Event) and self._items.empty():
            self._hurry.wait(self._pace_s)
            self._hurry.clear()
        return item


_PERIOD_S, _FILE_PERIOD_S = 0.25, 10.0


def say(text: str, width: int = 80) -> None:
    """Print a line of its own, over a progress line of at most `width` characters."""
    print("\r" + text.ljust(width) if _rewrites() else text, flush=True)


def _rewrites() -> bool:
    """Return True if a line of stdout can be rewritten: in a terminal or a notebook, but not in a file or a pipe."""
    stdout = sys.__stdout__
    return sys.stdout is not stdout or (stdout is not None and stdout.isatty())


class ProgressLine:
    """A sink that shows a progress line: `step 120/500 · loss 2.314 · 12,300 tokens/s · 31 s to go`.

    It rewrites the line at most four times a second, and ends it when the run stops. In a file, such as the log of a
    job, it writes a new line every 10 seconds. The step number includes the steps of earlier runs.

    progress: returns the numbers of the line, as `History` reports them.
    """

    def __init__(self, progress: Callable[[], Mapping[str, Any]]) -> None:
        self._progress = progress
        self._last = 0.0
        self._width = 0

    def write(self, event: dict[str, Any]) -> None:
        """Take an event."""
        kind = event["kind"]
        if kind == RunStarted.kind:
            self._last, self._width = 0.0, 0
            if event["arithmetic"]:
                print(event["arithmetic"], flush=True)
        elif kind == StepDone.kind:
            if (now := time.monotonic()) - self._last >= (_PERIOD_S if _rewrites() else _FILE_PERIOD_S):
                self._last = now
                self._show(self._progress(), end="" if _rewrites() else "\n")
        elif kind == Switched.kind and event["in_place"]:
            said = f"{event['new']} is made in place, because memory cannot hold it and {event['old']} together"
            say(said, self._width)
        elif kind == Rebalanced.kind:
            say(mark_of(event)["text"], self._width)
        elif kind == RunStopped.kind and "loss" in (last := self._progress()):
            self._show({**last, "eta_s": None}, end="\n")  # after a stop, the time to the goal would be wrong

    def _show(self, now: Mapping[str, Any], *, end: str) -> None:
        line = progress_line(now)
        print("\r" + line.ljust(self._width) if _rewrites() else line, end=end, flush=True)
        self._width = len(line)


def progress_line(now: Mapping[str, Any]) -> str:
    """Return the progress line for these numbers."""
    parts = [f"step {now.get('step', 0)}" + (f"/{now['goal']}" if now.get("goal") else "")]
    if "loss" in now:
        parts.append(f"loss {figure(now['loss'])}")
    if now.get("tokens_per_s"):
        parts.append(f"{figure(now['tokens_per_s'])} {now['unit']}/s")
    if now.get("eta_s") is not None:
        parts.append(f"{text_of(now['eta_s'])} to go")
    return " · ".join(parts)
