"""The one moving line of a training: `step 120/500 · loss 2.314 · 12,300 tokens/s · 31 s to go`.

The step count includes earlier runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from nbkit.durations import text_of
from nbkit.figures import figure
from nbkit.records.events import RunStarted, RunStopped, StepDone, Switched

_PERIOD_S = 0.25


class ProgressLine:
    """A sink that rewrites its line at most four times a second, and ends it when the run stops.

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
            if (now := time.monotonic()) - self._last >= _PERIOD_S:
                self._last = now
                self._show()
        elif kind == Switched.kind and event["in_place"]:
            said = f"\r{event['new']} in place: memory does not hold it beside {event['old']}"
            print(said.ljust(self._width), flush=True)
        elif kind == RunStopped.kind and "loss" in self._progress():
            self._show()
            print(flush=True)

    def _show(self) -> None:
        line = progress_line(self._progress())
        sys.stdout.write("\r" + line.ljust(self._width))
        sys.stdout.flush()
        self._width = len(line)


def progress_line(now: Mapping[str, Any]) -> str:
    """Return the line of these numbers."""
    parts = [f"step {now.get('step', 0)}" + (f"/{now['goal']}" if now.get("goal") else "")]
    if "loss" in now:
        parts.append(f"loss {figure(now['loss'])}")
    if now.get("tokens_per_s"):
        parts.append(f"{figure(now['tokens_per_s'])} {now['unit']}/s")
    if now.get("eta_s") is not None:
        parts.append(f"{text_of(now['eta_s'])} to go")
    return " · ".join(parts)
