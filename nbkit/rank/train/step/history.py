"""The record of a job: one dict per step, equal on all ranks, completed one step after the step was made.

A long training keeps those of its newest steps, and of the steps before these every 2nd, 4th, ... so that memory and
checkpoints stay as large as they are; the records on disk have every step.

Measures how long steps take, on every rank.

Finds the rank on which a run failed, as far as this one can know.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from nbkit.errors import Stopped, TrainingError
from nbkit.figures import unit_of
from nbkit.rank.telemetry.phases import OUTSIDE, phase
from nbkit.rank.train import argument_checks
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.step.failure import failure_of
from nbkit.rank.train.step.pace import Paces, pace_of
from nbkit.rank.train.step.pending_step import Pending
from nbkit.rank.train.step.step_stats import StepNumbers
from nbkit.records.events import Event, StepDone


class Clock:
    """Seconds from loss to loss, without what runs between steps (evaluation, checkpoints, live cells)."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A run begins now."""
        self._mark = time.perf_counter()

    def lap(self) -> float:
        """Return seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        return seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What runs inside does not count, laps of its own and a clock that is stopped again included."""
        so_far = time.perf_counter() - self._mark
        try:
            with phase(OUTSIDE):
                yield
        finally:
            self._mark = time.perf_counter() - so_far


KEPT = 10_000  # records of newest steps; and so many at most of the steps before
_THINNED_EVERY = 1024  # steps
_RECENT = 20  # steps under one strategy, whose median is the pace
_LAST_STEPS = 5  # the longest of them tells how long a stop waits for a boundary


class Records(list[dict[str, Any]]):
    """A list of step records that shows itself in one line, so that a cell may end with `trainer.fit(500)`."""

    def __repr__(self) -> str:
        if not self:
            return "<no steps yet>"
        first, last = self[0], self[-1]
        return f"<{len(self)} steps, {first['step']} to {last['step']}: loss {first['loss']:.4g} -> {last['loss']:.4g}>"

    def thin(self) -> None:
        """Of the steps before the newest, keep every 2nd, 4th, ...: the number of the newest alone says which."""
        before = self[-1]["step"] - KEPT
        every = 1 << max((before - 1) // KEPT, 0).bit_length()
        if every > 1:
            self[:-KEPT] = [record for record in self[:-KEPT] if not record["step"] % every]


class History:
    """Finished records, the steps whose numbers are under way, and who is told of them."""

    def __init__(self, *, world_size: int, device: torch.device | str = "cpu") -> None:
        self.records = Records()
        self.paces = Paces()  # of strategies whose records may be thinned out by now
        self.pending: deque[Pending] = deque()
        self.clock = Clock()
        self.listeners: list[Callable[[Event], None]] = []
        self.step = 0
        self.at_once = False  # numbers are read at the boundary behind their step, which is waited for on a device
        self.agreed = 0  # the newest request that all ranks hold
        self.ends = False  # a rank was told that the training is to end
        self.data_ends = False  # a rank has seen shards of the data end: the next batch is read accordingly
        self.settled: Pending | None = None  # the step whose record is the last
        self.newest: StepNumbers | None = None  # of the step whose record is the last
        self.remarks: dict[str, str] = {}  # go into the record of the next step
        self.begun = False  # the step after the finished ones
        self._torn = self._silent = False
        self._apart = 0.0  # seconds of steps in which some ranks held the next request, and others did not
        self._world_size, self._device = world_size, device
        self._first = self._total = 0

    def begin(self, total: int) -> None:
        """A run of `total` steps (0: not known) begins now."""
        self._first, self._total = self.step, total
        step_boundary.report(step=self.step, goal=self.goal, step_s=self._longest)
        self.clock.restart()

    def replace(self, step: int, records: Iterable[dict[str, Any]], *, loaded: bool = False) -> None:
        """Stand at `step` with `records`. loaded: of a checkpoint; a run has as many steps left to make as it had."""
        self._first += (step - self.step) * loaded
        self.step, self.records[:] = step, records
        self.paces = Paces(self.records)
        self.newest = self.settled = None  # a rank that has just joined knows nothing of it

    @property
    def acts(self) -> bool:
        """Return True if a step boundary has something to serve, as far as the numbers are read."""
        return self.ends or self.agreed > step_boundary.inbox.acted

    @property
    def making(self) -> int:
        """The step that is made now, or was made last."""
        return self.step + self.begun

    @property
    def goal(self) -> int:
        """The step that a run ends with; 0: not known."""
        return self._first + self._total if self._total else 0

    @property
    def _longest(self) -> float:
        """Seconds of the longest of the last steps."""
        return max((record["seconds"] for record in self.records[-_LAST_STEPS:]), default=0.0)

    @property
    def made_last(self) -> Pending | None:
        """The newest step that was made; None where none was since the history was replaced."""
        return next((step for step in reversed(self.pending) if step.made), self.settled)

    def log(self, numbers: Mapping[str, float | Tensor]) -> None:
        """Add numbers to the record of the newest step; `loss` is there already."""
        if not self.pending:
            raise TrainingError("log() before the first backward().", hint="job.backward(batch), then job.log(...)")
        self.pending[-1].add({name: number for name, number in numbers.items() if name != "loss"})

    def made(self) -> None:
        """The optimizer has taken the newest step."""
        self.begun = False
        if self.pending and not self.pending[-1].made:
            self.pending[-1].made = True
            self.pending[-1].remarks, self.remarks = self.remarks, {}
            self.step += 1

    def settle(self, *, keep: int = 0, act: bool = False) -> None:
        """Read the numbers of finished steps into the records, all but the newest `keep`.

        act: this is a step boundary, where a request that all ranks hold is served. Raises NotFinite and Stopped.
        """
        while len(self.pending) > keep:
            pending = self.pending.popleft()
            if not pending.made:
                continue
            numbers = self.newest = self.check(pending)
            self._apart = self._apart + max(numbers.seconds) if 0 < numbers.held < self._world_size else 0.0
            self.settled, record = pending, pending.record(numbers)
            if "loss_scale" not in record:  # with one, such a step was skipped
                since = self.step - pending.step + 1
                argument_checks.check_gradients(record.get("grad_norm", 0.0), step=pending.step, steps_since=since)
            self.add(record)
            if not self._silent:
                if not record["step"] % _THINNED_EVERY:
                    self.records.thin()
                self._report(record)
            with self.clock.stopped():
                self.emit(StepDone(record["step"], record=record))
        # Whoever read the numbers (save() does, and at every step it may be the only one), a boundary serves. The next
        # step's reduction may still ask about a request that was acted on after this one's.
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
            finally:  # to save reads what another step said of the same end
                self.ends = False

    def add(self, record: dict[str, Any]) -> None:
        """Take the record of the step after the last one."""
        self.records.append(record)
        if not self._silent:  # the steps of a trial are taken back
            self.paces.add(record)

    def check(self, pending: Pending) -> StepNumbers:
        """Return the numbers of a step, and with them what the ranks agreed on: CPU ranks know before the step is over.

        Raises NotFinite, or TrainingError when the ranks saw different data.
        """
        numbers = pending.reduction.read()
        self.data_ends |= numbers.data_ends
        self._torn |= pending.made and not numbers.whole
        argument_checks.check_whole(numbers, pending)
        argument_checks.check_finite(numbers, pending, steps_since=self.step - pending.step + 1)
        argument_checks.check_streams(numbers, pending)
        if numbers.held == self._world_size and not self._waits(numbers, pending.asked):
            self.agreed = pending.asked
        self.ends |= numbers.ends
        return numbers

    def _waits(self, numbers: StepNumbers, asked: int) -> bool:
        """Return True if what all ranks make at once for the request `asked` is being made; they begin it here."""
        if numbers.ready == self._world_size:
            return False
        # Where some ranks have it already, as an interrupt may leave them, it is made when the request is served.
        return step_boundary.inbox.prepare_collectively(asked, begin=numbers.ready == 0)

    def torn(self) -> bool:
        """Return True if a step was made with gradients that the ranks had not summed; if so, what is pending is
        dropped.

        So it is when a GPU's reduction is aborted: the host had gone on and enqueued the optimizer's step behind it.
        """
        torn = self._torn or any(step.made and not step.reduction.read().whole for step in self.pending)
        self._torn = False
        if torn:
            self.pending.clear()
        return torn

    def begin_again(self) -> None:
        """The ranks stand at one boundary again: what they had agreed on before is asked anew."""
        self.agreed, self.ends, self._apart, self.begun = step_boundary.inbox.acted, False, 0.0, False
        self.clock.restart()

    def forget(self, step: int) -> None:
        """The steps after `step` have not been made."""
        while self.pending and self.pending[-1].step > step:
            self.pending.pop()

    def drop(self) -> None:
        """Forget the steps whose numbers are under way, and whatever was wrong with them."""
        self.pending.clear()
        self._torn = False

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Nobody is told of what happens inside."""
        outer, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = outer

    def emit(self, event: Event) -> None:
        """Tell the job's listeners. They return at once; they must not wait or communicate."""
        if not self._silent:
            for listener in self.listeners:
                listener(event)

    def ended_by(self, error: BaseException) -> str:
        """Why a run ends, in a word; of a failure everyone is told what it was."""
        if isinstance(error, Stopped | GeneratorExit):
            return "stopped"
        if (failure := failure_of(error, step=self.step)) is not None:
            self.emit(failure)
        return type(error).__name__

    def _report(self, record: dict[str, Any]) -> None:
        alike = [one["seconds"] for one in self.records[-_RECENT:] if one.get("strategy") == record["strategy"]]
        step, pace = record["step"], pace_of(alike)
        assert pace is not None
        left = (self.goal - step) * pace.seconds if self._total else None
        speed = record["tokens"] / pace.seconds if pace.seconds else 0.0
        step_boundary.report(
            step=step,
            goal=self.goal,
            loss=record["loss"],
            tokens_per_s=speed,
            unit=unit_of(record),
            step_s=self._longest,
            eta_s=left,
            pace={"strategy": record.get("strategy", ""), **asdict(pace)},
        )
