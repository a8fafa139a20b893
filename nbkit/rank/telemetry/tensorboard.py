"""What TensorBoard is given: scalars of every step and events as text, from rank 0, written by a thread of its own."""

from __future__ import annotations

import importlib.util
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nbkit.records import tags
from nbkit.records.events import Event, RunStopped, StepDone

__all__ = ["BoardWriter", "add_values", "new_run_dir"]

_PACE_S = 1.0  # to be woken for each step would cost the training more than the writing

Queue = queue.SimpleQueue[Event | threading.Event | None]

_TAGS = {
    "loss": tags.LOSS,
    "eval_loss": tags.EVAL_LOSS,
    "grad_norm": tags.GRAD_NORM,
    "lr": tags.LR,
    "mfu": tags.MFU,
}
_SPOKEN_FOR = {*_TAGS, "step", "seconds", "tokens", "samples", "strategy"}


def new_run_dir(parent: str, *, name: str | None, strategy: str, batch: int | None) -> Path:
    """A directory that did not exist: parent/<name or time>-<strategy>[-b<batch>], numbered if it has to be."""
    stem = "-".join(
        [name or time.strftime("%Y%m%d-%H%M%S"), strategy.replace("=", "").replace(" ", "-")]
        + ([f"b{batch}"] if batch else [])
    )
    number = 1
    while True:
        path = Path(parent) / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path


def add_values(writer: Any, values: Mapping[str, float], step: int) -> None:
    """tag -> value of a step, in one event of a SummaryWriter: each costs this process as much as all values in it."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    made = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()]
    writer._get_file_writer().add_summary(Summary(value=made), step)


class BoardWriter:
    """A listener that writes events to `path`. Complete on disk when a run has stopped.

    What goes wrong in writing is warned of once, at the end of the run; it never ends a training.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._queue: Queue = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._failures: list[Exception] = []
        self._writing = importlib.util.find_spec("tensorboard") is not None
        if not self._writing:
            warnings.warn(
                "tensorboard is not installed, so nothing is written for it: pip install tensorboard   "
                "(log_dir=None turns this off)",
                stacklevel=2,
            )
            return
        # The thread knows the queue alone, so that it ends with this object.
        weakref.finalize(self, self._queue.put, None)
        threading.Thread(
            target=_write_all, args=(path, self._queue, self._hurry, self._failures), name="nbkit-board", daemon=True
        ).start()

    def __call__(self, event: Event) -> None:
        """Take an event; the run's last one waits until all are on disk."""
        if not self._writing:
            return
        self._queue.put(event)
        if isinstance(event, RunStopped):
            written = threading.Event()
            self._queue.put(written)
            self._hurry.set()
            written.wait()
            if self._failures:
                self._writing = False
                warnings.warn(
                    f"nothing more is written for TensorBoard to {self.path}: "
                    f"{type(self._failures[0]).__name__}: {self._failures[0]}",
                    stacklevel=2,
                )


def _write_all(path: Path, items: Queue, hurry: threading.Event, failures: list[Exception]) -> None:
    writer: Any = None
    while (item := items.get()) is not None:
        if not isinstance(item, threading.Event) and items.empty():
            hurry.wait(_PACE_S)
            hurry.clear()
        try:
            if not failures:
                writer = writer or _open(path)
                _write(writer, item)
        except Exception as error:
            failures.append(error)
        finally:
            if isinstance(item, threading.Event):
                item.set()
    if writer is not None:
        writer.close()


def _open(path: Path) -> Any:
    # Imported here, in the thread: it takes half a second that the first step need not wait for.
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(path))
    writer.add_custom_scalars(tags.layout())
    return writer


def _write(writer: Any, item: Event | threading.Event) -> None:
    if isinstance(item, threading.Event):
        writer.flush()
    elif isinstance(item, StepDone):
        add_values(writer, _scalars(item.record), item.step)
    else:
        text = ", ".join(f"{key} {value}" for key, value in asdict(item).items() if value not in ("", None))
        writer.add_text(tags.EVENTS, f"{item.kind}: {text}", item.step)


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    scalars = {tag: record[key] for key, tag in _TAGS.items() if key in record}
    scalars[tags.STEP_SECONDS] = record["seconds"]
    if record["seconds"] > 0:
        scalars[tags.TOKENS_PER_SECOND] = record["tokens"] / record["seconds"]
        if "samples" in record:
            scalars[tags.SAMPLES_PER_SECOND] = record["samples"] / record["seconds"]
    return scalars | {tags.logged(key): value for key, value in record.items() if key not in _SPOKEN_FOR}
