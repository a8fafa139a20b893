"""Keep the record of a job: one dict per step, which is equal on all ranks and complete one step later.

A long training keeps the records of its newest steps, and of every 2nd, 4th, ... older step. So memory and checkpoints
do not grow. The records on disk have every step. `Clock` measures how long steps take, on every rank. The pace of a
strategy is the median duration of its newest steps, with a confidence interval.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nbkit.errors import Stopped, TrainingError
from nbkit.figures import unit_of
from nbkit.planner.choose.search import AGED
from nbkit.rank.loss.changed_loss import no_longer_a_mean
from nbkit.rank.telemetry.phases import OUTSIDE, phase
from nbkit.rank.telemetry.sinks import Bus
from nbkit.rank.train import argument_checks
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.step.failure import failure_of
from nbkit.rank.train.step.step_stats import Pending, StepNumbers
from nbkit.records.event_words import recorded
from nbkit.records.events import Event, StepDone
from nbkit.records.readings import MEDIAN_OF, STANDS, usual_steps

LEAST = 5  # steps for an interval: the median is between the shortest and the longest of 5 with 94 % confidence
_STRATEGIES = 64  # number of strategies to remember; beyond it, the one that was used longest ago is dropped


@dataclass(frozen=True)
class StepPace:
    """The pace of a strategy.

    seconds: the median duration of `steps` steps. low, high: its 95 % confidence interval; None for fewer than `LEAST`
    steps. ago: the number of later steps. rate: the median of tokens per second. compared: True if the steps are
    those of a comparison with other strategies.
    """

    seconds: float
    low: float | None
    high: float | None
    steps: int
    ago: int = 0
    rate: float = 0.0
    compared: bool = False


def pace_of(seconds: Sequence[float], tokens: Sequence[float] = ()) -> StepPace:
    """Return the pace of steps that took `seconds`. tokens: the number of tokens of each step, if known."""
    few = len(seconds) < LEAST
    low, high = (None, None) if few else interval(seconds)
    rates = [each / took for each, took in zip(tokens, seconds, strict=False) if took]
    return StepPace(
        statistics.median(seconds), low, high, len(seconds), rate=statistics.median(rates) if rates else 0.0
    )


def interval(seconds: Sequence[float]) -> tuple[float, float]:
    """Return two values of `seconds`: a 95 % confidence interval of the median, for any distribution."""
    ordered, n = sorted(seconds), len(seconds)
    at = max(0, math.floor((n - 1.96 * math.sqrt(n)) / 2))
    return ordered[at], ordered[n - 1 - at]


class _Pace:
    """The newest steps of one strategy. first: its first step after the last switch to it, or after its trial.

    steps: (number, seconds, tokens) of each step, replaced as a whole. before: the pace before `first`, and the number
    of the last step that it includes. compared: True if `before` is from a comparison with other strategies.
    """

    def __init__(self, first: int, before: tuple[StepPace, int] | None, *, compared: bool = False) -> None:
        self.first, self.before, self.compared = first, before, compared
        self.steps: tuple[tuple[int, float, float], ...] = ()

    def comparable(self) -> tuple[StepPace, int] | None:
        """Return the pace to compare with other strategies, and the number of its last step.

        A comparison measures strategies under equal conditions, so its figure is used for `AGED` more steps of
        the same strategy. Newer steps alone may be faster only because the machine has less other work.
        """
        lately = self.compared and (not self.steps or self.steps[-1][0] - self.first <= AGED)
        return self.before if lately else self.now()

    def now(self) -> tuple[StepPace, int] | None:
        """Return the pace, and the number of its last step. With few new steps, this is the earlier pace."""
        steps = self.steps
        if not steps or steps[-1][0] == self.first:
            return self.before
        usual = usual_steps(steps[-1][0], self.first)
        of = [one for one in steps if one[0] in usual]
        if len(of) < LEAST and self.before is not None:
            return self.before
        return pace_of([seconds for _, seconds, _ in of], [tokens for *_, tokens in of]), steps[-1][0]


class Paces:
    """The paces of all strategies that have run. Only one thread writes, any thread may read.

    trials: the number of measurements by trials.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._known: dict[str, _Pace] = {}  # strategy, as in records -> its pace
        self._step = self.trials = 0
        self._last = ""
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the record of the next step."""
        strategy, number = recorded(record["strategy"]), record["step"]
        pace = self._known.get(strategy)
        if pace is None or strategy != self._last:
            pace = self._known[strategy] = _Pace(number, pace.now() if pace is not None else None)
        step = number, record["seconds"], float(record.get("tokens", 0))
        pace.steps = (*pace.steps, step)[-MEDIAN_OF - STANDS :]
        self._step, self._last = number, strategy
        self._forget()

    def measured(self, strategy: str, seconds: Sequence[float], *, compared: bool = False) -> None:
        """Replace the pace of `strategy` by the seconds of a trial's steps, which are in no record.

        compared: other strategies were measured in turns with this one.
        """
        pace = replace(pace_of(seconds), compared=compared)
        self._known[recorded(strategy)] = _Pace(self._step, (pace, self._step), compared=compared)
        self.trials += 1
        self._forget()

    def _forget(self) -> None:
        if len(self._known) > _STRATEGIES:
            del self._known[min(self._known, key=lambda name: self._left(self._known[name]))]

    def _left(self, pace: _Pace) -> int:
        return pace.steps[-1][0] if pace.steps else pace.first

    def of(self, strategy: str) -> StepPace | None:
        """Return the pace of a strategy; None if it is unknown.

        The first step does not count: it is slower, because it prepares things that later steps reuse. After a
        comparison, this is the pace in the comparison; `newest` returns the pace of the newest steps.
        """
        pace = self._known.get(recorded(strategy))
        return self._with_age(pace.comparable() if pace is not None else None)

    def newest(self, strategy: str) -> StepPace | None:
        """Return the pace of the newest steps under a strategy; None if it is unknown."""
        pace = self._known.get(recorded(strategy))
        return self._with_age(pace.now() if pace is not None else None)

    def _with_age(self, found: tuple[StepPace, int] | None) -> StepPace | None:
        return replace(found[0], ago=self._step - found[1]) if found is not None else None


class Clock:
    """Measures the seconds of steps, without the work between them (evaluation, checkpoints, live cells)."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start measuring now."""
        self._mark = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        return seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock inside, even if `lap` is called inside. May be nested."""
        so_far = time.perf_counter() - self._mark
        try:
            with phase(OUTSIDE):
                yield
        finally:
            self._mark = time.perf_counter() - so_far


KEPT = 10_000  # number of newest records that are kept, and limit for older records
_THINNED_EVERY = 1024  # steps
_LAST_STEPS = 5  # the longest of the last steps tells how long a stop waits for a step boundary


class Records(list[dict[str, Any]]):
    """A list of step records that shows itself in one line, so that a cell may end with `trainer.fit(500)`."""

    def __repr__(self) -> str:
        if not self:
            return "<no steps yet>"
        first, last = self[0], self[-1]
        return f"<{len(self)} steps, {first['step']} to {last['step']}: loss {first['loss']:.4g} -> {last['loss']:.4g}>"

    def thin(self) -> None:
        """Keep every 2nd, 4th, ... of the older steps. Which ones depends only on the number of the newest step."""
        before = self[-1]["step"] - KEPT
        every = 1 << max((before - 1) // KEPT, 0).bit_length()
        if every > 1:
            self[:-KEPT] = [record for record in self[:-KEPT] if not record["step"] % every]


def _nothing(_: dict[str, Any]) -> None:
    """Do nothing. This is `History.after_step` in the user's own loop."""


class History:
    """The records of a job, its steps whose results are not read yet, and the bus of its events.

    after_step: called with the record of each finished step. Unlike a sink it is part of the training: it may
    communicate, and its errors end the run.
    """

    def __init__(self, *, world_size: int, device: torch.device | str = "cpu") -> None:
        self.records = Records()
        self.paces = Paces()  # kept apart, because records are thinned out
        self.counts: dict[str, tuple[int, int]] = {}  # strategy -> see StepNumbers.counted
        self.pending: deque[Pending] = deque()
        self.clock = Clock()
        self.bus = Bus()
        self.after_step: Callable[[dict[str, Any]], None] = _nothing
        self.step = 0
        self.at_once = False  # read the results right after each step, which waits for the device
        self.agreed = 0  # the newest request that all ranks hold
        self.ends = False  # a rank was told to end the training
        self.compares_weights = False  # a rank has changed its weights: the next step compares those of all ranks
        self.data_ends = False  # a rank has seen shards of the data end: the next batch is read accordingly
        self._shown: dict[str, Any] | None = None  # the last record of this run
        self.settled: Pending | None = None  # the step of the last record
        self.newest: StepNumbers | None = None  # the results of that step
        self.remarks: dict[str, str] = {}  # go into the record of the next step
        self.begun = False  # True if the next step is under way
        self._torn = self._silent = False
        self._apart = 0.0  # seconds of recent steps in which only some ranks had the next request
        self._world_size, self._device = world_size, device
        self._first = self._total = 0

    def begin(self, total: int) -> None:
        """Begin a run of `total` steps; 0 if their number is not known."""
        self._first, self._total, self._shown = self.step, total, None
        step_boundary.report_by(self._progress)
        self.clock.restart()

    def replace(self, step: int, records: Iterable[dict[str, Any]], *, loaded: bool = False) -> None:
        """Set the number of finished steps and the records.

        loaded: they are from a checkpoint. The running `fit` still makes all steps that it had left.
        """
        self._first += (step - self.step) * loaded
        self.step, self.records[:] = step, records
        self.paces = Paces(self.records)
        self.newest = self.settled = None  # on all ranks, because a rank that has just joined does not have them

    @property
    def acts(self) -> bool:
        """Return True if the results that are read say that a step boundary has a request to serve."""
        return self.ends or self.agreed > step_boundary.inbox.acted

    @property
    def is_silent(self) -> bool:
        """Return True within `silent`, whose steps will be undone."""
        return self._silent

    @property
    def making(self) -> int:
        """Return the number of the step that is under way, or else of the last step."""
        return self.step + self.begun

    @property
    def goal(self) -> int:
        """Return the number of the run's last step; 0 if it is not known."""
        return self._first + self._total if self._total else 0

    @property
    def _longest(self) -> float:
        """Return the seconds of the longest of the last steps."""
        return max((record["seconds"] for record in self.records[-_LAST_STEPS:]), default=0.0)

    @property
    def made_last(self) -> Pending | None:
        """Return the newest finished step; None if there is none since the history was replaced."""
        return next((step for step in reversed(self.pending) if step.made), self.settled)

    def log(self, numbers: Mapping[str, float | Tensor]) -> None:
        """Add numbers to the record of the newest step. `loss` is recorded already."""
        if not self.pending:
            raise TrainingError(
                "log() was called before the first backward().", hint="job.backward(batch), then job.log(...)"
            )
        self.pending[-1].add({name: number for name, number in numbers.items() if name != "loss"})

    def made(self) -> None:
        """Note that the optimizer has made the newest step."""
        self.begun = False
        if self.pending and not self.pending[-1].made:
            self.pending[-1].made = True
            self.pending[-1].remarks, self.remarks = self.remarks, {}
            self.step += 1

    def settle(self, *, keep: int = 0, act: bool = False) -> None:
        """Read the results of finished steps into the records, except for the newest `keep` steps.

        act: this is a step boundary, so serve a request that all ranks hold. Raises NotFinite and Stopped.
        """
        while len(self.pending) > keep:
            pending = self.pending.popleft()
            if not pending.made:
                continue
            numbers = self.newest = self.check(pending)
            self._apart = self._apart + max(numbers.seconds) if 0 < numbers.held < self._world_size else 0.0
            self.settled, record = pending, pending.record(numbers)
            if any(numbers.counted):
                self.counts[pending.strategy] = numbers.counted
            if "loss_scale" not in record:  # with a loss scale, a step with such gradients was skipped
                since = self.step - pending.step + 1
                argument_checks.check_gradients(record.get("grad_norm", 0.0), step=pending.step, steps_since=since)
            self.add(record)
            if not self._silent:
                if not record["step"] % _THINNED_EVERY:
                    self.records.thin()
                self._shown = record
            with self.clock.stopped():
                self.emit(StepDone(record["step"], record=record))
                if not self._silent:
                    self.after_step(record)
        # A boundary serves requests even if another caller, such as save(), has read the results. The reduction of the
        # next step may still ask about a request that was served already.
        if act and self.agreed > step_boundary.inbox.acted:
            with self.clock.stopped():
                step_boundary.act(self.agreed)
        if act and self._apart > step_boundary.SHARE_SECONDS:
            self._apart = 0.0
            with self.clock.stopped():
                step_boundary.share(torch.device(self._device))
        if act and self.ends and not self._silent:
            try:
                step_boundary.end()
            finally:  # saving reads the results of another step, which may ask for the same end again
                self.ends = False

    def add(self, record: dict[str, Any]) -> None:
        """Add the record of the step after the last one."""
        self.records.append(record)
        if not self._silent:  # the steps of a trial are undone
            self.paces.add(record)

    def check(self, pending: Pending) -> StepNumbers:
        """Return the results of a step. Note the requests that all ranks agreed on in this step.

        CPU ranks call it before the step is over. Raises NotFinite, or TrainingError if the ranks saw different data.
        """
        numbers = pending.reduction.read()
        self.data_ends |= numbers.data_ends
        self._torn |= pending.made and not numbers.whole
        argument_checks.check_whole(numbers, pending)
        argument_checks.check_finite(numbers, pending, steps_since=self.step - pending.step + 1)
        argument_checks.check_streams(numbers, pending)
        argument_checks.check_rates(numbers, pending)
        argument_checks.check_edits(numbers, step=pending.step, strategy=pending.strategy)
        if numbers.refused and not pending.losses:
            raise no_longer_a_mean(f"seen in the rows of rank {numbers.refused[0]}")
        if any(numbers.weights):
            # A rank may have changed its weights and restored them, so all ranks compare them in the next step. Under
            # ZeRO the update would hide the difference, so this step ends the training.
            self.compares_weights = not all(numbers.weights) and "zero" not in pending.strategy
            if not self.compares_weights:
                argument_checks.check_weights(numbers, pending)
        if numbers.held == self._world_size and not self._waits(numbers, pending.asked):
            self.agreed = pending.asked
        self.ends |= numbers.ends
        return numbers

    def _waits(self, numbers: StepNumbers, asked: int) -> bool:
        """Return True if the ranks still prepare the request `asked` together. Begin that if necessary."""
        if numbers.ready == self._world_size:
            return False
        # If only some ranks are prepared, as after an interrupt, the rest is done when the request is served.
        return step_boundary.inbox.prepare_collectively(asked, begin=numbers.ready == 0)

    def torn(self) -> bool:
        """Return True if the optimizer used gradients whose sum over the ranks failed. Then drop the pending steps.

        This happens when a reduction on a GPU is aborted: the host has already enqueued the optimizer's step.
        """
        torn = self._torn or any(step.made and not step.reduction.read().whole for step in self.pending)
        self._torn = False
        if torn:
            self.pending.clear()
        return torn

    def begin_again(self) -> None:
        """Begin again at the same boundary on all ranks. They must agree again on requests that are not served."""
        self.agreed, self.ends, self._apart, self.begun = step_boundary.inbox.acted, False, 0.0, False
        self.clock.restart()

    def forget(self, step: int) -> None:
        """Drop the steps after `step` with their errors, as if they had not been made."""
        while self.pending and self.pending[-1].step > step:
            self.pending.pop()
        while self.records and self.records[-1]["step"] > step:
            self.records.pop()
        self._torn = False

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Emit no events inside."""
        outer, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = outer

    def emit(self, event: Event) -> None:
        """Send an event to the sinks."""
        if not self._silent:
            self.bus.emit(event)

    def ended_by(self, error: BaseException) -> str:
        """Return one word for the reason why a run ends. Emit an event if it is a failure."""
        if isinstance(error, Stopped | GeneratorExit):
            return "stopped"
        if (failure := failure_of(error, step=self.step)) is not None:
            self.emit(failure)
        return type(error).__name__

    def _progress(self) -> dict[str, Any]:
        """Return the progress of this run, for `step_boundary.progress`. From any thread."""
        record, goal = self._shown, self.goal
        if record is None:
            return {"step": self._first, "goal": goal, "step_s": self._longest}
        step, only = record["step"], pace_of([record["seconds"]], [record["tokens"]])
        pace = self.paces.of(record["strategy"]) or only
        newest = self.paces.newest(record["strategy"]) or only
        return {
            "step": step,
            "goal": goal,
            "loss": record["loss"],
            "tokens_per_s": newest.rate,
            "unit": unit_of(record),
            "step_s": self._longest,
            "eta_s": (goal - step) * newest.seconds if self._total else None,
            "pace": {"strategy": record.get("strategy", ""), **asdict(pace)},
        }
