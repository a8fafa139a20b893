"""Batches of data that comes in shards. Each data-parallel rank reads only the samples of its own readers.

Order: reader k reads the data shards k, k + readers, ... one after the other. The stream takes one sample of each
reader in turn, and leaves out readers that have ended. The order depends only on the data, and not on ranks, batches or
workers. If possible, the rank that reads a row also computes it. But every rank gets its number of rows.

Ends: only the rank that uses a reader finds out where it ends. A rank reads two batches ahead. If one of its readers
ends there, the rank reports this in the step's small reduction. Then the ranks compare the ends before the first
affected batch. They also compare before the first batch after a jump. One rank may read a row and another compute it,
if some readers have ended or dp does not divide their number. Such rows are sent after that comparison.

Queues: a rank has a queue for each of its readers, with samples that were read and not yet computed. The rank itself or
worker processes fill the queues. torch's DataLoader starts the workers. Each worker has its own loader, so that a
worker with slow readers does not delay the others. A worker reads for all its readers in turn and sends samples as
bytes, because one file handle for every tensor would soon be too many.
"""

from __future__ import annotations

import io
import pickle
import sys
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from nbkit.device_speeds import rows_by_speed
from nbkit.errors import TrainingError
from nbkit.rank.data import data_rng
from nbkit.rank.data.batch import Shard, bounds
from nbkit.rank.data.data_state import (
    COMPARED,
    NO_STATE,
    READ_AGAIN,
    Opened,
    StreamPosition,
    checksum,
    draw_from,
    draws_now,
    read,
    same_draws,
    written,
)
from nbkit.rank.data.sample_rows import undrawn
from nbkit.rank.data.split.data_shards import DataShards, refuse_unasked
from nbkit.rank.data.stream import Stream, checked
from nbkit.rank.data.workers import Collate, Draws, Loader
from nbkit.rank.rng.seeding import ITERATED, mixed

MOST_READERS = 64

Row = tuple[int, int]
"""(reader, number of the sample among the reader's samples)"""


@dataclass(frozen=True)
class RoundRobin:
    """The order of samples. readers: the number of readers. ends: reader -> number of its samples, if known."""

    readers: int
    ends: Mapping[int, int]

    def rows(self, first: int, count: int) -> list[Row]:
        """Return the samples at positions first, first + 1, ...; fewer than `count` if all readers have ended."""
        found: list[Row] = []
        begun, turn, living = 0, 0, list(range(self.readers))
        for end in [*sorted(set(self.ends.values())), None]:
            if not living:
                break
            whole = (end - turn) * len(living) if end is not None else first + count - begun
            at = max(first - begun, 0)
            until = min(whole, first + count - begun)
            found += [(living[i % len(living)], turn + i // len(living)) for i in range(at, until)]
            if end is None:
                break
            begun, turn = begun + whole, end
            living = [reader for reader in living if self.ends.get(reader, end + 1) > end]
        return found


def share_out(rows: Sequence[Row], most: Sequence[int]) -> list[list[int]]:
    """Return for each rank the indices in `rows` of the rows that it computes. Rank r computes most[r] rows.

    A rank first takes rows that it reads, then rows that other ranks read but do not compute. Rank r has the readers r,
    r + ranks, ...
    """
    shares: list[list[int]] = [[] for _ in most]
    left: list[int] = []
    for number, (reader, _) in enumerate(rows):
        rank = reader % len(most)
        (shares[rank] if len(shares[rank]) < most[rank] else left).append(number)
    for rank, share in enumerate(shares):
        room = most[rank] - len(share)
        share += left[:room]
        share.sort()
        del left[:room]
    return shares


_CHUNKS_AHEAD = 2  # chunks of each reader that a worker reads ahead


@dataclass
class Queue:
    """Samples of one reader. first: the number of samples[0]. end: the reader's number of samples, None if unknown.

    marks: positions of the reader, namely the newest one at or before `first`, and all later ones.
    """

    first: int
    samples: deque[Any] = field(default_factory=deque)
    end: int | None = None
    marks: deque[StreamPosition] = field(default_factory=deque)

    @property
    def read(self) -> int:
        """Return the number of the reader's samples that have been read."""
        return self.first + len(self.samples)

    def add(self, samples: Sequence[Any], end: int | None, mark: StreamPosition | None) -> None:
        """Add samples that have been read. end: see Queue. mark: the reader's position after them."""
        self.samples += samples
        self.end = end
        if mark is not None:
            self.marks.append(mark)

    def mark(self, collate: Collate) -> StreamPosition | None:
        """Return the latest position from which the next sample can be read; None if there is none."""
        if not self.marks or self.marks[0].index > self.first:
            return None
        checks = tuple(checksum(collate, sample) for sample in islice(self.samples, COMPARED))
        return replace(self.marks[0], first=self.first, checks=checks)

    def follows(self, mark: StreamPosition, collate: Collate) -> bool:
        """Return True if the samples that have been read match the checksums of the mark."""
        at = mark.first - self.first
        here = list(islice(self.samples, at, at + len(mark.checks))) if at >= 0 else []
        return all(checksum(collate, sample) == check for sample, check in zip(here, mark.checks, strict=False))

    def take(self, index: int) -> Any:
        """Return sample `index`, and remove it and all earlier samples from the queue."""
        while self.first < index:
            self.samples.popleft()
            self.first += 1
        self.first += 1
        while len(self.marks) > 1 and self.marks[1].index <= self.first:
            self.marks.popleft()
        return self.samples.popleft()


class SampleQueues:
    """The queues of a rank's readers. starts: reader -> the first sample to queue. chunk: samples to read at a time.

    marks: reader -> position where reading begins, if not at the reader's first sample. ended: reader -> number of its
    samples, for readers that have ended.
    """

    def __init__(
        self,
        course: Course,
        starts: Mapping[int, int],
        *,
        workers: int,
        chunk: int,
        marks: Mapping[int, StreamPosition],
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

    def marks(self, collate: Collate) -> dict[int, StreamPosition]:
        """Return reader -> the latest position from which its next sample can be read, for readers that have one."""
        found = {reader: queue.mark(collate) for reader, queue in self.queues.items()}
        return {reader: mark for reader, mark in found.items() if mark is not None}

    def close(self) -> None:
        """End the workers."""
        self._from.clear()


class _Chunks(IterableDataset[bytes | TrainingError]):
    """The dataset of a worker. It yields (reader, samples, end, mark) for each reader in turn, pickled."""

    def __init__(
        self, course: Course, starts: Mapping[int, int], chunk: int, marks: Mapping[int, StreamPosition]
    ) -> None:
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
        prefetch_factor=_CHUNKS_AHEAD * readers,
        # A forked process has the names that a cell has defined, and need not import them.
        multiprocessing_context="fork" if sys.platform == "linux" else None,
        generator=torch.Generator(),
    )


def _as_it_is(item: Any) -> Any:
    return item


class _Pickler(pickle.Pickler):
    """A pickler that sends tensors as numpy arrays. torch would send each tensor as a separate file."""

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


_SEED = "seed the shuffle: shuffle(seed=0), and detshuffle instead of webdataset's shuffle"
_AHEAD = 2  # batches to read ahead: all ranks know a report of one step before they begin the step after the next


@dataclass(eq=False)
class SplitStream(Stream):
    """Shards of iterable data, of which each rank reads a part.

    gather: returns the values of all ranks, by rank; collective over all ranks.
    """

    own = False
    _: KW_ONLY
    shards: DataShards
    gather: Callable[[Any], list[Any]]
    _ends: dict[int, int] = field(default_factory=dict, init=False)
    _found: dict[int, int] = field(default_factory=dict, init=False)
    _compares: bool = field(default=True, init=False)
    _queues: SampleQueues | None = field(default=None, init=False)
    _marks: dict[int, StreamPosition] = field(default_factory=dict, init=False)
    _begun: dict[int, StreamPosition] = field(default_factory=dict, init=False)
    _proven: bool = field(default=True, init=False)
    _trusts: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.readers = min(self.shards.number, MOST_READERS)
        if not self.shards.by_method:
            self.shards.copied()
        # An error while reading is reported later, when the training reads.
        self.takes_part, self.has_state = True, False
        self._compare()

    def _compare(self) -> None:
        """Raise TrainingError if ranks hold different data, or if each shard yields all samples. Collective."""

        def read() -> Any:
            found = self.shards.first_samples(2)
            self.takes_part, self.has_state = found.takes_part, found.has_state
            return self.collate(found.samples)

        found = self.gather(data_rng.content(read))
        self._drawn_anew, self._world_size = 0 in found, len(found)
        if self.shards.counted and not self.takes_part:
            raise refuse_unasked(self.shards)
        if (others := [rank for rank, mark in enumerate(found) if mark != found[0]]) and 0 not in found:
            raise TrainingError(
                "The ranks hold different data: the first samples of the first shard differ.",
                numbers=f"rank {others[0]} beside rank 0, {self.shards.number} shards",
                hint="use the same seed on every rank: shuffle(seed=0); and do not split the data over ranks yourself",
            )
        if self._drawn_anew:
            warnings.warn(
                "the data yields different samples each time it is read, so after a switch, a load or a rewind some "
                f"samples come twice, and others never. {_SEED}",
                stacklevel=6,
            )

    def _check_drawn(self) -> None:
        """Raise TrainingError if several ranks work on the same rows but each would read different ones."""
        if self._drawn_anew and self.ranks < self._world_size:
            raise TrainingError(
                "The data yields different samples each time it is read, but several ranks must work on the same rows.",
                numbers=f"{self._world_size} ranks, {self._world_size // self.ranks} of them work on each row together",
                hint=_SEED,
            )

    def recut(self, rank: int, ranks: int, speeds: tuple[Fraction, ...]) -> None:
        """Read another part of each batch from now on."""
        super().recut(rank, ranks, speeds)
        self._compares = True

    def begin(self) -> None:
        """Make ranks compare ends before the next batch, because they may have stopped in different places."""
        self._compares = True

    def shards_end(self) -> None:
        """Make ranks compare ends before the next batch, because some rank has a reader that ends soon."""
        self._compares = True

    def close(self) -> None:
        """End the workers. `next` starts new ones."""
        if self.workers:
            self._drop()

    def seek(self, epoch: int, offset: int) -> None:
        """Go on with sample number `offset` of `epoch`. Each rank reads and skips earlier samples of its own readers.

        Collective with the next batch.
        """
        if epoch != self.epoch:
            self._forget()
        self.epoch, self.offset, self._compares = epoch, offset, True

    def where(self) -> Any:
        """Return the known ends of readers, and the marks of readers; None if the data has no states.

        Collective if the data has states.
        """
        if not self.has_state:
            return None
        self._share_marks()
        marks = [[reader, written(mark)] for reader, mark in sorted(self._marks.items())]
        return {"shards": self.shards.number, "ends": [list(each) for each in self._ends.items()], "marks": marks}

    def resume(self, epoch: int, offset: int, where: Any) -> None:
        """Seek with the result of `where`. If it came from another number of shards, the data is read again."""
        self._forget()
        self.seek(epoch, offset)
        if self.has_state and isinstance(where, dict) and where.get("shards") == self.shards.number:
            self._ends = dict(where["ends"])
            marks = {reader: read(mark) for reader, mark in where["marks"]}
            self._marks = {reader: mark for reader, mark in marks.items() if mark is not None}
        if not offset or self._marks:
            return
        why = "the checkpoint has no state of such data" if self.has_state else NO_STATE
        warnings.warn(READ_AGAIN.format(offset=offset, epoch=epoch, why=why), stacklevel=4)

    def _share_marks(self) -> None:
        """Share the marks of all readers between ranks. Collective."""
        self._note_marks()
        if self._world_size > 1:
            for epoch, marks in self.gather((self.epoch, self._marks)):
                here = {reader: mark for reader, mark in marks.items() if epoch == self.epoch}
                self._marks |= {r: m for r, m in here.items() if r not in self._marks or m.index > self._marks[r].index}

    def next(self, draws: Draws | None = None) -> Shard:
        """Return this rank's rows of the next global batch."""
        self._check_drawn()
        try:
            return self._next()
        except BaseException:
            # Reading was broken off inside a batch. The position is before this batch, so the readers are opened again.
            self._drop()
            raise

    def _next(self) -> Shard:
        rows = self._rows()
        if len(rows) < self.batch_size and (self.drop_last or not rows):
            if not self.offset:
                raise TrainingError(
                    "The data ended before one global batch was full.",
                    numbers=f"{len(rows)} samples in epoch {self.epoch}, batch_size {self.batch_size}",
                    hint="a smaller batch_size, or more data",
                )
            self.seek(self.epoch + 1, 0)
            return self._next()
        parts = share_out(rows, self._most(len(rows)))
        read = {row: self._take(row) for row in rows if row[0] % self.ranks == self.rank}
        read |= self._sent(rows, parts, read)
        samples = [read[rows[number]] for number in parts[self.rank]]
        first, self.offset = self.offset, self.offset + len(rows)
        mark = repr((self.shards.number, self.seed, self.epoch, first, len(rows), sorted(self._ends.items())))
        return Shard(
            data=checked(self.collate(samples), len(samples)) if samples else None,
            rows=len(samples),
            total=len(rows),
            indices=range(first, self.offset),
            fingerprint=zlib.crc32(mark.encode()),
            parts=parts,
            ends=self._found != self._ends,
        )

    def _rows(self) -> list[Row]:
        """Return the rows of the next batch, the same on every rank."""
        if self._compares and self.has_state:
            self._share_marks()
        known = self._read_ahead()
        while self._compares and self.ranks > 1:
            everyone = self.gather((self.epoch, known))
            self._ends = {reader: end for _, ends in everyone for reader, end in ends.items()}
            self._compares = any(one != everyone[0] for one in everyone)
            if self._compares:
                known = self._read_ahead()
        if self.ranks == 1:
            self._ends = known
        self._compares = False
        return self._order.rows(self.offset, self.batch_size)

    @property
    def _order(self) -> RoundRobin:
        return RoundRobin(self.readers, self._ends)

    def _read_ahead(self) -> dict[int, int]:
        """Read this rank's samples of this batch and the next ones, and return all known ends."""
        while True:
            read = (1 + _AHEAD) * self.batch_size
            rows = self._order.rows(self.offset, max(read, self.readers))
            own = [(number, row) for number, row in enumerate(rows) if row[0] % self.ranks == self.rank]
            queues = self._open([row for _, row in own])
            try:
                for number, (reader, index) in own:
                    if number < read:
                        queues.fill(reader, index + 1)
            except TrainingError:
                if self._proven:
                    raise
                self._read_anew()
                continue
            if not self._proven and not all(
                queues.queues[reader].follows(mark, self.collate) for reader, mark in self._begun.items()
            ):
                self._read_anew()
                continue
            self._proven = True
            ends = {reader: queue.end for reader, queue in queues.queues.items() if queue.end is not None}
            self._found = self._ends | ends
            if self.ranks > 1 or self._found == self._ends:
                return self._found
            self._ends = self._found  # there is no other rank to ask

    def _open(self, rows: Sequence[Row]) -> SampleQueues:
        """Return queues for the samples of `rows` and later samples. Opens them if necessary."""
        starts = dict.fromkeys(range(self.rank, self.readers, self.ranks), 0)
        first = dict[int, int]()
        for reader, index in rows:
            first.setdefault(reader, index)
        held = self._queues.queues if self._queues is not None else {}
        if held.keys() != starts.keys() or any(held[reader].first > index for reader, index in first.items()):
            self._drop()
        if self._queues is None:
            course = Course(self.shards, self.readers, self.epoch, self.seed)
            chunk, at = -(-self.batch_size // self.readers), starts | first
            marks = {reader: mark for reader, mark in self._marks.items() if mark.index <= at.get(reader, -1)}
            marks = marks if self._trusts else {}
            self._begun, self._proven = marks, not marks
            ended = {reader: end for reader, end in self._ends.items() if reader in starts and reader not in first}
            self._queues = SampleQueues(course, at, workers=self.workers, chunk=chunk, marks=marks, ended=ended)
        return self._queues

    def _read_anew(self) -> None:
        """Warn and read from the beginning, because the data does not continue where its states say."""
        why = "the data gives different samples after its load_state_dict()"
        warnings.warn(READ_AGAIN.format(offset=self.offset, epoch=self.epoch, why=why), stacklevel=4)
        self._close_queues()
        self._marks, self._proven, self._trusts = {}, True, False

    def _most(self, total: int) -> list[int]:
        """Return the number of rows of each rank."""
        if self.speeds:
            return [stop - start for start, stop in rows_by_speed(total, self.speeds)]
        return [len(range(*bounds(total, self.ranks, rank))) for rank in range(self.ranks)]

    def _sent(self, rows: Sequence[Row], parts: Sequence[Sequence[int]], read: dict[Row, Any]) -> dict[Row, Any]:
        """Send the samples that one rank reads and another computes, and return them. Collective if there are any."""
        moved = [rows[i] for rank, part in enumerate(parts) for i in part if rows[i][0] % self.ranks != rank]
        if not moved:
            return {}
        everyone = self.gather({row: read[row] for row in moved if row in read})
        return {row: sample for each in everyone for row, sample in each.items()}

    def _take(self, row: Row) -> Any:
        assert self._queues is not None
        return self._queues.queues[row[0]].take(row[1])

    def _note_marks(self) -> None:
        if self._queues is not None and self.has_state and self._trusts:
            self._marks |= self._queues.marks(self.collate)

    def _drop(self) -> None:
        self._note_marks()
        self._close_queues()

    def _close_queues(self) -> None:
        if self._queues is not None:
            self._queues.close()
        self._queues = None

    def _forget(self) -> None:
        self._close_queues()
        self._ends, self._found, self._marks = {}, {}, {}


@dataclass(frozen=True)
class Course:
    """A pass over the data. readers: the number of readers that share it. seed: seed of random draws while reading."""

    shards: DataShards
    readers: int
    epoch: int
    seed: int

    def of(self, reader: int) -> range:
        """Return the data shards of a reader."""
        return range(reader, self.shards.number, self.readers)


class ShardReader:
    """Reads the samples of reader `number` in order. index: the number of the next sample.

    mark: a position in the same epoch at which to begin, instead of the first sample.
    """

    def __init__(self, course: Course, number: int, mark: StreamPosition | None = None) -> None:
        self.course, self.number = course, number
        self.index = 0 if mark is None else mark.index
        self.left = iter([shard for shard in course.of(number) if mark is None or shard > mark.shard])
        self._shard = -1 if mark is None else mark.shard
        self._from = mark
        self._opened: Opened | None = None
        with undrawn():
            data_rng.seed_host(mixed(course.seed, course.epoch, ITERATED), number, 0)
            self._seeded = self._drawn = draws_now()
        if mark is not None and mark.drawn is not None:
            self._drawn = mark.drawn

    def mark(self) -> StreamPosition | None:
        """Return the current position; None between shards, or if the data has no state."""
        if self._opened is None or not self._opened.has_state:
            return None
        data, iterator = self._opened.states()
        drawn = None if same_draws(self._seeded, self._drawn) else self._drawn
        return StreamPosition(self.index, self._shard, data, iterator, drawn)

    def read(self, count: int) -> list[Any]:
        """Return the next `count` samples, or fewer at the end. Raises TrainingError, which names shard and sample."""
        found: list[Any] = []
        with undrawn():
            draw_from(self._drawn)
            while len(found) < count:
                if self._opened is None and self._from is None:
                    if (shard := next(self.left, None)) is None:
                        break
                    self._shard = shard
                try:
                    with self.course.shards.reading(self._shard):
                        if self._opened is None:
                            mark, self._from = self._from, None
                            self._opened = self.course.shards.opened(self._shard, self.course.epoch, mark)
                        some = list(islice(self._opened.samples, count - len(found)))
                except Exception as error:
                    raise TrainingError(
                        f"Shard {self._shard} of the data could not be read: {type(error).__name__}: {error}",
                        numbers=f"after {self.index + len(found)} samples of reader {self.number} of "
                        f"{self.course.readers}, epoch {self.course.epoch}",
                        hint="loading=nbkit.Loading(workers=0) reads without workers, and shows where the error is",
                    ) from error
                found += some
                if len(found) < count:
                    self._opened = None
            self._drawn = draws_now()
        self.index += len(found)
        return found
