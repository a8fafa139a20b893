"""Sinks: the user's own objects that get the events of a training, such as a tracker's client.

    class Tracker:
        def open(self, run):  # optional
            self.run = wandb.init(name=run["name"])

        def write(self, event):  # {"kind": "step", "step": 7, "loss": 1.2, ...}
            if event["kind"] == "step":
                self.run.log(event)

        def close(self):  # optional
            self.run.finish()

    trainer = nbkit.Trainer(..., sinks=[Tracker()])

TensorBoard's scalars, the records on disk and the progress line listen to the same events: see `History.emit`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

from nbkit.errors import TrainingError
from nbkit.rank.telemetry.record_writer import Background
from nbkit.records.events import Event, RunStopped, StepDone

_LAST_SECONDS = 10.0
"""The end of a run, and the end of the process, wait so long for a sink."""


@runtime_checkable
class Sink(Protocol):
    """An object that gets the events of a training, on rank 0. `open(run)` and `close()` are optional."""

    def write(self, event: dict[str, Any]) -> None:
        """Take an event: {"kind": ..., "step": finished steps, ...}. The event of a step has its entry of `history`."""
        ...


def check_sinks(sinks: Sequence[Sink]) -> None:
    """Raise TrainingError if a sink is a class, or has no method `write`."""
    for sink in sinks:
        if isinstance(sink, type) or not isinstance(sink, Sink):
            raise TrainingError(
                "A sink is an object with a method write(event).",
                numbers=f"sinks=[{sink!r}]",
                hint=f"sinks=[{sink.__name__}()]" if isinstance(sink, type) else "sinks=[Tracker()]",
            )


class SinkListener:
    """Hands the events of a job to one sink, in a thread. No step waits for it, and its errors end no training.

    A sink that raises is named in a warning, and gets nothing more.
    """

    def __init__(self, sink: Sink, run: dict[str, Any]) -> None:
        thread = _Thread(sink, run)
        self._writing = Background(
            thread.take, thread.close, name="nbkit-sink", what=f"given to the sink {type(sink).__name__}"
        )
        # The thread does not refer to this object, so that it ends with it, or with the process.
        weakref.finalize(self, self._writing.end, seconds=_LAST_SECONDS)

    def __call__(self, event: Event) -> None:
        """Take an event; the last one of a run waits a while for the sink."""
        about = event.record if isinstance(event, StepDone) else asdict(event)
        self._writing.put({"kind": event.kind, "step": event.step, **about})
        if isinstance(event, RunStopped):
            self._writing.flush(_LAST_SECONDS)


class _Thread:
    """The part of a SinkListener that runs in its thread."""

    def __init__(self, sink: Sink, run: dict[str, Any]) -> None:
        self._sink, self._run, self._opened = sink, run, False

    def take(self, item: Any) -> None:
        if not self._opened:
            self._opened = True
            getattr(self._sink, "open", _nothing)(self._run)
        if isinstance(item, dict):
            self._sink.write(item)

    def close(self) -> None:
        if self._opened:
            getattr(self._sink, "close", _nothing)()


def _nothing(*_: Any) -> None:
    """Stand in for a method that a sink need not have."""
