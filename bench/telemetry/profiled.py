"""Read the parts of steps from a trace of torch's profiler: a reference that knows nothing of nbkit.

torch itself marks the loader, the step of the optimizer, and each operation of gloo from its issue to its end.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import median

Spans = list[tuple[float, float]]  # (start, stop) in microseconds


def parts_of(trace: Path) -> dict[str, float]:
    """Return part -> seconds, the median over the traced steps of a rank.

    communication: the time of operations, in which no program here computes. compute: what remains of the step.
    """
    events = json.loads(trace.read_text())["traceEvents"]
    marks = [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in events if event.get("ph") == "X"]
    operations, data, optimizer = (
        sorted((start, stop) for name, start, stop in marks if name.startswith(begin))
        for begin in ("gloo:", "enumerate(DataLoader)#", "Optimizer.step#")
    )
    steps = []
    for first, last in pairwise(stop for _, stop in optimizer):
        busy, loaded, updated = (_length(spans, first, last) for spans in (operations, data, optimizer))
        steps.append((last - first - busy - loaded - updated, busy, loaded))
    parts = zip(("compute", "communication", "data"), zip(*steps, strict=True), strict=True)
    return {name: median(times) / 1e6 for name, times in parts}


def _length(spans: Spans, first: float, last: float) -> float:
    """Return how much of the time from `first` to `last` is in a span. Spans may overlap. They are in order."""
    length, at = 0.0, first
    for start, stop in spans:
        start, stop = max(start, at), min(stop, last)
        if stop > start:
            length, at = length + stop - start, stop
    return length
