"""`on_failure="shrink"`: a training goes on without the ranks that have died, where memory and mesh allow it.

What a dead rank held has to be somewhere while it moves to the others: it was replaced first, and the number of ranks
changes at the boundary where all have met. The ranks with the highest numbers leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nbkit.errors import StrategyError, TrainingError
from nbkit.rank.train.replace.resume_fit import FitRange
from nbkit.rank.train.resize.plan_resize import ResizeAtBoundary, planned
from nbkit.rank.world.world import World

Trainer = Any  # nbkit.rank.train.trainer's, which imports this file


def shrink(trainer: Trainer, span: FitRange, say: Callable[[str], None]) -> FitRange:
    """Raise Resizing, to go on with `span.fewer` ranks less. Collective, at a step boundary.

    Where that cannot be, it is said why, and all ranks go on, those that were replaced too: what is returned is the
    span for that.
    """
    now, place = trainer.job.world_size, World.join_from_env().place
    try:
        if place.local_world_size != now:
            raise TrainingError("The number of ranks changes on one host alone.", numbers=f"{now} ranks on several")
        wanted = planned(trainer, now - span.fewer, "", ())
    except (StrategyError, TrainingError) as refused:
        say(f"on_failure='shrink': goes on with {now} ranks. {refused.what} {refused.numbers}")
        return replace(span, fewer=0)
    raise ResizeAtBoundary(wanted)
