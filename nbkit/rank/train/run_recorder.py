"""Record a job on disk while it trains: records of every rank, scalars for TensorBoard, and the forecast.

A Trainer and `nbkit.prepare` record automatically, into the directory of their run. log_dir=None turns recording off.
NBKIT_TELEMETRY=off leaves only the scalars of rank 0. A user's own loop calls nothing for this: `job.batches`,
`job.backward` and `job.optimizer` measure the time of each phase. `with nbkit.rank.telemetry.phase("data"):` adds
detail.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbkit.errors import NbkitError, TrainingError, UsageError
from nbkit.planner import forecast
from nbkit.quoting import path_part
from nbkit.rank.telemetry import tensorboard
from nbkit.rank.telemetry.clock_offset import clock_offset
from nbkit.rank.telemetry.collectives import mode
from nbkit.rank.telemetry.health import bytes_held, memory_of, reset_peak
from nbkit.rank.telemetry.phases import OTHER, OUTSIDE, clock, phase
from nbkit.rank.telemetry.session import FIRST_IN_DETAIL, Session
from nbkit.rank.telemetry.sinks import Bus
from nbkit.rank.train.estimate.cost_model import CostModel
from nbkit.rank.train.runs_dir import check_room, note_name
from nbkit.rank.train.step_count import Counts
from nbkit.rank.world import world
from nbkit.records.event_words import without_experts
from nbkit.records.events import RunStarted, Switched
from nbkit.records.records import StepRecord
from nbkit.strategy import Strategy

_MEMORY_EVERY = 100


class Recorder:
    """Marks the end of each step of a job, measures memory now and then, and writes the forecast of the formulas.

    Make it before the model: memory that the process already uses then is not counted for the job. Without a session
    it does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.base_bytes, self._peak, _ = bytes_held(device)
        self._device = device
        self._session: Session | None = None
        self._run_dir = Path()
        self._due = self._since = 0
        self._made = False  # a step was made, and its end is not marked yet
        self._foreseen, self._forecasts = "", False

    def record_into(self, run_dir: Path, bus: Bus, *, strategy: str, rank: int, world_size: int) -> None:
        """Record the job in the existing directory `run_dir` from now on. Collective: see clock_offset.

        A process that replaces a rank adds another part to that rank's file. A rank that cannot write to the directory
        warns, and trains without records.
        """
        if rank == 0:
            bus.add(tensorboard.job_sink(run_dir))
        if mode() == "off":
            return
        offset, here = clock_offset(), world.current()
        try:
            session = Session(
                run_dir,
                rank=rank,
                world_size=world_size,
                device=self._device,
                strategy=strategy,
                offset_ns=offset,
                base_bytes=self.base_bytes,
                first_of_host=here is None or rank % here.place.local_world_size == 0,
            )
        except OSError as error:
            warnings.warn(f"rank {rank} records nothing: {type(error).__name__}: {error}", stacklevel=4)
            return
        self._session, self._run_dir, self._forecasts = session, run_dir, rank == 0
        # In this order: the scalars are read from what the session has written.
        for sink in (session, self, tensorboard.rank_sink(run_dir, rank)):
            bus.add(sink)

    @property
    def recent(self) -> list[StepRecord]:
        """The newest measured steps of this rank; empty without a session."""
        return self._session.recent if self._session is not None else []

    @property
    def peak_bytes(self) -> int:
        """The most bytes that this process has ever held. The counters of torch and the kernel are reset in between."""
        return max(self._peak, bytes_held(self._device)[1])

    def before_count(self) -> None:
        """Begin to measure the peak of a step. `peak_bytes` keeps the earlier peak."""
        self._peak = self.peak_bytes
        reset_peak(self._device)

    def write(self, event: dict[str, Any]) -> None:
        """Receive an event. After a start or a switch, plan a memory measurement two steps later."""
        if event["kind"] in (RunStarted.kind, Switched.kind):
            self._due, self._since = event["step"] + 2, event["step"]
        if event["kind"] == RunStarted.kind:
            self._made = False

    def after_step(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        held: Iterable[nn.Parameter],
        strategy: Strategy,
        cost_model: Callable[[], CostModel],
        counts: Counts,
    ) -> None:
        """Record memory and forecast, if due, after the optimizer has made step number `step`.

        Call it while the gradients exist. held: see ShardedModel. counts: the counts of a step under this strategy.
        """
        self._made = True
        training = clock.laps is not None and clock.state != OUTSIDE
        # The steps of a trial are not steps of the training.
        if self._session is None or not training or (step != self._due and step % _MEMORY_EVERY):
            return
        with phase(OTHER):
            of = model, optimizer
            told = memory_of(*of, step=step, held=held, device=self._device, peak=counts.peak, named=counts.named)
            self._session.memory(told)
            if self._forecasts and self._foreseen != (foreseen := self._seen(strategy, cost_model)):
                self._foreseen = foreseen
                # An error in a formula must not end the training. Only rank 0 computes it; the others would wait.
                try:
                    forecast.append(self._run_dir, cost_model().forecast(strategy, since=self._since))
                except (NbkitError, OSError):
                    pass
                except Exception as error:
                    warnings.warn(f"no formula for {strategy}: {type(error).__name__}: {error}", stacklevel=2)

    def _seen(self, strategy: Strategy, cost_model: Callable[[], CostModel]) -> str:
        """Return the strategy, and whether the formulas know its peak. A change makes a new forecast necessary."""
        return f"{strategy}{', peak' * cost_model().peaks.knows(strategy.tp, strategy.cp)}"

    def look_closely(self) -> None:
        """Record the next FIRST_IN_DETAIL steps in detail, as after every switch."""
        if self._session is not None:
            self._session.detail(FIRST_IN_DETAIL)

    def trace(self, steps: int, *, after: int) -> dict[str, Any]:
        """Record the next `steps` steps in detail, and return their numbers as {"first", "last"}.

        after: the number of finished steps. Raises UsageError if nothing is recorded, or if `steps` is not at least 1.
        """
        if self._session is None or mode() == "off":
            raise UsageError(
                "This training is not recorded, so there is nothing to trace.",
                numbers=f"telemetry {mode()}",
                hint="nbkit.Trainer(..., log_dir='runs'), without NBKIT_TELEMETRY=off",
            )
        if not isinstance(steps, int) or steps < 1:
            raise UsageError(
                "A trace needs a whole number of steps, at least 1.", numbers=f"{steps!r}", hint="%nbkit trace 3"
            )
        self._session.detail(steps)
        return {"first": after + 1, "last": after + steps}

    def at_boundary(self, step: int) -> None:
        """Mark the end of step number `step`, if a step was made since the last call."""
        if self._session is not None and self._made:
            self._made = False
            clock.step(step)


def new_run_dir(
    log_dir: str,
    *,
    name: str | None,
    batch: int | None,
    strategy: str,
    rank: int,
    world_size: int,
    device: torch.device,
) -> Path:
    """Make a new directory under `log_dir` for the records of a run, and return it on every rank. Collective.

    Raises TrainingError, on every rank, if rank 0 cannot make it or max_disk is reached.
    """
    runs = Path(log_dir).absolute()
    check_room(runs, runs, "no run can begin")
    made = [_made_dir(log_dir, name, strategy, batch) if rank == 0 else ("", "")]
    if world_size > 1:
        dist.broadcast_object_list(made, src=0, device=device)
    folder, problem = made[0]
    if problem:
        raise TrainingError(
            "nbkit cannot make a directory for the records of the run.",
            numbers=problem,
            hint="log_dir=None, or another directory",
        )
    return Path(folder)


def _made_dir(log_dir: str, name: str | None, strategy: str, batch: int | None) -> tuple[str, str]:
    """Make log_dir/<name or time>-<strategy>[-b<batch>], with a number if it exists already.

    Returns (path, "") or ("", the problem in words).
    """
    short = without_experts(strategy)  # a name has at most 255 bytes
    words = [path_part(name) if name else time.strftime("%Y%m%d-%H%M%S"), short.replace("=", "").replace(" ", "-")]
    stem = "-".join([*words, f"b{batch}"] if batch else words)
    number = 1
    while True:
        path = Path(log_dir) / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(mode=0o700, parents=True)  # losses and error texts are private
            note_name(path, name)
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            return "", f"{type(error).__name__}: {error}"
        # Absolute: a cell may change the working directory of one rank.
        return str(path.absolute()), ""
