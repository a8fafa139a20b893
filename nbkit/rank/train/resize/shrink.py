"""`on_failure="shrink"`: go on without the ranks that have died, if memory and mesh allow it.

The state of a dead rank has to be somewhere while it moves to the others. So the rank is replaced first, and the number
of ranks changes at the boundary where all have met. The ranks with the highest numbers leave.
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
    """Raise ResizeAtBoundary, to go on with `span.fewer` ranks less. Collective, at a step boundary.

    If that is not possible, say why, and return the span with which all ranks go on, the replaced ones too.
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
