"""Where a job's batches come from, as the job needs to know it: without a Trainer it need not know anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbkit.strategy import Strategy


@dataclass(frozen=True)
class Feed:
    """position, go_to: where in the data it stands, carried when ranks become one again. fits: refuses a strategy that
    cannot cut the batch, and returns the arithmetic of one that can. recut: the strategy has changed.
    remakes: who makes the steps asks `proof.settled` in each, and can make one again."""

    position: Callable[[], Any] = lambda: None
    go_to: Callable[[Any], None] = lambda position: None
    fits: Callable[[Strategy], Any] = lambda strategy: None
    recut: Callable[[], None] = lambda: None
    remakes: bool = False
