"""When this rank came through the stages of the newest replacement, in wall and CPU-seconds: what is to be made faster.

A handful of numbers for each replacement. `make chaos C=kill` prints them; nothing else reads them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class StageMark:
    """The stage ended at `wall` (time.time()), when this process had used `cpu` seconds of all its threads."""

    stage: str
    wall: float
    cpu: float


marks: list[StageMark] = []


def begin(stage: str) -> None:
    """The first stage of a replacement ends; those of an earlier one are forgotten."""
    marks.clear()
    mark(stage)


def mark(stage: str) -> None:
    """A stage ends."""
    marks.append(StageMark(stage, time.time(), time.process_time()))
