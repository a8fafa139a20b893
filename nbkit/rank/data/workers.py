"""Reads batches of map-style data ahead in worker processes. Samples and random draws are the same as without workers.

torch's DataLoader starts the workers and receives what they read. It reads the batches that are expected next. If these
change (by a switch, a repeated step, or another position), reading starts again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from nbkit.errors import TrainingError
from nbkit.rank.data import data_rng

Collate = Callable[[list[Any]], Any]
Draws = tuple[int, int, int]
"""(seed of the job, step, rank): seeds the random draws while a batch is read."""

_BATCHES_PER_WORKER = 2
_SHARED = "/dev/shm"
_ENDS_IN_S = 0.2  # a thread that is not blocked ends within this time


@dataclass(frozen=True)
class ToRead:
    """A request for one rank's rows of one batch. indices: of the data. epoch: for the data's set_epoch."""

    indices: tuple[int, ...]
    epoch: int | None
    draws: Draws | None


@dataclass(frozen=True)
class _Failed:
    """An error while reading, as text.

    index: the sample's index; None if all samples were read together, or if collating failed. shared: the size of the
    shared memory through which workers pass their batches, if the error is that it was full; else "".
    """

    index: int | None
    error: str
    trace: str
    worker: int
    shared: str = ""


class BatchReader(Dataset[Any]):
    """Reads batches, in this process or in a worker."""

    def __init__(self, data: Any, collate: Collate) -> None:
        self.data, self.collate = data, collate
        self._epoch: int | None = None
        self._at: int | None = None

    def read(self, wanted: ToRead) -> Any:
        """Return the collated rows."""
        if wanted.epoch != self._epoch and hasattr(self.data, "set_epoch"):
            self.data.set_epoch(wanted.epoch)
        self._epoch, self._at = wanted.epoch, None
        if hasattr(self.data, "__getitems__"):
            return self.collate(self.data.__getitems__(list(wanted.indices)))
        return self.collate(list(self._samples(wanted.indices)))

    def _samples(self, indices: Sequence[int]) -> Iterator[Any]:
        for self._at in indices:
            yield self.data[self._at]
        self._at = None

    def __getitem__(self, wanted: ToRead) -> bytes | _Failed:
        """Return the batch in a worker, pickled in the way of torch's queue.

        The queue would pickle it in a separate thread. There, an object that cannot be pickled would be lost, and the
        receiver would wait for it forever.
        """
        info = get_worker_info()
        try:
            if wanted.draws is not None:
                data_rng.seed_host(*wanted.draws)
            return bytes(ForkingPickler.dumps(self.read(wanted)))
        except Exception as error:
            text, worker = f"{type(error).__name__}: {error}", info.id if info is not None else 0
            return _Failed(self._at, text, traceback.format_exc(), worker, _shared_memory_full(error))


def _shared_memory_full(error: Exception) -> str:
    """Return the size of the shared memory if `error` says that it is full; "" for any other error."""
    if not ("shared memory" in str(error) or "/torch_" in str(error)) or not os.path.isdir(_SHARED):
        return ""
    total, _, free = shutil.disk_usage(_SHARED)
    return f"{_SHARED} has {total / 1e6:,.1f} MB, {free / 1e6:,.1f} MB of them free"


def _as_it_is(batch: Any) -> Any:
    """Return the batch unchanged. This replaces torch's conversion, which makes tensors and lists of its parts."""
    return batch


class Loader(DataLoader[Any]):
    """torch's DataLoader without its warning about many workers, which counts only the cores of a pinned rank."""

    def check_worker_number_rationality(self) -> None:
        return


class _BatchThread:
    """A thread that receives the next batch from torch's iterator while a step is computed.

    A worker passes a file for each tensor, with a handshake. That takes a millisecond per tensor, and more on busy
    cores.
    """

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self._wanted: SimpleQueue[bool] = SimpleQueue()
        self._come: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._asked = False
        self._thread = threading.Thread(target=self._receive, name="nbkit-batches", daemon=True)
        self._thread.start()

    def take(self) -> Any:
        """Return the next batch, and start to receive the one after it. Raises what torch's iterator raises."""
        self._ask()
        batch, error = self._come.get()
        self._asked = False
        if error is not None:
            raise error
        self._ask()
        return batch

    def settle(self) -> None:
        """Wait for the batch being received, and drop it. Until `take`, only the caller then uses torch's iterator."""
        if self._asked:
            self._come.get()
            self._asked = False

    def end(self) -> None:
        """End the workers and the thread. The workers have five seconds to finish reading."""
        self._wanted.put(False)
        # torch ends workers when its iterator is deleted. But the thread refers to the iterator, and may wait in it for
        # a batch that takes minutes. So torch's own method ends the workers first, and then the queue gets an item.
        getattr(self.batches, "_shutdown_workers", lambda: None)()
        self._thread.join(_ENDS_IN_S)
        if self._thread.is_alive():
            with contextlib.suppress(AttributeError):
                self.batches._worker_result_queue.put(None)

    def _ask(self) -> None:
        if not self._asked:
            self._asked = True
            self._wanted.put(True)

    def _receive(self) -> None:
        while self._wanted.get():
            try:
                batch = next(self.batches)
                self._come.put((ForkingPickler.loads(batch) if isinstance(batch, bytes) else batch, None))
            except BaseException as error:
                self._come.put((None, error))


class ReadAhead:
    """The batches that follow a position, read ahead by `workers` processes."""

    def __init__(self, reader: BatchReader, workers: int) -> None:
        self._told: deque[ToRead] = deque()
        self._ahead: Iterator[ToRead] = iter(())
        self._loader: DataLoader[Any] = Loader(
            reader,
            batch_size=None,
            collate_fn=_as_it_is,
            sampler=self,  # type: ignore[arg-type]
            num_workers=workers,
            prefetch_factor=_BATCHES_PER_WORKER,
            persistent_workers=True,
            # A forked process has the names that a cell has defined, and need not import them.
            multiprocessing_context="fork" if sys.platform == "linux" else None,
            generator=torch.Generator(),  # so the loader does not draw its workers' seeds from the job's generator
        )
        self._thread: _BatchThread | None = None

    def __iter__(self) -> Iterator[ToRead]:
        for wanted in self._ahead:
            self._told.append(wanted)
            yield wanted

    def next(self, wanted: ToRead, after: Callable[[], Iterator[ToRead]]) -> Any:
        """Return the batch `wanted`. If reading has to start again, `after` returns the batches that follow it.

        Raises TrainingError for a sample that could not be read, with its index.
        """
        try:
            if self._thread is None or not self._told or self._told[0] != wanted:
                if self._thread is not None:
                    self._thread.settle()
                self._told.clear()
                self._ahead = chain((wanted,), after())
                batches = iter(self._loader)
                self._thread = self._thread or _BatchThread(batches)
            self._told.popleft()
            batch = self._thread.take()
        except BaseException:
            self.close()
            raise
        if isinstance(batch, _Failed) and batch.shared:
            self.close()
            raise TrainingError(
                "The shared memory of this host is full, and workers need it to pass on their batches.",
                numbers=f"{batch.shared}; worker {batch.worker}: {batch.error}",
                hint="loading=nbkit.Loading(workers=0)   or more shared memory: docker run --shm-size=8g",
            ) from RuntimeError(batch.trace)
        if isinstance(batch, _Failed):
            self.close()
            what = "A batch" if batch.index is None else f"Sample {batch.index}"
            index = wanted.indices[0] if batch.index is None else batch.index
            raise TrainingError(
                f"{what} could not be read by worker {batch.worker}: {batch.error}",
                numbers=f"samples {', '.join(map(str, wanted.indices[:16]))}{', ...' * (len(wanted.indices) > 16)}",
                hint=f"data[{index}] in a cell raises it here; loading=nbkit.Loading(workers=0) reads without workers",
            ) from RuntimeError(batch.trace)
        return batch

    def close(self) -> None:
        """End the workers. `next` starts new ones."""
        thread, self._thread, self._loader._iterator = self._thread, None, None
        self._told.clear()
        if thread is not None:
            thread.end()
