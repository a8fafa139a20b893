"""A strategy measured on the live job: some steps under it, of which nothing stays but how long they took."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from nbkit.errors import SwitchError, TrainingError
from nbkit.rank.data.data_rng import own_draws
from nbkit.rank.parallel.pipeline.p2p_groups import meet
from nbkit.rank.train.argument_checks import check_counts
from nbkit.rank.train.control.collective_guard import Guard
from nbkit.rank.train.switch.switch import Switchable
from nbkit.rank.train.training_state import TrainingState
from nbkit.records.events import Switched
from nbkit.strategy import Strategy


def try_out(job: Switchable, text: str, steps: int, make_step: Callable[[], None], *, again: bool) -> dict[str, Any]:
    """Measure a strategy on the live job for some steps, then go back to where it was, weights and all. Collective.

    make_step: makes one step of the training, and nothing beside it; no listener hears of it. again: whether the data
    can be read again. Takes the memory of both states, and raises SwitchError where there is none. Returns strategy,
    steps, and the median seconds of a step there (the first left out, which makes what later ones reuse) and here
    before. Raises TrainingError for data that cannot be read again, and SwitchError, on every rank alike, when the
    first step fails on any.
    """
    check_counts(steps=steps)
    check_again(again)
    old, new = job.strategy, job.parsed(text)
    before = [record["seconds"] for record in job.ledger.records[-steps:] if record["strategy"] == str(old)]
    with job.ledger.clock.stopped():
        event, seconds = measure(job, new, steps, make_step)
        job.close_left_groups()
    return {
        "strategy": event.new,
        "steps": steps,
        "step_s": statistics.median(seconds[1:] or seconds),
        "before_step_s": statistics.median(before) if before else None,
        "switch_s": event.pause_s,
    }


def check_again(again: bool) -> None:
    """Raises TrainingError for data that cannot be read again."""
    if not again:
        raise TrainingError(
            "A trial's samples are read again after it, and this data is an iterator, which reads each once.",
            hint="an IterableDataset, or any object whose __iter__ begins anew",
        )


def measure(
    job: Switchable,
    new: Strategy,
    steps: int,
    make_step: Callable[[], None],
    *,
    later: AbstractContextManager[None] | None = None,
) -> tuple[Switched, list[float]]:
    """The switch to `new`, and the seconds of `steps` steps under it; then all is as before. Collective.

    later: entered around all but the first of them, which makes what later ones reuse.
    """
    with own_draws(), job.on_trial(new) as (state, event):
        records = job.ledger.records
        made = len(records)
        job.ledger.clock.restart()
        _first(job, state, make_step)
        with later or nullcontext():
            for _ in range(steps - 1):
                make_step()
            job.ledger.settle()
        return event, [record["seconds"] for record in records[made:]]


def _first(job: Switchable, left: TrainingState, make_step: Callable[[], None]) -> None:
    """The step that may well fail: then it does so on all ranks."""
    guard = Guard(f"{job.step} trial {job.strategy}", world_size=job.world_size, device=job.device)
    try:
        make_step()
        guard.agree()
    except Exception as error:
        if not guard.concerns(error):
            raise
        failures = guard.failures(error)
        job.integrity.restored(ranks_agree=True)  # what there was before is whole, and is taken up again
        meet(left.sharded_model.connections.edges, job.device)
        old = left.sharded_model.strategy
        raise SwitchError(
            f"{job.strategy} was not measured: its first step failed, and training goes on under {old}.",
            numbers=failures.words,
            hint="%strategy shows what can be picked",
        ) from error
    finally:
        guard.end()
