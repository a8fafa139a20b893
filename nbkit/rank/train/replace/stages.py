"""Note when this rank came through the stages of the newest replacement, in wall and CPU seconds, to find slow stages.

It is a handful of numbers for each replacement. `make chaos C=kill` prints them; nothing else reads them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class StageMark:
    """The end of a stage: at `wall` (time.time()), when all threads of this process had used `cpu` seconds."""

    stage: str
    wall: float
    cpu: float


marks: list[StageMark] = []


def begin(stage: str) -> None:
    """Mark the end of the first stage of a replacement, and forget those of an earlier one."""
    marks.clear()
    mark(stage)


def mark(stage: str) -> None:
    """Mark the end of a stage."""
    marks.append(StageMark(stage, time.time(), time.process_time()))
