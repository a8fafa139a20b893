"""The one moving line of a training: `step 120/500 · loss 2.314 · 12,300 tokens/s · 31 s to go`. Earlier runs count."""

from __future__ import annotations

import sys
import time

from nbkit.durations import text_of
from nbkit.figures import figure
from nbkit.rank.train.control import step_boundary
from nbkit.records.events import Event, RunStarted, RunStopped, StepDone, Switched

_PERIOD_S = 0.25


class ProgressLine:
    """A listener that rewrites its line at most four times a second, and ends it when the run stops."""

    def __init__(self) -> None:
        self._last = 0.0
        self._width = 0

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, RunStarted):
            self._last, self._width = 0.0, 0
            if event.arithmetic:
                print(event.arithmetic, flush=True)
        elif isinstance(event, StepDone):
            if (now := time.monotonic()) - self._last >= _PERIOD_S:
                self._last = now
                self._show()
        elif isinstance(event, Switched) and event.in_place:
            print(f"\r{event.new} in place: memory does not hold it beside {event.old}".ljust(self._width), flush=True)
        elif isinstance(event, RunStopped) and "loss" in step_boundary.progress():
            self._show()
            print(flush=True)

    def _show(self) -> None:
        line = progress_line()
        sys.stdout.write("\r" + line.ljust(self._width))
        sys.stdout.flush()
        self._width = len(line)


def progress_line() -> str:
    """The line as it stands."""
    now = step_boundary.progress()
    parts = [f"step {now.get('step', 0)}" + (f"/{now['goal']}" if now.get("goal") else "")]
    if "loss" in now:
        parts.append(f"loss {now['loss']:.3f}")
    if now.get("tokens_per_s"):
        parts.append(f"{figure(now['tokens_per_s'])} {now['unit']}/s")
    if now.get("eta_s") is not None:
        parts.append(f"{text_of(now['eta_s'])} to go")
    return " · ".join(parts)
