"""The feed of a job: the little that it has to know of where its batches come from; without a Trainer nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbkit.strategy import Strategy


@dataclass(frozen=True)
class Feed:
    """position, go_to: where in the data it stands, carried when ranks become one again. fits: refuses a strategy that
    cannot cut the batch, and returns the arithmetic of one that can. recut: the strategy has changed.
    remakes: who makes the steps asks `proof.settled` in each, and can make one again. after: finished steps -> where a
    training stands in the data that has made them all on it; None where nobody knows. where: see
    Stream.where; collective."""

    position: Callable[[], Any] = lambda: None
    go_to: Callable[[Any], None] = lambda position: None
    fits: Callable[[Strategy], Any] = lambda strategy: None
    recut: Callable[[], None] = lambda: None
    remakes: bool = False
    after: Callable[[int], Any] = lambda step: None
    where: Callable[[], Any] = lambda: None
