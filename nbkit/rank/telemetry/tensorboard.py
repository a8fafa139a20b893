"""Write what TensorBoard shows, in threads that nothing waits for but the end of a run.

About the job, from rank 0: scalars of every step, and events as text. About each rank: where its step goes, what it
sends, and its memory, read from its own record file.

    job.ledger.listeners += [Session(run_dir, rank=rank, ...), ScalarWriter(run_dir, rank)]     # in this order

A rank's scalars are written once a second, as the mean of the steps since the last time. So the cost does not grow with
the pace of the steps.
"""

from __future__ import annotations

import importlib.util
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from nbkit.rank.telemetry.record_writer import IDLE, Background, mean_of
from nbkit.records import tags
from nbkit.records.events import Event, RunStarted, RunStopped, StepDone
from nbkit.records.readings import members_of, table
from nbkit.records.record_file import START, read_since
from nbkit.records.records import Group, MemoryRecord, Record, StepRecord

_PACE_S = 1.0  # waking up for each step would cost the training more than the writing

_TAGS = {
    "loss": tags.LOSS,
    "eval_loss": tags.EVAL_LOSS,
    "grad_norm": tags.GRAD_NORM,
    "lr": tags.LR,
    "mfu": tags.MFU,
}
_SPOKEN_FOR = {*_TAGS, "step", "seconds", "tokens", "samples", "strategy"}
_ROW = {"bytes": "bytes", "calls": "calls", "seconds": "call_seconds", "algbw": "algbw", "busbw": "busbw"}
_MEMORY = ("parameters", "gradients", "optimizer", "buffers", "now", "peak")


def _add_values(writer: Any, values: Mapping[str, float], step: int) -> None:
    """Write tag -> value of a step, in one event of a SummaryWriter.

    An event costs this process as much as all its values.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    if not hasattr(writer, "_get_file_writer"):
        for tag, value in values.items():
            writer.add_scalar(tag, float(value), step)
        return
    made = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()]
    writer._get_file_writer().add_summary(Summary(value=made), step)


class BoardWriter:
    """A listener that writes events to `path`. All is on disk when a run has stopped.

    A failure in writing is warned of once, at the next step. It never ends a training.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writing: Background | None = None
        if importlib.util.find_spec("tensorboard") is None:
            warnings.warn(
                "tensorboard is not installed, so nothing is written for it: pip install tensorboard   "
                "(log_dir=None turns this off)",
                stacklevel=2,
            )
            return
        writer = _JobWriter(path)
        what = f"written for TensorBoard to {path}"
        self._writing = Background(writer.take, writer.close, name="nbkit-board", what=what, pace_s=_PACE_S)
        # The thread refers only to the writer, so that it ends with this object.
        weakref.finalize(self, self._writing.end)

    def __call__(self, event: Event) -> None:
        """Take an event; the run's last one waits until all are on disk."""
        if self._writing is None:
            return
        self._writing.put(event)
        if isinstance(event, RunStopped):
            self._writing.flush()


class _JobWriter:
    """The part of a BoardWriter that runs in its thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None

    def take(self, item: Event | threading.Event) -> None:
        if self._writer is None:
            self._writer = _open(self._path)
            self._writer.add_custom_scalars(tags.layout())
        if isinstance(item, threading.Event):
            self._writer.flush()
        elif isinstance(item, StepDone):
            _add_values(self._writer, _scalars(item.record), item.step)
        else:
            text = ", ".join(f"{key} {value}" for key, value in asdict(item).items() if value not in ("", None))
            self._writer.add_text(tags.EVENTS, f"{item.kind}: {text}", item.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _open(path: Path) -> Any:
    """Return a SummaryWriter for `path`.

    Call it in the writing thread: its import takes half a second, for which no step waits.
    """
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(path))


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    scalars = {tag: record[key] for key, tag in _TAGS.items() if key in record}
    scalars[tags.STEP_SECONDS] = record["seconds"]
    if record["seconds"] > 0:
        scalars[tags.TOKENS_PER_SECOND] = record["tokens"] / record["seconds"]
        if "samples" in record:
            scalars[tags.SAMPLES_PER_SECOND] = record["samples"] / record["seconds"]
    return scalars | {tags.logged(key): value for key, value in record.items() if key not in _SPOKEN_FOR}


def _scalars_of(rank: int, step: StepRecord, groups: Iterable[Group]) -> dict[str, float]:
    """Return tag -> value of a step of this rank. What was not timed is left out."""
    found: dict[str, float] = {}
    if step.seconds > 0:
        found[tags.RANK_SECONDS] = step.seconds
        found[tags.MEASURING] = step.own_seconds / step.seconds
        found |= {tags.part(name): seconds for name, seconds in step.parts.items()}
        if step.parts.get("bubble"):
            found[tags.BUBBLE] = step.parts["bubble"] / step.seconds
    for row in table({rank: step}, members_of(groups)):
        values = {what: getattr(row, name) for name, what in _ROW.items()} | {"overlap": row.overlap}
        found |= {tags.moved(row.op, row.axis, what): value for what, value in values.items() if value is not None}
    return found


class ScalarWriter:
    """A listener that writes into <run_dir>/rank<rank> while runs are under way. All is on disk when one has stopped.

    A failure in writing is warned of once, at the next step. It never ends a training.
    """

    def __init__(self, run_dir: Path, rank: int, *, every_s: float = 1.0) -> None:
        self.path = run_dir / f"rank{rank}"
        self._writing: Background | None = None
        if importlib.util.find_spec("tensorboard") is None:
            return  # rank 0's BoardWriter says so
        self._follower = _RankWriter(run_dir / "telemetry" / f"rank{rank}.jsonl", self.path, rank)
        take, close, what = self._follower.take, self._follower.close, f"written for TensorBoard to {self.path}"
        self._writing = Background(take, close, name="nbkit-scalars", what=what, idle_s=every_s)
        # The thread refers only to the follower, so that it ends with this object.
        weakref.finalize(self, self._writing.end)

    def __call__(self, event: Event) -> None:
        """Take an event; the run's last one waits until all is on disk."""
        if self._writing is None:
            return
        if isinstance(event, RunStarted):
            self._follower.running = True
        elif isinstance(event, RunStopped):
            self._follower.running = False
            self._writing.flush()
        else:
            self._writing.tell()


class _RankWriter:
    """The part of a ScalarWriter that runs in its thread.

    running: write now and then, not only when all is asked for.
    """

    def __init__(self, records: Path, folder: Path, rank: int) -> None:
        self._records, self._folder, self._rank = records, folder, rank
        self.running = False
        self._cursor = START
        self._groups: list[Group] = []
        self._writer: Any = None

    def take(self, item: Any) -> None:
        if self.running or item is not IDLE:
            self._write(*self._read())

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _read(self) -> tuple[list[StepRecord], list[MemoryRecord]]:
        found: Sequence[Record]
        found, self._cursor = read_since(self._records, self._cursor)
        known = {group.label for group in self._groups}
        self._groups += [one for one in found if isinstance(one, Group) and one.label not in known]
        steps = [one for one in found if isinstance(one, StepRecord)]
        return steps, [one for one in found if isinstance(one, MemoryRecord)]

    def _write(self, steps: list[StepRecord], memories: list[MemoryRecord]) -> None:
        if not steps and not memories:
            return
        if self._writer is None:
            self._writer = _open(self._folder)
        # Steps of two strategies are never mixed.
        for _, those in groupby(steps, key=lambda step: step.numbers.get("strategy")):
            step = mean_of(list(those))
            _add_values(self._writer, _scalars_of(self._rank, step, self._groups), step.step)
        for memory in memories:
            _add_values(self._writer, {tags.memory(name): getattr(memory, name) for name in _MEMORY}, memory.step)
        self._writer.flush()
