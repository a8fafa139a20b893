"""What a rank has read and not yet computed, a queue for each of its readers; filled here or by worker processes.

Torch's DataLoader starts the workers, one loader for each, so that a worker whose readers are slow keeps back no other.
A worker reads for all its readers in turn and sends samples as bytes: a file handle for every tensor would soon be too
many.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from nbkit.errors import TrainingError
from nbkit.rank.data.split.shard_reader import Course, ShardReader
from nbkit.rank.data.workers import Loader

_AHEAD = 2  # chunks of each reader that a worker reads ahead


@dataclass
class Queue:
    """first: the number of samples[0] among the reader's. end: how many it has in all, once that is known."""

    first: int
    samples: deque[Any] = field(default_factory=deque)
    end: int | None = None

    @property
    def read(self) -> int:
        """How many of the reader's samples have been read."""
        return self.first + len(self.samples)

    def take(self, index: int) -> Any:
        """Sample `index`; it and those before it are let go of."""
        while self.first < index:
            self.samples.popleft()
            self.first += 1
        self.first += 1
        return self.samples.popleft()


class SampleQueues:
    """Queues of the readers in `starts`, from the samples that it gives on. chunk: samples that are read at a time."""

    def __init__(self, course: Course, starts: Mapping[int, int], *, workers: int, chunk: int) -> None:
        self.course, self.chunk = course, max(chunk, 1)
        self.queues = {reader: Queue(start) for reader, start in starts.items()}
        self._here = {} if workers else {reader: ShardReader(course, reader) for reader in starts}
        self._from: dict[int, Iterator[Any]] = {}
        numbers = sorted(starts)
        for worker in range(min(workers, len(numbers))):
            own = numbers[worker::workers]
            batches = iter(_loader(_Chunks(course, {number: starts[number] for number in own}, self.chunk), len(own)))
            self._from.update(dict.fromkeys(own, batches))

    def fill(self, reader: int, until: int) -> None:
        """Read samples of `reader` before number `until`, or to its end."""
        queue = self.queues[reader]
        while queue.end is None and queue.read < until:
            if reader in self._from:
                self._hear(self._from[reader])
                continue
            here, wanted = self._here[reader], until - queue.read
            _skip(here, queue.first)
            samples = here.read(wanted)
            queue.samples += samples
            if len(samples) < wanted:
                queue.end = here.index

    def _hear(self, chunks: Iterator[Any]) -> None:
        packed = next(chunks)
        if isinstance(packed, TrainingError):
            raise packed
        reader, end, samples = pickle.loads(packed)
        self.queues[reader].samples += samples
        self.queues[reader].end = end

    def close(self) -> None:
        """End the workers."""
        self._from.clear()


class _Chunks(IterableDataset[bytes | TrainingError]):
    """In a worker: (reader, its end, samples) of each reader in turn, packed."""

    def __init__(self, course: Course, starts: Mapping[int, int], chunk: int) -> None:
        self.course, self.starts, self.chunk = course, starts, chunk

    def __iter__(self) -> Iterator[bytes | TrainingError]:
        readers = {number: ShardReader(self.course, number) for number in self.starts}
        try:
            for number, reader in readers.items():
                _skip(reader, self.starts[number])
            while readers:
                for number, reader in list(readers.items()):
                    samples = reader.read(self.chunk)
                    ended = len(samples) < self.chunk
                    if ended:
                        del readers[number]
                    yield _packed((number, reader.index if ended else None, samples))
        except TrainingError as error:
            yield error


def _skip(reader: ShardReader, until: int) -> None:
    while reader.index < until and reader.read(min(until - reader.index, 256)):
        pass


def _loader(chunks: _Chunks, readers: int) -> Loader:
    return Loader(
        chunks,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=1,
        prefetch_factor=_AHEAD * readers,
        # What a cell has defined need not be imported by a process that is forked.
        multiprocessing_context="fork" if sys.platform == "linux" else None,
        generator=torch.Generator(),
    )


def _as_it_is(item: Any) -> Any:
    return item


class _Pickler(pickle.Pickler):
    """Tensors as arrays: torch packs each as a file of its own."""

    def reducer_override(self, item: Any) -> Any:
        plain = type(item) is Tensor and item.layout is torch.strided and item.device.type == "cpu"
        if plain and not item.requires_grad and item.is_contiguous():
            if item.dtype is torch.bfloat16:
                return _bfloat16, (item.view(torch.int16).numpy(),)
            if item.dtype not in _AS_TORCH_HAS_THEM:
                return torch.from_numpy, (item.numpy(),)
        return NotImplemented


_AS_TORCH_HAS_THEM = {torch.float8_e4m3fn, torch.float8_e5m2}


def _bfloat16(array: Any) -> Tensor:
    return torch.from_numpy(array).view(torch.bfloat16)


def _packed(item: Any) -> bytes:
    out = io.BytesIO()
    _Pickler(out, protocol=pickle.HIGHEST_PROTOCOL).dump(item)
    return out.getvalue()
