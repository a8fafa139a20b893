"""Telemetry of a job on this rank: takes what was measured as it comes, and has it written off the step.

    session = Session(run_dir, rank=..., world_size=..., device=..., offset_ns=clock_offset())
    job.ledger.listeners.append(session)        # runs, steps' numbers, events
    clock.step(number)                          # at the end of each step: see phases.py

Nothing here waits but the end of a run, when all is on disk. Until then the files are at most a quarter of
a second behind.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter_ns as now

import torch

from nbkit.rank.device import accelerator
from nbkit.rank.telemetry.collectives import own_ns, ring
from nbkit.rank.telemetry.disk_thread import Background
from nbkit.rank.telemetry.health import Health
from nbkit.rank.telemetry.memory import bytes_held
from nbkit.rank.telemetry.phases import Step, clock
from nbkit.rank.telemetry.record_writer import RecordFile
from nbkit.rank.telemetry.writer_thread import Mark, Writer
from nbkit.records.events import Event, RunStarted, RunStopped, StepDone, Switched
from nbkit.records.records import LISTEN_EVERY, EventRecord, Header, MemoryRecord, Record, StepRecord
from nbkit.wire.processes import node_name

FIRST_IN_DETAIL = 3  # steps of a run, and after a switch
_IDLE_S = 2.0  # without steps, what cells sent is written this often
_PACE_S = 0.25  # what comes meanwhile is written at once: to be woken for each step costs the training


def record_path(run_dir: Path, rank: int) -> Path:
    """Where rank `rank` of a run writes its records."""
    return run_dir / "telemetry" / f"rank{rank}.jsonl"


class Session:
    """One per rank and run. A listener of events; hears of steps from the clock while a training runs.

    offset_ns: of this rank's clock, see clock_offset.py. detail_every: every so many steps are kept moment by moment
    (the first three too, and three after a switch); in those, and every LISTEN_EVERY steps, asynchronous collectives
    tell when they end. base_bytes: what this process held before the job; default: what it holds now. first_of_host:
    see health.py. What goes wrong in writing is warned of once, at the next step, and never ends a training.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        world_size: int,
        device: torch.device | None = None,
        strategy: str = "",
        offset_ns: int = 0,
        detail_every: int = 50,
        base_bytes: int | None = None,
        first_of_host: bool = True,
    ) -> None:
        self.path = record_path(run_dir, rank)
        self._cuda = cuda = accelerator().holds(device)
        self._detail_every, self._until = detail_every, FIRST_IN_DETAIL
        self._made_steps, self._next = 0, 1
        begun, unix = now(), time.time()
        base = 0 if self._cuda else bytes_held(device)[0] if base_bytes is None else base_bytes

        def head(part: int) -> Sequence[Record]:  # kept by the thread: it must not hold this object
            header = Header(
                rank,
                world_size,
                part,
                host=node_name(),
                clock="cuda" if cuda else "host",
                strategy=strategy,
                clock_ns=begun,
                offset_ns=offset_ns,
                unix_s=unix,
                base_bytes=base,
            )
            return [header, *writer.groups]

        self._writer = writer = Writer(since=ring.end)
        writer.open(RecordFile(self.path, head))
        what = f"recorded in {self.path}"
        self._writing = Background(
            writer.take, writer.close, name="nbkit-records", what=what, idle_s=_IDLE_S, pace_s=_PACE_S
        )
        # The thread knows the writer alone, so that it ends with this object.
        weakref.finalize(self, self._writing.end)
        self._health = Health(
            self._writing.put, gpu="" if device is None else accelerator().uuid(device), first=first_of_host
        )
        weakref.finalize(self, self._health.end)

    def __call__(self, event: Event) -> None:
        """Take an event of the job."""
        if isinstance(event, StepDone):
            self._writing.put((event.step, event.record))
            return
        self.note(EventRecord(event.step, ns=now(), event={"kind": event.kind, **asdict(event)}))
        if isinstance(event, RunStarted):
            self._next = event.step + 1
            self.begin()
        elif isinstance(event, RunStopped):
            self.end()
        elif isinstance(event, Switched):
            self.detail(FIRST_IN_DETAIL)

    def begin(self) -> None:
        """This thread makes steps from here on; for a loop of one's own, without events."""
        if self._made not in clock.listeners:
            clock.listeners.append(self._made)
        self._writing.put(Mark(None, ring.end, time.process_time_ns(), own_ns()))
        clock.begin(cuda=self._cuda)
        self._look()
        self._health.run(True)

    def end(self) -> None:
        """No steps for now. Returns when everything is on disk."""
        clock.end()
        self._health.run(False)
        if self._made in clock.listeners:
            clock.listeners.remove(self._made)
        self.flush()

    @property
    def recent(self) -> list[StepRecord]:
        """The newest steps of this rank, oldest first."""
        return list(self._writer.recent)

    def flush(self) -> None:
        """Wait until everything that is known is on disk, steps whose numbers have not come included.

        After `close` nothing more gets there.
        """
        self._writing.flush()

    def note(self, record: Record) -> None:
        """Have a record written as it is."""
        self._writing.put(record)

    def detail(self, steps: int) -> None:
        """Keep the next `steps` steps moment by moment, one that is being made included. From any thread."""
        self._until = max(self._until, self._made_steps + steps)
        self._look()

    def memory(self, measured: MemoryRecord) -> None:
        """Take what memory.memory_of counted, after a backward pass and before the gradients are dropped."""
        self._writing.put(measured)

    def close(self) -> None:
        """Write what there is, and end."""
        self.end()
        self._health.end()
        self._writing.end()

    def _made(self, step: Step) -> None:
        self._health.step = step.number
        self._writing.put(Mark(step, ring.end, time.process_time_ns(), own_ns(), self._in_detail))
        self._made_steps, self._next = self._made_steps + 1, step.number + 1
        self._look()

    @property
    def _in_detail(self) -> bool:
        return self._made_steps < self._until or self._next % self._detail_every == 0

    def _look(self) -> None:
        """As closely as the step deserves that begins."""
        clock.listening = self._in_detail or self._next % LISTEN_EVERY == 0
