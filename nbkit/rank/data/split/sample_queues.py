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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from nbkit.errors import TrainingError
from nbkit.rank.data.data_state import COMPARED, Mark, checksum
from nbkit.rank.data.split.shard_reader import Course, ShardReader
from nbkit.rank.data.workers import Collate, Loader

_AHEAD = 2  # chunks of each reader that a worker reads ahead


@dataclass
class Queue:
    """first: the number of samples[0] among the reader's. end: how many it has in all, once that is known.

    marks: where its reading stood, the newest that is not beyond `first`, and those behind.
    """

    first: int
    samples: deque[Any] = field(default_factory=deque)
    end: int | None = None
    marks: deque[Mark] = field(default_factory=deque)

    @property
    def read(self) -> int:
        """How many of the reader's samples have been read."""
        return self.first + len(self.samples)

    def add(self, samples: Sequence[Any], end: int | None, mark: Mark | None) -> None:
        """What has been read. mark: where reading stands behind them."""
        self.samples += samples
        self.end = end
        if mark is not None:
            self.marks.append(mark)

    def mark(self, collate: Collate) -> Mark | None:
        """From where the next sample is read soonest; None where nobody can say."""
        if not self.marks or self.marks[0].index > self.first:
            return None
        checks = tuple(checksum(collate, sample) for sample in islice(self.samples, COMPARED))
        return replace(self.marks[0], first=self.first, checks=checks)

    def follows(self, mark: Mark, collate: Collate) -> bool:
        """Whether the samples that have been read are those of which the mark has checksums."""
        at = mark.first - self.first
        here = list(islice(self.samples, at, at + len(mark.checks))) if at >= 0 else []
        return all(checksum(collate, sample) == check for sample, check in zip(here, mark.checks, strict=False))

    def take(self, index: int) -> Any:
        """Sample `index`; it and those before it are let go of."""
        while self.first < index:
            self.samples.popleft()
            self.first += 1
        self.first += 1
        while len(self.marks) > 1 and self.marks[1].index <= self.first:
            self.marks.popleft()
        return self.samples.popleft()


class SampleQueues:
    """Queues of the readers in `starts`, from the samples that it gives on. chunk: samples that are read at a time.

    marks: reader -> where its reading begins, if not at its first sample. ended: reader -> how many samples it has, of
    those that have given all.
    """

    def __init__(
        self,
        course: Course,
        starts: Mapping[int, int],
        *,
        workers: int,
        chunk: int,
        marks: Mapping[int, Mark],
        ended: Mapping[int, int],
    ) -> None:
        self.course, self.chunk = course, max(chunk, 1)
        self.queues = {
            reader: Queue(ended.get(reader, start), end=ended.get(reader)) for reader, start in starts.items()
        }
        for reader, mark in marks.items():
            self.queues[reader].marks.append(mark)
        numbers = sorted(starts.keys() - ended.keys())
        self._here = {} if workers else {reader: ShardReader(course, reader, marks.get(reader)) for reader in numbers}
        self._from: dict[int, Iterator[Any]] = {}
        for worker in range(min(workers, len(numbers))):
            own = numbers[worker::workers]
            chunks = _Chunks(course, {number: starts[number] for number in own}, self.chunk, marks)
            batches = iter(_loader(chunks, len(own)))
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
            queue.add(samples, here.index if len(samples) < wanted else None, here.mark())

    def _hear(self, chunks: Iterator[Any]) -> None:
        packed = next(chunks)
        if isinstance(packed, TrainingError):
            raise packed
        reader, *read = pickle.loads(packed)
        self.queues[reader].add(*read)

    def marks(self, collate: Collate) -> dict[int, Mark]:
        """Reader -> from where its next sample is read soonest, of those that say it."""
        found = {reader: queue.mark(collate) for reader, queue in self.queues.items()}
        return {reader: mark for reader, mark in found.items() if mark is not None}

    def close(self) -> None:
        """End the workers."""
        self._from.clear()


class _Chunks(IterableDataset[bytes | TrainingError]):
    """In a worker: (reader, samples, its end, its mark) of each reader in turn, packed."""

    def __init__(self, course: Course, starts: Mapping[int, int], chunk: int, marks: Mapping[int, Mark]) -> None:
        self.course, self.starts, self.chunk, self.marks = course, starts, chunk, marks

    def __iter__(self) -> Iterator[bytes | TrainingError]:
        readers = {number: ShardReader(self.course, number, self.marks.get(number)) for number in self.starts}
        try:
            for number, reader in readers.items():
                _skip(reader, self.starts[number])
            while readers:
                for number, reader in list(readers.items()):
                    samples = reader.read(self.chunk)
                    ended = len(samples) < self.chunk
                    if ended:
                        del readers[number]
                    yield _packed((number, samples, reader.index if ended else None, reader.mark()))
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
