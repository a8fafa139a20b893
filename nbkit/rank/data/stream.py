"""Endless streams of this rank's shards of the batches, whose position is a small value.

Map-style data: epoch e is `torch.randperm(len, generator seeded by seed + e)` (or 0..n-1), cut into global batches; a
rank fetches its own rows alone. Iterable data: every rank iterates the same stream and keeps its rows. Either way the
position is (epoch, samples taken in it): what workers have read ahead does not count, so a resumed stream misses and
repeats no sample. What iterable data draws comes from a generator state of the stream's own, so that it is drawn again
alike.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction
from itertools import count, islice
from typing import Any, ClassVar

import torch

from nbkit.errors import TrainingError
from nbkit.rank.data.balanced import Balanced
from nbkit.rank.data.balanced_order import BalancedOrder
from nbkit.rank.data.batch import Parts, Shard, bounds, fingerprint, numbers_of, parts_by_speed, rows_of
from nbkit.rank.data.data_rng import Compared, content
from nbkit.rank.data.equal_shares import equal_shares
from nbkit.rank.data.workers import Draws, ReadAhead, Reader, ToRead
from nbkit.rank.rng.seeding import ITERATED, mixed

Collate = Callable[[list[Any]], Any]
Order = range | torch.Tensor | BalancedOrder


def is_map_style(data: Any) -> bool:
    """Whether `data` has a length and items by index, as torch's map-style datasets have."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


@dataclass(eq=False)
class Stream(ABC):
    """Shards without end, and where it stands: `offset` samples into `epoch`.

    rank, ranks, speeds: which part of each global batch is read; may change between batches. own: each rank reads other
    samples, not all the same stream. goes_back: what was read can be read again. workers: processes that read ahead,
    where the data allows it.
    """

    data: Any
    _: KW_ONLY
    batch_size: int
    rank: int
    ranks: int
    speeds: tuple[Fraction, ...] = ()
    seed: int
    shuffle: bool
    drop_last: bool
    collate: Collate
    workers: int = 0
    epoch: int = field(default=0, init=False)
    offset: int = field(default=0, init=False)
    own: ClassVar[bool]
    goes_back: bool = field(default=True, init=False)

    @abstractmethod
    def next(self, draws: Draws | None = None) -> Shard:
        """This rank's rows of the next global batch. draws: what a worker that reads them draws from."""

    def close(self) -> None:  # noqa: B027
        """End the workers, where there are some; `next` starts others."""

    def follow(self, other: Stream) -> None:
        """Stand where `other` stands, which is not read any more."""
        other.close()
        self.seek(other.epoch, other.offset)

    @abstractmethod
    def seek(self, epoch: int, offset: int) -> None:
        """Go on with sample number `offset` of `epoch`. Raises TrainingError when the data does not go there."""

    def after(self, step: int) -> dict[str, int]:
        """Where `step` batches end, from the first sample on. Of a stream whose length nobody knows: in epoch 0."""
        return {"epoch": 0, "offset": step * self.batch_size}


@dataclass(eq=False)
class MapStream(Stream):
    """Shards of a map-style dataset."""

    own = True

    def __post_init__(self) -> None:
        data, ranks = self.data, self.ranks
        if len(data) < self.batch_size:
            raise TrainingError(
                "The dataset is smaller than one global batch.",
                numbers=f"{len(data)} samples, batch_size {self.batch_size}",
                hint=f"batch_size={max(len(data) // ranks, 1) * ranks} or less" if len(data) else "a dataset with data",
            )
        self.length = len(data)
        self._reader = Reader(data, self.collate)
        self._ahead = ReadAhead(self._reader, self.workers) if self.workers else None
        self._compared = Compared(content(lambda: _fetched(data, [0, -1 % self.length], (0, 1), self.collate).data))
        self.seek(0, 0)

    def seek(self, epoch: int, offset: int) -> None:
        """Go on with sample number `offset` of `epoch`. Raises TrainingError when the data is shorter."""
        if offset > self.length:
            raise _shorter(epoch, offset, self.length)
        self.epoch, self.offset = epoch, offset
        self._order = self._ordered(epoch)

    def after(self, step: int) -> dict[str, int]:
        """Where `step` batches end, from the first sample on."""
        each = self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)
        epoch, left = divmod(step, each)
        offset = 0
        for _ in range(left):
            offset += self._rows(self.length - offset)
        return {"epoch": epoch, "offset": offset}

    def close(self) -> None:
        """End the workers; `next` starts others."""
        if self._ahead is not None:
            self._ahead.close()

    def next(self, draws: Draws | None = None) -> Shard:
        """This rank's rows of the next global batch. draws: what a worker that reads them draws from."""
        self._compared.check(self.ranks)
        shard = self._advance()
        own = self._own(shard)
        if not own:
            return shard
        wanted = ToRead(own, self.epoch, draws)
        if self._ahead is None:
            data = self._reader.read(wanted)
        else:
            data = self._ahead.next(wanted, lambda: self._following(draws))
        return replace(shard, data=_checked(data, len(own)))

    def _advance(self) -> Shard:
        """The next batch without its data; the position is behind it."""
        left = self.length - self.offset
        if left < (self.batch_size if self.drop_last else 1):
            self.seek(self.epoch + 1, 0)
            left = self.length
        total = self._rows(left)
        chosen = self._order[self.offset : self.offset + total]
        indices = chosen.tolist() if isinstance(chosen, torch.Tensor) else list(chosen)
        # Lengths, seeds or batch sizes that differ between ranks show here.
        mark = repr((self.length, self.seed, self.epoch, self.offset, total, indices[0], indices[-1]))
        self.offset += total
        parts = self._parts(indices)
        rows = len(numbers_of(parts, total, self.ranks, self.rank))
        return Shard(None, rows, total, indices, fingerprint=zlib.crc32(mark.encode()), parts=parts)

    def _own(self, shard: Shard) -> tuple[int, ...]:
        """Indices of this rank's rows."""
        return tuple(shard.indices[row] for row in numbers_of(shard.parts, shard.total, self.ranks, self.rank))

    def _following(self, draws: Draws | None) -> Iterator[ToRead]:
        """This rank's rows of the batches behind the position, one for each step, if nothing happens."""
        later = copy(self)

        def each() -> Iterator[ToRead]:
            for number in count(1):
                own = later._own(later._advance())
                by = None if draws is None else (draws[0], draws[1] + number, draws[2])
                if own:
                    yield ToRead(own, later.epoch, by)

        return each()

    def _ordered(self, epoch: int) -> Order:
        if self.shuffle:
            return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + epoch))
        return range(self.length)

    def _rows(self, left: int) -> int:
        """Rows of the next batch, with `left` samples left in the epoch."""
        return min(self.batch_size, left)

    def _parts(self, indices: Sequence[int]) -> Parts:
        """Which rows of the batch each rank has; None: as many as every other."""
        return parts_by_speed(len(indices), self.speeds)


class BalancedStream(MapStream):
    """Shards of Balanced data, each of the same cost.

    The batches of an epoch differ by one sample at most: a short last one could not be shared evenly.
    """

    data: Balanced

    def __post_init__(self) -> None:
        self.data.measured(together=True)
        super().__post_init__()

    def _ordered(self, epoch: int) -> Order:
        if not self.shuffle:
            return range(self.length)
        return BalancedOrder(self.data.costs, self.data.groups, seed=self.seed, epoch=epoch)

    def _rows(self, left: int) -> int:
        if self.drop_last:
            return self.batch_size
        return -(-left // -(-left // self.batch_size))

    def _parts(self, indices: Sequence[int]) -> Parts:
        costs, groups = self.data.costs, self.data.groups
        of_groups = None if groups is None else [groups[i] for i in indices]
        return equal_shares([costs[i] for i in indices], self.ranks, of_groups, self.speeds)


@dataclass(eq=False)
class IterableStream(Stream):
    """Shards of a stream that can only be iterated; every rank iterates all of it."""

    own = False

    def __post_init__(self) -> None:
        self._samples: Iterator[Any] | None = None
        self._started = False
        self._drawn = torch.empty(0)
        # Of data that cannot begin again: where the newest batch begins and ends, its samples; those to be given again.
        self._newest: tuple[list[tuple[int, int]], list[Any]] | None = None
        self._again: list[Any] | None = None
        self.goes_back = not isinstance(self.data, Iterator)

    def seek(self, epoch: int, offset: int) -> None:
        """Go on with sample number `offset` of `epoch`: the samples before it are read and passed over.

        Raises TrainingError when the data is an iterator that has been read and cannot begin again: it goes back by the
        newest batch only.
        """
        if (epoch, offset) != (self.epoch, self.offset):
            if (newest := self._newest) is not None and (epoch, offset) in newest[0]:
                self._again = newest[1] if (epoch, offset) == newest[0][0] else None
            else:
                self._check_can_start()
                self._samples = None
        self.epoch, self.offset = epoch, offset

    def _open(self) -> Iterator[Any]:
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(self.epoch)
        self._check_can_start()
        torch.default_generator.manual_seed(mixed(self.seed, self.epoch, ITERATED))
        samples: Iterator[Any] = iter(self.data)
        self._started = True
        passed = sum(1 for _ in islice(samples, self.offset))
        if passed < self.offset:
            raise _shorter(self.epoch, self.offset, passed)
        return samples

    def next(self, draws: Draws | None = None) -> Shard:
        """This rank's rows of the next global batch."""
        samples = self._read()
        if not self._enough(samples) and (self.offset or not samples):
            self.epoch, self.offset, self._samples = self.epoch + 1, 0, None
            samples = self._read()
        if not self._enough(samples):
            raise TrainingError(
                "The data ended before one global batch was full.",
                numbers=f"{len(samples)} samples in epoch {self.epoch}, batch_size {self.batch_size}",
                hint="a smaller batch_size, or more data",
            )
        first, total = self.offset, len(samples)
        self.offset += total
        if not self.goes_back:
            self._newest = [(self.epoch, first), (self.epoch, self.offset)], samples
        parts = parts_by_speed(total, self.speeds)
        mine = numbers_of(parts, total, self.ranks, self.rank)
        return Shard(
            data=self.collate([samples[row] for row in mine]) if mine else None,
            rows=len(mine),
            total=total,
            indices=range(first, first + total),
            fingerprint=fingerprint(self.collate([samples[0], samples[-1]]), 2),
            everything=lambda: (self.collate(samples), samples, self.collate),
            parts=parts,
        )

    def _check_can_start(self) -> None:
        if self._started and not self.goes_back:
            raise TrainingError(
                "The data is an iterator that cannot start again.",
                numbers=f"epoch {self.epoch}, {self.offset} samples into it",
                hint="an IterableDataset, or any object whose __iter__ begins anew",
            )

    def _read(self) -> list[Any]:
        if self._again is not None:
            samples, self._again = self._again, None
            return samples
        try:
            with torch.random.fork_rng(devices=[]):
                if self._samples is None:
                    self._samples = self._open()
                else:
                    torch.set_rng_state(self._drawn)
                samples = list(islice(self._samples, self.batch_size))
                self._drawn = torch.get_rng_state()
            return samples
        except BaseException:
            # Broken off inside a batch: the position is still before it, so the stream is read up to there again.
            self._samples = None
            raise

    def _enough(self, samples: list[Any]) -> bool:
        return len(samples) == self.batch_size or (bool(samples) and not self.drop_last)


@contextmanager
def reading(current: Callable[[], Stream]) -> Iterator[None]:
    """Around a training: after it no workers are left. current: what it reads, which may be opened anew meanwhile."""
    try:
        yield
    finally:
        current().close()


def open_stream(data: Any, **how: Any) -> Stream:
    """The stream that fits the kind of `data`; how: see Stream. Raises TrainingError when it is neither kind."""
    _refuse_loader(data)
    if isinstance(data, Balanced):
        return BalancedStream(data, **how)
    if is_map_style(data):
        return MapStream(data, **how)
    if not isinstance(data, Iterable):
        raise TrainingError(
            "The data is neither map-style nor iterable.",
            numbers=f"{type(data).__name__}: __len__ {hasattr(data, '__len__')}, "
            f"__getitem__ {hasattr(data, '__getitem__')}, __iter__ {hasattr(data, '__iter__')}",
            hint="data=dataset with __len__ and __getitem__, or with __iter__",
        )
    return IterableStream(data, **how)


def shards(data: Any, *, batch_size: int, rank: int, ranks: int, collate: Collate) -> Iterator[Shard]:
    """This rank's shards of one pass over `data` in its own order: every sample once, none added."""
    _refuse_loader(data)
    if is_map_style(data):
        for first in range(0, len(data), batch_size):
            total = min(batch_size, len(data) - first)
            yield _fetched(data, list(range(first, first + total)), range(*bounds(total, ranks, rank)), collate)
        return
    samples, first = iter(data), 0
    while taken := list(islice(samples, batch_size)):
        start, stop = bounds(len(taken), ranks, rank)
        rows = collate(taken[start:stop]) if stop > start else None
        yield Shard(rows, stop - start, len(taken), range(first, first + len(taken)))
        first += len(taken)


def _fetched(data: Any, indices: list[int], mine: Sequence[int], collate: Collate) -> Shard:
    own = [indices[row] for row in mine]
    if not own:
        return Shard(None, 0, len(indices), indices)
    samples = data.__getitems__(own) if hasattr(data, "__getitems__") else [data[i] for i in own]
    return Shard(_checked(collate(samples), len(own)), len(own), len(indices), indices)


def _checked(batch: Any, samples: int) -> Any:
    """`batch`, which has a row for each of so many samples."""
    if (rows := rows_of(batch)) != samples:
        raise TrainingError(
            "The collated batch has another number of rows than samples.",
            numbers=f"{samples} samples, {rows} rows",
            hint="collate so that dim 0 of every tensor is the sample",
        )
    return batch


def _refuse_loader(data: Any) -> None:
    if isinstance(data, torch.utils.data.DataLoader):
        raise TrainingError(
            "The data is a DataLoader: its items are batches, not samples.",
            numbers=f"its batch_size {data.batch_size}",
            hint="data=loader.dataset, with batch_size= and collate=; or nbkit.prepare(...) and job.batches(loader)",
        )


def _shorter(epoch: int, offset: int, samples: int) -> TrainingError:
    return TrainingError(
        "The data is shorter than where training stood in it.",
        numbers=f"position {offset} of epoch {epoch}, {samples} samples",
        hint="resume with the data that the checkpoint was made with",
    )
