"""Writes files for TensorBoard in separate threads. Only the end of a run waits for these threads.

Rank 0 writes scalars of every step of the job, and events as text. Each rank writes the parts of its step time, its
communication and its memory, which it reads from its own record file.

    bus.add(Session(run_dir, rank=rank, ...))
    bus.add(rank_sink(run_dir, rank))  # after the session

A rank's scalars are written once a second, as the mean over the steps since the last write. So the cost does not depend
on the number of steps per second.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from nbkit.rank.telemetry.sinks import InThread, Sink
from nbkit.records import tags
from nbkit.records.events import RunStopped, StepDone
from nbkit.records.readings import members_of, table
from nbkit.records.record_file import START, mean_of, read_since
from nbkit.records.records import Group, MemoryRecord, Record, StepRecord

_PACE_S = 1.0  # waking up for each step would cost the training more than the writing does
_LAST_SECONDS = 60.0  # the import of TensorBoard takes several seconds on a busy machine

_TAGS = {
    "loss": tags.LOSS,
    "eval_loss": tags.EVAL_LOSS,
    "grad_norm": tags.GRAD_NORM,
    "imbalance": tags.IMBALANCE,
    "lr": tags.LR,
    "mfu": tags.MFU,
}
_SPOKEN_FOR = {*_TAGS, "step", "seconds", "tokens", "samples", "strategy"}
_ROW = {"bytes": "bytes", "calls": "calls", "seconds": "call_seconds", "algbw": "algbw", "busbw": "busbw"}
_MEMORY = ("parameters", "gradients", "optimizer", "buffers", "now", "peak")


def _add_values(writer: Any, values: Mapping[str, float], step: int) -> None:
    """Write the values (tag -> value) of a step as one event, since an event costs as much as all its values."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    if not hasattr(writer, "_get_file_writer"):
        for tag, value in values.items():
            writer.add_scalar(tag, float(value), step)
        return
    made = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()]
    writer._get_file_writer().add_summary(Summary(value=made), step)


def job_sink(path: Path) -> InThread | None:
    """Return a sink that writes scalars and events of the job to `path`; warn and return None without TensorBoard."""
    if not _installed():
        warnings.warn(
            "tensorboard is not installed, so nothing is written for it: pip install tensorboard   "
            "(log_dir=None turns this off)",
            stacklevel=2,
        )
        return None
    return _in_thread(JobScalars(path), path)


def rank_sink(run_dir: Path, rank: int) -> InThread | None:
    """Return a sink that writes the records of `rank` to <run_dir>/rank<rank>; None without TensorBoard.

    Add it to the bus after the Session, because it reads the Session's file.
    """
    if not _installed():
        return None  # job_sink warns on rank 0
    path = run_dir / f"rank{rank}"
    return _in_thread(RankScalars(run_dir / "telemetry" / f"rank{rank}.jsonl", path, rank), path)


def _installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def _in_thread(sink: Sink, path: Path) -> InThread:
    return InThread(sink, what=f"written for TensorBoard to {path}", pace_s=_PACE_S, wait_s=_LAST_SECONDS)


class JobScalars:
    """A sink that writes scalars of every step, and events as text."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None

    def write(self, event: dict[str, Any]) -> None:
        """Write an event. After the last event of a run, everything is on disk."""
        if self._writer is None:
            self._writer = _open(self._path)
            self._writer.add_custom_scalars(tags.layout())
        kind = event.pop("kind")
        if kind == StepDone.kind:
            _add_values(self._writer, _scalars(event), event["step"])
        else:
            text = ", ".join(f"{key} {value}" for key, value in event.items() if value not in ("", None))
            self._writer.add_text(tags.EVENTS, f"{kind}: {text}", event["step"])
        if kind == RunStopped.kind:
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


def _open(path: Path) -> Any:
    """Return a SummaryWriter for `path`. Call it in the writing thread, because the import takes half a second."""
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
    """Return tag -> value for a step of this rank, without values that were not measured."""
    found: dict[str, float] = {}
    if step.seconds > 0:
        found[tags.RANK_SECONDS] = step.seconds
        found[tags.MEASURING] = step.own_seconds / step.seconds
        found |= {tags.part(name): seconds for name, seconds in step.parts.items()}
        if step.parts.get("bubble"):
            found[tags.BUBBLE] = step.parts["bubble"] / step.seconds
    if step.experts:
        found[tags.EXPERTS] = sum(step.experts.values())
        found |= {tags.expert(number): tokens for number, tokens in step.experts.items()}
    for row in table({rank: step}, members_of(groups)):
        values = {what: getattr(row, name) for name, what in _ROW.items()} | {"overlap": row.overlap}
        found |= {tags.moved(row.op, row.axis, what): value for what, value in values.items() if value is not None}
    return found


class RankScalars:
    """A sink that writes the new steps in the file `records` as their mean, and the new memory records."""

    def __init__(self, records: Path, folder: Path, rank: int) -> None:
        self._records, self._folder, self._rank = records, folder, rank
        self._cursor, self._due = START, 0.0
        self._groups: list[Group] = []
        self._writer: Any = None

    def write(self, event: dict[str, Any]) -> None:
        """Write if a second has passed since the last write, or if the run ends."""
        if event["kind"] == RunStopped.kind or time.monotonic() >= self._due:
            self._due = time.monotonic() + _PACE_S
            self._write(*self._read())

    def close(self) -> None:
        """Close the file."""
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
        # A mean is never taken over steps of different strategies.
        for _, those in groupby(steps, key=lambda step: step.numbers.get("strategy")):
            step = mean_of(list(those))
            _add_values(self._writer, _scalars_of(self._rank, step, self._groups), step.step)
        for memory in memories:
            _add_values(self._writer, {tags.memory(name): getattr(memory, name) for name in _MEMORY}, memory.step)
        self._writer.flush()
