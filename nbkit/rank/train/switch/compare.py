"""Measure strategies on the live job: one strategy (`try_out`), or several in turns (`compare`).

Each strategy makes some steps from the same state on the same batches. Then the steps are undone. Their times, peak
memory and sent bytes stay in the job's ledger, so every view of the job shows the same numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from nbkit.errors import StrategyError, SwitchError, TrainingError
from nbkit.rank.data.data_rng import own_draws
from nbkit.rank.train.argument_checks import check_counts
from nbkit.rank.train.estimate.free_memory import trim
from nbkit.rank.train.job import Job
from nbkit.rank.train.transaction import Transaction
from nbkit.records.events import Switched
from nbkit.strategy import Strategy


def try_out(job: Job, text: str, steps: int, make_step: Callable[[], None], *, again: bool) -> dict[str, Any]:
    """Measure a strategy on the live job for some steps, then restore the job completely. Collective.

    text: the strategy. make_step: makes one step of the training without events. again: the data can be read again.
    Return strategy, steps, the median seconds of a step under it (step_s) and before (before_step_s), and the pause of
    the switch (switch_s). Raises TrainingError if the data cannot be read again, and SwitchError, on every rank, if
    memory does not hold both states or the first step fails on any rank.
    """
    check_counts(steps=steps)
    check_again(again)
    old, new = job.strategy, job.parsed(text)
    before = job.ledger.paces.of(str(old))
    with job.ledger.clock.stopped():
        event, seconds = measure(job, new, steps, make_step)
        job.switcher.close_left_groups()
    job.ledger.paces.measured(event.new, seconds)
    return {
        "strategy": event.new,
        "steps": steps,
        "step_s": statistics.median(seconds),
        "before_step_s": before.seconds if before is not None else None,
        "switch_s": event.pause_s,
    }


def check_again(again: bool) -> None:
    """Raise TrainingError for data that cannot be read again."""
    if not again:
        raise TrainingError(
            "nbkit must read the samples of a trial again after it, but this data is an iterator, which gives each "
            "sample once.",
            hint="an IterableDataset, or any object whose __iter__ starts again",
        )


def measure(job: Job, new: Strategy, steps: int, make_step: Callable[[], None]) -> tuple[Switched, list[float]]:
    """Make `steps` steps under `new`, and undo them. Return (the switch, seconds of each step). Collective.

    Two steps come before the measured ones. The first one prepares things that later steps reuse. The second one
    measures memory and traffic if they are not known (see TrainingStep).
    """
    with own_draws(), job.switcher.trial(new) as (trial, event):
        records = job.ledger.records
        made = len(records) + 2
        job.ledger.clock.restart()
        _first(trial, make_step)
        for _ in range(1 + steps):
            make_step()
        job.ledger.settle()
        return event, [record["seconds"] for record in records[made:]]


def _first(trial: Transaction, make_step: Callable[[], None]) -> None:
    """Make the first step. If it fails on one rank, raise SwitchError on all ranks."""
    job, new = trial.job, trial.job.strategy
    trial.guard(f"{job.step} trial {new}")
    try:
        make_step()
        trial.agree()
    except Exception as error:
        if not trial.concerns(error):
            raise
        failures = trial.roll_back(error)
        raise SwitchError(
            f"{new} was not measured: its first step failed, and training continues under {job.strategy}.",
            numbers=failures.words,
            hint="%strategy shows what can be picked",
        ) from error
    finally:
        trial.unguard()


_MOST_TURNS = 4


def compare(
    job: Job, strategies: Sequence[str], steps: int, make_step: Callable[[], None], *, again: bool
) -> dict[str, Any]:
    """Measure each strategy and the one in force for `steps` steps, then undo these steps. Collective.

    Each strategy has several turns, from the same state on the same batches. So if the machine becomes slower, this
    affects all of them. The first two steps of each turn are not measured. make_step, again: see try_out.
    Return steps and, for each strategy: step_s, the median seconds of a step; low_s and high_s, its 95 % confidence
    interval, None for few steps; peak_bytes, the peak of the fullest rank in a step; sent_bytes, the bytes that the
    busiest rank sends in a step; and error, the reason if it was refused. Bytes are None if they are not known.
    """
    check_counts(steps=steps)
    check_again(again)
    names = list(dict.fromkeys(str(job.parsed(text)) for text in (str(job.strategy), *strategies)))
    turns = max(1, min(_MOST_TURNS, steps // 4))
    found = {name: _Measured() for name in names}
    with job.ledger.clock.stopped():
        for turn in range(turns):
            for name in names if turn % 2 == 0 else reversed(names):
                if not found[name].error:
                    found[name].add(job, job.parsed(name), math.ceil(steps / turns), make_step)
        job.switcher.close_left_groups()
    for name in names:
        if not found[name].error:
            job.ledger.paces.measured(name, found[name].seconds, compared=True)
    rows = [{"strategy": name, **found[name].row(job, name)} for name in names]
    return {"steps": steps, "strategies": rows}


class _Measured:
    """Measurements of a strategy on this rank. The seconds are the same on all ranks."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.error = ""

    def add(self, job: Job, strategy: Strategy, steps: int, make_step: Callable[[], None]) -> None:
        trim(job.device)
        try:
            job.builder.agree_on(strategy)  # the proof of a step may raise any TrainingError
        except (StrategyError, TrainingError) as error:  # every rank raises the same
            self.error = f"{error.what} {error.numbers}".strip()
            return
        try:
            _, seconds = measure(job, strategy, steps, make_step)
        except (StrategyError, SwitchError) as error:  # every rank raises the same
            self.error = f"{error.what} {error.numbers}".strip()
            return
        self.seconds += seconds

    def row(self, job: Job, name: str) -> dict[str, Any]:
        """Return the strategy's row of the result."""
        if self.error:
            return {"error": self.error}
        pace = job.ledger.paces.of(name)
        peak, sent = job.ledger.counts.get(name, (0, 0))
        assert pace is not None
        return {
            "step_s": pace.seconds,
            "low_s": pace.low,
            "high_s": pace.high,
            "peak_bytes": peak or None,
            "sent_bytes": sent or None,
            "error": "",
        }
